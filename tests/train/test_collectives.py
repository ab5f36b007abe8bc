"""The collectives of the compiled train step on 2x4 are Megatron's and no more.

XLA for CPUs has no reduce-scatter (it is an all-reduce and a slice there), and joins all-reduces that are ready together in one
instruction, so what is counted are operands.
"""

import re
from collections import Counter
from contextlib import nullcontext
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import by_name, make_config, on_mesh

from megajax.config import Config
from megajax.model.embedding import VocabParallelEmbedding
from megajax.model.linear import ColumnParallelLinear
from megajax.model.product import product
from megajax.parallel.layout import BATCH, Layout
from megajax.parallel.mesh import concrete
from megajax.train import step as step_module
from megajax.train.step import init_state, make_train_step

DATA, MODEL = 2, 4
DEVICES = np.arange(DATA * MODEL).reshape(DATA, MODEL)
LAYERS = 3
Shape = tuple[int, ...]


class Collective(NamedTuple):
    kind: str
    axis: str
    shapes: list[Shape]  # of its results, without dims of 1
    loop: str  # 'forward' or 'backward' where it is in the loop over layers, 'other' in another loop, '' outside


def compiled_text(config: Config, **compiler_options: object) -> str:
    with on_mesh(config):
        state = concrete(jax.eval_shape(lambda: init_state(config)))
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), BATCH)
        dtypes = {'tokens': jnp.int32, 'labels': jnp.int32, 'loss_mask': jnp.float32}
        shape = config.train.batch_size, config.train.seq_len
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
        return make_train_step(config).lower(state, batch).compile(compiler_options).as_text()


