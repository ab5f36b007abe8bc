"""What went wrong in a run is said, and nothing else."""

from dataclasses import replace
from pathlib import Path

from analysis.report.small_runs import facts_of

from megajax.analysis.report.problems import faults, section
from megajax.analysis.report.read import Checkpoint
from megajax.runtime.run.stall_report import Place, _tell_half
from megajax.runtime.run.watchdog import LOG

STALLED = 'The watchdog found no progress; watchdog.log has the stack traces.'


def test_a_run_that_came_near_a_limit_of_the_watchdog_has_not_stalled(tmp_path: Path) -> None:
    log = tmp_path / LOG
    place = Place(limit=600.0, beat=7, since=0.0, index=1, count=2, phase='step')
    with (tmp_path / 'page').open('w+b') as page:
        page.write(place.encode())
        page.flush()
        _tell_half(page.fileno(), place, 'pid 12 on host one', str(log), 0)
    assert 'for 300 s and ends at 600 s' in log.read_text()
    facts = facts_of(tmp_path, {'step': 1, 'loss': 1.0})
    assert STALLED not in [*faults(facts)]
    with log.open('a') as file:
        file.write("watchdog: no progress for 600 s in phase 'step': pid 12 on host one exits\n")
    assert STALLED in [*faults(facts)]


def test_a_last_validation_loss_that_is_not_finite_is_a_fault(tmp_path: Path) -> None:
    lines = [{'step': i, 'validation_loss': loss} for i, loss in enumerate((2.5, None, 3.0, None))]
    said = [*faults(facts_of(tmp_path, {'step': 3, 'loss': 2.0}, *lines))]
    assert 'The last validation loss, at step 3, is not finite.' in said
    assert not [fault for fault in said if 'No validation loss' in fault or 'rose' in fault]
    said = [*faults(facts_of(tmp_path, {'step': 3, 'loss': 2.0}, *lines[:3]))]
    assert 'The validation loss rose from its best of 2.500 at step 0 to 3.000.' in said


def test_restarts_that_are_not_known_are_not_denied(tmp_path: Path) -> None:
    steps = facts_of(tmp_path, {'step': 1, 'loss': 1.0}).run.config.train.steps
    lines = {'step': steps, 'loss': 1.0}, {'step': steps, 'validation_loss': 1.0}
    facts = facts_of(tmp_path, *lines)
    saved = Checkpoint(step=steps, record=None, bytes=0, fault=None)
    run = replace(facts.run, checkpoints=[saved])
    assert [*faults(replace(facts, run=run))] == []
    assert 'restarts and lost time are unknown' in str(section([replace(facts, run=run)]))
    known = replace(run, summary={'starts': 1, 'seconds': {'lost': 0}})
    assert 'no restarts, no lost time' in str(section([replace(facts, run=known)]))


def test_a_resume_repeats_the_steps_since_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {'step': 120, 'loss': 2.0})

    def said(*checkpoints: tuple[int, str | None]) -> list[str]:
        kept = [Checkpoint(step=i, record=None, bytes=0, fault=fault) for i, fault in checkpoints]
        found = faults(replace(facts, run=replace(facts.run, checkpoints=kept)))
        return [fault for fault in found if 'heckpoint' in fault]

    damaged = 'Checkpoint 100 is damaged: a file is missing.'
    resume = 'The newest complete checkpoint is of step 50; a resume repeats 70 steps.'
    assert said((50, None), (100, 'a file is missing')) == [damaged, resume]
    assert said((50, None), (120, None)) == []
    nothing = 'There is no complete checkpoint.'
    assert said((100, 'a file is missing')) == [damaged, nothing]
    assert said() == [nothing]
