"""Every parameter lies where the layout table of the design puts it, and the bytes of a device
shrink by that.
"""

import ast
import re

import jax
import optax
import pytest
from jax import P
from support import ROOT, by_name, exhaustive, make_config, on_mesh, random_params, slow

from megajax.core.counts.parameters import num_parameters
from megajax.core.parallel.layout import STAGES, UNSHARDED, Layout
from megajax.core.parallel.mesh import concrete
from megajax.core.train.step import init_state

# The mesh axis of each dim; those of a layer come after the dim of the stack, which is not sharded.
EVERY_MODEL = {
    'embedding.table': ('model', None),  # vocabulary, D
    'norm.weight': (None,),
    'layers.attention.norm.weight': (None,),
    'layers.attention.qkv.weight': (
        None,
        'model',
        None,
        None,
    ),  # D, key/value head, its columns, head dim
    'layers.attention.out.weight': ('model', None, None),  # head, head dim, D
    'layers.mlp.norm.weight': (None,),
    'layers.mlp.up.weight': (None, 'model'),
    'layers.mlp.down.weight': ('model', None),
}
GPT = EVERY_MODEL | {
    'position.table': (None, None),
    'norm.bias': (None,),
    'layers.attention.norm.bias': (None,),
    'layers.attention.qkv.bias': ('model', None, None),
    'layers.attention.out.bias': (None,),
    'layers.mlp.norm.bias': (None,),
    'layers.mlp.up.bias': ('model',),
    'layers.mlp.down.bias': (None,),
}
LLAMA = EVERY_MODEL | {
    'head': ('model', None),
    'layers.attention.query_norm.weight': (None,),
    'layers.attention.key_norm.weight': (None,),
    'layers.mlp.up.weight': (None, None, 'model'),  # D, gate and up, F
}
FEW_KV_HEADS = LLAMA | {'layers.attention.qkv.weight': (None, None, None, 'model')}

CASES = [
    ('gpt', 1, 2, GPT),
    ('gpt', 2, 4, GPT),
    ('gpt', 1, 8, GPT),
    ('llama', 4, 2, LLAMA),
    ('llama', 2, 4, FEW_KV_HEADS),
]


@pytest.mark.parametrize('sequence_parallel', [False, True])
@pytest.mark.parametrize(('name', 'data', 'model', 'table'), CASES)
def test_every_parameter_and_both_its_moments_lie_where_the_table_says(
    name, data, model, table, sequence_parallel
):
    config = make_config(name, data, model, sequence_parallel=sequence_parallel)
    expected = {
        parameter: (None, *axes) if parameter.startswith('layers.') else axes
        for parameter, axes in table.items()
    }
    with on_mesh(config):
        state = concrete(jax.eval_shape(lambda: init_state(config)))
        moments = (optax.tree_utils.tree_get(state.opt_state, moment) for moment in ('mu', 'nu'))
        for tree in (state.params, *moments):
            assert {
                parameter: tuple(x.sharding.spec) for parameter, x in by_name(tree).items()
            } == expected


@pytest.mark.parametrize(
    ('name', 'data', 'model', 'table'),
    [exhaustive(*case) for case in CASES[:3]] + [slow(*CASES[3]), CASES[4]],
)
def test_a_device_holds_its_share_of_what_is_sharded_and_all_of_the_rest(name, data, model, table):
    config = make_config(name, data, model)
    with on_mesh(config):
        params = by_name(random_params(config, std=0.05))
    total = 4 * num_parameters(config.model, padded=True)
    sharded = sum(x.nbytes for parameter, x in params.items() if 'model' in table[parameter])
    assert sum(x.nbytes for x in params.values()) == total
    assert sharded > 0.9 * total
    held = {
        device: sum(
            shard.data.nbytes
            for x in params.values()
            for shard in x.addressable_shards
            if shard.device == device
        )
        for device in jax.devices()[: data * model]
    }
    assert set(held.values()) == {sharded // model + total - sharded}


def test_matrices_at_rest_over_some_axes_keep_those_alone():
    config = make_config('llama', 2, 2, optim={'shard': 'weights'})
    layout = Layout.of(config)
    assert layout('DF', at_rest=True) == P('data', 'model')
    assert layout.at_rest_over(('data',))('DF', at_rest=True) == P('data', 'model')
    assert layout.at_rest_over(('model',))('DF', at_rest=True) == P(None, 'model')


def test_only_the_layout_writes_partition_specs() -> None:
    allowed = {
        ROOT / 'megajax/core/parallel/layout.py',
        *(ROOT / 'megajax').glob('xla/miscompiles/*.py'),
    }
    written = [
        f'{path.relative_to(ROOT)}:{node.lineno}'
        for path in sorted({*(ROOT / 'megajax').rglob('*.py')} - allowed)
        if re.search(r'\b(P|PartitionSpec)\(', text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and getattr(node.func, 'attr', getattr(node.func, 'id', '')) in ('P', 'PartitionSpec')
    ]
    assert not written


def test_an_array_with_dims_of_another_is_placed_as_it_in_these():
    rows = 'data', 'row'
    spec = P('replica', rows, None, 'model', None)
    assert UNSHARDED.like(spec, '*RSNH->*RNS-') == P('replica', rows, 'model', None, None)
    assert UNSHARDED.like(spec[1:], 'RSNH->RN') == P(rows, 'model')
    assert UNSHARDED.like(spec[1:], '*NH->N*') == P('model', rows, None)
    assert STAGES.like(spec[1:], '*->Z*') == P('stage', rows, None, 'model', None)
    assert STAGES.like(P(), '*->-*') == P(None)
