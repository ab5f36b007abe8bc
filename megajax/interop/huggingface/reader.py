"""Read a config.json strictly: report unsupported values and unused keys.

Imports no jax.
"""

import json
from collections.abc import Mapping
from typing import Any

from megajax.base.render.text import shorten
from megajax.core.config.values import fault

# Keys that concern training or the tokenizer, or have no effect on the logits.
INERT = frozenset(
    {
        'architectures',
        'model_type',
        'transformers_version',
        'torch_dtype',
        'dtype',
        'use_cache',
        'pretraining_tp',
        'max_window_layers',
    }
    | {
        'bos_token_id',
        'eos_token_id',
        'pad_token_id',
        '_name_or_path',
        'task_specific_params',
        'initializer_range',
        'n_ctx',
    }
    | {
        'summary_activation',
        'summary_first_dropout',
        'summary_proj_to_labels',
        'summary_type',
        'summary_use_proj',
    }
    | {'keys_to_ignore_at_inference'}
)

Keys = dict[str, Any]


class Reader:
    """A config.json that is read key by key.

    `problems` collects all errors, and `left` lists the keys that were not read.
    """

    def __init__(self, keys: Mapping[str, Any], file: str):
        self.keys, self.file, self.problems, self._asked = keys, file, list[str](), set(INERT)
        self._sections = dict[str, Reader]()

    def get(self, key: str, default: Any = ...) -> Any:
        """Return the value, or transformers' default if the key is optional and missing."""
        self._asked.add(key)
        value = self.keys.get(key, default)
        if value is ...:
            self.problems.append(f'{self.file}: {key}: required, and missing')
        return None if value is ... else value

    def take(self, key: str, ours: str, default: Any = ...) -> Any:
        """Return the value of a key that becomes megajax's key `ours`, such as `model.norm_eps`.

        Returns None if the key may be null, and is null or missing. Returns None and adds a problem
        if a required key is missing, or if the value is not valid for `ours`.
        """
        value = self.get(key, default)
        is_missing = default is ... and key not in self.keys
        may_be_none = default is None and value is None
        return None if is_missing or may_be_none else self.checked(key, value, ours)

    def checked(self, key: str, value: Any, ours: str) -> Any:
        """Return the value of a key; add a problem and return None if `ours` cannot have it."""
        why = fault(ours, value)
        if why:
            self._add(key, why)
        return None if why else value

    def section(self, key: str) -> 'Reader':
        """Return a reader of an object in this one; both readers share their problems."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, value, 'only an object is supported')
        section = Reader(value if isinstance(value, Mapping) else {}, f'{self.file}: {key}')
        section.problems = self.problems
        self._sections[key] = section
        return section

    def only(self, key: str, *allowed: Any, default: Any) -> None:
        """Reject any value but the allowed ones."""
        value = self.get(key, default)
        if value not in allowed:
            self.refuse(key, value, f'only {" or ".join(map(json.dumps, allowed))} is supported')

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Add the problem that this value is not supported."""
        self._add(key, f'{shorten(json.dumps(value))}: {why}')

    def _add(self, key: str, why: str) -> None:
        self.problems.append(f'{self.file}: {shorten(key)}: {why}')

    @property
    def left(self) -> list[str]:
        """The keys that were not read."""
        inner = (f'{key}.{x}' for key, section in self._sections.items() for x in section.left)
        return sorted([*(self.keys.keys() - self._asked), *inner])
