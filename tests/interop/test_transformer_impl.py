"""An export has the names of the layers of Megatron-LM that load it."""

import functools
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoints import tiny
from support import random_params

from megajax.interop.megatron.export import export_megatron
from megajax.interop.megatron.rank_files import FILE
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.torch_files import load_torch
from megajax.interop.megatron.weights import FUSED, NAMES
from megajax.interop.runs import prepare, start_run
from megajax.runtime.checkpoint.compare import parameter_shapes, read_parameter

EXPERTS = {'count': 4, 'active': 2, 'ffn_size': 8, 'first_dense': 1, 'router_bias': True}


class Written(NamedTuple):
    """An export: its folder, with the run, its tensors, and what was said of it."""

    folder: Path
    model: dict[str, np.ndarray]
    said: str


Writes = Callable[..., Written]


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> Writes:
    return functools.cache(lambda **options: write(tmp_path_factory.mktemp('written'), **options))


def write(folder: Path, **options: Any) -> Written:
    """The export of a model with one dense layer, one layer of experts, and norms of heads."""
    model = {'num_layers': 2, 'qk_norm': True, 'experts': EXPERTS}
    config = tiny(1, 1, model=model, data={'tokenizer': 'none'})
    load = partial(random_params, std=0.05)
    start_run(folder / 'run', config, prepare(folder / 'run', config), load, origin={})
    said = export_megatron(folder / 'run', folder / 'out', ranks=1, **options)
    path = folder / 'out/release/mp_rank_00' / FILE
    return Written(folder, load_torch(path)['model'], said)  # type: ignore[index]


def norms(names: Any) -> set[str]:
    found = (re.fullmatch(r'decoder\.layers\.(.*norm.*)(?:\.|_)weight', name) for name in names)
    return {match[1] for match in found if match}


def test_norms_are_in_the_linear_layers_of_transformer_engine(written: Writes) -> None:
    _, model, said = written()
    heads = {f'{n}.self_attention.{x}_layernorm' for n in range(2) for x in 'qk'}
    attention = {f'{n}.self_attention.linear_qkv.layer_norm' for n in range(2)}
    # The norm before a router is a module of its own.
    assert norms(model) == heads | attention | {
        '0.mlp.linear_fc1.layer_norm',
        '1.pre_mlp_layernorm',
    }
    assert said == (
        '--transformer-impl transformer_engine --tensor-model-parallel-size 1 '
        '--pipeline-model-parallel-size 1 --expert-model-parallel-size 1, '
        'without --moe-grouped-gemm'
    )


def test_norms_are_modules_of_the_local_layers(written: Writes) -> None:
    _, model, said = written(transformer_impl='local')
    heads = {f'{n}.self_attention.{x}_layernorm' for n in range(2) for x in 'qk'}
    modules = {f'{n}.{x}_layernorm' for n in range(2) for x in ('input', 'pre_mlp')}
    assert norms(model) == heads | modules
    assert said.startswith('--transformer-impl local ')


@pytest.mark.parametrize('options', [{}, {'transformer_impl': 'local'}])
def test_an_import_reads_the_names_of_both(
    written: Writes, options: dict[str, str], tmp_path: Path
) -> None:
    folder, *_ = written(**options)
    import_megatron(folder / 'out', tmp_path / 'again')
    run, again = folder / 'run/checkpoints/0', tmp_path / 'again/checkpoints/0'
    assert parameter_shapes(run) == parameter_shapes(again)
    for name in parameter_shapes(run):
        rows = 300 if name == 'embedding.table' else None
        np.testing.assert_array_equal(
            read_parameter(run, name)[:rows], read_parameter(again, name)[:rows], err_msg=name
        )


def test_names_of_dense_layers_are_those_that_megatron_core_translates_to() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        specs = pytest.importorskip(
            'megatron.core.models.gpt.gpt_layer_specs', reason='megatron-core is not installed'
        )
    translated = specs.get_gpt_layer_local_submodules().sharded_state_dict_keys_map
    layer = 'decoder.layers.{}.'
    for path, (name, _) in FUSED.items():
        local = NAMES[path][0].removeprefix(layer)
        module = next(module for module in translated if local.startswith(module))
        assert layer + local.replace(module, translated[module]) == name
