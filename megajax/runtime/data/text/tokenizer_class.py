"""Build tokenizer parts as transformers 5 does by class, whatever tokenizer.json says.

The classes below rebuild normalizer, pre_tokenizer and decoder, and take the vocabulary and, except
for GPTNeoXTokenizer, the post_processor from the file. With the class PreTrainedTokenizerFast,
transformers reads the whole file, as version 4 does with all classes.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megajax.base.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

# Qwen2's words, digits, punctuation and blanks
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# For Mistral's large vocabularies, for which transformers 4 wrote Llama 3's pattern.
MISTRAL = (
    r'[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+'
    r'|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*'
    r'|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
MISTRALS = None, 'mistral', 'mistral3', 'voxtral', 'ministral', 'pixtral'
MISTRAL_ENTRIES = 100_000  # large vocabularies have more entries than this
SPACE = '\u2581'  # SentencePiece's space
AS_IT_IS = 'PreTrainedTokenizerFast'
BYTES, PIECES = 'byte-level BPE', 'BPE of SentencePiece'  # kinds of vocabularies
# Other classes of transformers 5.24 that build their own parts or read other files.
OTHERS = re.compile(
    r'('
    r'Albert|Bart|Barthez|Bartpho|BertGeneration|BertJapanese|Bertweet|BigBird|'
    r'BioGpt|Blenderbot|BlenderbotSmall|ByT5|Camembert|Canine|CLIP|Clvp|CodeGen|'
    r'CodeLlama|Cohere|Cpm|CpmAnt|CTRL|Deberta|DebertaV2|Dia|DistilBert|'
    r'DPRContextEncoder|DPRQuestionEncoder|DPRReader|Esm|Esmc|FastSpeech2Conformer|'
    r'Flaubert|FSMT|Funnel|GPTNeoXJapanese|GPTSw3|Herbert|Lasr|'
    r'LayoutLMv2|LayoutLMv3|LayoutXLM|LED|Luke|Lxmert|M2M100|Marian|MarkupLM|'
    r'MBart|MBart50|Mgpstr|MLuke|MobileBert|MPNet|Mvp|MyT5|Nllb|Nougat|'
    r'OpenAIGPT|Pegasus|Perceiver|Phobert|PLBart|Pop2Piano|ProphetNet|Qwen3_5|'
    r'Reformer|RemBert|Roberta|RoCBert|RoFormer|SeamlessM4T|Siglip|Siglip2|'
    r'Speech2Text|SpeechT5|Splinter|SqueezeBert|T5|Tapas|Tipsv2|Udop|VideoPrism|'
    r'Vits|Wav2Vec2CTC|Wav2Vec2PhonemeCTC|Whisper|XGLM|XLM|XLMRoberta|XLNet'
    r')Tokenizer'
)

Keys = Mapping[str, Any]
Parts = dict[str, Any]  # by the attribute's name
logger = logging.getLogger(__name__)


def build_as_class(
    backend: 'tokenizers.Tokenizer', name: str, keys: Keys, file: str, *, by_family: bool
) -> 'tokenizers.Tokenizer':
    """Return a tokenizer with the parts of its class, and warn about parts that differ.

    `keys` are the keys of the tokenizer_config.json `file`; if they list added tokens, the result
    has none. `by_family` says that config.json decides the class. Raises ConfigError for a class
    that builds parts which megajax does not know, and for a class with a different kind of
    vocabulary.
    """
    fix = f'to read that file as it is, set "tokenizer_class": "{AS_IT_IS}"'
    if by_family:
        fix += ' in a copy of both files without config.json, and data.tokenizer to its path'
    if OTHERS.fullmatch(name):
        raise ConfigError(
            f'{file}: transformers makes a {name}, which does not read all of tokenizer.json; {fix}'
        )
    if name not in CLASSES:
        return backend
    kind, parts = CLASSES[name]
    if (there := _kind(backend)) != kind:
        raise ConfigError(
            f'{file}: transformers makes a {name}, which reads {kind}, and tokenizer.json has '
            f'{there}; {fix}'
        )
    made = parts(keys)
    replaced = [part for part, new in made.items() if _differ(getattr(backend, part), new)]
    for part, new in made.items():
        setattr(backend, part, new)
    for key, value in PROPERTIES[kind].items():
        setattr(backend.model, key, value)
    if replaced:
        logger.warning(
            '%s: as in transformers 5, a %s has a %s of its own, not that of tokenizer.json; %s',
            file,
            name,
            ', '.join(replaced),
            fix,
        )
    if keys.get('added_tokens_decoder') is None:
        return backend
    content = json.loads(backend.to_str()) | {'added_tokens': []}
    return type(backend).from_str(json.dumps(content))


def fix_mistral_regex(backend: 'tokenizers.Tokenizer', keys: Keys, model: Keys) -> None:
    """Split a text as transformers does if tokenizer_config.json, `keys`, has `fix_mistral_regex`.

    The key is in effect only for large vocabularies next to a Mistral's config.json, `model`, that
    a version before 5 wrote.
    """
    from tokenizers import Regex, pre_tokenizers

    version, old = str(model.get('transformers_version') or '4.'), backend.pre_tokenizer
    is_heeded = (
        keys.get('fix_mistral_regex')
        and model
        and model.get('model_type') in MISTRALS
        and re.match(r'[0-4]\.|5\.0\.0\.?(dev|a|b|rc)', version)
        and backend.get_vocab_size() > MISTRAL_ENTRIES
    )
    if not is_heeded or old is None:
        return
    split = pre_tokenizers.Split(Regex(MISTRAL), 'isolated')
    if isinstance(old, pre_tokenizers.Sequence):
        old[0] = split
    elif isinstance(old, pre_tokenizers.Metaspace):
        old = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    is_sequence = isinstance(old, pre_tokenizers.Sequence)
    backend.pre_tokenizer = old if is_sequence else pre_tokenizers.Sequence([split, old])


def _kind(backend: 'tokenizers.Tokenizer') -> str:
    model = type(backend.model).__name__
    if model != 'BPE':
        return model
    parts = (backend.pre_tokenizer, backend.decoder)
    return BYTES if any(b'"ByteLevel"' in x.__getstate__() for x in parts if x) else PIECES


def _differ(old: Any, new: Any) -> bool:
    return bool(_state(old) != _state(new))


def _state(part: Any) -> Any:
    """Return the parts that decide ids and texts, but not whether offsets include spaces."""

    def without_places(value: dict[str, Any]) -> dict[str, Any]:
        return {key: x for key, x in value.items() if key != 'trim_offsets'}

    if part is None:
        return None
    if type(part).__module__.endswith('processors'):  # ByteLevel, for example, adds no token
        return part.num_special_tokens_to_add(False) or None
    state = json.loads(part.__getstate__(), object_hook=without_places)
    is_decoder = type(part).__module__.endswith('decoders')
    return state['type'] if is_decoder and state['type'] == 'ByteLevel' else state


def _gpt2(keys: Keys) -> Parts:
    from tokenizers import decoders, pre_tokenizers

    return {
        'normalizer': None,
        'pre_tokenizer': pre_tokenizers.ByteLevel(bool(keys.get('add_prefix_space'))),
        'decoder': decoders.ByteLevel(),
    }


def _gpt_neox(keys: Keys) -> Parts:
    from tokenizers import normalizers, processors

    return _gpt2(keys) | {
        'normalizer': normalizers.NFC(),
        'post_processor': processors.TemplateProcessing('$A', '$A:0 $B:1', []),
    }


def _qwen2(keys: Keys) -> Parts:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    split = pre_tokenizers.Split(Regex(QWEN2), 'isolated')
    letters = pre_tokenizers.ByteLevel(bool(keys.get('add_prefix_space')), use_regex=False)
    return {
        'normalizer': normalizers.NFC(),
        'pre_tokenizer': pre_tokenizers.Sequence([split, letters]),
        'decoder': decoders.ByteLevel(),
    }


def _llama(keys: Keys) -> Parts:
    from tokenizers import decoders, pre_tokenizers

    space = keys.get('add_prefix_space')
    adds_space = space is None or bool(space)
    scheme = 'never' if not adds_space else 'always' if keys.get('legacy') else 'first'
    decoder = [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    return {
        'normalizer': None,
        'pre_tokenizer': pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False),
        'decoder': decoders.Sequence([*decoder, *[decoders.Strip(' ', 1, 0)] * adds_space]),
    }


def _gemma(keys: Keys) -> Parts:
    from tokenizers import decoders, normalizers, pre_tokenizers

    decoder = [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    return {
        'normalizer': normalizers.Replace(' ', SPACE),
        'pre_tokenizer': pre_tokenizers.Split(' ', 'merged_with_previous'),
        'decoder': decoders.Sequence(decoder),
    }


def _bert(keys: Keys) -> Parts:
    from tokenizers import decoders, normalizers, pre_tokenizers

    return {
        'normalizer': normalizers.BertNormalizer(
            handle_chinese_chars=bool(keys.get('tokenize_chinese_chars', True)),
            strip_accents=keys.get('strip_accents'),
            lowercase=bool(keys.get('do_lower_case', True)),
        ),
        'pre_tokenizer': pre_tokenizers.BertPreTokenizer(),
        'decoder': decoders.WordPiece('##'),
    }


# The kind of vocabulary that a class reads, and a function from its keys to its parts.
CLASSES: Mapping[str, tuple[str, Callable[[Keys], Parts]]] = {
    'GPT2Tokenizer': (BYTES, _gpt2),
    'GPTNeoXTokenizer': (BYTES, _gpt_neox),
    'Qwen2Tokenizer': (BYTES, _qwen2),
    'LlamaTokenizer': (PIECES, _llama),
    'GemmaTokenizer': (PIECES, _gemma),
    'BertTokenizer': ('WordPiece', _bert),
}
PROPERTIES: Mapping[str, Keys] = {
    BYTES: {'unk_token': None, 'ignore_merges': False},
    PIECES: {'unk_token': None, 'ignore_merges': False, 'fuse_unk': True, 'byte_fallback': True},
    'WordPiece': {},
}
