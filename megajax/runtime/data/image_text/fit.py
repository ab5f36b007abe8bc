"""Check that documents fit into sequences; a document is never split."""

from collections.abc import Sequence

from megajax.base.errors import ConfigError, Problem
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.documents import FileDocument


def check_fit(documents: Sequence[FileDocument], shape: RowShape) -> None:
    """Raise ConfigError if documents have more tokens or images than a sequence can have.

    The error names the place of the first such document, their number, and values with which all
    documents fit.
    """
    if problems := [*_of_pictures(documents, shape), *_of_tokens(documents, shape)]:
        raise ConfigError(*problems)


def check_pictures(document: FileDocument, shape: RowShape) -> None:
    """Raise ConfigError if a document has more images than a sequence can have."""
    if problems := _of_pictures([document], shape):
        raise ConfigError(*problems)


def _of_pictures(documents: Sequence[FileDocument], shape: RowShape) -> list[Problem]:
    wrong = [document for document in documents if len(document.grids) > shape.images]
    if not wrong:
        return []
    most = max(len(document.grids) for document in wrong)
    message = (
        f'has {len(wrong[0].grids)} images, and a sequence can have {shape.images}'
        f'{_share(wrong, documents, "too many")}; use vision.images={most}, or fewer images'
    )
    return [Problem(wrong[0].place, message, others=('vision.images',))]


def _of_tokens(documents: Sequence[FileDocument], shape: RowShape) -> list[Problem]:
    def of_pictures(document: FileDocument) -> int:
        return sum(map(shape.patches.tokens, document.grids))

    wrong = [document for document in documents if len(document.tokens) > shape.seq_len + 1]
    if not wrong:
        return []
    first, longest = wrong[0], max(len(document.tokens) for document in wrong)
    pictures = f', {of_pictures(first)} of them for images,' if first.grids else ''
    is_large = any(of_pictures(document) > len(document.grids) for document in wrong)
    smaller = ', a smaller vision.max_patches' if is_large else ''
    message = (
        f'has {len(first.tokens)} tokens{pictures} and a sequence can have {shape.seq_len + 1}'
        f'{_share(wrong, documents, "too long")}; '
        f'use {shape.longer(longest - 1)}{smaller}, or shorter documents'
    )
    others = shape.limited_by, 'model.max_seq_len', 'vision.max_patches'
    return [Problem(first.place, message, others=others)]


def _share(wrong: Sequence[FileDocument], documents: Sequence[FileDocument], how: str) -> str:
    return f'; {how}: {len(wrong):,} of {len(documents):,} documents' if len(documents) > 1 else ''
