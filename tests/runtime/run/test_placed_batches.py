"""The same batches on every mesh and with any number of processes, of which each reads its own
rows.
"""

import json
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.core.config import Config, load
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.feed import local_rows
from megajax.runtime.data import load_data
from megajax.runtime.run.placed_batches import PlacedBatches

ORACLES = Path(__file__).parents[2] / 'runtime/data/oracles/gpt_dataset'
TESTS = Path(__file__).parent  # a corpus of as many files as rows
FIRST, LAST = 7, 10


def make_config(order: str) -> Config:
    corpus = [f'data.blend={{{ORACLES}/a: 0.7, {ORACLES}/b: 0.3}}', 'data.tokenizer=none']
    if order == 'streamed':
        corpus = [f'data.corpus={TESTS}', 'data.tokenizer=bytes']
    small = [
        'train.batch_size=8',
        'train.seq_len=32',
        'train.steps=40',
        'train.sample_prompts=[]',
        'model.vocab_size=1000',
    ]
    return load('tiny', [*small, *corpus, 'data.document_mask=true', f'data.order={order}'])


@pytest.mark.parametrize('order', ['stateless', 'megatron', 'streamed'])
@pytest.mark.parametrize('mesh', [(1, 1), (2, 2), (4, 2)])
def test_the_same_batches_on_every_mesh(mesh: tuple[int, int], order: str) -> None:
    train = load_data(make_config(order)).train
    with jax.set_mesh(make_mesh(*mesh)):
        for step, batch in enumerate(PlacedBatches(train, FIRST, LAST), FIRST):
            expected = train[step]
            assert batch.keys() == expected.keys()
            for name, placed in batch.items():
                np.testing.assert_array_equal(np.asarray(placed), expected[name])


def test_a_batch_that_was_peeked_at_is_still_the_next() -> None:
    train = load_data(make_config('stateless')).train
    with jax.set_mesh(make_mesh(1, 1)):
        batches = PlacedBatches(train, FIRST, LAST)
        for step in range(FIRST, LAST):
            peeked = [batches.peek() for _ in range(step - FIRST)]
            batch = next(batches)
            assert all(one is batch for one in peeked)
            np.testing.assert_array_equal(np.asarray(batch['labels']), train[step]['labels'])
        assert not list(batches)


PROCESS = f"""
import json, sys
import jax
number, count, port = map(int, sys.argv[1:4])
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8 // count)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{{port}}', count, number)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_placed_batches import rows_of_this_process
print(json.dumps(rows_of_this_process(sys.argv[4])))
"""


def rows_of_this_process(order: str) -> dict[str, object]:
    """The labels that each row of each step has here, the rows that were read, and the place after
    them that all processes agree on.
    """
    train = load_data(make_config(order)).train
    found: dict[str, object] = {}
    with jax.set_mesh(make_mesh(4, 2)):
        rows = local_rows(train.batch_size)
        batches = PlacedBatches(train, FIRST, LAST)
        for step, batch in enumerate(batches, FIRST):
            for shard in batch['labels'].addressable_shards:
                for row, labels in enumerate(np.asarray(shard.data), shard.index[0].start):
                    found[f'{step} {row}'] = labels.tolist()
    place = batches.place(LAST)
    return {'read': [rows.start, rows.stop], 'found': found, 'place': place}


@pytest.mark.parametrize(
    ('count', 'order'),
    [
        pytest.param(2, 'megatron', marks=pytest.mark.slow),
        pytest.param(4, 'stateless', marks=pytest.mark.faults),
        pytest.param(4, 'streamed', marks=pytest.mark.faults),
    ],
)
def test_processes_read_their_own_rows_of_the_same_batches(count: int, order: str) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    commands = [
        [sys.executable, '-c', PROCESS, str(number), str(count), str(port), order]
        for number in range(count)
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, [
        errors[-2000:] for _, errors in said
    ]
    results = [
        json.loads(next(line for line in out.splitlines() if line.startswith('{')))
        for out, _ in said
    ]  # gloo speaks too
    share = 8 // count
    assert [result['read'] for result in results] == [
        [number * share, (number + 1) * share] for number in range(count)
    ]
    train = load_data(make_config(order)).train
    expected = {
        f'{step} {row}': labels.tolist()
        for step in range(FIRST, LAST)
        for row, labels in enumerate(train[step]['labels'])
    }
    assert {
        key: labels for result in results for key, labels in result['found'].items()
    } == expected
    place = json.loads(json.dumps(train.place(LAST)))
    assert [result['place'] for result in results] == [place] * count


def test_a_resumed_run_reads_on_where_the_straight_one_was() -> None:
    config = make_config('stateless')
    with jax.set_mesh(make_mesh(2, 2)):
        straight = islice(PlacedBatches(load_data(config).train, 0, 40), FIRST, LAST)
        resumed = PlacedBatches(load_data(config).train, FIRST, LAST)
        for a, b in zip(straight, resumed, strict=True):
            for name in a:
                np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]))