def collectives(text: str) -> list[Collective]:
    computations = re.findall(r'^(?:ENTRY )?%(\S+) [^\n]*\{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    trips = {}  # of the loop whose body a computation is
    for line in re.findall(r'^.* while\(.*$', text, re.MULTILINE):
        count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        trips[re.search(r'body=%([^\s,]+)', line)[1]] = int(count[1]) if count else None
    found = []
    for name, body in computations:
        loop = 'other' if name in trips else ''
        if trips.get(name) == LAYERS:
            loop = 'backward' if 'transpose(jvp(layers))' in body else 'forward'
        pattern = r'= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)$'
        for shapes, kind, rest in re.findall(pattern, body, re.MULTILINE):
            results = [tuple(int(d) for d in dims.split(',') if d not in ('', '1')) for dims in re.findall(r'\w+\[([\d,]*)\]', shapes)]
            found.append(Collective(kind, '' if kind == 'collective-permute' else axis_of(rest), results, loop))
    assert len(found) == len(re.findall(r'channel_id=', text))
    return found


def axis_of(text: str) -> str:
    """The mesh axis that replica_groups run along, in any of XLA's spellings."""
    if named := re.search(r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = re.findall(r"'(\w+)'", named[3])
        devices = iota(named[2] or f'[{prod(sizes.values())}]').reshape([*sizes.values()])
        devices = np.moveaxis(devices, [[*sizes].index(name) for name in along], range(-len(along), 0))
        groups = devices.reshape(-1, prod(sizes[name] for name in along))
    elif short := re.search(r'replica_groups=\[([\d,]+)\]<=(\S+?),? ', text):
        groups = iota(short[2]).reshape([int(size) for size in short[1].split(',')])
    else:
        listed = re.search(r'replica_groups=\{(\{.*?\})\}', text)[1]
        groups = np.array([[int(device) for device in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', listed)])
    is_along = (axis for axis, expected in (('data', DEVICES.T), ('model', DEVICES)) if as_sets(groups) == as_sets(expected))
    return next(is_along, 'other')


def as_sets(groups: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups.tolist()}


def iota(text: str) -> np.ndarray:
    """The devices in the order that '[4,2]' or '[2,4]T(1,0)' gives them."""
    shape, order = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text).groups()
    shape = [int(size) for size in shape.split(',')]
    return np.arange(prod(shape)).reshape(shape).transpose([int(dim) for dim in order.split(',')] if order else None).ravel()


def small(name: str = 'gpt', *, sequence_parallel: bool = False, microbatches: int = 1, **model: object) -> Config:
    model = {'num_layers': LAYERS, 'dropout': 0.0, 'num_kv_heads': 4, 'qk_norm': False} | model
    train = {'microbatches': microbatches}
    return make_config(name, DATA, MODEL, sequence_parallel=sequence_parallel, model=model, train=train)


def activation(config: Config) -> Shape:
    rows = config.train.batch_size // DATA // config.train.microbatches
    return tuple(size for size in (rows, config.train.seq_len, config.model.hidden_size) if size > 1)


def activations(found: list[Collective], loop: str, config: Config) -> Counter:
    """How many whole activations each kind of collective over `model` makes in one layer."""
    return Counter(c.kind for c in found if c.loop == loop and c.axis == 'model' for shape in c.shapes if shape == activation(config))


def check_layers(found: list[Collective], config: Config) -> None:
    gathers = {'all-gather': 2} if config.mesh.sequence_parallel else {}
    for loop in ('forward', 'backward'):
        assert activations(found, loop, config) == {'all-reduce': 2} | gathers
        # Beside these only gradients of norms and row-parallel biases, which sequence parallelism makes partial sums of.
        rest = [shape for c in found if c.loop == loop for shape in c.shapes if shape != activation(config)]
        assert len(rest) <= (6 if config.mesh.sequence_parallel and loop == 'backward' else 0)
        assert set(rest) <= {(config.model.hidden_size,)}


def check_rest(found: list[Collective], config: Config) -> None:
    *rows, length, hidden = activation(config)
    chunked = (*rows, MODEL, length // MODEL, hidden) if config.mesh.sequence_parallel else activation(config)
    # The embedding's output and the gradient of the head's input; maximum, total, label's logit and mean logit of each token.
    allowed = Counter({('all-reduce', activation(config)): 1, ('all-reduce', chunked[:-1]): 4}) + Counter([('all-reduce', chunked)])
    if config.mesh.sequence_parallel:
        # The head's input and the gradient of the embedding's output; the last norm's weight and bias.
        allowed += Counter([('all-gather', chunked), ('all-gather', activation(config))])
        allowed += Counter({('all-reduce', (hidden,)): 2})
    outside = [c for c in found if c.axis != 'data' and c.loop not in ('forward', 'backward')]
    assert not Counter((c.kind, shape) for c in outside for shape in c.shapes if shape) - allowed


def check_data(found: list[Collective], config: Config) -> None:
    with on_mesh(config):
        params = by_name(jax.eval_shape(lambda: init_state(config)).params)
        shards = [tuple(size for size in x.sharding.shard_shape(x.shape) if size > 1) for x in params.values()]
    over_data = [c for c in found if c.axis == 'data']
    carrying = [c for c in over_data if any(c.shapes)]
    assert [c.loop for c in carrying] == ['']
    assert Counter(shape for c in carrying for shape in c.shapes if shape) == Counter(shards)
    assert {c.axis for c in found} == {'data', 'model'}
    assert all(c.loop == '' for c in over_data)


# The tests' own settings (conftest.py) turn these down.
AS_USERS_DO = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}

CHECKS = check_layers, check_rest, check_data


@pytest.mark.parametrize(
    ('name', 'sequence_parallel', 'microbatches'),
    [('gpt', False, 1), ('gpt', True, 4), ('llama', True, 1), ('llama', False, 4)],
)
def test_a_layer_makes_two_collectives_each_way_or_four_and_gradients_are_reduced_over_data_once(name, sequence_parallel, microbatches):
    config = small(name, sequence_parallel=sequence_parallel, microbatches=microbatches)
    found = collectives(compiled_text(config, **AS_USERS_DO))
    for check in CHECKS:
        check(found, config)


def replicated_mlp(monkeypatch):
    monkeypatch.setattr(Layout, 'mlp_up_DF', jax.P(None, None))
    monkeypatch.setattr(Layout, 'mlp_down_FD', jax.P(None, None))


def unfused_gate_and_up(monkeypatch):
    fused = ColumnParallelLinear.__call__

    def unfused(self: ColumnParallelLinear, x_BSD: jax.Array) -> jax.Array:
        if self.weight.ndim != 3:
            return fused(self, x_BSD)
        parts = (self.weight[:, i : i + 1] for i in range(2))
        return jnp.concatenate([product(x_BSD, w, 1, self.layout.columns(x_BSD, self.spec), x_BSD.dtype) for w in parts], 2)

    monkeypatch.setattr(ColumnParallelLinear, '__call__', unfused)


def gathered_table(monkeypatch):
    def lookup(self: VocabParallelEmbedding, token_BS: jax.Array, dtype: jnp.dtype, position_BSD: jax.Array) -> jax.Array:
        table_VD = jax.reshard(self.table[...], jax.P(None, None))
        return position_BSD + table_VD.at[token_BS].get(out_sharding=self.layout.residual_BSD(token_BS))

    monkeypatch.setattr(VocabParallelEmbedding, '__call__', lookup)


def reduced_for_each_microbatch(monkeypatch):
    make = step_module.make_loss_and_gradients

    def make_worse(config: Config):
        count = config.train.microbatches
        one = make(config.model_copy(update={'train': config.train.model_copy(update={'microbatches': 1})}))

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(DATA, count, -1, *x.shape[1:], out_sharding=jax.P('data', None, None, None))
            return jnp.moveaxis(x, 1, 0).reshape(count, -1, *x.shape[3:], out_sharding=jax.P(None, 'data', None))

        def loss_and_gradients(params, batch, key):
            def accumulate(total, microbatch):
                return jax.tree.map(jnp.add, total, one(params, microbatch, key)), None

            zero = jnp.zeros((), out_sharding=jax.P())
            return jax.lax.scan(accumulate, ((zero, zero), jax.tree.map(jnp.zeros_like, params)), jax.tree.map(split, batch))[0]

        return loss_and_gradients

    monkeypatch.setattr(step_module, 'make_loss_and_gradients', make_worse)


@pytest.mark.parametrize(
    ('worsen', 'failing', 'config'),
    [
        (replicated_mlp, check_layers, small()),
        (unfused_gate_and_up, check_layers, small('llama')),
        (gathered_table, check_rest, small()),
        (reduced_for_each_microbatch, check_data, small(microbatches=4)),
    ],
)
def test_a_worse_program_is_seen_by_the_check_that_is_for_it(worsen, failing, config, monkeypatch):
    worsen(monkeypatch)
    found = collectives(compiled_text(config))
    for check in CHECKS:
        with pytest.raises(AssertionError) if check is failing else nullcontext():
            check(found, config)
