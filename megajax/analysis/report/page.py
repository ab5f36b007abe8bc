"""Build the HTML report: five answers at the top, a section for each, and the configs."""

import datetime
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import megajax
from megajax.analysis.report import cost, learning, predicted, problems, time_spent
from megajax.analysis.report.chart import chip
from megajax.analysis.report.html import Html, details, element, join, table
from megajax.analysis.report.run_facts import Facts
from megajax.base.render.units import large
from megajax.core.config import dump
from megajax.core.config.differences import flat
from megajax.core.counts.parameters import num_parameters

GENERATOR = '<meta name="generator" content="megajax report"/>'
# Nothing is fetched and no script runs, whatever the data of a run contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
POINTS, FEWEST_POINTS = 240, 40  # most and fewest points of a curve
_CURVES = 960  # most points of all runs in one chart


class _Question(NamedTuple):
    name: str  # anchor of the section
    title: str
    headline: Callable[[Facts], str]
    section: Callable[[Sequence[Facts], int], Html]


QUESTIONS = (
    _Question('learned', 'Did it learn?', learning.headline, learning.section),
    _Question('cost', 'What did it cost?', cost.headline, cost.section),
    _Question(
        'wrong', 'Did anything go wrong?', problems.headline, lambda runs, _: problems.section(runs)
    ),
    _Question('time', 'Where did the time go?', time_spent.headline, time_spent.section),
    _Question(
        'predicted',
        'Is it as fast as predicted?',
        predicted.headline,
        lambda runs, _: predicted.section(runs),
    ),
)


def page(runs: Sequence[Facts]) -> str:
    """Return the HTML report on one or more runs."""
    points = max(FEWEST_POINTS, min(POINTS, _CURVES // len(runs)))
    title = ', '.join(facts.run.name for facts in runs)
    style = resources.files('megajax.analysis.report').joinpath('style.css').read_text()
    head = element(
        'head',
        element('meta', charset='utf-8'),
        Html(GENERATOR),
        element('meta', http_equiv='Content-Security-Policy', content=_POLICY),
        element('meta', name='viewport', content='width=device-width, initial-scale=1'),
        element('title', f'{title} - megajax report'),
        element('style', Html(style)),
    )
    body = element(
        'body',
        element('header', element('h1', title), *map(_subtitle, runs)),
        element(
            'main',
            _glance(runs),
            *(_section(each, runs, points) for each in QUESTIONS),
            _configs(runs),
        ),
        element('footer', _footer()),
    )
    return f'<!doctype html>\n{element("html", head, body, lang="en")}\n'


def _subtitle(facts: Facts) -> Html:
    run = facts.run
    model, train = run.config.model, run.config.train
    parts = [
        f'{large(num_parameters(model))} parameters',
        f'{model.num_layers} layers of {model.hidden_size}',
        train.dtype,
        cost.mesh_of(run),
        f'step {run.last_step:,} of {train.steps:,}',
    ]
    return element('p', chip(facts.color), f' {run.name}: ', ', '.join(parts), class_='subtitle')


def _glance(runs: Sequence[Facts]) -> Html:
    """Return each question with its answer, one line per run."""
    entries = []
    for question in QUESTIONS:
        lines = [
            element('div', chip(facts.color) if len(runs) > 1 else '', question.headline(facts))
            for facts in runs
        ]
        if question.name == 'learned' and (note := learning.comparison(runs)):
            lines.append(element('div', note))
        link = element('a', question.title, href=f'#{question.name}')
        entries += [element('dt', link), element('dd', *lines)]
    return element('dl', *entries, class_='glance')


def _section(question: _Question, runs: Sequence[Facts], points: int) -> Html:
    heading = element('h2', question.title, id=question.name)
    return element('section', heading, question.section(runs, points))


def _configs(runs: Sequence[Facts]) -> Html:
    differences = _differences(runs)
    names = [join([chip(facts.color), facts.run.name]) for facts in runs]
    parts = []
    if len(runs) > 1 and differences:
        parts.append(table(['key', *names], differences, names=1 + len(runs)))
    elif len(runs) > 1:
        parts.append(element('p', 'All runs have the same config.', class_='note'))
    parts += [
        details(f'Config of {facts.run.name}', element('pre', dump(facts.run.config)))
        for facts in runs
    ]
    title = 'Config differences' if len(runs) > 1 else 'Config'
    return element('section', element('h2', title, id='configs'), *parts)


def _differences(runs: Sequence[Facts]) -> list[list[object]]:
    """Return the keys whose values differ, except `run.dir`, with the value in each run."""
    settings = [flat(facts.run.config.model_dump(mode='json')) for facts in runs]
    keys = dict.fromkeys(key for each in settings for key in each if key != 'run.dir')
    return [
        [element('code', key), *(_value(each.get(key)) for each in settings)]
        for key in keys
        if any(each.get(key) != settings[0].get(key) for each in settings)
    ]


def _value(value: Any) -> str:
    return '-' if value is None else str(value)


def _footer() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f'Written by megajax {megajax.__version__} at {now:%F %T} UTC.'
