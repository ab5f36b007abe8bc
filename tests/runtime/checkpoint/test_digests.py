"""What a checkpoint's digests find, without jax: every file is one that may be changed, cut,
emptied or lost.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from megajax.runtime.checkpoint.digests import (
    COMMIT,
    SUMS,
    find_steps,
    hash_part,
    problems,
    read_sums,
    strangers,
    write_sums,
)

FILES = {
    'state/_METADATA': b'{}',
    'state/d/0': b'0123456789' * 100,
    'record.json': b'{"step": 7}',
    'state/manifest': b'm',
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / '7'
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_sums(folder)
    (folder / COMMIT).write_text('done')
    return folder


def test_what_was_written_is_right(step: Path) -> None:
    assert problems(step) == problems(step, contents=False) == []
    assert read_sums(step).digests.keys() == FILES.keys()
    assert find_steps(step.parent) == [7]


def test_sha256sum_agrees(step: Path) -> None:
    if not shutil.which('sha256sum'):
        pytest.skip('no sha256sum here')
    check = ['sha256sum', '--check', '--strict', '--quiet', SUMS]
    assert subprocess.run(check, cwd=step, check=False).returncode == 0
    (step / 'state/d/0').write_bytes(b'1')
    assert subprocess.run(check, cwd=step, capture_output=True, check=False).returncode == 1


def test_a_name_may_have_any_letters(step: Path) -> None:
    (step / '検索.jinja').write_text('{{ messages }}')
    write_sums(step)
    assert '検索.jinja' in read_sums(step).digests


def test_parts_that_others_have_hashed_are_not_read_and_give_the_same_digests(step: Path) -> None:
    alone = (step / SUMS).read_bytes()
    parts = [hash_part(step, 'state/d'), hash_part(step, 'no/folder')]
    write_sums(step, parts)
    assert (step / SUMS).read_bytes() == alone
    (step / 'state/d/0').write_bytes(bytes(1000))
    write_sums(step, parts)
    assert (step / SUMS).read_bytes() == alone
    assert problems(step) == ['state/d/0 differs from what was written']


def test_digests_of_a_part_that_does_not_arrive_in_full_are_not_written(step: Path) -> None:
    parts = [hash_part(step, 'state/d')]
    (step / SUMS).unlink()
    (step / 'state/d/0').write_bytes(bytes(999))
    with pytest.raises(OSError, match='holds 1013 bytes instead of 1014'):
        write_sums(step, parts)
    (step / 'state/d/0').unlink()
    with pytest.raises(OSError, match='holds 14 bytes instead of 1014'):
        write_sums(step, parts)
    with pytest.raises(ValueError, match='incomplete'):
        write_sums(step, [parts[0].partition('\n')[0]])
    assert not (step / SUMS).exists()


@pytest.mark.parametrize('name', FILES)
def test_a_changed_file_is_named(step: Path, name: str) -> None:
    path = step / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert problems(step) == [f'{name} differs from what was written']
    assert problems(step, contents=False) == []
    path.write_bytes(b'')
    assert problems(step) == [f'{name} is empty']
    assert 'instead of' in problems(step, contents=False)[0]
    path.unlink()
    assert problems(step) == problems(step, contents=False) == [f'{name} is missing']


@pytest.mark.parametrize('kept', range(6))
def test_digests_that_are_cut_between_lines_are_not_whole(step: Path, kept: int) -> None:
    lines = (step / SUMS).read_text().splitlines(keepends=True)
    (step / SUMS).write_text(''.join(lines[:kept]))
    assert problems(step) == ([f'{SUMS} is damaged'] if kept < len(lines) else [])


def test_any_flipped_bit_of_the_digests_is_found(step: Path) -> None:
    content = (step / SUMS).read_bytes()
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (step / SUMS).write_bytes(flipped)
        assert problems(step) or bit // 8 == len(content) - 1, bit


def test_a_step_without_digests_or_commit_is_not_trusted(step: Path) -> None:
    (step / SUMS).unlink()
    assert problems(step) == [f'{SUMS} is missing']
    (step / COMMIT).unlink()
    assert problems(step) == [f'was never finished: there is no {COMMIT}']
    assert find_steps(step.parent) == []


def test_links_are_not_followed(step: Path, tmp_path: Path) -> None:
    link = tmp_path / '8'
    link.symlink_to(step)
    assert problems(link) == ['is a symbolic link']
    assert find_steps(tmp_path) == [7, 8]
    (step / 'state/d/0').rename(tmp_path / 'elsewhere')
    (step / 'state/d/0').symlink_to(tmp_path / 'elsewhere')
    assert problems(step) == ['state/d/0 is a symbolic link']
    (step / 'state/d/0').unlink()
    shutil.move(step / 'state', tmp_path / 'moved')
    (step / 'state').symlink_to(tmp_path / 'moved')
    assert {line.split()[0] for line in problems(step)} == {
        name for name in FILES if name.startswith('state')
    }


def test_a_path_that_leads_out_of_the_step_is_not_read(step: Path, tmp_path: Path) -> None:
    (tmp_path / 'secret').write_bytes(FILES['record.json'])
    (step / SUMS).write_text((step / SUMS).read_text().replace('record.json', '../secret'))
    assert problems(step) == ['../secret is missing']


def test_only_whole_numbers_are_steps(step: Path) -> None:
    for name in ('07', '٣', 'abc', '7.orbax-checkpoint-tmp', '-1'):
        shutil.copytree(step, step.parent / name)
    assert find_steps(step.parent) == [7]
    assert find_steps(step.parent / 'nowhere') == []


def test_what_came_later_is_listed(step: Path) -> None:
    (step / 'evil.pkl').write_bytes(b'')
    assert problems(step) == []
    assert strangers(step) == ['evil.pkl']
