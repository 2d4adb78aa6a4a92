"""Decoders of all types, each made once and one at a time.

msgspec reads what a struct consists of when it first meets it, and a second thread that meets it meanwhile ends the
process with a segmentation fault (seen with 0.22: one start of the node plugin in thirty). So every decoder comes from
here, and the linter allows none elsewhere.
"""

import threading
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder  # noqa: TID251 - here alone

T = TypeVar("T")

# Guards the making of decoders: one that is made is safe for any number of threads.
MAKING = threading.Lock()
MADE: dict[Any, Decoder[Any]] = {}


def decoder_for(kind: type[T]) -> Decoder[T]:
    """Give the decoder of a type."""
    found = MADE.get(kind)
    if found is None:
        with MAKING:
            found = MADE[kind] = Decoder(kind)
    return found


def converted(plain: Any, kind: type[T], *, strict: bool = True) -> T:  # noqa: ANN401 - whatever a document says
    """Read plain values as a type."""
    decoder_for(kind)
    return msgspec.convert(plain, kind, strict=strict)  # noqa: TID251 - the type is known by now
