"""The retention of checkpoints, as Orbax policies."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from orbax.checkpoint import checkpoint_managers

from megajax.core.config import CheckpointConfig
from megajax.runtime.checkpoint.step_folders import StepFolders


def preservation_policy(
    config: CheckpointConfig,
    loss_of: Callable[[int], float | None],
    folders: StepFolders,
) -> Any:
    """Return the policy that retains the newest, every n-th and the best steps, as `config` asks.

    `loss_of` returns a step's validation loss. `folders` knows which steps were rejected, and which
    folders are not the run's own; neither of these displaces an intact step. A rejected step is
    deleted when the next step is written, but a folder that is not the run's own is kept. Step 0 is
    kept as well: training never writes it, so it is an import, from which other runs may still
    start.
    """
    policies: list[Any] = [checkpoint_managers.LatestN(config.keep)]
    if config.keep_every:
        policies.append(_EveryNth(folders.due, config.keep_every))
    if config.keep_best:
        policies.append(_LeastLoss(loss_of, config.keep_best))
    return _OfTheSound(checkpoint_managers.AnyPreservationPolicy(policies), folders.is_junk)


class _OfTheSound:
    """A policy that is applied to intact checkpoints only."""

    def __init__(self, policy: Any, is_junk: Callable[[int], bool | None]):
        self.policy, self.is_junk = policy, is_junk

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return for each checkpoint whether it is retained; Orbax calls this."""
        junk = {info.step: self.is_junk(info.step) if info.step else None for info in checkpoints}
        sound = [info for info in checkpoints if junk[info.step] is False]
        stays = dict(
            zip(
                (info.step for info in sound),
                self.policy.should_preserve(sound, context=context),
                strict=True,
            )
        )
        return [stays.get(info.step, junk[info.step] is None) for info in checkpoints]


class _EveryNth:
    """Orbax's EveryNSteps, which also retains a checkpoint that stands for an n-th step.

    This is one whose save was due at the n-th step and was delayed.
    """

    def __init__(self, due: Callable[[int], int], n: int):
        self.due, self.n = due, n

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return for each checkpoint whether it is retained; Orbax calls this."""
        steps = [info.step for info in checkpoints]
        return [step // self.n != (self.due(step) - 1) // self.n for step in steps]


class _LeastLoss:
    """Orbax's BestN with losses from the records, which outlive the process.

    A step without a loss is never among the best.
    """

    def __init__(self, loss_of: Callable[[int], float | None], n: int):
        self.loss_of, self.n = loss_of, n
        self.best = checkpoint_managers.BestN(get_metric_fn=float, reverse=True, n=n)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return for each checkpoint whether it is retained; Orbax calls this."""
        losses = {info.step: self.loss_of(info.step) for info in checkpoints}
        measured = [
            _Info(step, loss)
            for step, loss in losses.items()
            if loss is not None and math.isfinite(loss)
        ]
        best = {
            info.step
            for info, stays in zip(
                measured, self.best.should_preserve(measured, context=context), strict=True
            )
            if stays
        }
        return [info.step in best for info in checkpoints]


class _Info(NamedTuple):
    step: int
    metrics: float
