"""Files that stand for others which were not downloaded. Imports no jax."""

from pathlib import Path

POINTER = b'version https://git-lfs.'  # with which Git LFS begins the files that it leaves out


def repair(path: Path) -> str:
    """Return what to do about a file whose contents cannot be read."""
    with path.open('rb') as file:
        is_pointer = file.read(len(POINTER)) == POINTER
    return (
        'it is a Git LFS pointer and not the file itself: run git lfs pull in its repository'
        if is_pointer
        else 'download or copy it again'
    )
