"""The losses of a run and its results are said with their units, their best values and steps."""

import re
from pathlib import Path

import pytest
from analysis.report.small_runs import facts_of

from megajax.analysis.report.learning import headline, section


@pytest.mark.parametrize(
    ('name', 'values', 'below'),
    [
        ('validation_loss', (2.1, 1.9, 2.3), '1.9 at step 1'),
        ('validation_loss', (1.9, 2.1, 2.3), '1.9 at step 0'),
        ('validation_loss', (1.9, 2.1, 1.9), None),
        ('validation_order_loss', (0.5, 0.4, 0.6), '0.4 at step 1'),
        ('validation_bits_per_byte', (1.2, 1.1, 1.3), '1.1 at step 1'),
        ('validation_read', (0.9, 0.6, 0.8), '0.9 at step 0'),
        ('validation_read_unlike', (0.6, 0.8, 0.9), None),
        ('budget_used', (300, 200, 100), None),
        ('budget_used', (300, 100, 200), None),
    ],
)
def test_the_best_of_a_result_is_the_smallest_loss_or_the_largest_share(
    tmp_path: Path, name: str, values: tuple[float, ...], below: str | None
) -> None:
    evaluations = [{'step': step, name: value} for step, value in enumerate(values)]
    shown = str(section([facts_of(tmp_path, {'step': 2, 'loss': 1.0}, *evaluations)], 240))
    assert re.findall(r'<small>(.*?)</small>', shown) == ([] if below is None else [below])


def test_a_run_that_was_validated_once_says_the_loss_and_its_step(tmp_path: Path) -> None:
    step, evaluation = {'step': 7, 'loss': 4.0}, {'step': 5, 'validation_loss': 3.25}
    facts = facts_of(tmp_path, step, evaluation)
    assert headline(facts) == 'validation loss 3.250 nats per token at step 5'
    without = headline(facts_of(tmp_path, step))
    assert without == 'training loss 4.000 → 4.000, without validation'
