"""Retry of a compare-and-swap: read, change, write, and start over if another writer came first.

The counterpart of client-go's `retry.RetryOnConflict`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound

T = TypeVar("T")

# What another writer can cause: the object changed, was deleted, or was created since it was read.
LOST_RACE: tuple[type[ApiError], ...] = (Conflict, NotFound, AlreadyExists)


def retry_on_conflict(
    attempt: Callable[[int], T], *, attempts: int, retry_on: tuple[type[ApiError], ...] = LOST_RACE
) -> T:
    """Call `attempt(number)`, numbered from 0, until it raises none of `retry_on`; each call has to read afresh.

    The last attempt's error is raised as it is: an ApiError concerns this object only, whereas Unavailable would tell
    callers that the whole API is in trouble. There is no pause, as a conflict means that another writer made progress.
    """
    for number in range(attempts - 1):
        with suppress(*retry_on):
            return attempt(number)
    return attempt(attempts - 1)
