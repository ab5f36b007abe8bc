"""Each step is in `metrics.jsonl` once, whatever happens to the run or to the disk, and nothing of
it ends a run.
"""

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import disk_full_at, make_config
from tensorboardX.proto.event_pb2 import Event, SessionLog

from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.runtime.run.log import metrics
from megajax.runtime.run.log.metrics import MetricsWriter, check_wandb


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [line['step'] for line in lines(folder)]


def take(writer: MetricsWriter, *numbers: int, **values: float) -> None:
    for step in numbers:
        writer.write(
            step, loss=1 / (step + 1), taken=1.0, step_ms=100.0, data_wait_ms=20.0, **values
        )


def events(folder: Path) -> Iterator[Event]:
    for path in sorted((folder / 'tensorboard').iterdir()):  # their names begin with the time
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack('<Q', content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def drawn(folder: Path) -> list[int]:
    """The steps of the curve of losses, as TensorBoard draws it: a start takes away what was there
    of its step and later ones.
    """
    found: list[int] = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            found = [step for step in found if step < event.step]
        found += [event.step for value in event.summary.value if value.tag == 'loss']
    return found


def test_each_step_is_a_line_and_a_point_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(0, validation_loss=2.5)
        take(writer, 1, 2, grad_norm=math.inf)
    assert lines(tmp_path)[0] == {'step': 0, 'validation_loss': 2.5}
    assert lines(tmp_path)[2] == {
        'step': 2,
        'loss': 1 / 3,
        'taken': 1.0,
        'step_ms': 100.0,
        'data_wait_ms': 20.0,
        'grad_norm': None,
    }
    assert drawn(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    'left', ['', '{"step": 5, "lo', '\0\0\0\0\n', '{"loss": 3}\n', '5\n', '[' * 100_000 + '\n']
)
def test_a_resumed_run_takes_away_the_steps_that_it_lost_and_a_line_that_was_cut_short(
    tmp_path: Path, left: str
) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        take(writer, *range(5))
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write(left)
    with MetricsWriter(tmp_path, 2) as writer:
        assert writer.lost_seconds() == pytest.approx(2 * 0.08)
        assert writer.lost_seconds(until=3) == pytest.approx(0.08)
        take(writer, 3, 4)
    assert steps(tmp_path) == drawn(tmp_path) == [0, 1, 2, 3, 4]


def test_a_run_that_had_no_checkpoint_begins_again_with_step_0(tmp_path: Path) -> None:
    for _ in range(2):
        with MetricsWriter(tmp_path, 0) as writer:
            take(writer, 0, 1)
    assert steps(tmp_path) == drawn(tmp_path) == [0, 1]


def test_a_run_that_is_rolled_back_writes_its_steps_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        take(writer, 1, 2, 3)
        writer.write(4, loss=math.nan, taken=0.0, step_ms=100.0, data_wait_ms=20.0)
        writer.rewind(2)
        assert writer.lost_seconds() == pytest.approx(0.08)  # that of step 4 was lost before
        take(writer, 3, 4)
    assert steps(tmp_path) == drawn(tmp_path) == [1, 2, 3, 4]
    assert None not in [line['loss'] for line in lines(tmp_path)]


def test_a_line_without_times_is_not_counted_as_lost(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        take(writer, 1, 2)
        writer.write(3, loss=0.5, taken=1.0)
        writer.rewind(1)
        assert writer.lost_seconds() == pytest.approx(0.08)


def test_on_a_full_disk_a_run_goes_on_with_one_warning_and_writes_all_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        take(writer, 1, 2)
        with disk_full_at((tmp_path / 'metrics.jsonl').stat().st_size + 10):
            take(writer, 3, 4, 5)
            assert steps(tmp_path) == [1, 2]
            writer.rewind(3)
            take(writer, 4)
        take(writer, 5)
    assert steps(tmp_path) == drawn(tmp_path) == [1, 2, 3, 4, 5]
    told = [record.getMessage() for record in caplog.records]
    assert [message.partition(' ')[0] for message in told] == ['metrics.jsonl', 'TensorBoard']
    assert all(
        message.endswith('cannot be written ([Errno 27] File too large); the run continues')
        for message in told
    )


def test_a_file_that_cannot_be_opened_does_not_keep_a_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'metrics.jsonl').mkdir()
    (tmp_path / 'tensorboard').touch()
    with MetricsWriter(tmp_path, 0) as writer:
        take(writer, 1, 2)
        (tmp_path / 'metrics.jsonl').rmdir()
        take(writer, 3)
    assert steps(tmp_path) == [1, 2, 3]
    assert len(caplog.records) == 2


def test_wandb_that_is_not_installed_is_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, 'find_spec', lambda name: None)
    message = f'run.wandb=mine needs wandb, which is not installed: {install("wandb")}, or'
    with pytest.raises(ConfigError, match=f'^{re.escape(message)}'):
        check_wandb(make_config(run={'wandb': 'mine'}))
    check_wandb(make_config())


def told_wandb(folder: Path) -> list[tuple[str, list[int]]]:
    """The id and the steps of each start in wandb's files, which are LevelDB logs: blocks of 32
    KiB, records of one protobuf each.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(
        (folder / 'wandb').glob('offline-run-*/*.wandb'), key=lambda path: path.stat().st_mtime_ns
    ):
        content, run, numbers = path.read_bytes()[7:], '', []
        while len(content) > 7:
            _, length, kind = struct.unpack('<IHB', content[:7])
            assert kind == 1, 'a record over two blocks'
            record, content = Record.FromString(content[7 : 7 + length]), content[7 + length :]
            run = record.run.run_id or run
            if record.HasField('history'):
                numbers.append(record.history.step.num)
        found.append((run, numbers))
    return found


@pytest.mark.faults
@pytest.mark.skipif(metrics.find_spec('wandb') is None, reason='wandb is an extra')
def test_wandb_gets_each_step_once_in_one_run_also_after_a_restart_and_its_end_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    config = make_config(run={'wandb': 'megajax'})
    with MetricsWriter(tmp_path, 0, config=config) as writer:
        take(writer, 0, 1, 2, 3)
        writer.rewind(2)
        take(writer, 3, 4)
    with MetricsWriter(tmp_path, 4, config=config) as writer:
        take(writer, 5, 6)
        wandb.run.finish()
        take(writer, 7, 8)
    wandb.teardown()  # its process writes on after `finish`
    id, _ = (tmp_path / 'wandb_id').read_text().splitlines()
    assert told_wandb(tmp_path) == [(id, [0, 1, 2, 3, 4]), (id, [5, 6])]
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert re.match(
        r'wandb cannot be written \(Run \(\w+\) is finished.*; the run continues$', warning
    )
