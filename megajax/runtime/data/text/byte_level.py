"""Byte-level tokenizers without a file: the bytes themselves, and a BPE trained on texts."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megajax.runtime.data.text.long_texts import parts

if TYPE_CHECKING:
    import tokenizers

# end-of-document tokens of a tokenizer.json without other files, by preference: GPT-2's and
# megajax's, Llama 2's, Llama 3's, BERT's
END_OF_DOCUMENT = ('<|endoftext|>', '</s>', '<|end_of_text|>', '[SEP]')

# The pieces within which BPE merges: a word with the space before it; punctuation with the blanks,
# line break and indentation after it; blanks. On the standard library, 1024, 2048 and 4096 entries
# give 2.75, 3.30 and 3.82 bytes per token, compared with 2.62, 3.08 and 3.48 for GPT-2's pattern.
PIECES = r' ?\w+| ?[^\w\s]+\s*|\s+'


def bytes_backend(special: Sequence[str] = ()) -> 'tokenizers.Tokenizer':
    """Return a tokenizer of bytes; see `tokenizer.byte_tokenizer`."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    # GPT-2 writes a byte as a letter: itself if it is printable, else the next one from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    letters = dict(zip(sorted(ByteLevel.alphabet()), printable + others, strict=True))
    backend = _byte_level(BPE(vocab=letters, merges=[]))
    backend.add_special_tokens([END_OF_DOCUMENT[0], *special])
    return backend


def bpe_backend(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()
) -> 'tokenizers.Tokenizer':
    """Return a byte-level BPE trained on texts; see `tokenizer.train_bpe`."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    backend = _byte_level(BPE())
    split = pre_tokenizers.Split(Regex(PIECES), 'isolated')
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    size, alphabet = vocab_size - 1 - len(special), pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        (part for text in texts for part in parts(text)),
        BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens([END_OF_DOCUMENT[0], *special])
    return backend


def _byte_level(model: 'tokenizers.models.BPE') -> 'tokenizers.Tokenizer':
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
