"""What another project gets of a checkpoint, and gives to a run, depends on no rung and no mesh."""

from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import laid_out, make_state
from support import exhaustive, gather, on_mesh, slow

from megajax.core.config import load
from megajax.interop.huggingface.directories import export_huggingface
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.megatron.export import export_megatron
from megajax.interop.megatron.rank_files import find_ranks
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.torch_files import load_torch
from megajax.runtime.checkpoint.checkpoints import Checkpoints

LAYOUTS = (
    'data=3 x model=2, weights',
    'data=4 replicas=2 x model=2, gradients',
    'data=2 x model_rows=2 model=2, optimizer',
)


def exported(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """The tensors of two ranks of Megatron-LM and of GPT-2, of a checkpoint that a layout wrote."""
    config = laid_out(layout)
    with on_mesh(config), Checkpoints(folder / 'run/checkpoints', config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
    export_megatron(folder / 'run', folder / 'megatron', ranks=2)
    export_huggingface(folder / 'run', folder / 'hf')
    ranks = enumerate(find_ranks(folder / 'megatron'))
    tensors = {f'{rank} {name}': x for rank, (path,) in ranks for name, x in model_of(path).items()}
    return tensors | dict(read_tensors(folder / 'hf'))


def model_of(path: Path) -> dict[str, np.ndarray]:
    return load_torch(path)['model']  # type: ignore[index, no-any-return]


@pytest.fixture(scope='module')
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp('one')
    return folder, exported(folder, 'one device')


PADDED = 'data=3 x model=2, weights'


@pytest.mark.parametrize(
    'layout', [layout if layout == PADDED else exhaustive(layout) for layout in LAYOUTS]
)
def test_exports_hold_the_same_bits_whatever_layout_wrote_the_checkpoint(
    tmp_path: Path, expected: tuple[Path, dict[str, np.ndarray]], layout: str
) -> None:
    found = exported(tmp_path, layout)
    assert found.keys() == expected[1].keys()
    for name, x in expected[1].items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize(
    'layout', [layout if layout == PADDED else slow(layout) for layout in LAYOUTS]
)
def test_an_import_begins_a_run_of_any_layout(
    tmp_path: Path, expected: tuple[Path, dict[str, np.ndarray]], layout: str
) -> None:
    config = laid_out(layout)
    sections = {'mesh': config.mesh, 'optim': config.optim}
    changed = [
        f'{section}.{key}={value}'
        for section, settings in sections.items()
        for key, value in settings.model_dump(exclude_defaults=True).items()
    ]
    import_megatron(expected[0] / 'megatron', tmp_path / 'run', [*changed, 'train.batch_size=24'])
    config = load(tmp_path / 'run/config.yaml')
    with on_mesh(config), Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints:
        assert checkpoints.newest_verified() == 0
        state = checkpoints.restore(0)
        wanted = make_state(laid_out(layout), 1)
        assert jax.tree.map(lambda x: x.sharding, state.params) == jax.tree.map(
            lambda x: x.sharding, wanted.params
        )
    vocabulary = config.model.vocab_size  # the rows after it are padding, which no export has
    for name, x in gather(wanted.params).items():
        found = gather(state.params)[name]
        if name == 'embedding.table':
            found, x = found[:vocabulary], x[:vocabulary]
        np.testing.assert_array_equal(found, x, err_msg=name)
