"""Detect silent data corruption: compute a step twice, on different devices.

With `train.replay_every`, such a step runs from the same state and batch on the mesh of the run and
on that mesh with its devices rotated (`core/parallel/rotated_mesh.py`). Both programs are compiled
from the same text, so their results are bit-identical on healthy hardware.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled
from optax import GradientTransformation

from megajax.core.config import Config, CorruptionError
from megajax.core.parallel.mesh import host_names
from megajax.core.parallel.placements import parameter_name
from megajax.core.parallel.rotated_mesh import abstract_on, copy_rotated, rotated, successors
from megajax.core.parallel.shard_digests import compile_digests
from megajax.core.train.feed import Batch, abstract_batch
from megajax.core.train.first_step import TrainStep
from megajax.core.train.step import Metrics, TrainState, make_train_step
from megajax.runtime.processes.consensus import from_all
from megajax.runtime.run.clock import Clock
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.watchdog import Watchdog


class Difference(NamedTuple):
    """The first array that differs on a process's devices.

    Processes send it to each other as int32.
    """

    array: int  # index of the array among the results of a step; -1 if no array differs
    device: int  # jax's id of the device that has the result of the step
    repeated_on: int  # jax's id of the device that has the result of its repetition
    elements: int  # number of elements that differ there, counted on the host; capped, like `of`
    of: int
    devices: int  # number of devices of the process on which any array differs


NOTHING = Difference(-1, -1, -1, 0, 0, 0)
MOST_ELEMENTS = 2**31 - 1


class Replay:
    """The compiled step of a run, repeated on the rotated mesh every `train.replay_every` steps.

    All processes must create a Replay, and take the same steps.
    """

    def __init__(
        self,
        config: Config,
        train_step: Compiled,
        state: TrainState,
        *,
        report: Report,
        clock: Clock,
        watchdog: Watchdog,
        optimizer: GradientTransformation | None = None,
    ):
        self.every = config.train.replay_every
        self.report, self.clock, self.watchdog = report, clock, watchdog
        self._train_step = train_step
        self._has_run = False
        if self.every:
            self._compile(config, state, optimizer)

    def is_due(self, step: int) -> bool:
        """Whether a step is to be repeated."""
        return bool(self.every) and step % self.every == 0

    def of_step(self, step: int) -> TrainStep:
        """Return the function that takes a step: the compiled step, repeated if it is due.

        It raises CorruptionError, in all processes, if the repetition has a different result.
        """
        return partial(self._take_twice, step) if self.is_due(step) else self._train_step

    def _compile(
        self, config: Config, state: TrainState, optimizer: GradientTransformation | None
    ) -> None:
        start = time.perf_counter()
        self._mesh = jax.sharding.get_mesh()
        self._rotated = rotated(self._mesh)
        with self.report.waiting('compiling the step for its repetition'):
            with jax.set_mesh(self._rotated):
                state = abstract_on(self._rotated, state)
                train_step = make_train_step(config, optimizer)
                lowered = train_step.lower(state, abstract_batch(config))
                self._repetition = lowered.compile()
            self._digests, self._digests_of_repetition = (
                compile_digests(mesh, [x for _, x in named_results(*program.out_info)])
                for mesh, program in (
                    (self._mesh, self._train_step),
                    (self._rotated, self._repetition),
                )
            )
        seconds = time.perf_counter() - start
        moves = any(device != after for device, after in successors(self._mesh).items())
        where = 'the next device of the same process' if moves else 'the same device'
        self.report.say(
            f'replay     every {self.every} steps, on {where}; compiled in {seconds:.1f} s'
        )

    def _take_twice(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        start = self.clock.begin('replay')
        copies = jax.block_until_ready(copy_rotated(self._mesh, (state, batch)))
        copied = self.clock.begin('productive')
        results = jax.block_until_ready(self._train_step(state, batch))
        done = self.clock.begin('replay')
        self.watchdog.beat(f'step {step}, repeated', 'step' if self._has_run else 'first step')
        self._compare(step, results, self._repetition(*copies))
        end = self.clock.begin('productive')
        self._has_run = True
        self.report.say(
            f'step {step}  replayed bit for bit in {end - done + copied - start:.2f} s '
            f'(the step took {done - copied:.2f} s)'
        )
        return results

    def _compare(
        self,
        step: int,
        results: tuple[TrainState, Metrics],
        repeated: tuple[TrainState, Metrics],
    ) -> None:
        """Raise CorruptionError in all processes if a shard differs in one of them."""
        names, arrays = zip(*named_results(*results), strict=True)
        others = [x for _, x in named_results(*repeated)]
        own = self._difference(arrays, others)
        found = [Difference(*map(int, row)) for row in from_all(*own)]
        processes = [index for index, each in enumerate(found) if each.devices]
        if not processes:
            return
        process = min(processes, key=lambda index: found[index].array)
        first, host = found[process], host_names()[process]
        devices = sum(each.devices for each in found)
        is_alone = first.repeated_on == first.device
        where = 'the same device' if is_alone else f'device {first.repeated_on}'
        raise CorruptionError(
            f'silent data corruption at step {step}: {names[first.array]} on device {first.device} '
            f'(process {process}, host {host}) does not match its replay on {where} '
            f'({first.elements:,} of {first.of:,} elements; {devices} of {self._mesh.size} devices '
            f'differ, in process {", ".join(map(str, processes))}). At least one device is faulty. '
            'This step was not saved. Test or exclude these devices, then run the same command '
            'with this run.dir to resume from the last checkpoint'
        )

    def _difference(self, arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> Difference:
        """Return the first array that differs on a device of this process."""
        own = _by_place(self._digests(*arrays))
        repeated = _by_place(self._digests_of_repetition(*others))
        differing = {
            place: np.flatnonzero(own[place] != repeated[place])
            for place in own
            if (own[place] != repeated[place]).any()
        }
        if not differing:
            return NOTHING
        place = min(differing, key=lambda place: differing[place][0])
        array = int(differing[place][0])
        device = self._mesh.devices.flat[place]
        after = self._rotated.devices.flat[place]
        bits, other_bits = _bytes_on(device, arrays[array]), _bytes_on(after, others[array])
        elements = int((bits != other_bits).any(axis=1).sum())
        return Difference(
            array,
            device.id,
            after.id,
            min(elements, MOST_ELEMENTS),
            min(len(bits), MOST_ELEMENTS),
            len(differing),
        )


def named_results(state: TrainState, metrics: Metrics) -> list[tuple[str, jax.Array]]:
    """Return the arrays that a step returns, with their names; the loss is the first.

    An error in the forward pass changes the loss and, as a result, all other arrays.
    """
    names = sorted(metrics, key=lambda name: (name != 'loss', name))
    return [(name, metrics[name]) for name in names] + [
        (parameter_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def _by_place(digests: jax.Array) -> dict[int, np.ndarray]:
    """Return the digests of this process's devices by their index in the mesh."""
    return {
        shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in digests.addressable_shards
    }


def _bytes_on(device: jax.Device, x: jax.Array) -> np.ndarray:
    """Return the bytes of each element of an array's part on a device, [element, byte]."""
    shard = next(shard.data for shard in x.addressable_shards if shard.device == device)
    return np.ascontiguousarray(shard).reshape(-1).view(np.uint8).reshape(-1, x.dtype.itemsize)
