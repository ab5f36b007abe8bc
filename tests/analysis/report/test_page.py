"""The page answers its five questions from any run, and its data are never markup."""

import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megajax.analysis.inspect.result import Inspection
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.time import step_time
from megajax.analysis.report.cost import SHOWN
from megajax.analysis.report.html import _VOID
from megajax.analysis.report.learning import tokens_of
from megajax.analysis.report.page import QUESTIONS, page
from megajax.analysis.report.read import Checkpoint, Steps, read_runs
from megajax.analysis.report.run_facts import Facts, Prediction
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import hardware
from megajax.runtime.checkpoint.record import RECORD

EVIL = '</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>"\'\u202e\x1b[2J\x00'
MODEL = (
    'train: {seq_len: 16}\n'
    'model: {num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 64, max_seq_len: 16'
)


def page_on(*folders: Path) -> str:
    runs = read_runs(folders)
    return page([Facts(run=run, color=number) for number, run in enumerate(runs)])


class Outline(HTMLParser):
    """The tags of a page, which must be closed in their order, and its links and ids."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags, self.open = Counter[str](), list[str]()
        self.sources, self.ids = list[str](), list[str]()
        self.feed(markup)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID
        self.tags[tag] += 1
        self.note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not [name for name in given if name.startswith('on')]
        self.sources += [given[name] or '' for name in ('src', 'href') if name in given]
        self.ids += [given['id'] or ''] if 'id' in given else []


def words(markup: str) -> str:
    return ' '.join(html.unescape(re.sub(r'<style>.*?</style>|<[^>]+>', ' ', markup)).split())


def glance(markup: str) -> list[str]:
    """The answers at the head of the page, in the order of the questions."""
    return [words(answer) for answer in re.findall(r'<dd>(.*?)</dd>', markup)]


def add_lines(folder: Path, *lines: dict[str, object]) -> None:
    with (folder / 'metrics.jsonl').open('a') as file:
        file.writelines(json.dumps(line) + '\n' for line in lines)


@pytest.fixture(scope='module')
def markup(finished_run: Path) -> str:
    return page_on(finished_run)


def test_a_page_is_well_formed_and_stands_alone(markup: str) -> None:
    outline = Outline(markup)
    assert outline.tags['script'] == outline.tags['link'] == outline.tags['iframe'] == 0
    assert "default-src 'none'" in html.unescape(markup)
    assert all(source.startswith('#') for source in outline.sources)
    assert {source[1:] for source in outline.sources} <= set(outline.ids)
    assert len(set(outline.ids)) == len(outline.ids)
    assert 'url(' not in markup
    assert '@import' not in markup


def test_the_questions_stand_in_their_order_and_the_answers_lead_to_them(markup: str) -> None:
    titles = re.findall(r'<h2 id="[^"]*">(.*?)</h2>', markup)
    assert titles == [*(question.title for question in QUESTIONS), 'Config']
    links = [source for source in Outline(markup).sources if source.startswith('#')]
    assert links == [f'#{question.name}' for question in QUESTIONS]


def test_every_line_of_a_picture_has_two_ends(markup: str) -> None:
    lines = re.findall('<line [^>]*>', markup)
    assert lines
    assert all(f' {end}="' in line for line in lines for end in ('x1', 'x2', 'y1', 'y2'))


def test_every_tick_of_a_picture_has_a_number(markup: str) -> None:
    below = re.findall(r'<text [^>]*class="tick middle"[^>]*>([^<]*)</text>', markup)
    assert len(below) > markup.count('<svg') > 0
    assert all(re.search(r'\d', number) for number in below)


def test_numbers_of_a_table_are_on_the_right_and_texts_on_the_left(markup: str) -> None:
    found = Counter[str]()
    for row in re.findall(r'<tr>(.*?)</tr>', markup):
        for where, cell in re.findall(r'<td(.*?)>(.*?)</td>', row)[1:]:
            text = words(cell)
            if re.fullmatch(r'[\d.,]+( k?B)?', text):
                assert where == ' class="number"', text
            elif re.fullmatch(r'[\d-]+ [\d:]+|[a-z]+( [a-z]+)*', text) and text != 'equal':
                assert where == '', text
            found[where] += 1
    assert len(found) == 2


def test_of_many_checkpoints_the_newest_are_shown(finished_run: Path) -> None:
    (run,) = read_runs([finished_run])
    for count, more in ((SHOWN, ''), (SHOWN + 1, f', the newest {SHOWN} of {SHOWN + 1}')):
        kept = [Checkpoint(step=i, record=None, bytes=0, fault=None) for i in range(1, count + 1)]
        shown = page([Facts(run=replace(run, checkpoints=kept), color=0)])
        assert f'Checkpoints of {run.name}{more}<' in shown


def test_a_run_that_was_resumed_on_another_mesh_says_so(markup: str) -> None:
    assert 'The run was started 2 times.' in markup
    assert 'mesh.data was changed from 2 to 1 after step 3.' in markup
    learned, cost, _, time, speed = glance(markup)
    assert learned.startswith('validation loss 5.')
    assert 'on 2 devices' in cost
    assert '% in productive steps' in time
    assert speed.endswith('no collective sends more than in Megatron')


def test_the_collectives_of_the_step_are_those_of_inspect(finished_run: Path) -> None:
    (run,) = read_runs([finished_run])
    inspection = Facts(run=run, color=0).inspection
    assert not isinstance(inspection, str)
    assert inspection.ratios['model'] == pytest.approx(0.8, abs=0.1)
    shown = words(page_on(finished_run))
    for row in inspection.rows:
        assert f'{row.site} {row.phase} {row.axis}' in shown


def test_a_run_with_nothing_but_a_config_says_what_is_missing(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copy(finished_run / 'config.yaml', tmp_path)
    markup = page_on(tmp_path)
    Outline(markup)
    assert glance(markup) == [
        'no step was taken yet',
        'time unknown: the run wrote no summary.json',
        'No step has finished: metrics.jsonl has none',
        'time unknown: the run wrote no summary.json',
        'no step time was measured; collectives unknown',
    ]
    assert 'the run has no step.hlo.gz' in markup


def test_the_differences_of_two_configs_are_a_table(finished_run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(finished_run, tmp_path / 'other'))
    text = (other / 'config.yaml').read_text()
    (other / 'config.yaml').write_text(text.replace('  seed: 1234', '  seed: 7'))
    markup = page_on(finished_run, other)
    Outline(markup)
    rows = re.findall(r'<tr><td><code>(.*?)</code></td><td>(.*?)</td><td>(.*?)</td>', markup)
    assert rows == [('train.seed', '1234', '7')]
    assert 'run, training' in markup
    assert 'other, validation' in markup


def test_equal_configs_are_said_to_be_equal(finished_run: Path, copied_run: Path) -> None:
    assert 'All runs have the same config.' in page_on(finished_run, copied_run)


def test_skipped_and_slow_steps_are_named_with_their_reasons(copied_run: Path) -> None:
    usual = {'loss': 5.0, 'grad_norm': 1.0, 'taken': 1, 'finite': 1, 'overflow': 0, 'spike': 0}
    times = {'step_ms': 100.0, 'data_wait_ms': 1.0, 'checkpoint_ms': 0.0}
    add_lines(
        copied_run,
        *({'step': step, **usual, **times} for step in range(7, 40)),
        {'step': 40, **usual, **times, 'taken': 0, 'finite': 0, 'loss': None},
        {'step': 41, **usual, **times, 'taken': 0, 'spike': 1, 'loss': 90.0},
        {'step': 42, **usual, **times, 'step_ms': 9000.0, 'data_wait_ms': 8900.0},
    )
    shown = words(page_on(copied_run))
    reasons = '1 for non-finite loss or gradients, 1 for a loss spike.'
    assert f'2 steps skipped: {reasons}' in shown
    assert '40 not finite 1' in shown
    assert '42 9,000.0 90.0 8,900.0 0.0' in shown
    assert 'The newest complete checkpoint is of step 6; a resume repeats 36 steps.' in shown


def test_the_routing_of_experts_has_charts_and_idle_experts_are_a_fault(copied_run: Path) -> None:
    before = words(page_on(copied_run))
    routed = {'loss': 5.0, 'expert_load': 2.5, 'router_entropy': 1.2, 'idle_experts': 3}
    add_lines(copied_run, *({'step': step, **routed} for step in range(7, 107)))
    shown = words(page_on(copied_run))
    for title, is_there in (
        ('Load of the busiest expert', True),
        ('Router entropy', True),
        ('Dropped assignments', False),
    ):
        assert title not in before
        assert (title in shown) == is_there
    assert 'at least 3 experts received no token' in shown


def test_a_rise_of_the_validation_loss_is_a_fault(copied_run: Path) -> None:
    add_lines(copied_run, {'step': 6, 'validation_loss': 99.0})
    assert 'The validation loss rose from its best' in page_on(copied_run)


def test_the_best_loss_is_below_the_last_if_they_differ(copied_run: Path) -> None:
    best = r'<br/?><small>[\d.]+ at step \d+</small>'
    assert not re.search(best, page_on(copied_run))
    (run,) = read_runs([copied_run])
    _, losses = run.evaluated('validation_loss')
    add_lines(copied_run, {'step': 7, 'validation_loss': (losses[0] + losses.min()) / 2})
    assert re.search(best, page_on(copied_run))


def test_a_single_validation_loss_that_is_not_finite_is_no_rise(copied_run: Path) -> None:
    file = copied_run / 'metrics.jsonl'
    lines = [line for line in file.read_text().splitlines() if 'validation_loss' not in line]
    file.write_text('\n'.join(lines) + '\n')
    add_lines(copied_run, {'step': 6, 'validation_loss': float('nan')})
    assert 'loss rose' not in page_on(copied_run)


def test_without_validation_the_training_loss_is_the_answer(copied_run: Path) -> None:
    file = copied_run / 'metrics.jsonl'
    lines = [line for line in file.read_text().splitlines() if 'validation_loss' not in line]
    file.write_text('\n'.join(lines) + '\n')
    markup = page_on(copied_run)
    assert re.match(r'training loss 5\.\d+ → 5\.\d+, without validation', glance(markup)[0])
    assert 'No validation loss was measured, so overfitting would go unnoticed.' in markup


def test_a_damaged_checkpoint_is_a_fault(copied_run: Path) -> None:
    (copied_run / 'checkpoints/6/record.json').unlink()
    assert 'Checkpoint 6 is damaged: ' in page_on(copied_run)


def test_a_run_on_known_gpus_is_compared_with_its_prediction(copied_run: Path) -> None:
    record = json.loads((copied_run / 'step.json').read_text())
    record |= {'device_kind': 'NVIDIA H100 80GB HBM3'}
    (copied_run / 'step.json').write_text(json.dumps(record))
    markup = page_on(copied_run)
    predicted = r'per step, [\d.]+x the predicted [\d.]+ ms \(± \d\d%\); no collective'
    assert re.search(predicted, markup)
    assert 'launch overhead' in markup


@pytest.mark.parametrize(
    ('kind', 'rates'), [('NVIDIA H100 PCIe', 'h100_pcie'), ('NVIDIA B9000', 'h100')]
)
def test_a_step_is_estimated_at_the_rates_of_its_own_gpu(
    kind: str, rates: str, copied_run: Path
) -> None:
    """Otherwise at those of the target that it was compiled for."""
    record = json.loads((copied_run / 'step.json').read_text())
    record |= {'device_kind': kind, 'target': 'h100'}
    (copied_run / 'step.json').write_text(json.dumps(record))
    assert f'schedule at the rates of {hardware(rates).name}, a step' in words(page_on(copied_run))


@pytest.mark.parametrize('missing', ['across_hosts', 'inside_host'])
def test_a_step_is_estimated_at_the_rates_of_a_file_that_has_the_links_that_it_uses(
    missing: str, copied_run: Path
) -> None:
    record = json.loads((copied_run / 'step.json').read_text())
    (copied_run / 'step.json').write_text(json.dumps(record | {'target': 'h100'}))
    mine = hardware('a100').model_copy(update={'name': missing, missing: None})
    (run,) = read_runs([copied_run])
    inspection = Facts(run=run, color=0, gpu=mine).inspection
    assert isinstance(inspection, Inspection)
    assert inspection.rates.hardware == (
        missing if missing == 'across_hosts' else hardware('h100').name
    )


def test_a_run_on_a_cpu_is_predicted_with_its_own_schedule(finished_run: Path) -> None:
    """It is not the schedule that `auto` chooses on GPUs."""
    cpu = hardware('h100').model_copy(update={'device_kinds': ('cpu',)})
    (run,) = read_runs([finished_run])
    prediction = Facts(run=run, color=0, gpu=cpu).prediction
    assert isinstance(prediction, Prediction)
    config = run.compiled_config
    of_gpu, of_cpu = (
        step_time(resolved(config, on_gpu=on_gpu), Cluster.of(cpu, config.mesh.num_devices))
        for on_gpu in (True, False)
    )
    assert prediction.time == of_cpu != of_gpu


def test_more_than_megatron_is_a_fault(copied_run: Path) -> None:
    record = json.loads((copied_run / 'step.json').read_text())
    record['config']['train']['batch_size'] = 2
    (copied_run / 'step.json').write_text(json.dumps(record))
    shown = words(page_on(copied_run))
    assert 'XLA sends more than Megatron at mlp, forward, over model.' in shown


def test_the_step_is_audited_with_its_own_config_and_not_with_a_later_one(
    copied_run: Path,
) -> None:
    text = (copied_run / 'config.yaml').read_text()
    (copied_run / 'config.yaml').write_text(text.replace('batch_size: 4', 'batch_size: 2'))
    shown = words(page_on(copied_run))
    assert 'no collective sends more than in Megatron' in shown
    record = json.loads((copied_run / 'step.json').read_text())
    assert record.pop('config')['train']['batch_size'] == 4
    (copied_run / 'step.json').write_text(json.dumps(record))  # as an older megajax has stored it
    assert 'XLA sends more than Megatron' in words(page_on(copied_run))


def test_bert_has_the_results_of_both_its_tasks(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text(f'{MODEL}, objective: masked_lm}}')
    add_lines(
        tmp_path,
        {'step': 1, 'loss': 4.8, 'nll': 4.1},
        {'step': 0, 'validation_loss': 4.2, 'validation_order_loss': 0.7},
        {'step': 1, 'validation_loss': 4.1, 'validation_order_loss': 0.6},
    )
    markup = page_on(tmp_path)
    assert glance(markup)[0] == 'validation loss 4.200 → 4.100 nats per masked token'
    assert 'validation order loss' in markup


def with_tokenizer(folder: Path, digest: str) -> Path:
    """A run folder whose newest record names another tokenizer."""
    for record in folder.glob(f'checkpoints/*/{RECORD}'):
        values = json.loads(record.read_text()) | {'tokenizer_sha256': digest}
        record.write_text(json.dumps(values))
    return folder


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(
    finished_run: Path, copied_run: Path
) -> None:
    rule = 'The runs have different tokenizers, so losses per token are not comparable'
    assert rule not in page_on(finished_run, copied_run)
    markup = page_on(finished_run, with_tokenizer(copied_run, 'f' * 64))
    Outline(markup)
    assert (
        f'{rule}; compare bits per byte on the same validation text instead.' in glance(markup)[0]
    )
    assert re.search(r'nats per token \([\d.]+ → [\d.]+ bits per byte\)', glance(markup)[0])
    assert {'Loss of run', 'Loss of night'} <= {*re.findall('Loss of [a-z]+', markup)}
    assert 'Loss in the second half' not in markup


def test_a_run_without_a_checkpoint_has_the_tokenizer_of_its_folder(
    finished_run: Path, copied_run: Path
) -> None:
    shutil.rmtree(copied_run / 'checkpoints')
    saved, without = read_runs([finished_run, copied_run])
    assert saved.tokenizer
    assert without.tokenizer == saved.tokenizer
    (copied_run / 'tokenizer.json').unlink()
    shown = glance(page_on(finished_run, copied_run))[0]
    assert 'Some tokenizers are unknown, so losses per token are not comparable' in shown


def test_runs_with_different_tokenizers_and_no_bits_per_byte_are_said_not_to_compare(
    finished_run: Path, copied_run: Path
) -> None:
    metrics = with_tokenizer(copied_run, 'f' * 64) / 'metrics.jsonl'
    metrics.write_text(metrics.read_text().replace('validation_bits_per_byte', 'unread'))
    shown = glance(page_on(finished_run, copied_run))[0]
    assert 'No bits per byte were logged for night.' in shown


def test_a_run_on_pictures_shows_the_newest_it_has_read(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / 'config.yaml').write_text(f'{MODEL}}}')
    add_lines(tmp_path, {'step': 90, 'loss': 1.0}, {'step': 90, 'validation_read': 0.25})
    for step, color in ((8, 'red'), (90, 'green')):
        Image.new('RGB', (4, 4), color).save(tmp_path / f'readings-{step}.png')
    outline = Outline(page_on(tmp_path))
    (source,) = [source for source in outline.sources if not source.startswith('#')]
    assert source.startswith('data:image/png;base64,')
    assert 'validation read' in page_on(tmp_path)


def test_tokens_are_those_of_the_batches_whatever_their_sizes_were(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text(f'{MODEL}}}')
    (run,) = read_runs([tmp_path])
    each = run.config.train.batch_size * run.config.train.seq_len
    seconds = np.array([0.3, 0.7, 0.011, 0.5])
    tokens = np.array([64, 64, 192, np.nan])  # of the last step, nothing is known
    steps = Steps(np.arange(1.0, 5), {'tokens_per_s': tokens / seconds, 'step_ms': 1e3 * seconds})
    assert tokens_of(replace(run, steps=steps)) == 64 + 64 + 192 + each


def test_a_long_run_is_a_small_page_with_its_worst_step(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text(f'{MODEL}}}')
    usual = {'grad_norm': 1.0, 'lr': 1e-3, 'step_ms': 5.0, 'tokens_per_s': 1e6, 'mfu': 0.4}
    lines = [{'step': step, 'loss': 9 * step**-0.1, **usual} for step in range(1, 20_001)]
    lines[12_344]['step_ms'] = 123_456.0
    add_lines(tmp_path, *lines)
    markup = page_on(tmp_path)
    assert len(markup) < 300_000
    assert '123,456.0' in markup


def test_whatever_a_run_holds_is_no_markup(copied_run: Path, tmp_path: Path) -> None:
    before = Outline(page_on(copied_run))
    evil = tmp_path / '<script>alert(3)<'
    copied_run.rename(evil)
    samples = [{'step': step, EVIL: EVIL} for step in (3, 6)]
    (evil / 'samples.jsonl').write_text('\n'.join(map(json.dumps, samples)))
    add_lines(evil, {'step': 6, f'validation_{EVIL}': 1.0})
    record = json.loads((evil / 'step.json').read_text())
    (evil / 'step.json').write_text(json.dumps(record | {'device_kind': EVIL}))
    (evil / 'config.yaml').write_text(
        (evil / 'config.yaml').read_text().replace('<b>bold</b>', '<script>alert(4)</script>')
    )
    markup = page_on(evil)
    after = Outline(markup)
    assert after.tags.keys() <= before.tags.keys() | {'br'}
    assert after.tags['script'] == after.tags['img'] == 0
    assert not {'\u202e', '\x1b', '\x00'} & {*markup}
    assert '\\u202e\\x1b[2J\\x00' in markup
    markup.encode()
