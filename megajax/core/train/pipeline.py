"""Pipeline parallelism: the stages run in lock step, following the tables of `schedule.py`.

The stages of `mesh.stages` are a mapped dim, [stage, data shard, ...], like data shards. In each
tick, every stage runs the passes in the schedule: forward, backward, or both. Its output is sent to
its neighbor while it computes the next one. This is 1F1B (Narayanan et al., 2021) in one program
for all devices. An idle stage also computes, on embedded tokens or stale activations, but its
results are not used: the cotangent of its backward pass is zero, and so are its gradients.

Every stage has the embedding and the head. All stages look up the embedding, but only the first one
uses it. Each stage computes the head for its part of the tokens that the last stage has finished,
so that all stages have the same amount of work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.counts.schedule import IDLE, Phase, Schedule, make_schedule, schedule_of
from megajax.core.model.residuals import LayerPasses, keeping_inputs, keeping_residuals
from megajax.core.parallel.layout import STAGES, Layout
from megajax.core.parallel.pipeline_ops import BOTH, add, load, select, send, store
from megajax.core.train.feed import Batch
from megajax.core.train.objective import Objective, Sums
from megajax.core.train.stage_arrays import joined, slots, zeros_of_layers, zeros_outside
from megajax.core.train.stage_model import StageModel

Tree = Any
Ring = list[tuple[int, int]]
# Named scopes of the stages' sends; `inspect` needs them to tell the two directions apart if there
# are only two stages.
TO_NEXT, TO_PREVIOUS = 'to_next_stage', 'to_previous_stage'


class Tick(NamedTuple):
    """The entries of a schedule for one tick or, stacked, for many; -1 if there is none."""

    forward_Z3: jax.Array  # microbatch, chunk and slot of each stage's forward pass
    backward_Z3: jax.Array
    embedded: jax.Array  # microbatch of the first stage's forward pass
    returned: jax.Array  # microbatch of the first stage's backward pass
    head: jax.Array  # microbatch for which the head is due


class Carry(NamedTuple):
    """The arrays [stage, ...] that one tick hands to the next."""

    x: jax.Array  # input of the next forward pass
    dx: jax.Array  # gradient of the input of the last backward pass
    kept: Tree  # [Z, slot, ...]: values saved for the backward passes of chunks in flight
    turn: jax.Array  # [Z, turn, ...]: gradients of the last stage's outputs
    layers: Tree  # [Z, chunk, ...]: gradients accumulated so far
    outside: Tree
    sums: Sums


def pipelined(
    objective: Objective, layout: Layout
) -> Callable[[Tree, Tree, Batch, jax.Array], Any]:
    """Return a function of primals, weights, microbatches and dropout key.

    The function returns the sums of each stage and shard, and the gradients for
    `zero.sum_over_data`.
    """
    config, keeping = objective.config, keeping_residuals
    if config.train.recompute == 'full':
        objective, keeping = objective.without_recomputation, keeping_inputs

    def of_microbatches(
        primals: Tree, weights: Tree, microbatches: Batch, key: jax.Array
    ) -> tuple[Sums, Tree]:
        schedule = schedule_of(config)
        model = StageModel(objective, layout, schedule, primals, weights, microbatches, key)
        passes = keeping(model.run_layers)
        carry = _start(model, passes)
        for phase in schedule.phases:
            do_tick = partial(_tick, model=model, passes=passes, phase=phase)
            carry, _ = lax.scan(do_tick, carry, _ticks(schedule, phase))
        return carry.sums, joined(carry.layers, carry.outside, layout)

    return of_microbatches


def evaluate_pipelined(
    objective: Objective, layout: Layout, params: Tree, microbatches: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood, and the loss of sentence-order prediction or zero.

    Both are sums over the microbatches, of shape [stage, *shards].
    """
    mesh, count = objective.config.mesh, len(microbatches['tokens'])
    schedule = make_schedule(mesh.stages, mesh.virtual_stages, count)
    model = StageModel(objective, layout, schedule, params, None, microbatches)
    zero = model.zeros('')
    carry = model.zeros('BTD'), (zero, zero)
    for phase in schedule.phases:
        if phase.forward:
            do_tick = partial(_evaluation_tick, model=model, phase=phase)
            carry, _ = lax.scan(do_tick, carry, _ticks(schedule, phase))
    return carry[1]


def _start(model: StageModel, passes: LayerPasses) -> Carry:
    """Return the carry before the first tick: zeros."""
    schedule, layout = model.schedule, model.layout
    x, zero = model.zeros('BTD'), model.zeros('')
    idle_Z3 = jnp.full((schedule.stages, 3), IDLE, out_sharding=STAGES('Z-'))
    _, kept = jax.eval_shape(lambda x: _forward(model, passes, x, idle_Z3), x)
    return Carry(
        x=x,
        dx=x,
        kept=jax.tree.map(lambda x: slots(x, schedule.num_slots), kept),
        turn=slots(x, schedule.num_turns),
        layers=zeros_of_layers(model.layers, layout),
        outside=zeros_outside(model.outside, layout),
        sums=(zero, zero),
    )


def _tick(
    carry: Carry, tick: Tick, *, model: StageModel, passes: LayerPasses, phase: Phase
) -> tuple[Carry, None]:
    """Run one tick of a phase, as scheduled."""
    ring = _ring(model.schedule)
    # Sends to earlier stages overlap with the forward pass, and sends to later stages with the
    # backward pass.
    dy = _send_back(carry.dx, ring) if phase.backward else None
    if phase.forward:
        x = model.input(carry.x, tick.embedded, tick.forward_Z3)
        y, kept = _forward(model, passes, x, tick.forward_Z3)
        kept = store(carry.kept, kept, tick.forward_Z3[:, 2])
        carry = carry._replace(x=_send_on(y, ring), kept=kept)
        if phase.head:
            is_always_due = phase.ticks == model.schedule.microbatches
            carry = _head(carry, y, tick.head, model, is_always_due=is_always_due)
    if dy is not None:
        carry = _backward(carry, dy, tick, model, passes)
    return carry, None


