"""Call a function without root's permission to read and write every file."""

import ctypes
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

VERSION = 0x20080522  # of the structs of capset(2)

T = TypeVar('T')


def as_ordinary_user(call: Callable[[], T]) -> T:
    """Return what `call` returns in a thread without capabilities, which each thread has apart."""
    with ThreadPoolExecutor(1, initializer=_drop_capabilities) as pool:
        return pool.submit(call).result()


def _drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack('Ii', VERSION, 0))
    if ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24)):
        raise OSError('capset failed')
