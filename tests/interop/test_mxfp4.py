"""Experts in MXFP4 are unpacked into the values that the format and transformers give them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interop.stored import DATA
from safetensors.numpy import save_file

from megajax.core.config import ConfigError, ModelConfig
from megajax.interop.huggingface.adapters import _check_base
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.interop.huggingface.families import read_family
from megajax.interop.huggingface.mxfp4 import unpack
from megajax.interop.huggingface.tensors import SINGLE, read_tensors
from megajax.interop.huggingface.weights import huggingface_pieces
from megajax.interop.pieces import dims_here, shapes_of

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # Microscaling Formats 1.0, table 5
VALUES += [-x for x in VALUES]
METHOD = {'quantization_config': {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}}


def packed(name: str, shape: tuple[int, int, int], *, seed: int = 0) -> dict[str, np.ndarray]:
    """The two parts of a tensor [expert, in, out], with scales around 1."""
    draw, (experts, inputs, outputs) = np.random.default_rng(seed), shape
    prefix = experts, outputs, inputs // 32
    return {
        f'{name}_blocks': draw.integers(0, 256, (*prefix, 16), np.uint8),
        f'{name}_scales': draw.integers(120, 128, prefix, np.uint8),
    }


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in unpack(tensors, 'here').items()}


def test_every_value_with_every_scale_is_the_one_of_the_format() -> None:
    scales = np.arange(252, dtype=np.uint8)  # above, the largest values exceed bf16
    blocks = np.broadcast_to((np.arange(16) * 17).astype(np.uint8), (252, 1, 1, 16))
    (found,) = unpacked({'x_blocks': blocks, 'x_scales': scales.reshape(-1, 1, 1)}).values()
    assert (found.shape, found.dtype) == ((252, 32, 1), ml_dtypes.bfloat16)
    exact = np.repeat(VALUES, 2) * np.ldexp(1.0, scales[:, None].astype(int) - 127)
    np.testing.assert_array_equal(found[..., 0].astype(float), exact)
    low_first = unpacked(
        {'x_blocks': blocks[:1] * 0 + 0x2F, 'x_scales': scales[127:128, None, None]}
    )
    assert low_first['x'][0, :2, 0].tolist() == [-6.0, 1.0]


def test_the_bits_are_those_of_transformers() -> None:
    torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
    theirs = pytest.importorskip('transformers.integrations.mxfp4')
    parts = packed('x', (3, 96, 5))
    expected = theirs.convert_moe_packed_tensors(*map(torch.from_numpy, parts.values()))
    found = unpacked(parts)['x']
    assert found.tobytes() == expected.view(torch.int16).numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gpt-oss as it is released: experts in MXFP4, and all other tensors in bf16."""
    keys = json.loads((DATA / 'gpt_oss' / 'config.json').read_text())
    tensors = dict[str, np.ndarray]()
    for name, x in read_tensors(DATA / 'gpt_oss').items():
        if x.ndim == 3:
            tensors |= packed(name, x.shape, seed=len(tensors))
        else:
            tensors[name] = x.astype(ml_dtypes.bfloat16)
    (tmp_path / 'packed').mkdir()
    save_file(tensors, tmp_path / 'packed' / SINGLE)
    (tmp_path / 'packed' / 'config.json').write_text(json.dumps(keys | METHOD))
    return tmp_path / 'packed'


def test_an_import_of_a_released_gpt_oss_has_the_exact_values(folder: Path, tmp_path: Path) -> None:
    import_huggingface(folder, tmp_path / 'run', ['mesh.model=2'])
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out') == ('gpt_oss', 'bfloat16')
    expected, found = unpacked(read_tensors(folder)), read_tensors(tmp_path / 'out')
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].tobytes()) == (x.dtype, x.tobytes()), name
    assert 'quantization_config' not in json.loads((tmp_path / 'out/config.json').read_text())


@pytest.mark.parametrize(('dim', 'size'), [('X', 1), ('A', 8)])
@pytest.mark.parametrize('name', ['layers.experts.up.weight', 'layers.experts.down.weight'])
def test_a_shard_unpacks_its_own_values_alone(name: str, dim: str, size: int) -> None:
    keys = json.loads((DATA / 'gpt_oss' / 'config.json').read_text())
    model = ModelConfig(**read_family(keys, 'config.json')[1])
    piece = huggingface_pieces(model, shapes_of(model), family='gpt_oss')[name][0]
    (tensor,) = unpack(packed('x', piece.shape), 'here').values()
    axis, at = dims_here(model)[name].index(dim), list(piece.at)
    at[axis] = slice(size, 2 * size)
    found, whole = tensor.unpack(box := piece.box(tuple(at))), np.asarray(tensor)
    np.testing.assert_array_equal(found[box], whole[box])
    places = np.arange(whole.size).reshape(whole.shape)
    shard = piece.read(places).take(range(size, 2 * size), axis)
    np.testing.assert_array_equal(np.sort(shard, None), np.sort(places[box], None))


def test_adapters_may_belong_to_the_release(folder: Path, tmp_path: Path) -> None:
    config = import_huggingface(folder, tmp_path / 'run')
    checkpoint = tmp_path / 'run' / 'checkpoints' / '0'
    _check_base(checkpoint, config.model, str(folder), 'gpt_oss')
    other = read_tensors(folder)
    name = 'model.layers.0.mlp.experts.down_proj_scales'
    save_file(other | {name: other[name] - 1}, folder / SINGLE)
    with pytest.raises(ConfigError, match='down_proj differs from the base model of the run'):
        _check_base(checkpoint, config.model, str(folder), 'gpt_oss')


def test_transformers_gets_the_same_logits_from_the_release_and_its_export(
    folder: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
    transformers = pytest.importorskip('transformers', reason='it is in the same extra')
    import_huggingface(folder, tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    released, exported = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (folder, tmp_path / 'out')
    )
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(released(tokens).logits, exported(tokens).logits)


def test_parts_that_do_not_fit_together_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    name = 'model.layers.1.mlp.experts.down_proj'
    blocks, scales = f'{name}_blocks', f'{name}_scales'
    tensors = read_tensors(folder)
    for change, message in (
        (
            {scales: None},
            f'missing tensors (1 of 37; config.json decides which tensors exist): {name}',
        ),
        (
            {scales: tensors[scales][:, 1:]},
            f'{blocks}: (4, 32, 1, 16) does not fit {scales}, (4, 31, 1)',
        ),
        ({blocks: tensors[blocks].astype(np.int32)}, f'{blocks}: expected uint8, got int32'),
        ({scales: tensors[scales] | 255}, f'{name}: 4096 of 4096 numbers are not finite'),
    ):
        kept = {key: x for key, x in (tensors | change).items() if x is not None}
        save_file(kept, folder / SINGLE)
        with pytest.raises(ConfigError) as error:
            import_huggingface(folder, tmp_path / 'run')
        assert f'{folder}: {message}' in str(error.value)


def test_another_way_of_packing_is_refused() -> None:
    keys = json.loads((DATA / 'gpt_oss' / 'config.json').read_text())
    for value in ({'quant_method': 'fp8'}, {'quant_method': []}, {}, 'mxfp4'):
        with pytest.raises(ConfigError, match='are not supported, only those as "mxfp4"; import'):
            read_family(keys | {'quantization_config': value}, 'config.json')
