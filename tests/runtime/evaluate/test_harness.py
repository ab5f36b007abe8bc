"""megajax and the harness's own `HFLM` answer the same requests for the same folder of weights and
tokenizer; where these are installed.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import slow
from tokenizers import Tokenizer
from twelve_tokenizers import byte_level, sentencepiece

for name in ('torch', 'transformers', 'lm_eval'):
    pytest.importorskip(name, reason=f'{name} is not installed')

import jax  # noqa: E402
from interop.make_data import SIZES, random_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from megajax.core.config import ConfigError  # noqa: E402
from megajax.interop.huggingface.directories import import_huggingface  # noqa: E402
from megajax.runtime.checkpoint.open import open_model  # noqa: E402
from megajax.runtime.evaluate.harness import HarnessModel  # noqa: E402

WINDOW = 32
GPT2 = {'n_embd': 16, 'n_layer': 2, 'n_head': 4, 'n_positions': WINDOW, 'n_inner': 24}
FOLDERS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], str, str]] = {
    'gpt2': (byte_level, GPT2, '<|endoftext|>', '<|endoftext|>'),
    'llama': (lambda: sentencepiece('first'), SIZES | {'num_key_value_heads': 2}, '<s>', '</s>'),
    'qwen3': (byte_level, SIZES | {'num_key_value_heads': 2}, '<|im_start|>', '<|endoftext|>'),
}
CONTEXT = 'the cat sat on the mat and said return self to the dog. '


class Both(NamedTuple):
    """The models of the same weights."""

    theirs: Any
    ours: HarnessModel


@pytest.fixture(name='both', params=['llama', slow('gpt2'), slow('qwen3')], scope='module')
def open_both(request: Any, tmp_path_factory: Any) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make, keys, bos, eos = FOLDERS[request.param]
    tokenizer = make()
    ids = {f'{x}_token_id': tokenizer.token_to_id(name) for x, name in (('bos', bos), ('eos', eos))}
    keys = keys | ids | {'vocab_size': tokenizer.get_vocab_size()}
    model = random_model(request.param, keys)
    # Of bytes that are no text, `tokenizers` decodes fewer than megajax.
    model.lm_head.weight.data[[i for name, i in tokenizer.get_vocab().items() if '<0x' in name]] = 0
    model.lm_head.weight.data[tokenizer.token_to_id('<|im_end|>')] *= 2
    model.save_pretrained(folder / 'in')
    generation = folder / 'in/generation_config.json'
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {'top_k': 1}))
    tokenizer.save(str(folder / 'in/tokenizer.json'))
    (folder / 'in/tokenizer_config.json').write_text(
        json.dumps(
            {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': bos, 'eos_token': eos}
        )
    )
    import_huggingface(folder / 'in', folder / 'run')
    # The cache mixes up requests of which one's tokens begin with those of another.
    theirs = HFLM(
        pretrained=str(folder / 'in'),
        device='cpu',
        dtype='float32',
        batch_size=1,
        logits_cache=False,
    )
    opened = open_model(folder / 'run', ['train.dtype=float32'])
    with jax.set_mesh(opened.mesh):
        assert opened.tokenizer is not None
        model = opened.config, opened.params, opened.tokenizer
        yield Both(theirs, HarnessModel(*model, opened.companions.generation))


def ask(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments, task_name=None)


def test_texts_have_the_tokens_that_they_have_in_the_harness(both: Both) -> None:
    begin = both.theirs.tokenizer.bos_token
    for text in ('the cat', f'{begin}the cat', 'say <|im_start|>user\n', '', ' the', f'{begin}'):
        for start in (None, True, False):
            expected = both.theirs.tok_encode(text, add_special_tokens=start)
            assert both.ours.tok_encode(text, add_special_tokens=start) == expected
    assert both.ours.prefix_token_id == both.theirs.prefix_token_id


def test_likelihoods_are_those_of_the_harness(both: Both) -> None:
    begin = both.theirs.tokenizer.bos_token
    pairs = [
        *[(CONTEXT, 'cat'), ('the', ' cat'), ('', ' the cat'), ('', 'x'), (CONTEXT * 9, ' dog')],
        *[('the ', 'cat'), (begin, 'the'), ('', f'{begin}the'), ('a', ' cat sat on the mat' * 2)],
        *[('a', 'bx' * (WINDOW // 2))],
    ]
    asked = [ask(*pair) for pair in pairs]
    found, expected = (m.loglikelihood(asked, disable_tqdm=True) for m in (both.ours, both.theirs))
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)
    assert [x for _, x in found] == [x for _, x in expected]
    asked = [ask(text) for text in ('', 'the', CONTEXT, CONTEXT * 5, begin)]
    found, expected = (m.loglikelihood_rolling(asked, True) for m in (both.ours, both.theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    'kwargs',
    [
        {'max_gen_toks': 12},
        {'max_gen_toks': 12, 'until': []},
        {'max_gen_toks': WINDOW - 1, 'temperature': 0.0},
        {'max_new_tokens': 9, 'max_tokens': 3, 'do_sample': False},
        {'max_completion_tokens': '5', 'do_sample': False, 'temperature': 0.7},
        {'max_tokens': 20, 'until': 'e', 'num_beams': 1},
        {'max_tokens': 20, 'until': ['t', 'a', 'ZZ']},
        {'max_tokens': 20, 'until': [' tool', ' f', ' s']},
        {'max_tokens': 20, 'until': ['<|im_end|>']},
        {'max_tokens': 20, 'do_sample': True, 'temperature': 0.9},  # one token, by the folder
    ],
    ids=range(10),
)
def test_continuations_are_those_of_the_harness(both: Both, kwargs: dict[str, Any]) -> None:
    asked = [ask(text, kwargs) for text in ('the cat', CONTEXT, CONTEXT * 3, '<|im_end|> the ')]
    found, expected = (m.generate_until(asked, disable_tqdm=True) for m in (both.ours, both.theirs))
    assert found == expected


@pytest.mark.parametrize(
    'kwargs',
    [
        {'max_gen_toks': WINDOW},
        {'max_new_tokens': 0},
        {},
        {'max_gen_toks': 4, 'do_sample': True},
        {'max_gen_toks': 4, 'do_sample': True, 'temperature': 0.0},
        {'max_gen_toks': 4, 'bogus': 1},
        {'max_gen_toks': 4, 'max_length': 1},
    ],
    ids=range(7),
)
def test_what_the_harness_fails_at_is_rejected(both: Both, kwargs: dict[str, Any]) -> None:
    asked = [ask('the cat', kwargs)]
    with pytest.raises((AssertionError, ValueError)):
        both.theirs.generate_until(asked, disable_tqdm=True)
    with pytest.raises(ConfigError, match=r'^generation_kwargs of a task: '):
        both.ours.generate_until(asked)


@pytest.mark.parametrize('pair', [('the', ''), ('', ''), ('the', 'xb' * WINDOW)], ids=range(3))
def test_likelihoods_that_the_harness_fails_at_are_rejected(
    both: Both, pair: tuple[str, str]
) -> None:
    with pytest.raises((AssertionError, IndexError)):
        both.theirs.loglikelihood([ask(*pair)], disable_tqdm=True)
    with pytest.raises(ConfigError, match=r'^a task asks for the likelihood of '):
        both.ours.loglikelihood([ask(*pair)], disable_tqdm=True)
