import functools
from pathlib import Path

import pytest

from megajax.xla.emulate import bisect
from megajax.xla.emulate.bisect import modules
from megajax.xla.hlo.errors import HloError

DUMPS = [
    'module_0001.jit_f.0000.pre-spmd-partitioner.after_pipeline-start.before_dce.txt',
    'module_0001.jit_f.0001.spmd-partitioner.after_shardy-xla.before_spmd-partitioning.txt',
    'module_0001.jit_f.0002.spmd-partitioner.after_spmd-partitioning.before_call-inliner.txt',
    'module_0001.jit_f.0003.simplification.after_pipeline-start.before_algsimp.txt',
    'module_0001.jit_f.0004.simplification.after_algsimp.before_reshape-mover.txt',
    'module_0001.jit_f.0005.simplification.after_reshape-mover.before_dce.txt',
    'module_0001.jit_f.0006.copy-insertion.after_removing_unnecessary_copies.txt',
    'module_0001.jit_f.0007.fusion.after_priority-fusion.before_cse.txt',
    'module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt',
]
OTHERS = [
    'module_0001.jit_f.after_spmd_partitioner.txt',
    'module_0001.jit_f.config.pbtxt',
    'module_0001.jit_f.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt',
    'module_0000.jit_convert.0000.simplification.after_algsimp.before_dce.txt',
    'module_0000.jit_convert.sm_9.0a_gpu_after_optimizations.txt',
    'module_0002.jit_zeros.0000.simplification.after_algsimp.before_dce.txt',
]

# The dumps of these tests contain their own names instead of modules.
first_wrong = functools.partial(bisect.first_wrong, read=Path.read_text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in DUMPS + OTHERS:
        (tmp_path / name).write_text(name)
    return tmp_path


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_modules_are_in_the_order_of_passes_from_the_partitioners_to_the_last(folder):
    assert names(modules(folder)) == DUMPS[2:]


def test_a_program_without_a_partitioner_has_all_of_its_dumps(folder):
    for path in folder.glob('*0002.spmd*'):
        path.unlink()
    assert names(modules(folder)) == [name for name in DUMPS if '0002' not in name]


def test_an_empty_folder_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match='dump_options'):
        modules(tmp_path)


@pytest.mark.parametrize(
    ('first', 'pass_name'),
    [
        (4, 'algsimp'),
        (5, 'reshape-mover'),
        (6, 'removing_unnecessary_copies'),
        (7, 'priority-fusion'),
        (8, 'the end of compilation'),
    ],
)
def test_the_pass_is_that_of_the_first_wrong_module(folder, first, pass_name):
    told = list[str]()
    culprit = first_wrong(modules(folder), lambda name: DUMPS.index(name) < first, told.append)
    assert culprit.pass_name == pass_name
    assert names([culprit.before, culprit.after]) == DUMPS[first - 1 : first + 1]
    assert len(told) <= 6


def test_the_partitioners_module_can_be_wrong_itself(folder):
    culprit = first_wrong(modules(folder), lambda name: False)
    assert (culprit.pass_name, culprit.pipeline) == ('spmd-partitioning', 'spmd-partitioner')
    assert culprit.before is None


def test_passes_between_modules_that_cannot_run_are_all_named(folder):
    def is_right(name: str) -> bool:
        if 'algsimp.before_reshape' in name or 'after_reshape' in name:
            raise HloError('no translation')
        return DUMPS.index(name) < 6

    told = list[str]()
    culprit = first_wrong(modules(folder), is_right, told.append)
    assert culprit.pass_name == 'algsimp or reshape-mover or removing_unnecessary_copies'
    assert culprit.pipeline == 'simplification or copy-insertion'
    assert any(line.startswith('no translation') for line in told)


def test_ends_without_a_translation_are_left_out(folder):
    def is_right(name: str) -> bool:
        if DUMPS.index(name) in (2, 8):
            raise HloError('no translation')
        return DUMPS.index(name) < 5

    assert first_wrong(modules(folder), is_right).pass_name == 'reshape-mover'


def test_a_right_program_has_no_wrong_pass(folder):
    with pytest.raises(ValueError, match='no pass is wrong'):
        first_wrong(modules(folder), lambda name: True)


def test_of_several_programs_it_is_the_one_that_most_passes_changed(folder):
    for path in folder.glob('module_0001.jit_f.00*'):
        path.unlink()
    for place in ('0000', '0001'):
        (folder / f'module_0000.jit_g.{place}.p.after_dce.txt').write_text('')
    assert {path.name.split('.')[1] for path in modules(folder)} == {'jit_g'}


def test_no_module_is_run_twice_and_the_neighbour_of_one_that_cannot_run_is_asked_instead(folder):
    asked = list[str]()

    def is_right(name: str) -> bool:
        asked.append(name)
        if DUMPS.index(name) == 5:
            raise HloError('no translation')
        return DUMPS.index(name) < 4

    assert first_wrong(modules(folder), is_right).pass_name == 'algsimp'
    assert len(asked) == len(set(asked))


def test_the_ten_thousandth_pass_comes_last(folder):
    late = folder / 'module_0001.jit_f.10000.fusion.after_cse.txt'
    late.write_text('')
    assert modules(folder)[-2:] == [late, folder / DUMPS[-1]]
