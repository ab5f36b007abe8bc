"""Send the tokens of a device to their experts, and multiply them by the experts' weights.

Everything here runs on one device. In array names, n is the dim of assignments, ordered by token; s
the slots of the buffer that is sent; r the rows that this device's experts receive; p the devices
that exchange tokens; and x the experts of this device. A weight [x, i, o] multiplies rows with
inputs i and outputs o.

Buffers have static sizes. If no token may be dropped, they hold somewhat more than a balanced load,
and assignments that do not fit are sent in later rounds (`Rounds`).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config.experts import ExpertsConfig
from megajax.core.counts.expert_rows import LATER_ROUNDS, block_rows, rows_to_each
from megajax.core.model.grouped import (
    Groups,
    group,
    outer,
    rows_by_transposed,
    rows_by_weights,
)
from megajax.core.model.platform import accumulation_dtype

Carry = TypeVar('Carry')


class Peers(NamedTuple):
    """The devices that hold the experts of a layer, along a mesh axis.

    `is_abstract` is whether a mapped function is only traced, outside the mapping, to find the
    shapes of its results. The axis does not exist there.
    """

    axis: str
    size: int
    is_abstract: bool

    @property
    def place(self) -> jax.Array | int:
        """The index of this device among the peers."""
        return 0 if self.is_abstract or self.size == 1 else lax.axis_index(self.axis)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all devices."""
        if self.is_abstract:
            return jnp.broadcast_to(x, (self.size, *x.shape))
        return lax.all_gather(x, self.axis)  # all-gather over expert

    def exchange(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        """Send each device its part along a dim, and join the received parts along `joined`."""
        if self.size == 1:
            return x
        if self.is_abstract:
            return jnp.concatenate(jnp.split(x, self.size, split), joined)
        # all-to-all over expert
        return lax.all_to_all(x, self.axis, split, joined, tiled=True)


@dataclasses.dataclass(frozen=True)
class Dispatch(abc.ABC):
    """Where the assignments of a device's tokens are sent."""

    slot_n: jax.Array  # slot of each assignment; past the buffer's end if it is dropped
    source_s: jax.Array  # assignment in each slot; past the last assignment if the slot is empty
    active: int  # number of experts per token
    peers: Peers

    @property
    def is_dropped_n(self) -> jax.Array:
        """Whether each assignment is dropped."""
        return self.slot_n >= len(self.source_s)

    def send_tokens(self, x_TD: jax.Array) -> jax.Array:
        """Send rows of tokens; return the rows that this device's experts receive."""
        return self.receive(_at(x_TD, self.source_s // self.active))

    def send(self, x_nD: jax.Array) -> jax.Array:
        """Send rows of assignments; return the rows that this device's experts receive."""
        return self.receive(_at(x_nD, self.source_s))

    def back(self, rows: jax.Array) -> jax.Array:
        """Return the row of each assignment [n, D]: zeros if it is dropped or in a later round."""
        return _at(self.give_back(rows), self.slot_n)

    def back_into(self, y_nD: jax.Array, rows: jax.Array) -> jax.Array:
        """Return y with the returned rows in place of the assignments that were sent."""
        return y_nD.at[self.source_s].set(self.give_back(rows), mode='drop')

    def in_later_rounds(self, run: Callable[['Dispatch', Carry], Carry], carry: Carry) -> Carry:
        """Call `run` for each round that follows this one; return its last result."""
        return carry

    @abc.abstractmethod
    def receive(self, buffer_sD: jax.Array) -> jax.Array:
        """Return the rows for this device's experts, from the buffers of all devices."""

    @abc.abstractmethod
    def give_back(self, rows: jax.Array) -> jax.Array:
        """Return each row to its slot [s, D] on the device that it came from."""

    @abc.abstractmethod
    def matmul(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        """Multiply each row by its expert's weight."""

    @abc.abstractmethod
    def input_gradient(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        """Multiply each row of gradients by its expert's transposed weight."""

    @abc.abstractmethod
    def weight_gradient(self, rows: jax.Array, gradient: jax.Array) -> jax.Array:
        """Return the gradient [x, i, o] of each expert's weight, in fp32."""

    @abc.abstractmethod
    def of_rows(self, bias_xo: jax.Array) -> jax.Array:
        """Return the bias of each row's expert, to be added to the rows."""

    @abc.abstractmethod
    def bias_gradient(self, gradient: jax.Array) -> jax.Array:
        """Return the sum of the rows of each expert, in fp32."""


class Rounds(NamedTuple):
    """The rounds in which assignments are sent, in order of experts, then of tokens."""

    device_n: jax.Array  # device that has the expert of each assignment
    rank_n: jax.Array  # rank of each assignment among those for the same device
    end_px: jax.Array  # number of assignments from each device for experts up to this one
    # number of rounds after the first, on all devices that exchange assignments
    num_later: jax.Array

    @classmethod
    def of(cls, expert_n: jax.Array, num_experts: int, peers: Peers) -> Self:
        """Distribute assignments over rounds."""
        of_device = num_experts // peers.size
        device_n = expert_n // of_device
        chosen_x = jnp.zeros(num_experts, jnp.int32).at[expert_n].add(1)
        # How many rows each device sends to each expert.
        every = peers.gather(chosen_x).reshape(peers.size, peers.size, of_device)
        first, later = rows_to_each(len(expert_n), peers.size)
        return cls(
            device_n,
            rank_in(device_n, peers.size, order=expert_n),
            jnp.cumsum(lax.dynamic_index_in_dim(every, peers.place, 1, keepdims=False), 1),
            -(jnp.minimum(first - every.sum(2).max(), 0) // later),
        )

    def sent(self, start: jax.Array | int, each: int, active: int, peers: Peers) -> 'Dropless':
        """Send `each` assignments to each device, starting with the one whose rank is `start`."""
        slot_n, size, count = self.rank_n - start, peers.size * each, len(self.rank_n)
        is_in = (slot_n >= 0) & (slot_n < each)
        slot_n = jnp.where(is_in, self.device_n * each + slot_n, size)
        rank_r = jnp.arange(each) + start
        local_pr = jax.vmap(lambda end_x: jnp.searchsorted(end_x, rank_r, side='right'))(
            self.end_px
        )
        of_device = self.end_px.shape[1]
        # If the load of the experts is balanced, a device receives as many rows as it sends.
        block = block_rows(min(size, count), of_device)
        groups = group(local_pr.reshape(-1).astype(jnp.int32), of_device, block=block)
        return Dropless(slot_n, sources(slot_n, size), active, peers, groups, self)


@dataclasses.dataclass(frozen=True)
class Dropless(Dispatch):
    """Rows [r, D] sorted by expert; `groups` says which rows belong to which expert."""

    groups: Groups
    rounds: Rounds | None  # None if all experts are on this device

    @classmethod
    def of(cls, expert_TY: jax.Array, experts: ExpertsConfig, peers: Peers) -> 'Dropless':
        """Send the assignments of the first round."""
        expert_n, active, count = expert_TY.reshape(-1), experts.active, expert_TY.size
        if peers.size == 1:
            groups = group(expert_n, experts.count, block=block_rows(count, experts.count))
            return cls(groups.place_n, groups.source_R, active, peers, groups, None)
        rounds = Rounds.of(expert_n, experts.count, peers)
        return rounds.sent(0, rows_to_each(count, peers.size)[0], active, peers)

    @property
    def is_dropped_n(self) -> jax.Array:
        return jnp.zeros(len(self.slot_n), bool)

    def in_later_rounds(self, run: Callable[[Dispatch, Carry], Carry], carry: Carry) -> Carry:
        if (rounds := self.rounds) is None:
            return carry
        first, later = rows_to_each(len(self.slot_n), self.peers.size)

        def body(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            done, carry = state
            sent = rounds.sent(first + done * later, later, self.active, self.peers)
            return done + 1, run(sent, carry)

        with jax.named_scope(LATER_ROUNDS):
            start = jnp.zeros((), jnp.int32), carry
            return lax.while_loop(lambda state: state[0] < rounds.num_later, body, start)[1]

    def receive(self, buffer_sD: jax.Array) -> jax.Array:
        if self.peers.size == 1:
            return buffer_sD
        return _at(self.peers.exchange(buffer_sD, 0, 0), self.groups.source_R)

    def give_back(self, rows: jax.Array) -> jax.Array:
        if self.peers.size == 1:
            return rows
        return self.peers.exchange(_at(rows, self.groups.place_n), 0, 0)

    def matmul(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        return rows_by_weights(rows, w_xio, self.groups)

    def input_gradient(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        return rows_by_transposed(rows, w_xio, self.groups)

    def weight_gradient(self, rows: jax.Array, gradient: jax.Array) -> jax.Array:
        return outer(rows, gradient, self.groups)

    def of_rows(self, bias_xo: jax.Array) -> jax.Array:
        return _at(bias_xo, self._expert_r)

    def bias_gradient(self, gradient: jax.Array) -> jax.Array:
        zeros = jnp.zeros((len(self.groups.sizes_X), gradient.shape[-1]))
        return zeros.at[self._expert_r].add(gradient.astype(jnp.float32), mode='drop')

    @property
    def _expert_r(self) -> jax.Array:
        """The expert of each row."""
        return jnp.repeat(self.groups.expert_b, self.groups.block)


@dataclasses.dataclass(frozen=True)
class WithCapacity(Dispatch):
    """Rows [x, r, D]: each expert has the same number of slots for each group of tokens.

    A group is a part of a sequence, so the same tokens are dropped on every mesh.
    """

    count: int  # number of all experts

    @classmethod
    def of(
        cls,
        expert_TY: jax.Array,
        experts: ExpertsConfig,
        group: int,
        peers: Peers,
        real_T: jax.Array | None = None,
    ) -> Self:
        """Send to each expert its first assignments in each group of `group` consecutive tokens.

        Tokens that are 0 in `real_T` come after all others of their group.
        """
        expert_n, active, count = expert_TY.reshape(-1), experts.active, experts.count
        slots = experts.slots(group)
        num_groups = len(expert_TY) // group
        group_n = jnp.arange(len(expert_n)) // (group * active)
        key_n = expert_n * num_groups + group_n
        order_n = None if real_T is None else 2 * key_n + jnp.repeat(real_T == 0, active)
        rank_n = rank_in(key_n, count * num_groups, order=order_n)
        slot_n = key_n * slots + rank_n
        size = count * num_groups * slots
        slot_n = jnp.where(rank_n < slots, slot_n, size)
        return cls(slot_n, sources(slot_n, size), active, peers, count)

    def receive(self, buffer_sD: jax.Array) -> jax.Array:
        rows = buffer_sD.reshape(self.count, -1, buffer_sD.shape[-1])
        return self.peers.exchange(rows, 0, 1)

    def give_back(self, rows: jax.Array) -> jax.Array:
        rows = self.peers.exchange(rows, 1, 0)
        return rows.reshape(-1, rows.shape[-1])

    def matmul(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        return _batched(rows, w_xio, (2, 1), rows.dtype)

    def input_gradient(self, rows: jax.Array, w_xio: jax.Array) -> jax.Array:
        return _batched(rows, w_xio, (2, 2), rows.dtype)

    def weight_gradient(self, rows: jax.Array, gradient: jax.Array) -> jax.Array:
        return _batched(rows, gradient, (1, 1), jnp.float32)

    def of_rows(self, bias_xo: jax.Array) -> jax.Array:
        return jnp.expand_dims(bias_xo, 1)

    def bias_gradient(self, gradient: jax.Array) -> jax.Array:
        return gradient.astype(jnp.float32).sum(1)


def dispatch(
    expert_TY: jax.Array,
    experts: ExpertsConfig,
    length: int,
    peers: Peers,
    real_T: jax.Array | None = None,
) -> Dispatch:
    """Return where a device's tokens are sent; `length` is the length of its parts of sequences.

    `real_T` is 0 for padding, which gets the slots that other tokens leave.
    """
    if experts.capacity is None:
        return Dropless.of(expert_TY, experts, peers)
    return WithCapacity.of(expert_TY, experts, experts.capacity_group or length, peers, real_T)


def rank_in(key_n: jax.Array, num_keys: int, order: jax.Array | None = None) -> jax.Array:
    """Return the index of each element among the elements with the same key.

    With `order`, elements are sorted by it first; the sort is stable.
    """
    all_n = jnp.arange(len(key_n))
    sorted_n = jnp.argsort(key_n if order is None else order, stable=True)
    ends = jnp.cumsum(jnp.zeros(num_keys, jnp.int32).at[key_n].add(1))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    return jnp.zeros(len(key_n), jnp.int32).at[sorted_n].set(all_n - starts[key_n[sorted_n]])


def sources(slot_n: jax.Array, size: int) -> jax.Array:
    """Return the assignment in each slot; past the last assignment if the slot is empty."""
    return jnp.full(size, len(slot_n)).at[slot_n].set(jnp.arange(len(slot_n)), mode='drop')


def _at(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows at these indices; zeros past the end."""
    return rows.at[index].get(mode='fill', fill_value=0)


def _batched(
    a: jax.Array, b: jax.Array, summed: tuple[int, int], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiply the matrices of each expert; `summed` is one dim of each operand."""
    dims = ((summed[0],), (summed[1],)), ((0,), (0,))
    of = accumulation_dtype(a, dtype)
    return lax.dot_general(a, b, dims, preferred_element_type=of).astype(dtype)
