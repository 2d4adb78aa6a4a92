"""The arithmetic of quotas: amounts that are in use, and hard limits on them.

Both are values: every operation returns a new one. Keys are opaque here: the demand of a pod has a key for each
dimension, and the usage of a quota one for each (quota, line, dimension).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

AmountKey = Hashable
K = TypeVar("K", bound=AmountKey)


class Amounts(Mapping[AmountKey, int]):
    """An amount for each key. A missing key is zero and zeros are not stored, so equal amounts compare equal."""

    __slots__ = ("_of",)

    def __init__(self, of: Mapping[Any, int] | Iterable[tuple[Any, int]] = ()) -> None:
        self._of: dict[AmountKey, int] = {key: amount for key, amount in dict(of).items() if amount}

    def __getitem__(self, key: AmountKey) -> int:
        return self._of.get(key, 0)

    def __iter__(self) -> Iterator[AmountKey]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amounts) and self._of == other._of

    def __hash__(self) -> int:
        return hash(frozenset(self._of.items()))

    def __repr__(self) -> str:
        return f"Amounts({self._of})"

    def _combined(self, other: "Amounts", combine: Callable[[int, int], int]) -> "Amounts":
        return Amounts((key, combine(self[key], other[key])) for key in self.keys() | other.keys())

    def __add__(self, other: "Amounts") -> "Amounts":
        return self._combined(other, lambda mine, theirs: mine + theirs)

    def __sub__(self, other: "Amounts") -> "Amounts":
        """Subtract; a result below zero stays negative."""
        return self._combined(other, lambda mine, theirs: mine - theirs)

    def __or__(self, other: "Amounts") -> "Amounts":
        """Return the larger amount of each key."""
        return self._combined(other, max)

    def times(self, count: int) -> "Amounts":
        return Amounts((key, amount * count) for key, amount in self._of.items())


class HardLimits(Mapping[K, int]):
    """The most that may be in use of each key. A key without a limit is unlimited; a limit of zero allows nothing."""

    __slots__ = ("_of",)

    def __init__(self, of: Mapping[K, int] | Iterable[tuple[K, int]] = ()) -> None:
        self._of: dict[Any, int] = dict(of)

    def __getitem__(self, key: K) -> int:
        return self._of[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __repr__(self) -> str:
        return f"HardLimits({self._of})"

    def free(self, used: Amounts, key: AmountKey) -> int:
        """Return what is left of a limited key; zero where more is in use than the limit allows."""
        return max(0, self._of[key] - used[key])

    def exceeded(self, used: Amounts) -> Amounts:
        """Return by how much each limit is exceeded."""
        return Amounts((key, used[key] - hard) for key, hard in self._of.items() if used[key] > hard)

    def short(self, used: Amounts, asked: Amounts) -> Amounts:
        """Return what is missing for `asked` on top of `used`; empty if it fits.

        Only keys that are asked for can be short: a namespace that exceeds one limit may still use what another allows.
        """
        # Over the keys that are asked for: a quota may have hundreds of lines, and this runs for every admitted pod.
        return Amounts(
            (key, used[key] + amount - hard)
            for key, amount in asked.items()
            if amount > 0 and (hard := self._of.get(key)) is not None and used[key] + amount > hard
        )

    def count_fitting(self, used: Amounts, asked: Amounts) -> int | None:
        """Return how many times `asked` fits on top of `used`; None if no limit applies."""
        counts = [self.free(used, key) // asked[key] for key in asked if asked[key] > 0 and key in self._of]
        return min(counts, default=None)
