"""Open the sources of a comparison: configs, runs, Hugging Face directories or dumps.

Their configs are read and checked before anything compiles.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megajax.analysis.compare.recording import SUFFIX
from megajax.core.config import Config, ConfigError, load, overridden, reload
from megajax.core.config.experts import OF_ROUTING
from megajax.interop.huggingface.families import read_config_json
from megajax.runtime.checkpoint.digests import is_finished, readable, sound_checkpoint
from megajax.runtime.checkpoint.record import RECORD, TOKENIZER, read_record

if TYPE_CHECKING:
    from flax import nnx

    from megajax.runtime.data import Data

Kind = Literal['config', 'run', 'huggingface', 'dump']
# A Hugging Face directory has no values for these keys, no loss section, and perhaps no dropout and
# no losses of routers. It takes them from the other side or, if both sides are directories, from
# here.
SHARED = 'batch_size', 'seq_len', 'dtype', 'fp8_scaling', 'seed'
ALONE = {'batch_size': 2, 'dtype': 'float32'}
ALONE_TOKENS = 128  # sequence length, unless the model's maximum is smaller
DROPOUT = 'dropout', 'attention_dropout'
WITHOUT_DROPOUT = tuple(f'model.{key}=0' for key in DROPOUT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One side of a comparison, as the user named it."""

    name: str
    kind: Kind
    path: Path  # the checkpoint, directory or file; for a config, its name
    overrides: tuple[str, ...]
    family: str | None = None  # family of a Hugging Face directory

    @classmethod
    @contextmanager
    def opened(
        cls, name: str, overrides: Sequence[str], own: Sequence[str] = ()
    ) -> 'Iterator[Source]':
        """Find out what a name refers to; `own` are overrides of this source alone.

        A run's checkpoint is not deleted while the context is open. Raises ConfigError if there is
        no such source, if it cannot be read, or if it is a dump and has overrides of its own.
        """
        path = Path(name)
        if path.suffix == SUFFIX:
            if own:
                raise ConfigError(
                    f'{name} is a dump of computed numbers, which {own[0]} cannot change: remove '
                    f'{own[0]}, or dump again with it'
                )
            yield cls(name=name, kind='dump', path=path, overrides=())
            return
        overrides = *overrides, *own
        with readable(path):
            is_huggingface = (path / 'config.json').is_file()
            is_run = path.is_dir() or is_finished(path.parent / 'checkpoints' / path.name)
        if is_huggingface:
            family, _, _ = read_config_json(path)
            yield cls(name=name, kind='huggingface', path=path, overrides=overrides, family=family)
        elif is_run:
            with sound_checkpoint(path) as checkpoint:
                yield cls(name=name, kind='run', path=checkpoint, overrides=overrides)
        else:
            yield cls(name=name, kind='config', path=path, overrides=overrides)

    def config(self, like: Config | None = None) -> Config:
        """Return the config to execute.

        A Hugging Face directory takes the keys that it lacks from `like`. Raises ConfigError for a
        config that cannot be compared site by site.
        """
        if self.kind == 'config':
            config = load(self.name, self.overrides)
        elif self.kind == 'run':
            record = read_record(self.path)
            config = reload(record.config, self.overrides, place=str(self.path / RECORD))
        else:
            config = self._of_huggingface(like)
        if config.vision is not None:
            raise ConfigError(
                f'{self.name}: compare does not support vision models (section `vision`); '
                'compare text models'
            )
        return config

    def _of_huggingface(self, like: Config | None) -> Config:
        _, model, _ = read_config_json(self.path)
        if 'vision' in model:
            raise ConfigError(
                f'{self.name}: compare does not support vision models such as {self.family}; '
                'compare text models'
            )
        longest = model.get('max_seq_len') or ALONE_TOKENS
        train: Mapping[str, Any] = (
            {**ALONE, 'seq_len': min(ALONE_TOKENS, longest)}
            if like is None
            else {key: getattr(like.train, key) for key in SHARED}
        )
        sections: dict[str, Any] = {'model': model, 'train': train}
        if like is not None:
            taken: dict[str, Any] = {key: getattr(like.model, key) for key in DROPOUT}
            if like.model.experts is not None and 'experts' in model:
                routing = like.model.experts.model_dump(mode='json', include=set(OF_ROUTING))
                taken['experts'] = model['experts'] | routing
            sections |= {
                'model': model | taken,
                'loss': like.loss.model_dump(mode='json'),
                'data': {'document_mask': like.data.document_mask},
            }
        place = str(self.path / 'config.json')
        return reload(sections, self.overrides, place=place)

    @property
    def has_data(self) -> bool:
        """Whether the source names training data; for a Hugging Face directory, overrides do."""
        return self.kind != 'huggingface' or bool(overridden(self.overrides, 'data.corpus'))

    def data(self, config: Config) -> 'Data':
        """Return the data, with the tokenizer and template of a run, or a directory's tokenizer."""
        from megajax.runtime.data import load_data

        tokenizer = self.path / TOKENIZER
        is_given = overridden(self.overrides, 'data.tokenizer') is not None
        if self.kind == 'huggingface' and not is_given and tokenizer.is_file():
            data = config.data.model_copy(update={'tokenizer': str(tokenizer)})
            return load_data(config.model_copy(update={'data': data}))
        if self.kind != 'run':
            return load_data(config)
        from megajax.runtime.checkpoint.hf_files import read_companions
        from megajax.runtime.run.infer_config import with_own_tokenizer

        own = with_own_tokenizer(config, self.path.absolute().parent.parent)
        if overridden(self.overrides, 'data.chat_template'):
            return load_data(own)
        template = read_companions(self.path).template(f'the chat template of {self.name}')
        return load_data(own, template)

    def load(self, config: Config) -> 'nnx.State':
        """Return the parameters on the current mesh, sharded as a config stores them."""
        if self.kind == 'run':
            from megajax.runtime.checkpoint.open import restore_params

            return restore_params(self.path, config)
        if self.kind == 'huggingface':
            from megajax.interop.huggingface.tensors import read_tensors
            from megajax.interop.huggingface.weights import from_huggingface

            tensors = read_tensors(self.path)
            return from_huggingface(config, tensors, source=self.name, family=self.family)
        import jax

        from megajax.core.train.step import make_params

        return jax.jit(lambda: make_params(config))()


def check_comparable(
    a: Config, b: Config, *, names: Sequence[str], fixed: Sequence[bool] = (False, False)
) -> None:
    """Raise ConfigError with every key that must be equal on both sides but is not.

    `fixed` says of each side whether it is a dump, whose config cannot change.
    """
    must_agree = {
        'architecture': ('model', 'num_layers', 'hidden_size', 'vocab_size', 'objective'),
        'batch shape': ('train', 'batch_size', 'seq_len'),
        'attention mask': ('data', 'document_mask'),
    }
    problems = []
    for same, (section, *keys) in must_agree.items():
        for key in keys:
            # As YAML writes it: false rather than False.
            x, y = (str(getattr(getattr(each, section), key)).lower() for each in (a, b))
            if x != y:
                side, value = ('a', y) if fixed[1] else ('b', x)
                has_fix = section != 'model' and not all(fixed)
                fix = f'; set --{side} {section}.{key}={value}' if has_fix else ''
                problems.append(
                    f'{section}.{key}: {x} in {names[0]} but {y} in {names[1]}; compare needs '
                    f'the same {same} on both sides{fix}'
                )
    if problems:
        raise ConfigError(*problems)
