"""Saving and restoring a run's state, through Orbax."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from megajax.config import Config, ConfigError
from megajax.parallel.mesh import concrete
from megajax.train.step import TrainState, init_state


class Checkpoints:
    """The checkpoints of one run directory; saving goes on in the background, `close` waits for it."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder.absolute(), config
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(config.checkpoint.keep),
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),  # the loop decides
            cleanup_tmp_directories=True,
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def latest_step(self) -> int | None:
        """The newest step that was committed, None if there is none."""
        return self.manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Start saving `state` under its step; a step that is there already stays as it is."""
        step = int(state.step)
        if step in self.manager.all_steps():
            return
        config = self.config.model_dump(mode='json')
        self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(config)))

    def restore(self, step: int) -> TrainState:
        """The state of `step`, in its places on the current mesh. ConfigError if it is of another model."""
        saved = self.manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
        self._check_same_model(step, saved['model'])
        abstract = concrete(jax.eval_shape(lambda: init_state(self.config)))
        return self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state

    def _check_same_model(self, step: int, saved: dict[str, Any]) -> None:
        wanted = self.config.model.model_dump(mode='json')
        different = [f'{key} {saved.get(key)} there, {value} here' for key, value in wanted.items() if saved.get(key) != value]
        if different:
            raise ConfigError(
                f'{self.folder / str(step)} holds another model (model.{"; model.".join(different)}): '
                'change these keys back, or choose another run.dir'
            )

    def close(self) -> None:
        """Wait until what was started is on disk; raises what went wrong."""
        self.manager.wait_until_finished()
        self.manager.close()
