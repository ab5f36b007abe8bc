"""The building blocks of a config's sections: groups of keys, and numbers with a unit.

`megajax config keys` and `docs/config.md` print the docstring below a key.
"""

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic_core import PydanticCustomError

from megajax.base.files.outputs import url_of


@dataclass(frozen=True)
class Unit:
    """The unit of a number, in the plural, for the annotation of its type."""

    name: str


# The largest signed 32-bit integer; step counters, positions and token ids on devices are int32.
INT32 = 2**31 - 1
# The longest time that a thread can wait for, 19 years.
LONGEST_WAIT = 600_000_000  # seconds


def check_path(text: str) -> str:
    """Return a path or file name; raise PydanticCustomError if the file system cannot have it."""
    fault = ''
    if not text:  # `Path('')` is the working directory
        fault = 'a name of at least one character'
    elif '\0' in text:
        fault = 'text without the character NUL'
    elif len(text) > 4095 or max(map(len, _encoded(text).split(b'/'))) > 255:
        fault = 'at most 4,095 characters, and at most 255 bytes between two slashes'
    if fault:
        raise PydanticCustomError('path', '{fault}', {'fault': fault})
    return text


def check_folder(text: str) -> str:
    """Return the path of a folder, with the home directory for `~`.

    Raises PydanticCustomError if no mounted file system can have it.
    """
    if url_of(Path(check_path(text))):
        fault = 'a folder on this machine or on a shared file system and no URL'
        raise PydanticCustomError('path', '{fault}', {'fault': fault})
    return os.path.expanduser(text)


def check_prompt(text: str) -> str:
    """Return a prompt whose sample can be in a line of samples.jsonl; else raise an error."""
    if text == 'step':
        message = "text other than 'step', the key of the number of the step in samples.jsonl"
        raise PydanticCustomError('prompt', '{message}', {'message': message})
    return text


def one_of(*names: str) -> BeforeValidator:
    """Return a validator of true, false or one of these names, with one message for all of them."""
    allowed = f'true, false or {" or ".join(map(repr, names))}'

    def check(value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, str) and value in names):
            return value
        raise PydanticCustomError('one_of', 'Input should be {allowed}', {'allowed': allowed})

    return BeforeValidator(check)


def _encoded(text: str) -> bytes:
    return text.encode(errors='surrogateescape')  # as Linux encodes names, in any locale


def plain_number(number: float) -> float:
    """Return a whole number as an integer, as users write it."""
    return int(number) if number == int(number) else number


Prompt = Annotated[str, AfterValidator(check_prompt)]
Name = Annotated[str, AfterValidator(check_path)]
Folder = Annotated[str, AfterValidator(check_folder)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# A step divides by these numbers, or by 1 - x, and fp32 would round smaller ones to 0. A position
# is divided by several numbers to get an angle, which must not overflow.
Denominator = Annotated[float, Field(ge=1.2e-38)]
DecayRate = Annotated[float, Field(ge=0, le=0.9999999)]
AngleDivisor = Annotated[float, Field(ge=1e-14)]
Count = Annotated[PositiveInt, Field(le=INT32)]
CountFromZero = Annotated[NonNegativeInt, Field(le=INT32)]
Devices = Annotated[PositiveInt, Field(le=2**20), Unit('devices')]
Elements = Annotated[PositiveInt, Field(le=2**24), Unit('elements')]
Heads = Annotated[PositiveInt, Field(le=2**16)]
Layers = Annotated[PositiveInt, Field(le=10_000)]
Minutes = Annotated[PositiveFloat, Field(le=LONGEST_WAIT // 60), Unit('minutes')]
Patches = Annotated[Count, Unit('patches')]
Pixels = Annotated[PositiveInt, Field(le=2**16), Unit('pixels')]
Sequences = Annotated[Count, Unit('sequences')]
Steps = Annotated[Count, Unit('steps')]
# A point in a schedule can be between two steps if it is computed from a number of samples.
Point = Annotated[float, Field(gt=0, le=INT32), AfterValidator(plain_number), Unit('steps')]
PointFromZero = Annotated[float, Field(ge=0, le=INT32), AfterValidator(plain_number), Unit('steps')]
Tokens = Annotated[Count, Unit('tokens')]


class Section(BaseModel):
    """A frozen group of keys that rejects unknown keys and values of a different type.

    For example, `8.0` and `'8'` are not accepted for 8.
    """

    model_config = ConfigDict(
        frozen=True,
        extra='forbid',
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # A search of layouts looks up counts by their sections tens of thousands of times.
        return hash((type(self), *self._values.values()))

    @property
    def _values(self) -> dict[str, Any]:
        """The keys' values, without cached properties."""
        return {name: self.__dict__[name] for name in type(self).__pydantic_fields__}

    def __getstate__(self) -> dict[Any, Any]:
        # Another process has other hashes of strings.
        return super().__getstate__() | {'__dict__': self._values}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with these values, which are not checked, and no cached properties."""
        own = copy.deepcopy(self._values) if deep else self._values
        copied = type(self).__new__(type(self))
        copied.__setstate__(
            {
                '__dict__': {**own, **(update or {})},
                '__pydantic_fields_set__': self.model_fields_set | (update or {}).keys(),
                '__pydantic_extra__': None,
                '__pydantic_private__': None,
            }
        )
        return copied

    def changed(self, **values: object) -> Self:
        """Return `model_copy` with these values: one copy for all calls with the same values."""
        own, copies = self.__dict__, self._copies
        if all(own[name] == value for name, value in values.items()):
            return self
        if (key := tuple(values.items())) not in copies:
            copies[key] = self.model_copy(update=values)
        return copies[key]

    @functools.cached_property
    def _copies(self) -> dict[tuple[tuple[str, object], ...], Self]:
        return {}

    def with_parts(self, sections: Mapping[str, Any]) -> Self:
        """Return the section with its excluded fields set to other sections of the config."""
        parts = {name: sections.get(name) for name in _excluded(type(self))}
        own = self.__dict__
        for name, part in parts.items():
            if own[name] is not part:
                return self.model_copy(update=parts)
        return self


@functools.cache
def _excluded(kind: type[Section]) -> tuple[str, ...]:
    return tuple(name for name, field in kind.model_fields.items() if field.exclude)


def follows(formula: str, compute: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a field whose default is computed from keys above it by a documented formula."""
    return Field(default_factory=compute, json_schema_extra={'default': formula})
