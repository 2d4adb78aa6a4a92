"""A cache that is bounded in size and time."""

from collections import OrderedDict
from typing import Generic, TypeVar

MAX_CACHED = 256

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """The latest MAX_CACHED values, for `keep_s` seconds each, with the time at which they were stored."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._entries: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def get(self, key: str, now: float) -> tuple[float, T] | None:
        entry = self._entries.get(key)
        return entry if entry is not None and now - entry[0] < self._keep_s else None

    def remove(self, key: str) -> None:
        self._entries.pop(key, None)

    def put(self, key: str, value: T, now: float) -> None:
        self._entries[key] = now, value
        self._entries.move_to_end(key)
        if len(self._entries) > MAX_CACHED:
            self._entries.popitem(last=False)
