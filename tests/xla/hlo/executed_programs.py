"""Programs in the manner of other projects, run with XLA's log of the collectives that it executes;
see test_executed.py.

`python executed_programs.py OUT.json` writes to OUT.json what `megajax.xla.hlo` counts in each, and
marks on stderr where each runs.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text
from megajax.xla.hlo.transfers import arrays_of

PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {}
TRIP_COUNTS = {'fori_loop of traced length': 6}


def program(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """Register what makes a jitted function and its arguments, all of them on one mesh."""
    PROGRAMS[build.__name__.replace('_', ' ')] = build
    return build


def mesh_of(auto: bool = True, **sizes: int) -> jax.sharding.Mesh:
    axis_type = AxisType.Auto if auto else AxisType.Explicit
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(axis_type,) * len(sizes))


def place(
    mesh: jax.sharding.Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32
) -> jax.Array:
    numbers = np.sin(np.arange(np.prod(shape))).reshape(shape) * 3
    return jax.device_put(jnp.asarray(numbers).astype(dtype), jax.NamedSharding(mesh, jax.P(*spec)))


def mapped(mesh: jax.sharding.Mesh, function: Callable, *arrays: jax.Array) -> tuple[Any, ...]:
    """The function of shards, whose results are stacked."""
    specs = tuple(array.sharding.spec for array in arrays)
    out = jax.P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    ), *arrays


def of_shards(function: Callable, **sizes: int) -> tuple[Any, ...]:
    """A function of one array of [8, 16] on each device of 2x4."""
    mesh = mesh_of(**(sizes or {'data': 2, 'model': 4}))
    return mapped(mesh, function, place(mesh, (64, 16), mesh.axis_names))


@program
def fsdp_step_with_remat_in_bf16():
    mesh = mesh_of(data=8)

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        up, down = (weight.astype(jnp.bfloat16) for weight in weights)
        return x + jnp.tanh(x @ up) @ down, None

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return (
            lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), weights)[0].astype(jnp.float32)
            ** 2
        ).mean()

    def step(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    weights = place(mesh, (3, 32, 64), None, 'data'), place(mesh, (3, 64, 32), None, 'data')
    return (
        jax.jit(step, out_shardings=jax.tree.map(lambda w: w.sharding, weights)),
        weights,
        place(mesh, (16, 32), 'data'),
    )


@program
def block_on_three_explicit_axes():
    mesh = mesh_of(auto=False, x=2, y=2, z=2)

    def block(
        h: jax.Array, qkv: jax.Array, out: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        gathered = (None, None, 'z'), ('z', None, None), (None, 'z'), ('z', None)
        qkv, out, up, down = (
            jax.reshard(w, jax.P(*spec))
            for w, spec in zip((qkv, out, up, down), gathered, strict=True)
        )
        q, k, v = jnp.einsum('bsd,dcnh->cbnsh', h, qkv, out_sharding=jax.P(None, 'x', 'z'))
        scores = jax.nn.softmax(jnp.einsum('bnqh,bnkh->bnqk', q, k), -1)
        h = h + jnp.einsum('bnqk,bnkh,nhd->bqd', scores, v, out, out_sharding=jax.P('x'))
        return h + jnp.einsum(
            'bsf,fd->bsd',
            jax.nn.silu(jnp.einsum('bsd,df->bsf', h, up)),
            down,
            out_sharding=jax.P('x'),
        )

    def step(h: jax.Array, *weights: jax.Array) -> Any:
        return jax.grad(lambda weights: block(h, *weights).sum())(weights)

    shapes = {
        (16, 3, 4, 8): ('x', None, 'z'),
        (4, 8, 16): ('z', None, 'x'),
        (16, 64): ('x', 'z'),
        (64, 16): ('z', 'x'),
    }
    return (
        jax.jit(step),
        place(mesh, (4, 8, 16), 'x'),
        *(place(mesh, shape, *spec) for shape, spec in shapes.items()),
    )


@program
def gpipe_of_four_stages():
    mesh = mesh_of(data=2, stage=4)
    chain = [(i, i + 1) for i in range(3)]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        stage = lax.axis_index('stage')

        def tick(carried: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = jnp.tanh(jnp.where(stage == 0, microbatch, carried) @ w[0])
            return lax.ppermute(made, 'stage', chain), made

        return (lax.scan(tick, x[0], jnp.concatenate([x, x[:3]]))[1][3:] ** 2).sum()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - lax.psum(jax.grad(loss)(w, x), 'data')

    return mapped(
        mesh, step, place(mesh, (4, 16, 16), 'stage'), place(mesh, (4, 8, 16), None, 'data')
    )


@program
def ring_attention():
    mesh = mesh_of(context=8)
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def step(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            k, v, top, bottom = state
            weights = jnp.exp(q @ k.T)
            k, v = lax.ppermute((k, v), 'context', ring)
            return k, v, top + weights @ v, bottom + weights.sum(-1, keepdims=True)

        *_, top, bottom = lax.fori_loop(
            0, 8, step, (k, v, jnp.zeros_like(q), jnp.zeros((q.shape[0], 1)))
        )
        return top / bottom

    return mapped(mesh, attend, *(place(mesh, (32, 8), 'context') for _ in range(3)))


@program
def moe_dispatch():
    def layer(x: jax.Array) -> jax.Array:
        chosen = jax.nn.one_hot(jnp.argmax(x[:, :4], -1), 4)
        sent = lax.all_to_all(jnp.einsum('te,td->etd', chosen, x), 'model', 0, 0)
        return jnp.einsum('te,etd->td', chosen, lax.all_to_all(jnp.tanh(sent), 'model', 0, 0))

    return of_shards(lambda x: layer(x) + lax.pmean(x, ('data', 'model')))


@program
def all_reduce_by_a_ring_of_permutes():
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def reduce(x: jax.Array) -> jax.Array:
        me = lax.axis_index('i')

        def scatter(step: int, x: jax.Array) -> jax.Array:
            got = lax.ppermute(x[(me - step) % 8], 'i', ring)
            return x.at[(me - step - 1) % 8].add(got)

        def gather(step: int, x: jax.Array) -> jax.Array:
            return x.at[(me - step) % 8].set(lax.ppermute(x[(me + 1 - step) % 8], 'i', ring))

        return lax.fori_loop(0, 7, gather, lax.fori_loop(0, 7, scatter, x))

    return of_shards(reduce, i=8)


@program
def unequal_groups():
    return of_shards(
        lambda x: jnp.sin(lax.psum(x, 'i', axis_index_groups=[[0, 1, 2], [3, 4, 5, 6], [7]])), i=8
    )


@program
def devices_in_another_order():
    devices = np.array(jax.devices())[[3, 0, 2, 1, 7, 5, 4, 6]].reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ('data', 'model'))
    return mapped(
        mesh,
        lambda x: lax.psum(jnp.sin(lax.psum(x, 'model')), 'data'),
        place(mesh, (64, 16), ('data', 'model')),
    )


def placed_by_xla(
    function: Callable,
    shape: tuple[int, ...],
    spec: tuple[Any, ...],
    out: tuple[Any, ...],
    **sizes: int,
) -> tuple[Any, ...]:
    mesh = mesh_of(**(sizes or {'i': 8}))
    return jax.jit(function, out_shardings=jax.NamedSharding(mesh, jax.P(*out))), place(
        mesh, shape, *spec
    )


@program
def sort_placed_by_xla():
    return placed_by_xla(lambda x: jnp.sort(x, 0), (64, 8), ('i',), ('i',))


@program
def top_k_placed_by_xla():
    return placed_by_xla(lambda x: lax.top_k(x, 4)[0], (8, 64), (None, 'i'), ())


@program
def fft_placed_by_xla():
    return placed_by_xla(lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), (64, 8), ('i',), ('i',))


@program
def convolution_placed_by_xla():
    kernel = jnp.ones((1, 1, 5))
    return placed_by_xla(
        lambda x: lax.conv(x, kernel, (1,), 'SAME'),
        (2, 1, 64),
        (None, None, 'i'),
        (None, None, 'i'),
    )


@program
def roll_placed_by_xla():
    return placed_by_xla(lambda x: jnp.roll(x, 3, 0), (64, 8), ('i',), ('i',))


@program
def gradients_of_an_mlp_placed_by_xla():
    mesh = mesh_of(data=2, model=4)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return x.mean()

    weights = [
        place(mesh, (16, 32), None, 'model'),
        place(mesh, (32, 32), 'model'),
        place(mesh, (32, 2)),
    ]
    return jax.jit(jax.grad(loss)), weights, place(mesh, (8, 16), 'data')


@program
def partial_sums_of_which_each_keeps_a_part():
    mesh = mesh_of(auto=False, data=2, model=4)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = jax.reshard(
            jnp.tanh(jnp.einsum('sf,fd->sd', x, w, out_sharding=jax.P('model'))), jax.P()
        )
        return jax.reshard(x, jax.P(None, 'model')), None

    return (
        jax.jit(lambda x, w: lax.scan(layer, x, w)[0]),
        place(mesh, (8, 32), None, 'model'),
        place(mesh, (3, 32, 32), None, 'model'),
    )


def sent_in(dtype: Any) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[Any, ...]:
        mesh = mesh_of(data=2, model=4)
        ring = [(i, (i + 1) % 4) for i in range(4)]

        def send(x: jax.Array) -> jax.Array:
            x = lax.ppermute(lax.all_gather(x, 'data')[0], 'model', ring)
            return x if dtype in (jnp.bool_, jnp.float8_e4m3fn) else lax.psum(x, 'model')

        return mapped(mesh, send, place(mesh, (64, 16), ('data', 'model'), dtype=dtype))

    return build


for sent in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn):
    PROGRAMS[f'sent in {sent.__name__}'] = sent_in(sent)


def reduce(x: jax.Array) -> jax.Array:
    return jnp.sin(lax.psum(x, 'model'))


def gather(x: jax.Array) -> jax.Array:
    return jnp.cos(lax.all_gather(x, 'data').sum(0))


@program
def every_second_step_of_a_scan():
    return of_shards(
        lambda x: lax.scan(
            lambda x, i: (lax.cond(i % 2 == 0, reduce, gather, x), None), x, jnp.arange(7)
        )[0]
    )


@program
def switch_by_a_table():
    table = jnp.array([0, 2, 1, 1, 0, 0, 2, 2, 2, 0, 1, 0])
    return of_shards(
        lambda x: lax.fori_loop(
            0, 12, lambda i, x: lax.switch(table[i], [reduce, gather, jnp.tanh], x), x
        )
    )


@program
def scans_in_scans():
    def repeat(function: Callable, times: int) -> Callable:
        return lambda x: lax.scan(lambda x, _: (function(x), None), x, None, length=times)[0]

    return of_shards(repeat(lambda x: gather(repeat(reduce, 3)(x)), 4))


@program
def loop_as_long_as_the_counter_of_another():
    return of_shards(
        lambda x: lax.fori_loop(
            0, 5, lambda i, x: lax.fori_loop(0, i, lambda _, x: reduce(x), x), x
        )
    )


def loop_of_traced_length() -> tuple[Any, ...]:
    mesh = mesh_of(data=2, model=4)
    length = jax.device_put(jnp.int32(6), jax.NamedSharding(mesh, jax.P()))
    return mapped(
        mesh,
        lambda x, n: lax.fori_loop(0, n, lambda _, x: reduce(x), x),
        place(mesh, (64, 16), ('data', 'model')),
        length,
    )


PROGRAMS['fori_loop of traced length'] = loop_of_traced_length


@program
def sums_cut_by_hand():
    def cut(x: jax.Array) -> jax.Array:
        over_data, half = lax.psum(x, 'data'), lax.axis_index('data')
        own, other = (
            lax.dynamic_slice_in_dim(over_data, 4 * place, 4) for place in (half, 1 - half)
        )
        return own + other + lax.dynamic_slice_in_dim(lax.psum(x, 'model'), 4 * half, 4)

    return of_shards(cut)


@program
def as_many_numbers_as_devices():
    return of_shards(lambda x: lax.psum(x.sum(0)[:4], 'model'))


@program
def permutes_that_send_nothing():
    return of_shards(
        lambda x: (
            lax.ppermute(x, 'model', [])
            + jnp.sin(lax.ppermute(x, 'model', [(i, i) for i in range(4)]))
        )
    )


def counted(name: str) -> tuple[list[dict[str, Any]], Callable[[], Any]]:
    """What is counted in a program, an entry an instruction, and what runs it."""
    function, *arguments = PROGRAMS[name]()
    mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(arguments))
    with jax.set_mesh(mesh):
        compiled = function.lower(*arguments).compile()
    text = Program(program_text(compiled), trip_count=TRIP_COUNTS.get(name))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in collectives(text, dict(mesh.shape)):
        computation = text.computations[one.computation]
        instruction = computation.by_name[one.instruction]
        entry = found.setdefault(
            (one.computation, one.instruction),
            {
                'opcode': instruction.opcode,
                'bytes': sum(sent.operand.bytes for sent in arrays_of(computation, instruction)),
                'groups': [
                    [mesh.devices.flat[device].id for device in group] for group in one.groups
                ],
                'times': one.times,
                'kinds': [],
                'read bytes': 0,
            },
        )
        entry['kinds'].append(one.kind)
        entry['read bytes'] += one.operand.bytes
    return [*found.values()], lambda: jax.block_until_ready(compiled(*arguments))


def main(path: str) -> None:
    jax.config.update('jax_num_cpu_devices', 8)
    counts = {}
    for name in PROGRAMS:
        counts[name], run = counted(name)
        print(f'RUN {name}', file=sys.stderr, flush=True)
        run()
        print('END', file=sys.stderr, flush=True)
    with open(path, 'w') as file:
        json.dump(counts, file)


if __name__ == '__main__':
    main(sys.argv[1])
