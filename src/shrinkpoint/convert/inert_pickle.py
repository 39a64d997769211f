"""Unpickles without running anything: every class and function becomes an inert stub.

Memory and time stay within the size of the pickle. Keys of equal hash, which make a dict quadratic, are refused, and so
are calls that copy one text or bytes object very often.
"""

from __future__ import annotations

import pickle
import pickletools
from collections import Counter
from typing import IO, Any, ClassVar

MAX_SAME_HASH = 64  # Largest number of keys of one dict or set with equal hashes; each is compared with all others
_MAX_KEY_PARTS = 256  # Largest number of values in a tuple that is a key: Python hashes a tuple anew each time
_MAX_EXTRA_BYTES = 64 << 20  # Bytes of arguments that calls may copy beyond the size of the pickle
_MAX_PLAIN_INT = (1 << 61) - 1  # Whole numbers below this are their own hashes

_OPCODE_NAMES = """
    PROTO FRAME STOP MARK POP POP_MARK MEMOIZE NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1
    LONG4 FLOAT BINFLOAT UNICODE BINUNICODE BINUNICODE8 SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE
    DICT LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ
    BUILD GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT
    SHORT_BINSTRING BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BINPERSID EMPTY_SET
"""


_PythonUnpickler: Any = pickle._Unpickler
"""The unpickler in Python, of which each opcode can be replaced; that in C has none of this."""


class HostilePickleError(ValueError):
    """Reading a pickle would take far more time or memory than its size."""


class Stub:
    """Stands for an object of any class in a pickle; keeps the state that the pickle gives it.

    Attributes:
        state: any nest of plain values and stubs.
        nbytes: length of the texts and bytes that it was made from.
    """

    state: Any = None  # a pickle makes objects without calling __init__
    nbytes = 0

    def __init__(self, *args: Any) -> None:
        self.nbytes = sum(map(_length, args))

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignores an item: the stub may stand for a dict."""

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class InertUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickles plain values, and a `Stub` in the place of everything else.

    Args:
        file: read from where it is up to the end of one pickle.
        size: bytes of the pickle, or of the file that holds it.

    Raises:
        Exception: the pickle is damaged, has opcodes that torch does not write, or would take far more than its size.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)
    for _info in pickletools.opcodes:
        if _info.name not in _OPCODE_NAMES.split():
            dispatch.pop(ord(_info.code), None)

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, encoding="latin-1")
        self._remaining = size + _MAX_EXTRA_BYTES
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}  # by id of a dict, which must not be freed

    def find_class(self, module: str, name: str) -> Any:
        return Stub

    def persistent_load(self, pid: Any) -> Any:
        return Stub()

    def check_key(self, target: Any, key: Any) -> Any:
        """The key to use in a dict; raises `HostilePickleError` if it collides with too many others."""
        self._count_hash(target, key)
        return key

    def _count_hash(self, target: Any, key: Any) -> None:
        if type(key) in (str, bytes) or (type(key) is int and -_MAX_PLAIN_INT < key < _MAX_PLAIN_INT):
            return
        # A tuple of very many values may be few values in many references
        pending, count = [key], 0
        while pending:
            value = pending.pop()
            count += 1
            if count > _MAX_KEY_PARTS:
                raise HostilePickleError("a pickle with a key of very many values")
            if type(value) is tuple:
                pending += value
        _, counts = self._hashes.setdefault(id(target), (target, Counter()))
        counts[hash(key)] += 1
        if counts[hash(key)] > MAX_SAME_HASH:
            raise HostilePickleError("a pickle with keys made to collide")

    def _spend(self, nbytes: int) -> None:
        self._remaining -= nbytes
        if self._remaining < 0:
            raise HostilePickleError("a pickle that copies one text or bytes object very often")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][self.check_key(self.stack[-1], key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        for index in range(0, len(items), 2):
            target[self.check_key(target, items[index])] = items[index + 1]

    def load_dict(self) -> None:
        items = self.pop_mark()
        target: dict[Any, Any] = {}
        for index in range(0, len(items), 2):
            target[self.check_key(target, items[index])] = items[index + 1]
        self.append(target)

    def load_reduce(self) -> None:
        arguments = self.stack[-1]
        for argument in arguments:
            self._spend(_length(argument))
            for item in argument if type(argument) in (list, tuple) else ():  # elements of a set, or pairs of a dict
                is_pair = type(item) in (list, tuple) and len(item) == 2
                for key in (item, item[0]) if is_pair else (item,):
                    if type(key) in (int, float, tuple):
                        self._count_hash(argument, key)
        super().load_reduce()

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Stub):
            raise ValueError("a state of what has none")
        for item in state if type(state) is tuple else ():
            self._spend(_length(item))
        self.stack[-1].__setstate__(state)

    for _name, _method in (
        ("SETITEM", load_setitem),
        ("SETITEMS", load_setitems),
        ("DICT", load_dict),
        ("REDUCE", load_reduce),
        ("BUILD", load_build),
    ):
        dispatch[getattr(pickle, _name)[0]] = _method


def _length(value: Any) -> int:
    return len(value) if type(value) in (str, bytes) else value.nbytes if isinstance(value, Stub) else 0
