"""The manifest PREFIX.json, which `megajax data build` writes next to PREFIX.bin and PREFIX.idx.

It records the tokenizer that made the tokens, with its hash.
"""

from hashlib import sha256
from pathlib import Path
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    ValidationError,
)

from megajax.base.errors import ConfigError, mistake
from megajax.base.files.exists import exists, is_file


class Manifest(BaseModel):
    """A record of how a pair of token files was made."""

    model_config = ConfigDict(frozen=True, extra='forbid', strict=True)

    tokenizer: str  # file name of a tokenizer.json in the same folder
    tokenizer_sha256: str
    vocab_size: PositiveInt
    eod: NonNegativeInt  # id of the end-of-document token
    append_eod: bool  # whether documents end with that token
    parse_special: bool = False  # whether special tokens spelled in a text were read as tokens
    documents: NonNegativeInt  # number of documents
    tokens: NonNegativeInt  # number of tokens
    max_token: NonNegativeInt  # largest token id
    text_bytes: NonNegativeInt  # bytes of UTF-8 text
    bin_sha256: str
    _path: Path = PrivateAttr(default=Path())  # path of the file from which it was read

    @classmethod
    def read(cls, prefix: str | Path) -> Self | None:
        """Return the manifest of a pair, or None if it has none.

        Raises ConfigError if the file is not a manifest, or if its tokenizer is missing, changed or
        not in the same folder.
        """
        path = manifest_path(prefix)
        if not exists(path):
            return None
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = '.'.join(map(str, first['loc']))
            raise mistake(
                path,
                f'is not what megajax data build wrote ({key}: {first["msg"]}); '
                'delete it, or build again',
            ) from error
        except OSError as error:
            raise mistake(path, f'cannot be read: {error.strerror}; make it readable') from error
        manifest._path = path
        manifest._check_tokenizer(path)
        return manifest

    @property
    def tokenizer_path(self) -> Path:
        """The path of the tokenizer.json that made the pair."""
        return self._path.with_name(self.tokenizer)

    def check_counts(self, documents: int, tokens: int) -> None:
        """Raise ConfigError if the files have other numbers of documents or tokens."""
        for key, actual in (('documents', documents), ('tokens', tokens)):
            if (recorded := getattr(self, key)) != actual:
                raise self.of_other_files(key, f'{recorded}, but the files have {actual}')

    def of_other_files(self, key: str, difference: str) -> ConfigError:
        """Return the error for a value that the files contradict."""
        fix = 'the manifest belongs to other files: copy all files of one build'
        return mistake(self._path, f'{key} is {difference}; {fix}')

    def _check_tokenizer(self, path: Path) -> None:
        file = (
            path.with_name(self.tokenizer) if Path(self.tokenizer).name == self.tokenizer else None
        )
        if file is None or file.is_symlink():  # a copied corpus must not reach into other folders
            raise mistake(
                path,
                f'tokenizer {self.tokenizer!r} is not a plain file in the same folder; '
                'put the file there, and its name here',
            )
        if not is_file(file):
            raise mistake(file, f'is missing, and {path.name} names it; copy it there')
        if sha256(file.read_bytes()).hexdigest() != self.tokenizer_sha256:
            raise mistake(
                file,
                f'is not the tokenizer that made these tokens: {path.name} has another hash; '
                'copy the right one',
            )


def manifest_path(prefix: str | Path) -> Path:
    """Return the path PREFIX.json."""
    return Path(f'{Path(prefix).expanduser()}.json')
