"""Orbax's manager of a run's checkpoints, with the options that megajax relies on."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from megajax.base.files.locks import folder_lock
from megajax.core.config import ModelConfig
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.runtime.checkpoint.digests import hash_part
from megajax.runtime.processes.consensus import SaveBarrier

# Seconds within which all processes must write and hash their parts. The watchdog and the
# connections between the processes end a save that hangs earlier.
TIMEOUT = 24 * 3600
# Bytes below which a replica writes an array alone. By default the replicas write a slice each, and
# each slice is a program of its own, whose compilation delays the first save.
SMALLEST_SLICE = 2**20
OWN = 'state/ocdbt.process_{}'  # the folder with the arrays that a process has written


class Manager(ocp.CheckpointManager):
    """Orbax's manager, but this one never asks jax whether the processes should stop.

    `runtime/run/stop.py` asks jax at each step, with a number of its own. jax chooses one number at
    which all processes stop, larger than any number that it was asked about. Orbax would ask with
    the number of the step. If that were the last question before jax chooses, the run's own numbers
    would never reach the chosen one, and the signal would be lost.

    `restore_gb` limits how much a process reads at a time, and `policy` is the retention. Orbax's
    thread calls `seal` in the first process, after the arrays of a step and before its commit
    marker. Its argument contains the digests of the arrays that each of several processes wrote.
    """

    _checkpoint_deleter: Any
    _step: int  # the step that is being saved

    def __init__(
        self,
        folder: Path,
        *,
        restore_gb: int,
        policy: Any,
        seal: Callable[[Iterable[str]], None],
    ):
        handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=restore_gb)
        handler._impl = ocp.PyTreeCheckpointHandler(
            restore_concurrent_gb=restore_gb, type_handler_registry=_types()
        )
        barrier = SaveBarrier(self._hash_own)
        options = _options(policy, barrier, lambda: seal(barrier.parts()))
        super().__init__(folder, options=options, item_handlers={'state': handler})
        # Orbax chooses the steps to delete when a save begins, and deletes them when it has ended.
        self._checkpoint_deleter = _Deleter(folder, self._checkpoint_deleter)

    def save(self, step: int, *args: Any, **options: Any) -> bool:
        """Save a step; if an old step of this number was due for deletion, the new step is kept."""
        self._checkpoint_deleter.left.discard(step)
        self._step = step
        return bool(super().save(step, *args, **options))

    def reached_preemption(self, step: int) -> bool:
        """Return False: the run itself watches for preemption."""
        return False

    def _hash_own(self) -> str:
        own = OWN.format(jax.process_index())
        return hash_part(Path(self.directory) / str(self._step), own)


def _types() -> Any:
    """Return Orbax's handlers of the types of leaves, with SMALLEST_SLICE for arrays."""

    def handler_of(kind: Any) -> Any:
        handler = copy.copy(type_handlers.get_type_handler(kind))
        if kind is jax.Array:
            handler._min_slice_bytes_for_replica_parallel = SMALLEST_SLICE
        return handler

    kinds = type_handlers.supported_types()
    return type_handlers.create_type_handler_registry(*((kind, handler_of(kind)) for kind in kinds))


class _Deleter:
    """Orbax's deleter, which delays the deletion of a step that a reader has locked.

    Such a step is deleted after a later save. In the first process, which deletes for all
    processes, `left` contains these steps.
    """

    def __init__(self, folder: Path, deleter: Any):
        self.folder, self.deleter = folder, deleter
        self.left: set[int] = set()

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Delete the delayed steps and Orbax's `steps`; Orbax calls this in each process."""
        if jax.process_index() == 0:
            self.left |= {*steps}
            for step in sorted(self.left):
                with folder_lock(self.folder / str(step), shared=False) as is_free:
                    if is_free:
                        self.deleter.delete(step)
                        self.left.discard(step)

    def delete(self, step: int) -> None:
        """Delete a step, even while a reader has locked it."""
        self.deleter.delete(step)

    def close(self) -> None:
        """Wait for running deletions."""
        self.deleter.close()


def restore_gb(model: ModelConfig) -> int:
    """Return how many GB a process may read at a time: the size of the largest parameter.

    Orbax's default limit is 96 GB, and Orbax rejects a larger array.
    """
    sizes = dim_sizes(model)
    return gb_to_read(max(elements(parameter.dims, sizes) for _, parameter in parameters(model)))


def gb_to_read(elements: int) -> int:
    """Return the GB that Orbax may count for the read of an fp32 array.

    It counts each shard that the read touches in full, as it was written, with padding.
    """
    return 1 + math.ceil(1.1 * 4 * elements / 1e9)


def _options(
    policy: Any, barrier: SaveBarrier, seal: Callable[[], None]
) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        preservation_policy=policy,
        # Orbax would take any folder without its markers for an interrupted save, so `sweep`
        # does this.
        cleanup_tmp_directories=False,
        async_options=ocp.AsyncOptions(
            timeout_secs=TIMEOUT,
            barrier_sync_fn=barrier,
            post_finalization_callback=seal,
            # With this option, Orbax's threads would wait minutes for a directory that cannot be
            # created.
            create_directories_asynchronously=False,
        ),
        file_options=ocp.options.FileOptions(path_permission_mode=0o750),
        # Otherwise any folder whose name is a number would be a checkpoint.
        atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
    )