def _evaluation_tick(
    carry: tuple[jax.Array, Sums], tick: Tick, *, model: StageModel, phase: Phase
) -> tuple[tuple[jax.Array, Sums], None]:
    """Run the forward pass of one tick, and the head without its gradients."""
    x, sums = carry
    x = model.input(x, tick.embedded, tick.forward_Z3)
    layers, given = load(model.layers, tick.forward_Z3[:, 1]), model.given(tick.forward_Z3)
    kinds = model.kinds_of_layers, model.given_kinds, BOTH
    y = model.over(model.run_layers, *kinds)(layers, given, x)
    if phase.head:
        sums = jax.tree.map(jnp.add, sums, model.sums(y, tick.head))
    return (_send_on(y, _ring(model.schedule)), sums), None


def _forward(
    model: StageModel, passes: LayerPasses, x: jax.Array, pass_Z3: jax.Array
) -> tuple[jax.Array, Tree]:
    """Run each stage's chunk of layers; also return the values that the backward pass needs."""
    forward = model.over(passes.forward, model.kinds_of_layers, model.given_kinds, BOTH)
    return forward(load(model.layers, pass_Z3[:, 1]), model.given(pass_Z3), x)


def _head(
    carry: Carry, y: jax.Array, microbatch: jax.Array, model: StageModel, *, is_always_due: bool
) -> Carry:
    """Add the sums and gradients of the head, if it is due, and store the gradient of y."""

    def due(outside: Tree, sums: Sums, turn: jax.Array) -> tuple[Tree, Sums, jax.Array]:
        new_sums, gradients, dy = model.differentiate_head(y, microbatch)
        slot_Z = jnp.zeros_like(model.stage_Z) + microbatch % model.schedule.num_turns
        outside, sums = jax.tree.map(jnp.add, (outside, sums), (gradients, new_sums))
        return outside, sums, store(turn, dy, slot_Z)

    before = carry.outside, carry.sums, carry.turn
    if is_always_due:
        outside, sums, turn = due(*before)
    else:  # all devices take the same branch, so it may contain collectives
        outside, sums, turn = lax.cond(microbatch >= 0, due, lambda *before: before, *before)
    return carry._replace(outside=outside, sums=sums, turn=turn)


def _backward(
    carry: Carry, dy: jax.Array, tick: Tick, model: StageModel, passes: LayerPasses
) -> Carry:
    """Add the gradients of each stage's chunk and, on the first stage, of the embedding."""
    schedule = model.schedule
    microbatch_Z, chunk_Z, slot_Z = jnp.moveaxis(tick.backward_Z3, -1, 0)
    ends = model.is_last_Z & (chunk_Z == schedule.chunks - 1)
    dy = select(ends, load(carry.turn, microbatch_Z % schedule.num_turns), dy)
    dy = select(microbatch_Z >= 0, dy, jnp.zeros_like(dy))
    backward = model.over(passes.backward, model.kinds_of_layers, model.given_kinds, BOTH, BOTH)
    layers, given = load(model.layers, chunk_Z), model.given(tick.backward_Z3)
    dlayers, dx = backward(layers, given, load(carry.kept, slot_Z), dy)
    # Neither the gradients of routers nor the counts of routers and of fp8 depend on dy.
    if model.objective.is_routed or model.objective.in_fp8:
        dlayers = jax.tree.map(lambda x: select(microbatch_Z >= 0, x, jnp.zeros_like(x)), dlayers)
    begins = model.is_first_Z & (chunk_Z == 0)
    # jax 0.12's XLA names the gather after this scope
    with jax.named_scope('transpose(embedding)'):
        embedded = select(begins, dx, jnp.zeros_like(dx))
    doutside = model.embedding_gradients(tick.returned, embedded)
    return carry._replace(
        dx=dx,
        layers=add(carry.layers, dlayers, chunk_Z),
        outside=jax.tree.map(jnp.add, carry.outside, doutside),
    )


def _send_on(y: jax.Array, ring: Ring) -> jax.Array:
    """Send each stage's output to the next stage."""
    with jax.named_scope(TO_NEXT):
        return send(y, ring)


def _send_back(dx: jax.Array, ring: Ring) -> jax.Array:
    """Send the gradient of each stage's input to the previous stage."""
    with jax.named_scope(TO_PREVIOUS):
        return send(dx, [(after, stage) for stage, after in ring])


def _ring(schedule: Schedule) -> Ring:
    """Return the pairs of a stage and its successor; the last stage sends to the first."""
    return [(stage, (stage + 1) % schedule.stages) for stage in range(schedule.stages)]


def _ticks(schedule: Schedule, phase: Phase) -> Tick:
    """Return the entries of a phase, each stage's on its own devices."""
    forward, backward, head = (
        table[phase.start : phase.stop]
        for table in (schedule.forward, schedule.backward, schedule.head)
    )
    of_stages = STAGES('-Z-')
    return Tick(
        forward_Z3=jax.reshard(jnp.asarray(forward), of_stages),
        backward_Z3=jax.reshard(jnp.asarray(backward), of_stages),
        embedded=jnp.asarray(forward[:, 0, 0]),
        returned=jnp.asarray(backward[:, 0, 0]),
        head=jnp.asarray(head),
    )
