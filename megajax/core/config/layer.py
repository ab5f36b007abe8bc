"""The keys of a config that may differ from layer to layer (`model.layers`), and rotary scaling."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, SerializerFunctionWrapHandler, model_serializer

from megajax.core.config.section import AngleDivisor, Layers, Section, Tokens, follows

Divisors = Annotated[tuple[AngleDivisor, ...], Field(strict=False)]


def _of_model(key: str, default: Any) -> Any:
    """Return a field that documents a key of the model as its default."""
    return Field(default=default, json_schema_extra={'default': key})


def _attention_factor(data: dict[str, Any]) -> float:
    kind, factor = data['type'], max(data['factor'], 1)
    if kind == 'longrope':
        return math.sqrt(1 + math.log(factor) / math.log(max(data['original_max_seq_len'], 2)))
    return 0.1 * math.log(factor) + 1.0 if kind == 'yarn' else 1.0


class RopeScaling(Section):
    """Scaling of the rotary frequencies for sequences longer than in pre-training.

    `linear` divides all frequencies by `factor`, `llama3` and `yarn` only the low ones. With
    `llama3`, wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched,
    wavelengths below `original_max_seq_len / high_freq_factor` do not change, and in between the
    factor grows smoothly. `yarn` does the same with `beta_slow` and `beta_fast`, and also scales
    the attention scores. `longrope` has a divisor for each frequency. The defaults are Llama 3.1's
    and YaRN's.
    """

    type: Literal['linear', 'llama3', 'yarn', 'longrope']
    """Which frequencies are scaled: all (linear, longrope), or the low ones (llama3, yarn)."""
    factor: AngleDivisor
    """Divisor of the scaled frequencies; growth of the longest sequence (longrope)."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched (llama3)."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are unchanged (llama3)."""
    original_max_seq_len: Tokens = 8192
    """Longest sequence in pre-training; yarn and longrope have no default."""
    beta_fast: PositiveFloat = 32.0
    """Wavelengths below original_max_seq_len / beta_fast are unchanged (yarn)."""
    beta_slow: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / beta_slow are stretched (yarn)."""
    truncate: bool = True
    """Whether the range between beta_fast and beta_slow is widened to whole rotary pairs (yarn)."""
    short_factor: Divisors = ()
    """Divisor of each frequency for sequences up to original_max_seq_len (longrope)."""
    long_factor: Divisors = ()
    """Divisor of each frequency for longer sequences, for exports only (longrope)."""
    attention_factor: PositiveFloat = follows(
        '1 + 0.1 * log(factor) with type yarn, '
        'sqrt(1 + log(factor) / log(original_max_seq_len)) with longrope, 1 otherwise',
        _attention_factor,
    )
    """Factor of the rotated dims of queries and keys; scores are multiplied by its square."""


class LayerConfig(Section):
    """Consecutive layers of a pattern. If a key is left out, the layers have the model's value."""

    repeat: Layers = 1
    """Number of consecutive layers."""
    window: Tokens | None = _of_model('model.window', None)
    """The layers' model.window; null: a token attends to all earlier ones."""
    position: Literal['rope', 'none'] = _of_model('model.position', 'rope')
    """The layers' model.position; none: no position encoding (NoPE)."""
    rope_theta: AngleDivisor = _of_model('model.rope_theta', 10000.0)
    """The layers' model.rope_theta."""
    rope_scaling: RopeScaling | None = _of_model('model.rope_scaling', None)
    """The layers' model.rope_scaling."""
    experts: None = _of_model('model.experts', None)
    """null: the layers have an MLP of model.ffn_size instead of experts."""

    @property
    def replaced(self) -> Mapping[str, Any]:
        """The keys of the model that these layers replace, with their values."""
        return {name: getattr(self, name) for name in self.model_fields_set - {'repeat'}}

    def __eq__(self, other: object) -> bool:
        """Compare only the keys that are given: a null key differs from one that is left out."""
        if not isinstance(other, LayerConfig):
            return NotImplemented
        return (self.repeat, self.replaced) == (other.repeat, other.replaced)

    def __hash__(self) -> int:
        return hash((self.repeat, frozenset(self.replaced.items())))

    @model_serializer(mode='wrap')
    def _written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only the keys that are given."""
        return {
            key: value for key, value in serialize(self).items() if key in self.model_fields_set
        }


def shortest_pattern(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the shortest `model.layers` with which the layers of a model have these settings."""
    count = len(layers)
    period = next(n for n in range(1, count + 1) if layers[n:] == layers[: count - n])
    equal = [(dict(one), len([*run])) for one, run in itertools.groupby(layers[:period])]
    return [({'repeat': length} if length > 1 else {}) | one for one, length in equal]
