"""The algebra of quotas: amounts that are used, ceilings that hold them, and what lies between.

`Amounts` is a function from keys to whole numbers that is zero almost everywhere, so amounts can be added and
subtracted freely. `Ceiling` says how much there may be of some keys; a key without a ceiling is unlimited, and
a ceiling of zero is not the same as none. All functions are total: no combination of values raises.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

CORES = "cores"
MEMORY = "memory"
PODS = "pods"

Key = Hashable


class Amounts(Mapping[Key, int]):
    """How much of each key; a key that is not there is zero, and zeros are never there."""

    __slots__ = ("_of",)

    def __init__(self, of: Mapping[Any, int] | Iterable[tuple[Any, int]] = ()) -> None:
        self._of: dict[Key, int] = {key: amount for key, amount in dict(of).items() if amount}

    def __getitem__(self, key: Key) -> int:
        return self._of.get(key, 0)

    def __iter__(self) -> Iterator[Key]:
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

    def _with(self, other: "Amounts", combine: Callable[[int, int], int]) -> "Amounts":
        return Amounts((key, combine(self[key], other[key])) for key in self.keys() | other.keys())

    def __add__(self, other: "Amounts") -> "Amounts":
        """Put two amounts together."""
        return self._with(other, lambda mine, theirs: mine + theirs)

    def __sub__(self, other: "Amounts") -> "Amounts":
        """Take one from the other; what is missing is negative."""
        return self._with(other, lambda mine, theirs: mine - theirs)

    def __or__(self, other: "Amounts") -> "Amounts":
        """Take the larger of each."""
        return self._with(other, max)

    def __and__(self, other: "Amounts") -> "Amounts":
        """Take the smaller of each."""
        return self._with(other, min)

    def __le__(self, other: "Amounts") -> bool:
        """Tell whether nothing of this exceeds the other."""
        return all(self[key] <= other[key] for key in self.keys() | other.keys())

    def floored(self) -> "Amounts":
        """Drop what is negative."""
        return self | Amounts()

    def masked(self, keys: Iterable[Key]) -> "Amounts":
        """Keep only these keys."""
        kept = set(keys)
        return Amounts((key, amount) for key, amount in self._of.items() if key in kept)

    def negative(self) -> frozenset[Key]:
        """Name the keys that are below zero."""
        return frozenset(key for key, amount in self._of.items() if amount < 0)


class Ceiling(Mapping[Key, int]):
    """The most there may be of each key that it names; other keys are unlimited."""

    __slots__ = ("_of",)

    def __init__(self, of: Mapping[Any, int] | Iterable[tuple[Any, int]] = ()) -> None:
        self._of: dict[Key, int] = dict(of)

    def __getitem__(self, key: Key) -> int:
        return self._of[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ceiling) and self._of == other._of

    def __hash__(self) -> int:
        return hash(frozenset(self._of.items()))

    def __repr__(self) -> str:
        return f"Ceiling({self._of})"

    def __and__(self, other: "Ceiling") -> "Ceiling":
        """Apply both: the lower of each."""
        joined = dict(self._of)
        for key, most in other.items():
            joined[key] = min(most, joined.get(key, most))
        return Ceiling(joined)

    def room(self, used: Amounts) -> "Ceiling":
        """Say what is left of each; negative where more is used than there may be."""
        return Ceiling((key, most - used[key]) for key, most in self._of.items())

    def excess(self, used: Amounts) -> Amounts:
        """Say by how much each ceiling is passed."""
        return Amounts((key, used[key] - most) for key, most in self._of.items() if used[key] > most)

    def short(self, used: Amounts, asked: Amounts) -> Amounts:
        """Say what is missing for `asked` on top of `used`; nothing missing means it fits.

        Only what is asked for can be short: a namespace that is already over one ceiling may still use another.
        """
        return self.excess(used + asked).masked(key for key in asked if asked[key] > 0)
