"""Recognize Git LFS pointers, files whose content was not downloaded. Imports no jax."""

from pathlib import Path

POINTER = b'version https://git-lfs.'  # the beginning of a pointer file


def repair(path: Path) -> str:
    """Return what to do about a file whose contents cannot be read."""
    try:
        with path.open('rb') as file:
            is_pointer = file.read(len(POINTER)) == POINTER
    except OSError as error:
        return f'it cannot be read: {error.strerror}; make it readable'
    return (
        'it is a Git LFS pointer, not the file itself: run git lfs pull in its repository'
        if is_pointer
        else 'download or copy it again'
    )
