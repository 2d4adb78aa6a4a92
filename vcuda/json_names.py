"""Names of nodes in the JSON form in which they arrive, to be compared with known ones without decoding them.

kube-scheduler sends all nodes that passed its own filters with every pod, in any order. To decode 5,000 names and look
them up takes 2 ms. Hashes of all of them, by array operations over the bytes, take a quarter of a millisecond.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from vcuda.decoding import decoder_for

Hashes = NDArray[np.uint64]
# The number of names, and two sums of their hashes that do not depend on the order.
Fingerprint = tuple[int, int, int]

QUOTE = ord('"')
# A hash is a polynomial of the bytes modulo 2**64, which is computed from sums over the whole text: so the factor has
# to be odd, that it can be divided by. Then the bits are mixed, as the sum of polynomials says little about them.
FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)
MIX, SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(31)
MIN_POWERS = 2**17


class Powers:
    """The powers of a factor modulo 2**64, as many as the longest text so far has bytes."""

    def __init__(self, factor: int) -> None:
        self._factor = np.uint64(factor)
        self._known: Hashes = np.ones(1, np.uint64)

    def first(self, count: int) -> Hashes:
        if len(self._known) < count:
            factors = np.full(max(count, MIN_POWERS), self._factor)
            factors[0] = 1
            self._known = np.cumprod(factors, dtype=np.uint64)
        return self._known[:count]


POWERS, INVERSE_POWERS = Powers(FACTOR), Powers(INVERSE)


class JsonNames(Sequence[str]):
    """A JSON list of names, as `encode_names` writes it."""

    def __init__(self, text: bytes, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> None:
        self.text, self._starts, self._ends = text, starts, ends

    @cached_property
    def hashes(self) -> Hashes:
        data = np.frombuffer(self.text, np.uint8)
        sums = np.cumsum(data * POWERS.first(len(data)), dtype=np.uint64)
        hashes = (sums[self._ends - 1] - sums[self._starts - 1]) * INVERSE_POWERS.first(len(data))[self._starts]
        hashes ^= hashes >> SHIFT
        hashes *= MIX
        mixed: Hashes = hashes ^ (hashes >> SHIFT)
        return mixed

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
        return len(self._starts)

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


def parse_names(text: bytes) -> JsonNames | None:
    """Return the names in valid JSON; None unless it is a list as `encode_names` writes it, and nothing is escaped."""
    data = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(data == QUOTE)
    starts, ends = quotes[0::2] + 1, quotes[1::2]
    if not len(quotes) or len(quotes) % 2 or b"\\" in text:
        return None
    # Between two names there is one character, which can only be a comma.
    is_plain = text.startswith(b'["') and text.endswith(b'"]') and (starts[1:] - ends[:-1] == len(b'","')).all()
    return JsonNames(text, starts, ends) if is_plain else None


def encode_names(names: Sequence[str]) -> bytes:
    """Return names as a JSON list, in the form in which kube-scheduler sends them."""
    return ('["' + '","'.join(names) + '"]').encode() if names else b"[]"
