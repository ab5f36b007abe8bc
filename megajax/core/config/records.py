"""Read records from YAML files: GPUs, and budgets of a compiled step."""

from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from megajax.base.errors import ConfigError
from megajax.core.config.bounded_yaml import explain, parse, read_text
from megajax.core.config.section import Section

Record = TypeVar('Record', bound=Section)


def read_record(
    file: Path | Traversable,
    kind: type[Record],
    *,
    hint: str = '',
    complete: Callable[[Any], Any] = lambda record: record,
) -> Record:
    """Read a record from a YAML file; `hint` is added to the error if there is no such file.

    `complete` adds the values that a record takes from a different file; its ConfigError need not
    name `file`.

    Raises ConfigError with every mistake in the file.
    """
    try:
        return kind.model_validate(_completed(parse(read_text(file)), complete, file))
    except FileNotFoundError:
        raise ConfigError(f'{file}: no such file{hint}') from None
    except OSError as error:
        raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
    except YAMLError as error:
        raise ConfigError(f'{file}: {explain(error)}') from error
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError(
            *(
                f'{file}: {".".join(map(str, detail["loc"])) or "the file"}: {detail["msg"]}'
                for detail in details
            )
        ) from error


def _completed(record: Any, complete: Callable[[Any], Any], file: Path | Traversable) -> Any:
    try:
        return complete(record)
    except ConfigError as error:
        raise ConfigError(*(f'{file}: {problem}' for problem in error.problems)) from error
