"""A GPU that does not compute in a dtype executes no step in it."""

from support import megajax as run_here

from megajax.analysis.fuzz.draw import draw
from megajax.analysis.fuzz.execute import case

FP8 = 'train.dtype=fp8'


def test_a_step_in_a_dtype_that_the_gpu_lacks_is_rejected():
    found = case(draw(0, 0, (FP8,)), {'seed': 0, 'number': 0, 'fixed': [FP8]}, 'a100')
    assert found.verdict == 'rejected'
    assert f'{FP8}: NVIDIA A100 SXM 80 GB computes in bfloat16' in found.message


def test_a_fixed_dtype_that_the_gpu_lacks_ends_with_2_before_any_step(tmp_path):
    out = tmp_path / 'found.jsonl'
    done = run_here('inspect', 'fuzz', 2, FP8, '--target', 'a100', '--out', out)
    assert done.returncode == 2
    assert f'{FP8}: NVIDIA A100 SXM 80 GB computes in bfloat16' in done.stderr
    assert not out.exists()
