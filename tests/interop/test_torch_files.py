"""A tensor of a file of PyTorch's is a view of its storage, and never reaches beyond."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.interop.megatron.torch_files import _rebuild_tensor
from megajax.interop.megatron.torch_writer import Stored, torch_files

STORAGE = np.arange(12)


@pytest.mark.parametrize(
    ('offset', 'size', 'stride', 'expected'),
    [
        (0, (3, 4), (4, 1), STORAGE.reshape(3, 4)),
        (2, (2, 5), (5, 1), STORAGE[2:].reshape(2, 5)),
        (0, (4, 3), (1, 4), STORAGE.reshape(3, 4).T),
        (5, (), (), np.array(5)),
        (1, (2, 3), (0, 1), np.array([[1, 2, 3]] * 2)),
        (12, (0, 3), (3, 1), np.zeros((0, 3))),
    ],
    ids=['whole', 'from a place on', 'transposed', 'scalar', 'repeated', 'empty'],
)
def test_a_tensor_is_what_its_strides_say(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], expected: np.ndarray
) -> None:
    np.testing.assert_array_equal(_rebuild_tensor(STORAGE, offset, size, stride), expected)


@pytest.mark.parametrize(
    ('offset', 'size', 'stride'),
    [(1, (3, 4), (4, 1)), (-1, (2,), (1,)), (0, (-2,), (1,)), (4, (2,), (-1,)), (0, (2,), (12,))],
)
def test_a_tensor_beyond_its_storage_is_refused(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match='reaches beyond its storage of 12'):
        _rebuild_tensor(STORAGE, offset, size, stride)


@pytest.mark.parametrize('size', [(2**30,), (2, 2), ()])
def test_a_tensor_of_a_tensor_is_refused(size: tuple[int, ...]) -> None:
    inner = _rebuild_tensor(STORAGE, 0, size, (0,) * len(size))
    with pytest.raises(ValueError, match='something other than a storage'):
        _rebuild_tensor(inner, 0, (1,), (1,))


@pytest.mark.parametrize('place', range(3))
def test_an_offset_in_a_type_that_overflows_is_refused(place: int) -> None:
    arguments: list[tuple[object, ...]] = [(0,), (2**62,), (4,)]
    arguments[place] = (np.array(arguments[place][0]),)
    (offset,), size, stride = arguments
    with pytest.raises(ValueError, match='is not an integer'):
        _rebuild_tensor(STORAGE, offset, size, stride)  # type: ignore[arg-type]


def test_a_file_that_is_not_finished_ends_with_the_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = list[object]()
    monkeypatch.setattr(sys, 'unraisablehook', ignored.append)

    def fail() -> None:
        with torch_files([tmp_path / 'x'], [{'x': Stored((3,), STORAGE.dtype)}]):
            raise OSError('no space')

    with pytest.raises(OSError, match='no space'):
        fail()
    gc.collect()
    assert not ignored
