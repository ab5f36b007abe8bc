"""Files and samples held to megatron-core itself, on random settings, where it is installed (pip
install megatron-core torch).
"""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    blended = pytest.importorskip(
        'megatron.core.datasets.blended_megatron_dataset_builder',
        reason='megatron-core is not installed',
    )

from megatron.core.datasets import gpt_dataset, indexed_dataset

from megajax.core.config import load
from megajax.runtime.data import load_data
from megajax.runtime.data.tokens.indexed import read_pair, write_index

DTYPES = [np.uint16, np.int32]


def random_documents(random: np.random.Generator) -> list[list[np.ndarray]]:
    """Documents of sequences of ids; some documents have several, or none."""
    documents = random.integers(40, 80)
    return [
        [
            random.integers(0, 1000, random.integers(1, 60))
            for _ in range(random.choice([0, 1, 1, 1, 3]))
        ]
        for _ in range(documents)
    ]


def write_with_megatron(prefix: Path, documents: list[list[np.ndarray]], dtype: type) -> None:
    import torch

    builder = indexed_dataset.IndexedDatasetBuilder(f'{prefix}.bin', dtype=dtype)
    for sequences in documents:
        ids = np.concatenate([*sequences, np.zeros(0, np.int64)])
        builder.add_document(
            torch.from_numpy(ids.astype(np.int64)), [len(sequence) for sequence in sequences]
        )
    builder.finalize(f'{prefix}.idx')


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('seed', range(5))
def test_both_write_the_same_bytes_and_read_each_other(
    tmp_path: Path, seed: int, dtype: type
) -> None:
    documents = random_documents(np.random.default_rng(seed))
    write_with_megatron(tmp_path / 'theirs', documents, dtype)
    sequences = [sequence.astype(dtype) for document in documents for sequence in document]
    boundaries = np.cumsum([0, *(len(document) for document in documents)])
    (tmp_path / 'ours.bin').write_bytes(np.concatenate(sequences).tobytes())
    with (tmp_path / 'ours.idx').open('wb') as file:
        write_index(
            file, np.dtype(dtype), np.array([len(one) for one in sequences], np.int32), boundaries
        )
    for suffix in ('bin', 'idx'):
        assert (tmp_path / f'ours.{suffix}').read_bytes() == (
            tmp_path / f'theirs.{suffix}'
        ).read_bytes()
    theirs, ours = (
        indexed_dataset.IndexedDataset(str(tmp_path / 'ours')),
        read_pair(tmp_path / 'theirs'),
    )
    assert len(theirs) == len(ours) == len(sequences)
    for i, sequence in enumerate(sequences):
        np.testing.assert_array_equal(theirs[i], sequence)
        np.testing.assert_array_equal(ours.tokens[ours.start(i) : ours.start(i + 1)], sequence)
    np.testing.assert_array_equal(theirs.document_indices, ours.documents)


@pytest.mark.parametrize('seed', range(20))
def test_training_and_validation_samples_are_the_same(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    prefixes = [str(tmp_path / name) for name in 'abc'[: random.integers(1, 4)]]
    for prefix in prefixes:
        write_with_megatron(Path(prefix), random_documents(random), DTYPES[random.integers(2)])
    weights = (
        [round(float(weight), 2) for weight in random.uniform(0.1, 5, len(prefixes))]
        if len(prefixes) > 1
        else None
    )
    seq_len, batch_size, steps = int(random.integers(5, 50)), 2, int(random.integers(1, 150))
    split = ['7,2,1', '80,10,10', '9,1,0'][random.integers(3)]
    corpus = (
        f'data.blend={{{", ".join(f"{p}: {w}" for p, w in zip(prefixes, weights, strict=True))}}}'
        if weights
        else f'data.corpus={prefixes[0]}'
    )
    config = load('tiny', [
        'mesh.data=1', 'mesh.model=1', f'train.batch_size={batch_size}',
        f'train.seq_len={seq_len}', f'train.steps={steps}', f'train.seed={seed}',
        'train.eval_every=10', 'train.eval_batches=2', 'train.sample_prompts=[]',
        'optim.warmup_steps=0', 'data.tokenizer=none', 'data.order=megatron',
        f'data.split={split}', corpus,
    ])  # fmt: skip
    data = load_data(config)
    sizes = [steps * batch_size, (steps // 10 + 1) * 2 * batch_size, batch_size]
    for batches, theirs in zip(
        (data.train, data.validation),
        megatron_datasets(prefixes, weights, split, seq_len, seed, sizes),
        strict=False,
    ):
        if theirs is None:
            continue
        count = min(len(theirs), 200)
        rows = [
            batches.rows(i // batch_size, i % batch_size, i % batch_size + 1) for i in range(count)
        ]
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(row['tokens'][0], theirs[i]['tokens'])
            np.testing.assert_array_equal(row['labels'][0], theirs[i]['labels'])


def megatron_datasets(prefixes, weights, split, seq_len, seed, sizes):  # type: ignore[no-untyped-def]
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=(prefixes, weights),
        split=split,
        path_to_cache=None,
        tokenizer=SimpleNamespace(eod=-1, pad=-1, vocab_size=4096, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return blended.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, sizes, lambda: True, config
    ).build()
