"""Twelve small tokenizers, one of each kind that treats the beginning of a text in its own way."""

import json
import random
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPACE = '\u2581'
EOD = '<|endoftext|>'
SPECIAL = '<|im_start|>', '<|im_end|>'
SENTENCES = [
    'the cat sat on the mat and said return self to the dog',
    'def f(x):\n    return None if x else self.value\n\n',
    'Say it again, and again: 12345 times! naïve café caf\u0065\u0301 e\u0301te\u0301',
    'user\nassistant\nsystem tool 白くあけぼの やうやう 東京',
] * 10
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def byte_level(
    *, prefix: bool = False, split: str = '', normalizer: object = None, trim: bool = True
) -> Tokenizer:
    """A byte-level BPE, with the regex of GPT-2 or `split`."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    first = [pre_tokenizers.Split(Regex(split), 'isolated')] if split else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_special_tokens([EOD, *SPECIAL])
    return backend


def with_added_tokens() -> Tokenizer:
    """Byte-level, with added tokens of all properties, special ones among them."""
    backend = byte_level()
    backend.add_tokens(
        [
            AddedToken('<think>', rstrip=True),
            AddedToken('</think>', lstrip=True, normalized=False),
            AddedToken('the', single_word=True),
            AddedToken('  ', normalized=False),
        ]
    )
    backend.add_special_tokens(
        [
            AddedToken('<|left|>', lstrip=True, normalized=False),
            AddedToken('<|right|>', rstrip=True, normalized=False),
            AddedToken('<|both|>', lstrip=True, rstrip=True, normalized=True),
            AddedToken('<|word|>', single_word=True),
        ]
    )
    return backend


def sentencepiece(scheme: str = '', *, strip: bool = False) -> Tokenizer:
    """A BPE with byte fallback: Metaspace by its prepend scheme, or Llama 2's normalizer."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme='always')
    learned.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    model = json.loads(learned.to_str())['model']
    names = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
    names += [*'[]/\n', SPACE, *sorted(model['vocab'], key=model['vocab'].__getitem__)]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in model['merges']]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True)
    )
    space = [decoders.Replace(SPACE, ' ')]
    if scheme:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme=scheme, split=scheme != 'never'
        )
    else:
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(' ', SPACE)]
        backend.normalizer = normalizers.Sequence(
            [normalizers.Strip()] * strip + steps  # type: ignore[operator]
        )
    backend.decoder = decoders.Sequence(
        [*space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ('<unk>', '<s>', '</s>', *SPECIAL)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single='<s> $A', special_tokens=[('<s>', 1)]
    )
    return backend


def unigram() -> Tokenizer:
    """A Unigram model with byte fallback, whose vocabulary has the special tokens."""
    learned = Tokenizer(models.Unigram())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(
        SENTENCES, trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token='<unk>')
    )
    pieces = json.loads(learned.to_str())['model']['vocab']
    names = ['<unk>', '<s>', '</s>', *SPECIAL, *(f'<0x{byte:02X}>' for byte in range(256))]
    vocab = [*((name, 0.0) for name in names), *((n, s) for n, s in pieces if n not in names)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ('<unk>', '<s>', '</s>', *SPECIAL)]
    )
    return backend


def word_piece() -> Tokenizer:
    """BERT's tokenizer."""
    backend = Tokenizer(models.WordPiece(unk_token='[UNK]'))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken('[MASK]', lstrip=True)])
    return backend


TWELVE: dict[str, Callable[[], Tokenizer]] = {
    'byte-level': byte_level,
    'byte-level with add_prefix_space': lambda: byte_level(prefix=True),
    'Metaspace first': lambda: sentencepiece('first'),
    'Metaspace always': lambda: sentencepiece('always'),
    'Metaspace never': lambda: sentencepiece('never'),
    'Prepend and Replace': sentencepiece,
    'Strip': lambda: sentencepiece(strip=True),
    'NFC': lambda: byte_level(normalizer=normalizers.NFC(), trim=False),
    'WordPiece': word_piece,
    'added tokens': with_added_tokens,
    'Unigram': unigram,
    "Llama 3's Split": lambda: byte_level(split=LLAMA3, trim=False),
}

WORDS = [
    *('the', 'cat', 'return', 'self', 'Say', 'user', 'def f(x):', '12345', "don't", 'naïve', 'e'),
    *('白くあけぼの', '🙂', '👩\u200d🔬', '\u0301', 'e\u0301', '\xa0', '\u2028', '\ufeff', SPACE),
    *(' ', ' ', ' ', ' ', '  ', '\n', '\n', '\n\n', '\t', '\r\n', '    ', '.', ', ', '[', ']'),
    *('<think>', '</think>', '<', '>', '<|', '|>', '/', '_', '\x00', '\u0130', 'ﬁ', 'Ⅷ', '１２'),
]


def random_text(draw: random.Random, spelled: list[str]) -> str:
    """Words, blanks, any character of Unicode, and letters that spell special tokens."""
    parts = []
    for _ in range(draw.randrange(12)):
        kind = draw.random()
        if kind < 0.8:
            parts.append(draw.choice(WORDS))
        elif kind < 0.9:
            code = draw.choice([draw.randrange(0x20, 0x3000), draw.randrange(0x110000)])
            parts.append(
                ' '
                if 0xD800 <= code < 0xE000 or 0xFDD0 <= code < 0xFDF0 or code >= 0x10F000
                else chr(code)
            )
        else:
            parts.append(draw.choice(spelled))
    return ''.join(parts)
