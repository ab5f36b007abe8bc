"""Read a pickle as data: plain containers and known records, with bounded memory and time.

A pickle is a program for a stack machine. This machine has only the instructions that build plain
data, and a pickle can call only functions that a reader provides (`Call`). Imports no jax.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from megajax.core.config import ConfigError

machine: Any = pickle  # as Any, because type checkers do not know the Python unpickler in it
# Most instructions of a program. Each makes at most one object or one entry of a container, so that
# this bounds the memory too. A checkpoint of 100,000 chunks has about 5 million.
MAX_INSTRUCTIONS = 2**24
MAX_KEY_ITEMS = 16  # most items of a tuple that is a key of a dict
# Instructions that call or look up functions other than through `Call`, or that reserve memory
# before they read.
LEFT_OUT = (
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ_EX,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.PERSID,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)


class Call(NamedTuple):
    """A function that a pickle may call instead of the global of that name."""

    function: Callable[..., Any]


class Record:
    """An object with the attributes that a pickle gives it, and nothing else."""

    def set_state(self, state: Any) -> None:
        """Set the attributes from a dict."""
        self.__dict__.update({str(name): value for name, value in dict(state).items()})


class Inert:
    """A placeholder for an object that is not needed; operations on it have no effect."""

    def __new__(cls, *_: Any, **__: Any) -> 'Inert':
        """Accept any arguments."""
        return super().__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> 'Inert':
        return self


class Unpickler(machine._Unpickler):
    """A stack machine that cannot run code, or reserve more memory than the file justifies.

    A subclass defines in `find_class` what replaces a global: a `Call`, `Inert`, or plain data.
    """

    dispatch = {  # noqa: RUF012
        code: run
        for code, run in machine._Unpickler.dispatch.items()
        if bytes([code]) not in LEFT_OUT
    }

    def __init__(self, program: bytes, path: str):
        super().__init__(io.BytesIO(program), encoding='utf-8')
        self.path = path

    def load(self) -> Any:
        """Run the program and return the object that it builds."""
        frames = self._unframer = machine._Unframer(self._file_read, self._file_readline)
        self.read, self.readinto, self.readline = frames.read, frames.readinto, frames.readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append, self.proto = self.stack.append, 0
        try:
            for _ in range(MAX_INSTRUCTIONS):
                code = self.read(1)[0]
                if code not in self.dispatch:
                    raise ValueError(f'instruction {code:#04x} is not one of plain data')
                self.dispatch[code](self)
        except machine._Stop as stop:
            return stop.value
        except IndexError as error:
            raise ValueError('its pickle is cut short or damaged') from error
        raise ValueError(f'its pickle has more than {MAX_INSTRUCTIONS:,} instructions')

    def find_class(self, module: str, name: str) -> Any:
        """Reject every global; subclasses make exceptions."""
        raise ConfigError(
            f'{self.path}: rejected: it asks for {module}.{name}, '
            'but only tensors and plain containers are allowed'
        )

    def load_reduce(self) -> None:
        """Call a function with a tuple of arguments."""
        arguments = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], arguments)

    def load_build(self) -> None:
        """Set attributes of a record; the attributes of other objects are not needed."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.set_state(state)
        elif not isinstance(target, (Inert, dict)):
            raise ValueError(f'attributes of {type(target).__name__} are to be set')

    def load_append(self) -> None:
        """Append one item to a list."""
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        """Append everything since the mark to a list."""
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Inert):
            raise ValueError(
                f'the pickle appends items to an object of type {type(target).__name__}'
            )

    def load_setitem(self) -> None:
        """Set one key and its value in a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        """Store in a dict the keys and values that follow the mark."""
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            target.update(_dict(items))
        elif not isinstance(target, Inert):
            raise ValueError(f'the pickle sets items of an object of type {type(target).__name__}')

    def load_dict(self) -> None:
        """Make a dict of the keys and values since the mark."""
        items = self.pop_mark()
        self.append(_dict(items))

    def load_additems(self) -> None:
        """Add everything since the mark to a set."""
        items = self.pop_mark()
        self.stack[-1].update(map(_key, items))

    def load_frozenset(self) -> None:
        """Make a frozen set of everything since the mark."""
        items = self.pop_mark()
        self.append(frozenset(map(_key, items)))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }


def _call(function: Any, arguments: Any) -> Any:
    if function is Inert or isinstance(function, Inert):
        return Inert()
    if not isinstance(function, Call) or type(arguments) is not tuple:
        raise ValueError(f'{type(function).__name__} is called')
    return function.function(*arguments)


def _dict(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError('a key has no value')
    return {_key(items[index]): items[index + 1] for index in range(0, len(items), 2)}


def _key(key: Any) -> Any:
    """Return a key if it is fast to hash; hashing deeply nested tuples could take forever."""
    items = key if type(key) is tuple and len(key) <= MAX_KEY_ITEMS else (key,)
    if any(type(item) is tuple or (type(item) is int and abs(item) >= 2**63) for item in items):
        raise ValueError('a key is neither a word, nor a number, nor a short tuple of them')
    return key
