"""The losses of a run and its results are said with their units, their best values and steps."""

import re
from pathlib import Path

import pytest
from analysis.report.small_runs import facts_of

from megajax.analysis.report.learning import (
    headline,
    last_loss,
    losses_chart,
    section,
    training_losses,
)


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


def test_the_training_loss_is_the_quantity_that_is_validated(tmp_path: Path) -> None:
    steps = [{'step': step, 'loss': 4.5, 'nll': 4.0} for step in (1, 2)]
    validated = {'step': 2, 'validation_loss': 3.75}
    facts = facts_of(tmp_path, *steps, validated, model='objective: masked_lm')
    shown = str(losses_chart('Loss', [facts], 240))
    assert 'training: 4\nvalidation: 3.75' in shown
    assert '>nats per masked token</text>' in shown
    assert last_loss(facts.run) == 4.0
    assert headline(facts_of(tmp_path, *steps)).startswith('training loss 4.000 → 4.000')


def test_a_step_without_a_cross_entropy_has_the_loss_of_its_objective(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {'step': 1, 'loss': 4.5}, {'step': 2, 'loss': 4.25, 'nll': 4.0})
    assert training_losses(facts.run).tolist() == [4.5, 4.0]
    assert '>nats per token</text>' in str(losses_chart('Loss', [facts], 240))


def test_a_validation_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    losses = (None, 2.5, 2.25, 2.75, None)
    lines = [{'step': 10 * i, 'validation_loss': loss} for i, loss in enumerate(losses)]
    facts = facts_of(tmp_path, {'step': 40, 'loss': 2.0}, *lines)
    assert headline(facts) == (
        'validation loss 2.500 → 2.750 nats per token, then not finite, best 2.250 at step 20'
    )
    assert 'not finite<br/><small>2.25 at step 20</small>' in str(section([facts], 240))
    facts = facts_of(tmp_path, {'step': 40, 'loss': 2.0}, lines[0])
    assert headline(facts) == 'training loss 2.000 → 2.000, no finite validation loss'
