"""The results of the checks of `quotient doctor`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from settings.configuration import Configuration

OK, WARNING, ERROR = "ok", "warning", "error"
MAX_NAMES_SHOWN = 5


class CheckResult(Struct, frozen=True):
    """The result of one check, with a remedy if it found a problem."""

    level: str
    check: str
    message: str
    remedy: str = ""


Check = Callable[[Any, Configuration], Iterator[CheckResult]]


def shorten_list(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def limit_results(results: Iterable[CheckResult], check: str) -> Iterator[CheckResult]:
    """Yield the first results, and how many there are beyond them: a cluster has thousands of pods and nodes."""
    found = list(results)
    yield from found[:MAX_NAMES_SHOWN]
    if len(found) > MAX_NAMES_SHOWN:
        yield CheckResult(WARNING, check, f"and {len(found) - MAX_NAMES_SHOWN} more of this kind")
