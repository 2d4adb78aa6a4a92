"""Names of nodes as kube-scheduler sends and gets them: found and written without a string of Python for each.

kube-scheduler sends all nodes that passed its own filters with every pod, in any order, and expects as many names in
the answers. To decode 5,000 names, look them up and encode them again takes 3 ms; their hashes and bytes, by the
functions of names_kernel.c, a fifth of a millisecond. Where that is not compiled, strings are used.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int64, c_void_p
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from vcuda.decoding import decoder_for
from vcuda.native_library import load_library, pointers

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]
# Python's own strings, so that parts of many names are taken by array operations.
Names = NDArray[np.object_]
# The number of names, and two sums of their hashes that do not depend on the order.
Fingerprint = tuple[int, int, int]
# The shortest name in a list takes so many bytes: its quotes and a comma.
LEAST_BYTES = 3
# As long as the longest number.
MOST_DIGITS = 20


class NamesKernel:
    """The functions of names_kernel.c."""

    def __init__(self) -> None:
        library: Any = load_library()
        self._hash, self._write, self._write_scores = library.hash_names, library.write_names, library.write_scores
        self._hash.argtypes = [c_char_p, c_int64, c_int64, c_void_p]
        self._write.argtypes = [*[c_void_p] * 3, c_int64, c_char_p, c_int64, c_void_p]
        self._write_scores.argtypes = [*[c_void_p] * 4, c_int64, *[c_char_p, c_int64] * 2, c_void_p]
        for each in (self._hash, self._write, self._write_scores):
            each.restype = c_int64

    def hashes(self, text: bytes) -> Hashes | None:
        """Return the hashes of the names in a JSON list; None if it has spaces or escaped characters, or is no list."""
        hashes = np.empty(len(text) // LEAST_BYTES + 1, np.uint64)
        count = self._hash(text, len(text), len(hashes), hashes.ctypes.data)
        return None if count < 0 else hashes[:count]

    def write(self, arrays: Sequence[NDArray[Any]], after: bytes, out: NDArray[np.uint8]) -> bytes:
        written = self._write(*pointers(arrays), len(arrays[-1]), after, len(after), out.ctypes.data)
        return out[:written].tobytes()

    def write_scores(self, arrays: Sequence[NDArray[Any]], texts: tuple[bytes, bytes], out: NDArray[np.uint8]) -> bytes:
        before, after = texts
        addresses = pointers(arrays)
        written = self._write_scores(
            *addresses, len(arrays[-1]), before, len(before), after, len(after), out.ctypes.data
        )
        return out[:written].tobytes()


KERNEL = NamesKernel() if load_library() is not None else None


class JsonNames(Sequence[str]):
    """A JSON list of names, as `encode_names` writes it."""

    def __init__(self, text: bytes, hashes: Hashes) -> None:
        self.text, self.hashes = text, hashes

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Equal for the same names in any order."""
        return len(self), int(self.hashes.sum(dtype=np.uint64)), int(np.bitwise_xor.reduce(self.hashes))

    @cached_property
    def _decoded(self) -> list[str]:
        return decoder_for(list[str]).decode(self.text)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded[index]

    def __len__(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and f'"{name}"'.encode() in self.text


class NameIndex:
    """Finds names among known ones by their hashes."""

    def __init__(self, names: Sequence[str]) -> None:
        known = parse_names(encode_names(names))
        hashes: Hashes = known.hashes if known else np.zeros(0, np.uint64)
        self._fingerprint = known.fingerprint if known else None
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        self._is_usable = 0 < len(names) == len(np.unique(hashes))

    def find(self, names: JsonNames) -> NDArray[np.intp] | slice | None:
        """Return the positions of names among the known ones, in ascending order; None if one of them is not known."""
        if not self._is_usable:
            return None
        # Usually all are asked for.
        if names.fingerprint == self._fingerprint:
            return slice(None)
        found = np.minimum(np.searchsorted(self._hashes, names.hashes), len(self._hashes) - 1)
        if (self._hashes[found] != names.hashes).any():
            return None
        return np.sort(self._order[found])


class PackedNames:
    """Names with their bytes, one after another."""

    def __init__(self, names: Names) -> None:
        self.names = names

    @cached_property
    def packed(self) -> tuple[NDArray[np.uint8], Positions]:
        """The bytes of all names, and where each begins, and the last one ends."""
        encoded = [name.encode() for name in self.names]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return np.frombuffer(b"".join(encoded) or b"\0", np.uint8), ends


class NodeNames(Sequence[str]):
    """Some of packed names, in an order of their own."""

    def __init__(self, packed: PackedNames, positions: Positions | None = None) -> None:
        """Without positions, all names."""
        self._packed = packed
        self._positions = np.arange(len(packed.names)) if positions is None else positions
        if positions is None:
            self.array = packed.names

    @cached_property
    def array(self) -> Names:
        return self._packed.names[self._positions]

    def take(self, positions: NDArray[Any]) -> "NodeNames":
        """Return the names at some positions of this list."""
        return NodeNames(self._packed, self._positions[positions])

    def joined(self, separator: str) -> bytes:
        """Return the names with a text between them."""
        if KERNEL is None or not len(self):
            return separator.join(self.array).encode()
        (names, offsets), positions, after = self._packed.packed, self._contiguous(), separator.encode()
        out = np.empty(self._size(offsets) + len(self) * len(after), np.uint8)
        return KERNEL.write((names, offsets, positions), after, out).removesuffix(after)

    def with_scores(self, scores: Positions, before: str, after: str) -> bytes:
        """Return each name with its score, which is not negative, between two texts."""
        if KERNEL is None or not len(self):
            pairs = zip(self.array, scores.tolist(), strict=True)
            return "".join(f"{name}{before}{score}{after}" for name, score in pairs).encode()
        (names, offsets), texts = self._packed.packed, (before.encode(), after.encode())
        out = np.empty(self._size(offsets) + len(self) * (len(texts[0]) + len(texts[1]) + MOST_DIGITS), np.uint8)
        arrays = (names, offsets, self._contiguous(), np.ascontiguousarray(scores, np.int64))
        return KERNEL.write_scores(arrays, texts, out)

    def _contiguous(self) -> Positions:
        return np.ascontiguousarray(self._positions, np.int64)

    def _size(self, offsets: Positions) -> int:
        return int((offsets[self._positions + 1] - offsets[self._positions]).sum())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found: str | list[str] = self.array[index] if isinstance(index, int) else self.array[index].tolist()
        return found

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.tolist())


def as_array(names: Sequence[str]) -> Names:
    array = np.empty(len(names), np.object_)
    array[:] = names
    return array


def node_names(names: Sequence[str]) -> NodeNames:
    return names if isinstance(names, NodeNames) else NodeNames(PackedNames(as_array(names)))


def parse_names(text: bytes) -> JsonNames | None:
    """Return the names in valid JSON; None unless it is a list as `encode_names` writes it, and nothing is escaped."""
    hashes = KERNEL.hashes(text) if KERNEL is not None else None
    return None if hashes is None else JsonNames(text, hashes)


def encode_names(names: Sequence[str]) -> bytes:
    """Return names as a JSON list, in the form in which kube-scheduler sends them."""
    return b'["%b"]' % node_names(names).joined('","') if names else b"[]"
