"""Indices and samples are those of megatron-core's GPTDataset and BlendedDataset, of which
`oracles/gpt_dataset` holds results.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from megajax.runtime.data.megatron_order import MegatronSamples, blend_index, blend_sizes
from megajax.runtime.data.text.parts import Part, split_sequences
from megajax.runtime.data.tokens.indexed import from_lengths, read_pair

ORACLES = Path(__file__).parent / 'oracles/gpt_dataset'
RESULTS = np.load(ORACLES / 'gpt_dataset.npz')
RUNS = json.loads(str(RESULTS['settings']))['runs']

every_split = pytest.mark.parametrize(
    ('split', 'number'), [('train', 0), ('valid', 1), ('test', 2)]
)


def datasets(run: str, number: int) -> list[MegatronSamples]:
    settings = RUNS[run]
    num_samples = settings['num_samples'][number]
    weights = [weight for _, weight in settings['blend'] if weight]
    made = blend_sizes(weights, num_samples)[1] if weights else [num_samples]
    parts = [
        split_sequences(read_pair(ORACLES / name), settings['split'])[number]
        for name, _ in settings['blend']
    ]
    return [
        MegatronSamples(
            part, seq_len=settings['sequence_length'], num_samples=count, seed=settings['seed']
        )
        for part, count in zip(parts, made, strict=True)
    ]


def sample_index(dataset: MegatronSamples) -> np.ndarray:
    """Megatron's index, [samples + 1, 2]: where in `document_index` a sample begins, and at which
    token of that sequence.
    """
    lengths = dataset.part.sequences.lengths[dataset.document_index]
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(len(dataset) + 1, dtype=np.int64) * dataset.seq_len
    positions = np.searchsorted(ends, starts, side='right')
    positions[0] = 0  # even if the first sequence is empty
    offsets = starts - (ends[positions] - lengths[positions])
    offsets[0] = 0
    return np.stack([positions, offsets], axis=1)


def sample_order(run: str, number: int, found: list[MegatronSamples]) -> list[tuple[int, int]]:
    settings = RUNS[run]
    weights = [weight for _, weight in settings['blend'] if weight]
    if not weights:
        return [(0, i) for i in range(len(found[0]))]
    index, numbers = blend_index(
        weights, sum(blend_sizes(weights, settings['num_samples'][number])[0])
    )
    return list(zip(index.tolist(), numbers.tolist(), strict=True))


@every_split
@pytest.mark.parametrize('run', RUNS)
def test_indices(run: str, split: str, number: int) -> None:
    for i, dataset in enumerate(datasets(run, number)):
        for name in ('document_index', 'shuffle_index'):
            np.testing.assert_array_equal(
                getattr(dataset, name), RESULTS[f'{run}/{split}/{i}/{name}']
            )
        np.testing.assert_array_equal(
            sample_index(dataset), RESULTS[f'{run}/{split}/{i}/sample_index']
        )


@every_split
@pytest.mark.parametrize('run', ['blend', 'blend3'])
def test_blends(run: str, split: str, number: int) -> None:
    found = np.array(sample_order(run, number, datasets(run, number)))
    np.testing.assert_array_equal(found[:, 0], RESULTS[f'{run}/{split}/dataset_index'])
    np.testing.assert_array_equal(found[:, 1], RESULTS[f'{run}/{split}/dataset_sample_index'])


@every_split
@pytest.mark.parametrize('run', RUNS)
def test_samples(run: str, split: str, number: int) -> None:
    found = datasets(run, number)
    order = sample_order(run, number, found)
    assert len(order) == RESULTS[f'{run}/{split}/length']
    window = np.zeros(RUNS[run]['sequence_length'] + 1, np.int32)
    for i, (tokens, labels) in enumerate(
        zip(RESULTS[f'{run}/{split}/tokens'], RESULTS[f'{run}/{split}/labels'], strict=True)
    ):
        dataset, sample = order[i]
        assert found[dataset].read(sample, window)[0] == len(window)
        np.testing.assert_array_equal(window[:-1], tokens)
        np.testing.assert_array_equal(window[1:], labels)


def test_sequences_begin_where_they_are_said_to_and_empty_ones_nowhere() -> None:
    lengths = np.array([0, 3, 0, 5, 2, 0])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sequences = from_lengths('x', owner.astype(np.uint16), lengths)
    samples = MegatronSamples(
        Part(sequences=sequences, first=0, last=6), seq_len=4, num_samples=6, seed=3
    )
    window = np.zeros(5, np.int32)
    for sample in range(len(samples)):
        found, begins = samples.read(sample, window)
        assert found == 5
        changes = [i for i in range(1, 5) if window[i] != window[i - 1]]
        assert set(changes) <= set(begins)


def test_no_tokens_are_an_error() -> None:
    empty = from_lengths('x', np.zeros(0, np.uint16), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match='sequences 0 to 2 hold no tokens'):
        MegatronSamples(Part(sequences=empty, first=0, last=2), seq_len=4, num_samples=6, seed=3)
