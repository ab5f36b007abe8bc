"""What happens to a parameter follows from its declaration, and nothing from its name."""

import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import (
    ROOT,
    assert_close,
    by_name,
    gather,
    make_batch,
    make_config,
    on_mesh,
)

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.core.config import Config, ConfigError, ModelConfig, load, presets
from megajax.core.counts import parameters as counts
from megajax.core.counts.declaration import Declared, Parameter, Role, named
from megajax.core.counts.layers import layer
from megajax.core.counts.parameters import shape_of
from megajax.core.model.block import Block
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.parameters import Parameters, cast_matrices
from megajax.core.model.shard_copies import along_last
from megajax.core.model.transformer import make_model
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import abstract_batch, place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.optimizer import decays
from megajax.core.train.step import init_state
from megajax.interop.huggingface.weights import from_huggingface
from megajax.interop.megatron.weights import from_megatron, to_megatron

NAMES = ['gpt', 'llama', 'bert']


@pytest.mark.parametrize('preset', presets())
def test_a_model_has_the_parameters_that_are_declared_and_no_others(preset: str) -> None:
    meshless = [
        'mesh.data=1',
        'mesh.replicas=1',
        'mesh.experts=1',
        'mesh.context=1',
        'mesh.model=1',
        'mesh.sequence_parallel=false',
    ]
    config = load(preset, meshless)
    sizes = counts.dim_sizes(config.model)

    def make() -> nnx.State:
        return nnx.state(make_model(config.model, Layout.of(config), key=jax.random.key(0)))

    with on_mesh(config):
        made = nnx.to_flat_state(jax.eval_shape(make))
    found = {'.'.join(path): (leaf.declared, leaf.shape) for path, leaf in made}
    declared = dict(named(counts.declare(config.model)))
    assert found == {name: (x, shape_of(x.dims, sizes)) for name, x in declared.items()}


def everything(config: Config) -> dict[str, Any]:
    """What follows from the declarations: by parameter, counted, and of the compiled step."""
    found = audit(config, compile_for(config, 'cpu', 1), 'cpu')
    rows = {
        f'{row.site} {row.phase} {row.axis}': [
            row.verdict,
            sorted((one.kind, one.array, one.times, one.wire_bytes) for one in row.placed),
            sorted((one.kind, one.array, one.times, one.wire_bytes) for one in row.megatron),
        ]
        for row in found.rows
    }
    counted = {
        'whole': counts.num_parameters(config.model),
        'on a device': counts.own_counts(config),
        'on a rank of Megatron': counts.megatron_counts(config.model, config.mesh.model),
        'FLOPs': (found.products.compiled, found.products.expected),
        'lint': sorted((one.level, one.rule) for one in found.findings),
    }
    return {'parameters': by_parameter(config), 'rows': rows, **counted}


def by_parameter(config: Config) -> dict[str, dict[str, Any]]:
    """Where a parameter and its moments lie, what a step computes with, and whether it decays."""
    layout = Layout.of(config)
    with on_mesh(config):
        state = jax.eval_shape(lambda: init_state(config))
        cast = lambda params: cast_matrices(params, config.train.dtype, layout)  # noqa: E731
        computed = by_name(jax.eval_shape(cast, state.params))
    decaying = by_name(decays(state.params))
    moments = [by_name(moment) for moment in (state.opt_state[1][0].mu, state.opt_state[1][0].nu)]
    return {
        name: {
            'shape': x.shape,
            'between steps': axes(x),
            'moments': [axes(moment[name]) for moment in moments],
            'in a step': axes(computed[name]),
            'dtypes': (str(x.dtype), str(computed[name].dtype)),
            'decays': decaying[name],
        }
        for name, x in by_name(state.params).items()
    }


