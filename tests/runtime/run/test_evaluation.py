"""The losses of an evaluation; what needs one is rejected where there is nothing to evaluate on."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_state, tiny
from support import on_mesh

from megajax.core.config import Config, ConfigError
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data import load_data, make_tokenizer
from megajax.runtime.run.evaluation import (
    Evaluation,
    check_best,
    check_best_interval,
    losses_of,
)


def test_the_best_checkpoints_need_a_validation_loss(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text(
        ''.join(f'{{"text": "{number} {"words " * 50}"}}\n' for number in range(50))
    )
    text = {'corpus': str(tmp_path / 'a.jsonl'), 'tokenizer': 'bytes'}
    config = tiny(data=text | {'split': '1,0,0'}, checkpoint={'keep_best': 2})
    refused = r'^checkpoint.keep_best: 2 has no effect, .* data.split=1,0,0 .*keep_best=null$'
    with pytest.raises(ConfigError, match=refused):
        check_best(config, load_data(config))
    for right in (
        tiny(data=text | {'split': '1,1,0'}, checkpoint={'keep_best': 2}),
        tiny(data=text | {'split': '1,0,0'}),
    ):
        check_best(right, load_data(right))


@pytest.mark.parametrize(
    ('every', 'eval_every', 'steps', 'fix'),
    [
        (3, 2, 12, 'use checkpoint.every=4, or train.eval_every=3'),
        (2, 4, 12, 'use checkpoint.every=4, or train.eval_every=2'),
        (4, 2, 12, None),
        (3, 2, 3, None),  # the last step is always evaluated
    ],
)
def test_the_best_checkpoints_are_chosen_among_all_that_are_due(
    every: int, eval_every: int, steps: int, fix: str | None
) -> None:
    def config(**keep: int) -> Config:
        train = {'eval_every': eval_every, 'steps': steps}
        return tiny(train=train, checkpoint={'every': every, **keep})

    check_best_interval(config())
    if fix is None:
        check_best_interval(config(keep_best=2))
        return
    with pytest.raises(ConfigError, match=f'^checkpoint.keep_best: 2 needs .*; {fix}$'):
        check_best_interval(config(keep_best=2))


def test_a_run_that_has_begun_continues_with_checkpoints_that_are_never_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(
        train={'eval_every': 2, 'steps': 12},
        checkpoint={'every': 3, 'keep_best': 2},
        run={'dir': str(tmp_path)},
    )
    with pytest.raises(ConfigError, match='needs the validation loss of each checkpoint'):
        check_best_interval(config)
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        checkpoints.save(make_state(config, 3), 3)
    check_best_interval(config)
    assert 'checkpoint.every=3 is not a multiple of train.eval_every=2' in caplog.text


def test_the_losses_are_per_token_per_byte_and_per_row() -> None:
    losses, text = losses_of(Counter(nll=6 * math.log(2), tokens=3, bytes=12))
    assert losses == pytest.approx(
        {'validation_loss': 2 * math.log(2), 'validation_bits_per_byte': 0.5}
    )
    assert text == '0.500 bits per byte (1.386 nats per token)'
    losses, text = losses_of(Counter(nll=6, tokens=3, order_nll=2, rows=4))
    assert losses == {'validation_loss': 2, 'validation_order_loss': 0.5}
    assert text == '2.000 nats per masked token, 0.500 for the order of its segments'


def test_the_bytes_of_labels_are_those_of_the_text_that_counts() -> None:
    tokenizer = make_tokenizer('bpe', 300, ['日本語 and text ' * 20])
    (ids,) = tokenizer.encode_batch(['日本語 and text'])
    assert tokenizer.token_bytes[ids].max() > 1
    labels = np.array([[*ids, tokenizer.eod, 7, 100_000]])  # the last one is an image token
    tokens, mask = np.roll(labels, 1), np.ones(labels.shape, np.float32)
    mask[0, -2:] = 0
    evaluation = Evaluation(
        tiny(),
        SimpleNamespace(validation=[], tokenizer=tokenizer),
        Path(),
        0,
        report=None,
        clock=None,
        stop=None,
        watchdog=None,
    )
    batch = {'tokens': tokens, 'labels': labels, 'loss_mask': mask}
    found = evaluation._with_label_bytes(batch)
    assert found['label_bytes'].sum() == len('日本語 and text'.encode())
