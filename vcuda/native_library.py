"""The library that is compiled from the C sources of this package when Quotient is installed."""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from numpy.typing import NDArray

LIBRARY = "libvcuda.so"


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built for this machine. Calls release Python's global lock."""
    with resources.as_file(resources.files(__package__).joinpath(LIBRARY)) as path:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            return None


def pointers(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the addresses of arrays, which have to live as long as these are used."""
    return [each.ctypes.data for each in arrays]