def axes(x: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
    return tuple(x.sharding.spec)


def of_everything(name: str) -> Config:
    return make_config(
        name,
        2,
        2,
        sequence_parallel=True,
        model={'dropout': 0.0},
        train={'dtype': 'bfloat16', 'microbatches': 2},
        optim={'shard': True},
    )


def new_names() -> dict[str, str]:
    """Random letters for each name of a module and of a parameter.

    A sublayer keeps its name, which is also that of what it sends and multiplies.
    """
    models = [make_config(name).model for name in NAMES]
    parts = {
        part for model in models for name, _ in counts.parameters(model) for part in name.split('.')
    } - {sublayer.name for sublayer in layer(models[0])}
    letters = random.Random(0)
    return {part: ''.join(letters.choices(string.ascii_lowercase, k=9)) for part in sorted(parts)}


def renamed(folder: Path, names: dict[str, str]) -> Path:
    """A copy of the package in which parameters and the modules that hold them have other names.

    They stand as text where they are declared and looked up, and as attributes of the modules.
    """
    shutil.copytree(ROOT / 'megajax', folder / 'megajax')
    any_name = '|'.join(names)
    attributes = re.compile(
        rf'(?<!megajax\.core\.)\b(?:self|model|weights|block)(?:\.(?:first|second|{any_name})\b)+'
    )
    looked_up = re.compile(
        rf"(?:\[|(?:get|make|maybe|dims)\()'(?:{any_name})'"
        rf"|'(?:{any_name})' in (?:parameters|self)\b"
        rf"|\('(?:{any_name})', '(?:{any_name})'"
    )
    as_text = re.compile(rf"'(?:{any_name})'")
    files = [
        *(folder / 'megajax/core/model').glob('*.py'),
        folder / 'megajax/core/train/objective.py',
    ]
    files.append(folder / 'megajax/core/counts/products.py')
    for file in files:
        if file.name not in ('product.py', 'fp32_gradients.py'):  # whose weights are not modules'
            text = attributes.sub(lambda x: rename(x.group(), names, r'\.'), file.read_text())
            file.write_text(looked_up.sub(lambda x: rename(x.group(), names, "'"), text))
    for declarations in ('declaration', 'layers', 'parameters', 'vision_parameters'):
        file = folder / f'megajax/core/counts/{declarations}.py'
        file.write_text(as_text.sub(lambda x: rename(x.group(), names, "'"), file.read_text()))
    return folder


def rename(text: str, names: dict[str, str], before: str) -> str:
    pattern = rf'(?<={before})(?:{"|".join(names)})\b'
    return re.sub(pattern, lambda found: names[found.group()], text)


def everything_of_renamed(name: str, folder: Path) -> dict[str, Any]:
    tree = renamed(folder, new_names())
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=os.environ | {'PYTHONPATH': f'{tree}:{ROOT / "tests"}', 'JAX_NUM_CPU_DEVICES': '8'},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('name', ['gpt', 'llama', 'bert'])
def test_nothing_but_the_name_changes_with_the_name_of_a_parameter(
    name: str, tmp_path: Path
) -> None:
    names = new_names()
    expected = json.loads(json.dumps(everything(of_everything(name))))
    expected['parameters'] = {
        '.'.join(names.get(part, part) for part in parameter.split('.')): x
        for parameter, x in expected['parameters'].items()
    }
    assert everything_of_renamed(name, tmp_path) == expected


NUM_EXPERTS = 4
MADE_UP = {
    'router': Parameter('DX', Role.TABLE, std=0.1),
    'expert_weights': Parameter('XDF', Role.MATRIX, std=0.1),
    'expert_bias': Parameter('XF', Role.VECTOR),
    'layer_scale': Parameter('D', Role.VECTOR, value=1.0, summed='T'),
}
SHAPES = {
    'router': (64, 4),
    'expert_weights': (4, 64, 256),
    'expert_bias': (4, 256),
    'layer_scale': (64,),
}


class LargerBlock(Block):
    """A layer that has the made-up parameters too, of which it uses the scale."""

    seen: dict[str, Any]  # what a step computes with

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        super().__init__(config, parameters, key=key)
        for name in MADE_UP:
            setattr(self, name, parameters.make(name, key) if name in parameters else None)

    def __call__(self, x_BTD: jax.Array, *others: Any, **rows: Any) -> tuple[jax.Array, Any]:
        y_BTD, kept = super().__call__(x_BTD, *others, **rows)
        LargerBlock.seen = {name: getattr(self, name) for name in MADE_UP}
        if self.layer_scale is None:
            return y_BTD, kept
        scale = along_last(self.layer_scale[...], y_BTD, 'TD', self.mlp.layout)
        return (y_BTD * scale).astype(y_BTD.dtype), kept


def patch_everywhere(patch: pytest.MonkeyPatch, old: Callable[..., Any], new: Any) -> None:
    """Give every module of the package that has a function another one for it."""
    for module in [m for name, m in sys.modules.items() if name.startswith('megajax.')]:
        if getattr(module, old.__name__, None) is old:
            patch.setattr(module, old.__name__, new)


@pytest.fixture(name='declare_too')
def patch_declarations(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Declare made-up parameters of every layer, and make them.

    Declarations are cached by the model's config, so these have one of their own.
    """

    def declare_too(*made_up: str) -> None:
        declare, dim_sizes = counts.declare, counts.dim_sizes
        added = counts.prefixed({name: MADE_UP[name] for name in made_up}, 'L')

        def declare_more(model: ModelConfig) -> Declared:
            declared = declare(model)
            return {**declared, 'layers': {**declared['layers'], **added}}

        patch_everywhere(monkeypatch, declare, declare_more)
        patch_everywhere(monkeypatch, dim_sizes, lambda x: {**dim_sizes(x), 'X': NUM_EXPERTS})
        monkeypatch.setattr('megajax.core.model.transformer.Block', LargerBlock)

    return declare_too


def larger(*mesh: int, init_std: float, **sections: dict[str, Any]) -> Config:
    model = {'init_std': init_std, 'dropout': 0.0}
    parallel = mesh[1] > 1
    return make_config('gpt', *mesh, sequence_parallel=parallel, model=model, **sections)


@pytest.mark.parametrize(
    ('name', 'at_rest', 'in_a_step', 'dtype', 'decays'),
    [
        ('router', (None,) * 3, (None,) * 3, 'float32', True),
        (
            'expert_weights',
            (None, None, 'data', 'model'),
            (None, None, None, 'model'),
            'bfloat16',
            True,
        ),
        ('expert_bias', (None, None, 'model'), (None, None, 'model'), 'float32', False),
        ('layer_scale', (None, None), (None, None), 'float32', False),
    ],
)
def test_a_made_up_parameter_is_treated_as_it_is_declared(
    name, at_rest, in_a_step, dtype, decays, declare_too
):
    declare_too(name)
    half = {'dtype': 'bfloat16'}
    config = larger(2, 2, init_std=0.0201, train=half, optim={'shard': True})
    assert by_parameter(config)[f'layers.{name}'] == {
        'shape': (2, *SHAPES[name]),
        'between steps': at_rest,
        'moments': [at_rest, at_rest],
        'in a step': in_a_step,
        'dtypes': ('float32', dtype),
        'decays': decays,
    }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_of_gathered_parameters_a_layer_gets_matrices_alone_in_the_dtype_of_the_step(
    dtype, declare_too
):
    declare_too(*MADE_UP)
    config = larger(2, 2, init_std=0.0202, train={'dtype': dtype}, optim={'shard': True})
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config)).params
        batch, key = abstract_batch(config), jax.random.key(0)
        _, gradients = jax.eval_shape(make_loss_and_gradients(config), params, batch, key)
    seen = {name: x.get_value() for name, x in LargerBlock.seen.items()}
    matrix = seen.pop('expert_weights')
    if dtype == 'bfloat16':
        assert isinstance(matrix, Slotted)
        assert (matrix.slot.dtype, matrix.weight.dtype) == ('float32', 'bfloat16')
    else:
        assert matrix.dtype == 'float32'
    assert {x.dtype.name for x in seen.values()} == {'float32'}
    assert seen['layer_scale'].shape == (config.mesh.model, 64)  # a copy for each shard
    assert {x.dtype.name for x in jax.tree.leaves(gradients)} == {'float32'}


@pytest.mark.slow
def test_what_the_shards_make_of_a_partial_gradient_is_added_up(declare_too):
    declare_too(*MADE_UP)
    found = []
    for mesh in ((1, 1), (2, 2)):
        config = larger(*mesh, init_std=0.0203, train={'microbatches': 2})
        with on_mesh(config):
            params, batch = init_state(config).params, place_batch(make_batch(config))
            gradients = jax.jit(make_loss_and_gradients(config))(params, batch, jax.random.key(0))
            found.append(gather(gradients[1]))
    assert_close(found[1], found[0], 1e-5)
    assert np.abs(found[0]['layers.layer_scale']).min() > 0


def test_made_up_parameters_are_counted(declare_too):
    before = larger(2, 2, init_std=0.0204)
    whole, own = counts.num_parameters(before.model), counts.own_counts(before)
    declare_too(*MADE_UP)
    config = larger(2, 2, init_std=0.0205)
    matrices, others = 2 * 4 * 64 * 256, 2 * (64 * 4 + 64)  # of two layers
    biases = 2 * 4 * 256
    assert counts.num_parameters(config.model) == whole + matrices + others + biases
    halves = own.matrices + matrices // 2, own.all + (matrices + biases) // 2 + others
    for now in (counts.own_counts(config), counts.megatron_counts(config.model, 2)):
        assert (now.matrices, now.all) == halves


@pytest.mark.parametrize('name', MADE_UP)
def test_a_made_up_parameter_is_refused_by_other_formats_by_its_name(name, declare_too):
    declare_too(name)
    config = larger(1, 1, init_std=0.0206 + sorted(MADE_UP).index(name) / 1e4)
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config)).params
        for refuses in (
            lambda: from_huggingface(config, {}, source='here'),
            lambda: from_megatron(config, {}),
            lambda: to_megatron(config, params),
        ):
            with pytest.raises(ConfigError, match=rf'layers\.{name}: .* has no tensor for this'):
                refuses()


if __name__ == '__main__':
    print(json.dumps(everything(of_everything(sys.argv[1]))))
