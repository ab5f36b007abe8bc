"""What `megajax data build` keeps beside PREFIX.bin and PREFIX.idx: PREFIX.json, with the hash of the tokenizer that made them."""

from hashlib import sha256
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from megajax.config.errors import ConfigError, Problem


class Manifest(BaseModel):
    """How a pair of files was made. `tokenizer` is the name of a tokenizer.json in the same folder, `text_bytes` counts UTF-8."""

    model_config = ConfigDict(frozen=True, extra='forbid', strict=True)

    tokenizer: str
    tokenizer_sha256: str
    vocab_size: PositiveInt
    eod: NonNegativeInt
    append_eod: bool
    documents: NonNegativeInt
    tokens: NonNegativeInt
    max_token: NonNegativeInt
    text_bytes: NonNegativeInt
    bin_sha256: str

    @classmethod
    def read(cls, prefix: str | Path) -> Self | None:
        """The manifest of a pair, None if it has none. Raises ConfigError if it is not one, or its tokenizer is not the one it names."""
        path = manifest_path(prefix)
        if not path.exists():
            return None
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = '.'.join(map(str, first['loc']))
            raise _problem(
                path,
                f'is not what megajax data build wrote ({where}: {first["msg"]}); delete it, or build again',
            ) from error
        except OSError as error:
            raise _problem(path, f'cannot be read: {error.strerror}; allow it') from error
        manifest._check_tokenizer(path)
        return manifest

    def tokenizer_path(self, prefix: str | Path) -> Path:
        """The tokenizer.json that made the pair."""
        return manifest_path(prefix).with_name(self.tokenizer)

    def _check_tokenizer(self, path: Path) -> None:
        file = (
            path.with_name(self.tokenizer) if Path(self.tokenizer).name == self.tokenizer else None
        )
        if file is None or file.is_symlink():  # a copied corpus must not reach into other folders
            raise _problem(
                path,
                f'tokenizer {self.tokenizer!r} is not a plain file in the same folder; put it there, and its name here',
            )
        if not file.is_file():
            raise _problem(file, f'is missing, and {path.name} names it; copy it there')
        if sha256(file.read_bytes()).hexdigest() != self.tokenizer_sha256:
            raise _problem(
                file,
                f'is not the tokenizer that built these tokens: {path.name} has another hash; copy the right one',
            )


def manifest_path(prefix: str | Path) -> Path:
    """PREFIX.json."""
    return Path(f'{Path(prefix).expanduser()}.json')


def _problem(path: Path, message: str) -> ConfigError:
    return ConfigError(Problem(path=str(path), message=message))
