"""Records in YAML files: GPUs, and budgets of a compiled step."""

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from megajax.config.errors import ConfigError
from megajax.config.model import Section

Record = TypeVar('Record', bound=Section)


def read_record(file: Path | Traversable, kind: type[Record], *, hint: str = '') -> Record:
    """Read a record from a YAML file; `hint` is added where there is no such file.

    Raises ConfigError with every mistake in the file.
    """
    try:
        values: Any = YAML(typ='safe', pure=True).load(file.read_text(encoding='utf-8'))
        return kind.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(f'{file}: no such file{hint}') from None
    except OSError as error:
        raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: not valid YAML: {str(error).splitlines()[0]}') from error
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError(
            *(
                f'{file}: {".".join(map(str, detail["loc"])) or "the file"}: {detail["msg"]}'
                for detail in details
            )
        ) from error
