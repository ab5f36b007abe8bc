"""Checkpoints under any sequence of what can befall them, as a state machine: the newest good step
is always the one found.
"""

import random
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import make_config, on_mesh

from megajax.core.config import Config
from megajax.core.parallel.mesh import concrete
from megajax.core.train.step import TrainState, init_state
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.digests import COMMIT, SUMS, find_steps

KEEP = 3
MESHES = [(2, 2), (1, 4), (4, 1), (1, 1)]
TINY = {'num_layers': 1, 'hidden_size': 16, 'num_heads': 4, 'vocab_size': 300, 'dropout': 0.0}


def tiny(data: int, model: int) -> Config:
    return make_config('gpt', data, model, model=TINY, checkpoint={'keep': KEEP})


ABSTRACT: dict[tuple[int, int], TrainState] = {}


def make_state(mesh: tuple[int, int], seed: int) -> TrainState:
    """A state in which every array has a number of its own, the same on every mesh; made in numpy,
    so without compiling.
    """
    if mesh not in ABSTRACT:
        ABSTRACT[mesh] = concrete(jax.eval_shape(lambda: init_state(tiny(*mesh))))
    number = iter(range(10**6))
    return jax.tree.map(
        lambda x: jax.device_put(np.full(x.shape, 1000 * seed + next(number), x.dtype), x.sharding),
        ABSTRACT[mesh],
    )


class Run(RuleBasedStateMachine):
    """A run beside a model of it: `good` has the seed of the state in each step that is to be
    found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / 'checkpoints'
        self.good: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.step = self.seed = 0
        self.mesh, self.context = MESHES[0], ExitStack()

    @initialize(mesh=st.sampled_from(MESHES))
    def begin(self, mesh: tuple[int, int]) -> None:
        self.mesh = mesh
        self._open()
        for _ in range(2):  # so that most of what follows has something to befall
            self.take_steps_and_save(1, True)

    @rule(count=st.integers(0, 2), wait=st.booleans())
    def take_steps_and_save(self, count: int, wait: bool) -> None:
        self.step += count
        self.seed += 1
        self.checkpoints.save(make_state(self.mesh, self.seed), self.step)
        if self.step not in self.good:  # what is sound stays as it is
            self.good[self.step] = self.seed
            self.damaged.clear()  # Orbax takes away what is refused
        if wait:
            assert self.checkpoints.wait()
        self.good = dict(sorted(self.good.items())[-KEEP:])

    @rule(mesh=st.sampled_from(MESHES))
    def end_and_start_again_on_another_mesh(self, mesh: tuple[int, int]) -> None:
        self.context.close()
        self.mesh = mesh
        self._open()

    @rule(share=st.floats(0, 1), sums=st.booleans())
    def be_killed_while_saving(self, share: float, sums: bool) -> None:
        """Leave what a kill leaves of a save: some of its files, the last of them cut, and never
        the one that is written last.
        """
        self.context.close()
        if steps := find_steps(self.folder):
            unfinished = self.folder / str(self.step + 1)
            if not unfinished.exists():
                shutil.copytree(self.folder / str(steps[-1]), unfinished)
                (unfinished / COMMIT).unlink()
                if not sums:
                    (unfinished / SUMS).unlink()
                    files = sorted(
                        path for path in (unfinished / 'state').rglob('*') if path.is_file()
                    )
                    for path in files[int(share * len(files)) :]:
                        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        self._open()

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: len(self.good) > 1)
    def go_back(self, choice: random.Random) -> None:
        step = choice.choice(sorted(self.good)[:-1])
        self.checkpoints.delete_after(step)
        self.good = {other: seed for other, seed in self.good.items() if other <= step}
        self.damaged = {other for other in self.damaged if other <= step}
        self.step = step

    @rule(
        choice=st.randoms(use_true_random=False),
        damage=st.sampled_from(['delete', 'flip', 'cut', 'lose a file']),
    )
    @precondition(lambda self: len(self.good) > 1)
    def lose_a_checkpoint(self, choice: random.Random, damage: str) -> None:
        """Between two runs somebody, or the disk, deletes or damages one."""
        self.context.close()
        step = choice.choice(sorted(self.good))
        path = self.folder / str(step)
        largest = max(
            (file for file in path.rglob('*') if file.is_file()),
            key=lambda file: file.stat().st_size,
        )
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        match damage:
            case 'delete':
                shutil.rmtree(path)
            case 'flip':
                largest.write_bytes(content)
            case 'cut':
                largest.write_bytes(content[:-1])
            case _:
                largest.unlink()
        del self.good[step]
        if damage != 'delete':
            self.damaged.add(step)
        self._open()

    @invariant()
    def the_newest_good_step_is_found_and_holds_what_was_saved(self) -> None:
        found = self.checkpoints.newest_verified()
        assert found == max(self.good, default=None)

    def _open(self) -> None:
        """As a run starts: from the newest good step."""
        self.context = ExitStack()
        self.context.enter_context(on_mesh(tiny(*self.mesh)))
        self.checkpoints = self.context.enter_context(Checkpoints(self.folder, tiny(*self.mesh)))
        newest = self.checkpoints.newest_verified()
        assert newest == max(self.good, default=None)
        if newest is not None:
            restored, expected = (
                self.checkpoints.restore(newest),
                make_state(self.mesh, self.good[newest]),
            )
            for actual, wanted in zip(
                jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True
            ):
                assert actual.sharding == wanted.sharding
                np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))
        self.step = newest or 0

    def teardown(self) -> None:
        self.context.close()
        shutil.rmtree(self.folder.parent)


TestRun = pytest.mark.faults(Run.TestCase)
TestRun.settings = settings(max_examples=12, stateful_step_count=10, derandomize=True)
