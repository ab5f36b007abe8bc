"""A resumed run begins with the first sample that it has not read, or says what it cannot keep."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import exhaustive

from megajax.core.config import Config, load
from megajax.runtime.checkpoint.record import Record, make_record
from megajax.runtime.data import Batches, load_data
from megajax.runtime.data.sources import shares
from megajax.runtime.run.resumed_data import resumed_data

PAIRS = Path(__file__).parents[2] / 'runtime/data/oracles/gpt_dataset'
FIRST, STEPS = 8, 40  # the batch size of the first start, and its train.steps
A, BLEND = f'data.corpus={PAIRS}/a', f'data.blend={{{PAIRS}/a: 0.7, {PAIRS}/b: 0.3}}'
SMALL = [
    'train.seq_len=32',
    'mesh.data=1',
    'mesh.model=1',
    'model.vocab_size=70000',
    'optim.warmup_steps=0',
    'train.sample_prompts=[]',
    'data.tokenizer=none',
    'data.split=900,50,50',
]


def config_of(batch_size: int, *overrides: str) -> Config:
    sizes = [f'train.batch_size={batch_size}', f'train.steps={STEPS}']
    return load('tiny', [*SMALL, *sizes, *overrides])


def samples_of(batches: Batches, step: int) -> list[bytes]:
    """The samples in the batch of a step."""
    return [row.tobytes() for row in batches[step]['labels']]


class Run:
    """A run that reads and trains nothing: its steps, and the samples that they had."""

    def __init__(self, *overrides: str):
        self.overrides, self.step, self.batches = overrides, 0, 0
        self.read: list[bytes] = []
        self.record: Record | None = None

    def start(self, steps: int, batch_size: int, *overrides: str, rolled_back: int = 0) -> Batches:
        """Start, or resume, the run for some steps; some more batches are read without a step."""
        config = config_of(batch_size, *self.overrides, *overrides)
        data = load_data(config)
        data = resumed_data(data, config, self.record, batches=self.batches)
        for _ in range(steps + rolled_back):
            self.read += samples_of(data.train, self.batches)
            self.batches += 1
        self.step += steps
        self.record = make_record(
            config,
            self.step,
            data=data.fingerprints,
            **data.train.place(self.batches),
        )
        return data.train


def straight(*overrides: str) -> Iterator[bytes]:
    """The samples of a run whose batch size never changes, in order."""
    batches = load_data(config_of(FIRST, *overrides)).train
    return (sample for step in range(len(batches)) for sample in samples_of(batches, step))


@pytest.mark.parametrize('corpus', [exhaustive(A), BLEND], ids=['corpus', 'blend'])
@pytest.mark.parametrize('order', ['stateless', 'megatron'])
@settings(max_examples=6, deadline=None)
@given(
    starts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, FIRST), st.integers(0, 1)), max_size=4
    )
)
def test_each_sample_is_read_once_in_an_epoch_whatever_the_batch_sizes(
    order: str, corpus: str, starts: list[tuple[int, int, int]]
) -> None:
    run = Run(corpus, f'data.order={order}')
    run.start(3, FIRST)
    for steps, batch_size, rolled_back in starts:
        run.start(steps, batch_size, rolled_back=rolled_back)
    expected = straight(corpus, f'data.order={order}')
    assert run.read == [next(expected) for _ in run.read]


@pytest.mark.parametrize(('weight', 'again'), [(2, 0), (1.0099, 64)])
def test_a_run_whose_weights_an_earlier_version_rounded_names_what_it_reads_again(
    caplog: pytest.LogCaptureFixture, weight: float, again: int
) -> None:
    run = Run(f'data.blend={{{PAIRS}/a: {weight}, {PAIRS}/b: 1}}')
    run.start(60, FIRST)
    run.start(1, FIRST)
    assert 'rounded' not in caplog.text
    assert run.record is not None
    run.record = run.record.model_copy(update={'exact_weights': False})
    run.start(1, FIRST)
    assert ('rounded' in caplog.text) == bool(again)
    if again:
        assert f'{again} are read again before the next epoch' in caplog.text


def stream(folder: Path) -> list[str]:
    """The settings of a run that streams a text of about 4,000 lines."""
    (folder / 'text.txt').write_text('\n'.join(map(str, range(100_000, 200_000, 25))))
    keys = 'data.order=streamed', 'data.tokenizer=bytes', 'data.split=1,0,0'
    return [f'data.corpus={folder}/text.txt', *keys]


@settings(max_examples=6, deadline=None)
@given(
    starts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, FIRST), st.integers(0, 1)), max_size=4
    )
)
def test_streams_go_on_to_the_token_whatever_the_batch_sizes(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, 'SMALLEST', 400)
        run = Run(*(keys := stream(tmp_path_factory.mktemp('corpus'))))
        run.start(3, FIRST)
        for steps, batch_size, rolled_back in starts:
            run.start(steps, batch_size, rolled_back=rolled_back)
        expected = straight(*keys)
        assert run.read == [next(expected) for _ in run.read]


@pytest.mark.parametrize(
    ('override', 'changed'),
    [
        ('train.seed=5', 'train.seed'),
        ('data.split=1,1,0', 'data.split'),
        ('data.corpus=other.txt', 'data.corpus'),
        ('data.order=stateless', 'data.order'),
    ],
)
def test_other_streams_begin_with_their_first_tokens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    override: str,
    changed: str,
) -> None:
    monkeypatch.setattr(shares, 'SMALLEST', 400)
    monkeypatch.chdir(tmp_path)
    keys = stream(tmp_path)
    (tmp_path / 'other.txt').write_text('another text\n' * 2000)
    run = Run(*keys)
    first, second = ([], [override]) if changed != 'data.order' else ([override], [])
    run.start(4, FIRST, *first)
    run.start(1, FIRST, *second)
    said = f'resume     {changed}: the streams have changed: the corpus is read from its beginning'
    assert said in caplog.text
    fresh = straight(*keys, *second)
    assert run.read[4 * FIRST :] == [next(fresh) for _ in range(FIRST)]


def test_growing_batches_of_megatron_s_order_stay_in_it_while_an_epoch_lasts() -> None:
    run = Run(A, 'data.order=megatron', 'train.seq_len=4', 'train.steps=20')
    run.start(3, FIRST)
    run.start(5, 24)  # 24 + 17 x 24 samples in all instead of 160, of 589
    expected = straight(A, 'data.order=megatron', 'train.seq_len=4', 'train.steps=20')
    assert run.read == [next(expected) for _ in run.read]
    assert Counter(run.read).most_common(1)[0][1] == 1


def test_a_record_of_an_old_version_has_read_batches_of_its_own_size() -> None:
    run = Run(A)
    run.start(4, FIRST)
    assert run.record is not None
    run.record = run.record.model_copy(update={'samples': None, 'order_of': None})
    run.start(2, 4)
    expected = straight(A)
    assert run.read == [next(expected) for _ in run.read]


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        (
            ['train.batch_size=4'],
            ['step 5 begins with sample 32 of the order', '128 tokens', '256'],
        ),
        (
            ['train.seq_len=16'],
            ['train.seq_len: the order of samples has changed', '1,024 tokens', 'up to 1,024'],
        ),
        (['train.seed=5'], ['train.seed: ', 'of the 1,024 tokens that the run has read']),
        (['data.split=1,1,0'], ['data.split: ']),
        ([f'data.corpus={PAIRS}/b'], ['the corpus has changed: it is read from its first']),
        (['data.order=megatron'], ['data.order: ']),
    ],
)
def test_what_cannot_be_kept_is_said_in_tokens(
    overrides: list[str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level('INFO')
    run = Run(A)
    run.start(4, FIRST)
    run.start(1, FIRST, *overrides)
    assert all(words in caplog.text for words in said), caplog.text


def test_the_same_corpus_by_another_name_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(A)
    run.start(4, FIRST)
    for suffix in 'bin', 'idx':
        shutil.copy(f'{PAIRS}/a.{suffix}', tmp_path / f'moved.{suffix}')
    run.start(4, FIRST, f'data.corpus={tmp_path}/moved')
    expected = straight(A)
    assert run.read == [next(expected) for _ in run.read]
    assert not caplog.text


def test_validation_documents_do_not_decide_what_a_run_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(40):
        (tmp_path / f'{i}.txt').write_text(f'text {i} ' * 99)
    text = [f'data.corpus={tmp_path}', 'data.tokenizer=bytes']
    run = Run(*text)
    run.start(4, FIRST)
    assert run.record is not None
    validation = f'validation documents of {tmp_path}'
    for data in ({validation: 'other'}, {}):  # an older version did not record them
        kept = {str(tmp_path): run.record.data[str(tmp_path)]}
        run.record = run.record.model_copy(update={'data': {**kept, **data}})
        run.start(2, FIRST)
    expected = straight(*text)
    assert run.read == [next(expected) for _ in run.read]
    assert not caplog.text


@pytest.mark.parametrize('order', ['stateless', 'megatron'])
@pytest.mark.parametrize(
    'blend', ['{b: 0.3, a: 0.7}', '{b: 0.7, a: 0.3}', '{a: 0.3, b: 0.7}', '{b: 7, a: 3}']
)
def test_another_order_of_a_blend_is_said_to_be_another_order_of_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, order: str, blend: str
) -> None:
    run = Run(BLEND, f'data.order={order}')
    run.start(4, FIRST)
    again = blend.replace('a:', f'{PAIRS}/a:').replace('b:', f'{PAIRS}/b:')
    run.start(4, FIRST, f'data.blend={again}')
    expected = straight(BLEND, f'data.order={order}')
    assert run.read != [next(expected) for _ in run.read]
    assert 'data.blend: the order of samples has changed' in caplog.text


def test_a_blend_that_was_moved_is_the_same_blend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in 'ab':
        for suffix in 'bin', 'idx':
            shutil.copy(f'{PAIRS}/{name}.{suffix}', tmp_path / f'{name}.{suffix}')
    run = Run(BLEND)
    run.start(4, FIRST)
    run.start(4, FIRST, f'data.blend={{{tmp_path}/a: 0.7, {tmp_path}/b: 0.3}}')
    expected = straight(BLEND)
    assert run.read == [next(expected) for _ in run.read]
    assert 'resume' not in caplog.text


def test_a_run_that_is_resumed_as_it_was_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level('INFO')
    for order in 'stateless', 'megatron':
        run = Run(A, f'data.order={order}')
        run.start(4, FIRST)
        run.start(4, FIRST)
    assert not caplog.text


def test_megatron_s_order_is_kept_by_fewer_steps_and_a_longer_run_says_that_it_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(A, 'data.order=megatron')
    run.start(4, FIRST)
    run.start(2, FIRST, 'train.steps=12')
    expected = straight(A, 'data.order=megatron')
    assert run.read == [next(expected) for _ in run.read]
    assert not caplog.text
    run.start(1, FIRST, 'train.steps=400')
    assert 'data.order=megatron: 3,200 samples need other passes' in caplog.text
    assert f'train.steps={STEPS} keeps the order' in caplog.text


def test_a_new_corpus_is_read_from_its_first_sample_and_shorter_sequences_from_the_same_token() -> (
    None
):
    run = Run(A)
    run.start(4, FIRST)
    assert run.record is not None
    assert run.start(0, 4, f'data.corpus={PAIRS}/b').samples_before(4) == 0
    run = Run(A)
    run.start(4, FIRST)
    assert run.start(0, FIRST, 'train.seq_len=24').samples_before(4) == -(-32 * 32 // 24)


@pytest.mark.parametrize('blend', [A, BLEND])
def test_a_run_from_megatron_goes_on_with_the_samples_it_would_have_had(blend: str) -> None:
    config = config_of(FIRST, blend, 'data.order=megatron')
    whole = load_data(config)
    read, total = 5 * FIRST, STEPS * FIRST
    record = make_record(config_of(4), 0, samples=read, order_of=total)
    rest = config_of(FIRST, blend, 'data.order=megatron', f'train.steps={STEPS - 5}')
    data = resumed_data(load_data(rest), rest, record, batches=0)
    for step in range(STEPS - 5):
        assert samples_of(data.train, step) == samples_of(whole.train, step + 5)


def test_what_megatron_has_consumed_is_not_skipped_in_another_order() -> None:
    config = config_of(FIRST, A)
    record = make_record(config_of(4), 0, samples=40, order_of=STEPS * FIRST)
    data = resumed_data(load_data(config), config, record, batches=0)
    assert samples_of(data.train, 0) == samples_of(load_data(config).train, 0)
