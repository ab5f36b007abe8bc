"""Find the tokenizer of a run: trained on text, loaded, or the one that made the token files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megajax.base.render.text import typed
from megajax.core.config import Config, mistake
from megajax.runtime.data.masked import SPECIAL
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.synthetic_images import IMAGE
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

CORPUS = ('data.corpus', 'data.blend')
IMAGE_TOKENS = IMAGE, '<|image_pad|>'  # names of image placeholders in tokenizers


def tokenizer_of_text(
    config: Config, texts: Callable[[], Sequence[str]], *, trained: str = ''
) -> Tokenizer:
    """Return the tokenizer of a text corpus.

    It may be trained on the corpus's `texts`, unless `trained` is the tokenizer.json of an earlier
    training on the same texts.
    """
    spec = 'bpe' if is_trained(config) else config.data.tokenizer
    if spec == 'none':
        raise mistake(
            'data.tokenizer',
            f'none is not supported for text (data.corpus={config.data.corpus}); '
            'use bpe, bytes or a tokenizer.json',
        )
    own = spec in ('bytes', 'bpe')
    special = (IMAGE,) if config.vision is not None and own else _special(config)
    if spec == 'bpe' and trained:
        return make_tokenizer(trained, config.model.vocab_size, special=special)
    known = texts() if spec == 'bpe' else ()
    return make_tokenizer(
        spec, config.model.vocab_size, known, special=special, or_else=", or 'bpe' to train one"
    )


def is_trained(config: Config) -> bool:
    """Whether the tokenizer of a text corpus is trained on its texts."""
    return config.data.tokenizer in ('auto', 'bpe')


def _special(config: Config) -> tuple[str, ...]:
    return SPECIAL if config.model.is_bert else ()


def tokenizer_of_pairs(
    config: Config, manifests: Mapping[str, Manifest | None]
) -> Tokenizer | None:
    """Return the tokenizer that made all token files, or None with data.tokenizer=none.

    Raises ConfigError if the tokenizer is unknown, or if several tokenizers made the files.
    """
    spec = config.data.tokenizer
    if spec == 'bpe':
        raise mistake(
            'data.tokenizer',
            f'bpe is trained on text, but {next(iter(manifests))} contains tokens; '
            'use auto, or the tokenizer that made them',
        )
    if spec == 'none':
        if config.train.sample_prompts:
            raise mistake(
                'train.sample_prompts',
                'is not supported with data.tokenizer=none; remove it',
                'data.tokenizer',
            )
        if config.model.is_bert:
            message = (
                'none is not supported with model.objective=masked_lm, which needs special tokens; '
                'give the tokenizer.json that made the tokens'
            )
            raise mistake('data.tokenizer', message, 'model.objective')
        return None
    tokenizer_paths = [manifest.tokenizer_path for manifest in manifests.values() if manifest]
    if spec == 'auto':
        if missing := [prefix for prefix, manifest in manifests.items() if manifest is None]:
            message = (
                f'no tokenizer is known: there is no {missing[0]}.json; '
                'give the tokenizer.json that made the tokens'
                + ('' if config.model.is_bert else ', or none')
            )
            raise mistake('data.tokenizer', message, *CORPUS)
        spec = str(tokenizer_paths[0])
    tokenizer = make_tokenizer(spec, config.model.vocab_size, special=_special(config))
    for path in tokenizer_paths:
        made_by = load_tokenizer(str(path))
        if made_by.fingerprint != tokenizer.fingerprint:
            message = (
                f'{spec} did not make these tokens: their tokenizer is {path}, '
                f'which has another hash; {_fix(config, made_by, spec)}'
            )
            raise mistake('data.tokenizer', message, *CORPUS)
    for prefix, manifest in manifests.items():
        if manifest and manifest.append_eod and manifest.eod != tokenizer.eod:
            message = (
                f'{spec} ends documents with token {tokenizer.eod}, but {prefix} ends them with '
                f'{manifest.eod}; build it again with --tokenizer {typed(spec)}'
            )
            raise mistake('data.tokenizer', message, *CORPUS)
    return tokenizer


def _fix(config: Config, made_by: Tokenizer, spec: str) -> str:
    """Return what to do about tokens that a different tokenizer made."""
    again = f'build them again: megajax data build NEW --input FILES --tokenizer {typed(spec)}'
    if config.data.tokenizer == 'auto':
        return f'blend corpora that share a tokenizer; {again}'
    if config.run.start_from is not None or _is_of_run(config, spec):  # the weights have its ids
        use = 'name NEW in data.blend' if config.data.blend else 'set data.corpus=NEW'
        return f'{again}, and {use}'
    size = made_by.vocab_size
    vocabulary = f' model.vocab_size={size}' if size > config.model.vocab_size else ''
    return f'use data.tokenizer=auto{vocabulary}, or {again}'


def _is_of_run(config: Config, path: str) -> bool:
    """Whether a tokenizer.json is the one of the run that resumes, or of one of its checkpoints."""
    folder = config.run.dir
    return folder is not None and Path(path).absolute().is_relative_to(Path(folder).absolute())


def check_image_token(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if a text could contain the image placeholder token.

    The placeholder must be a special token other than the end of a document, or an id that the
    tokenizer does not use.
    """
    if config.vision is None or tokenizer is None:
        return
    given, special = config.vision.image_token, tokenizer.special_tokens()
    own = [i for name, i in special.items() if name in IMAGE_TOKENS]
    if own and given != own[0]:
        message = f'{given} is not the image placeholder token; use {own[0]}'
    elif given < tokenizer.vocab_size and (given == tokenizer.eod or given not in special.values()):
        message = f'{given} is a token of texts; use a special token of data.tokenizer'
    else:
        return
    raise mistake('vision.image_token', message)
