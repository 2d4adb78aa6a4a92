"""A dictionary that keeps what was used last: in the order of use, up to a size."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_recent(kept: dict[K, V], key: K, value: V, max_size: int) -> None:
    """Put a value last, and drop the first ones beyond the size."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > max_size:
        del kept[next(iter(kept))]
