"""Save a run's state with Orbax in the background, and restore it after verifying its digests.

A step's folder contains Orbax's arrays in `state`, `record.json`, `tokenizer.json` and the digests
of all these files. Orbax writes its commit marker last and deletes old steps only afterwards. A
committed step therefore always has digests, and once one step is committed, there is always at
least one committed step. With several processes, all call the same methods and share the folder.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx
from optax import GradientTransformation

from megajax.base.errors import reason
from megajax.base.files.outputs import write_file
from megajax.core.config import CheckpointError, Config, ConfigError
from megajax.core.parallel.layer_order import tree_on_host, tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete
from megajax.core.train.scaling import nothing_seen
from megajax.core.train.step import TrainState, in_dtype, init_state
from megajax.runtime.checkpoint.compare import (
    RECENT,
    changed_shapes,
    check_same_arrays,
    check_same_data,
    check_same_model,
    check_same_order,
    holds_array,
    holds_parameters_only,
    log_differences,
    log_schedule,
    renames,
)
from megajax.runtime.checkpoint.digests import unusable, write_sums
from megajax.runtime.checkpoint.due import DueSave
from megajax.runtime.checkpoint.hf_files import Companions
from megajax.runtime.checkpoint.log_filters import leave_failed_saves_to_us
from megajax.runtime.checkpoint.losses import ValidationLosses
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.checkpoint.orbax_manager import Manager, restore_gb
from megajax.runtime.checkpoint.record import RECORD, TOKENIZER, Record, make_record, read_record
from megajax.runtime.checkpoint.retention import preservation_policy
from megajax.runtime.checkpoint.shared_reads import as_stored, to_read
from megajax.runtime.checkpoint.step_folders import StepFolders
from megajax.runtime.checkpoint.unpadded import Shape, strip_padding, unpadded
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.processes.consensus import FAILED_ELSEWHERE, from_all, from_first

ParametersOnly = dict[Literal['params'], nnx.State]

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; leaving it as a context waits for the save in progress.

    `data` describes the run's training data, in any words. Raises ConfigError if the folder cannot
    be used, and CheckpointError if it cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        tokenizer: Tokenizer | None = None,
        data: Mapping[str, str] | None = None,
        optimizer: GradientTransformation | None = None,
    ):
        self.folder, self.config, self.optimizer = folder.absolute(), config, optimizer
        self.tokenizer, self.data = tokenizer, data
        self.companions = Companions()  # the files that the model was imported with
        self.origin: Mapping[str, str] = {}  # the origin that records store
        self.restored: Record | None = None  # the record of the state that was restored last
        self._saving: Record | None = None
        self._padded: dict[str, Shape] = {}  # unpadded shapes of the arrays that are being saved
        self._failed: str | None = None  # the reason why the newest state is not on disk
        self._verified: int | None = None
        self._losses, self._folders = ValidationLosses(self.folder), StepFolders(self.folder)
        self._closed, self._due = False, DueSave(config.checkpoint)
        leave_failed_saves_to_us()
        policy = preservation_policy(config.checkpoint, self._losses.of, self._folders)
        try:
            self._manager = Manager(
                self.folder, restore_gb=restore_gb(config.model), policy=policy, seal=self._seal
            )
        except OSError as error:
            raise ConfigError(
                f'{self.folder} cannot be used: {reason(error)}; '
                'make it readable and writable, or choose another run directory'
            ) from error
        except jax.errors.JaxRuntimeError:  # another process is lost
            raise
        except Exception as error:
            raise CheckpointError(f'{self.folder} cannot be read: {reason(error)}') from error

    def newest_verified(self) -> int | None:
        """Return the newest step whose digests match; None if no step was ever finished.

        Each newer step is logged with its fault. Raises CheckpointError if all steps have a fault.
        """
        self._settle()
        self._verified = self._folders.find_newest()
        return self._verified

    def restore(self, step: int) -> TrainState:
        """Restore the state of `step`, sharded over the current mesh.

        Differences from the run that wrote the step are logged. Raises ConfigError if the model,
        dtype, tokenizer or data differ, and CheckpointError if the checkpoint is damaged.
        """
        self._settle()
        path = self.folder / str(step)
        if step != self._verified and self._folders.refuses(step):
            raise unusable(path)
        here, there = self._record(step), read_record(path)
        self.restored, self.origin = there, there.next_origin
        is_import = holds_parameters_only(path)
        check_same_data(path, there, here)  # first: the tokenizer may be trained on the data
        check_same_model(path, there, here, is_import=is_import)
        log_differences(there, here, is_import=is_import)
        if is_import:
            params = restore_params(path, self.config)
            return init_state(self.config, params, optimizer=self.optimizer)
        new = jax.eval_shape(lambda: init_state(self.config, optimizer=self.optimizer))
        abstract = concrete(new)
        check_same_arrays(path, unpadded(abstract, Layout.of(self.config)))
        check_same_order(path, there, here, abstract)
        recent = concrete(jax.eval_shape(lambda: nothing_seen(self.config)))
        abstract = abstract._replace(recent=recent if holds_array(path, RECENT) else None)
        to_saved, to_current = renames(path)
        args = ocp.args.StandardRestore(_parts(to_saved(to_read(abstract))), strict=False)  # pads
        try:
            parts = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
            state = as_stored(abstract._replace(**to_current(parts)), abstract)
            state = in_dtype(tree_on_stages(state, Layout.of(self.config)), self.config)
        except jax.errors.JaxRuntimeError:  # another process is lost
            raise
        except Exception as error:
            raise CheckpointError(f'{path} cannot be restored: {reason(error)}') from error
        # Of a copy: an array whose value is read keeps a copy of its shards.
        log_schedule(there, here, taken=int(state.guard.taken + 0))
        return state

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress, or has ended and was not cleaned up by `poll` yet."""
        return self._saving is not None

    def poll(self, step: int, on_end: Callable[[], object] = lambda: None) -> int | None:
        """Return the step since which a save is due, or None; all processes call this at each step.

        A save is due by `checkpoint.every`, by `checkpoint.minutes`, or, once, because the last
        save failed, and stays due until it begins. If the save in progress has ended, calls
        `on_end`, and then cleans up after a failed save and logs it.
        """
        late, running = self._due.is_late, self.is_saving and self._manager.is_saving_in_progress()
        if self.is_saving or self.config.checkpoint.minutes:
            answers = from_all(running, late)
            running = bool(answers[:, 0].any())
            late = bool(answers[0, 1])  # the clock of the first process counts
        if self.is_saving and not running:
            on_end()
            self._settle()
        return self._due.reach(step, is_late=late and not running)

    def save(
        self,
        state: TrainState | ParametersOnly,
        step: int,
        *,
        validation_loss: float | None = None,
        **place: Any,
    ) -> None:
        """Start saving `state` as step `step`, unless a valid checkpoint of `step` exists.

        The record contains the position in the data, as `Batches.place` returns it. An import saves
        parameters only; a run that resumes from it begins with a fresh optimizer. Waits for the
        previous save. A failure is logged here or by `poll`, and does not raise. Raises
        CheckpointError only if a folder of that name is not the run's and cannot be renamed.
        """
        if self._saving and self._saving.step == step:
            return
        self._settle()
        due = self._due.begin()
        if not self._make_room(step):
            return
        parts = _parts(state)
        self._padded = changed_shapes(parts, unpadded(parts, Layout.of(self.config)))
        since = None if due == step else due
        loss = self._losses.begin(step, validation_loss)
        self._saving = self._record(step, due=since, validation_loss=loss, **place)
        self._folders.renew(step)
        error: Exception | None = self._folders.write_error()
        if not from_all(error is not None).any():
            error = self._begin_to_save(step, parts)
            if not from_all(error is not None).any():
                return
        self._settle(error)

    def _begin_to_save(self, step: int, parts: dict[str, Any]) -> Exception | None:
        try:
            ordered = tree_on_host(parts, Layout.of(self.config))
            args = ocp.args.Composite(state=ocp.args.StandardSave(ordered))
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            return error
        return None

    def note_validation_loss(self, step: int, loss: float) -> None:
        """Write the loss of `step`, measured after its save began, once the step is finished."""
        self._losses.note(step, loss)
        if self._saving is None:
            self._losses.write()

    def is_evaluated(self, step: int) -> bool:
        """Whether the validation loss of a finished step is known; equal in all processes."""
        return bool(from_first(self._losses.of(step) is not None)[0])

    def wait(self) -> bool:
        """Wait for the save in the background; return whether the newest state is on disk.

        If it is not, the caller may try again.
        """
        self._settle()
        return self._failed is None

    def delete_after(self, step: int) -> None:
        """Delete all steps newer than `step`.

        A run that returns to `step` must not resume from the branch that it left.
        """
        self._settle()
        self._folders.remove_after(step)
        self._manager.reload()
        self._verified, self._failed = step if self._verified == step else None, None
        self._due.forget()
        self._losses.forget_noted()

    def close(self, *, final: bool = False) -> None:
        """Wait until the save in progress is on disk.

        Raises CheckpointError if it was the run's `final` save and failed.
        """
        if self._closed:
            return
        self._closed = True
        self._settle()
        with contextlib.suppress(Exception):  # `_settle` has logged the error
            self._manager.close()
        if jax.process_index() == 0:
            self._folders.clear_failed()
        if final and self._failed:
            raise CheckpointError(f'the last checkpoint is not in {self.folder}: {self._failed}')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(final=kind is None)

    def abandon(self) -> None:
        """Finish the save in progress and close without the other processes."""
        self._closed = True
        with contextlib.suppress(Exception):  # the run reports the error that it exits with
            self._manager.wait_until_finished()
        self._saving = None

    def _seal(self, parts: Iterable[str]) -> None:
        """Write the other files of a step, and all digests; `parts` has been hashed already.

        Orbax's thread calls this in the first process, after writing the arrays and before writing
        the commit marker.
        """
        assert self._saving is not None
        path = self.folder / str(self._saving.step)
        if self._padded:
            strip_padding(path / 'state', self._padded)
        write_file(path / RECORD, self._saving.model_dump_json(indent=2).encode())
        if self.tokenizer:
            self.tokenizer.save(path / TOKENIZER)
        self.companions.write(path)
        write_sums(path, parts)

    def _settle(self, error: Exception | None = None) -> None:
        """Wait for the save in the background, and gather its outcome from all processes."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as failure:
            error = error or failure
        step, since, self._saving = self._saving.step, self._saving.due, None
        failed = bool(from_all(error is not None).any())
        finished = self._folders.is_finished(step)
        if finished:
            self._losses.write()
        if finished and not failed:
            self._failed = None
            return
        elsewhere = FAILED_ELSEWHERE if failed else 'it was interrupted'
        why = reason(error) if error else elsewhere
        is_told = jax.process_index() == 0 or why != elsewhere  # once, or with a reason of its own
        log = logger.warning if is_told else logger.debug
        if finished:
            self._failed = None
            log('checkpoint %d is written, but older ones could not be deleted: %s', step, why)
        else:
            self._folders.remove_failed(step)
            self._failed, retries = why, self._due.fail(since or step)
            then = 'trying again' if retries else 'the next save is tried when it is due'
            log('checkpoint %d could not be written (%s); %s', step, why, then)
        self._manager.reload()

    def _make_room(self, step: int) -> bool:
        """Delete an unusable checkpoint of `step`; return False if there is a usable one."""
        sound, in_the_way = self._folders.clear_place(step)
        if sound:
            return False
        if in_the_way:
            self._folders.remove([step])
            self._manager.reload()
        return True

    def _record(self, step: int, **values: Any) -> Record:
        fingerprint = self.tokenizer.fingerprint if self.tokenizer else None
        return make_record(
            self.config,
            step,
            tokenizer_sha256=fingerprint,
            data=self.data,
            origin=self.origin,
            **values,
        )


def _parts(state: TrainState | ParametersOnly) -> dict[str, Any]:
    """Return the parts of a state by name, without the parts that the config does not use.

    Checkpoints that were written before such parts existed can therefore still be restored.
    """
    parts = state if isinstance(state, dict) else state._asdict()
    return {str(name): part for name, part in parts.items() if part is not None}
