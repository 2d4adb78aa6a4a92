"""Creates msgspec decoders: one per type, and only one at a time.

msgspec inspects a struct when it first sees it. If a second thread does the same at that moment, the process ends with
a segmentation fault (seen with 0.22: one start of the node plugin in thirty). So every decoder comes from here, and the
linter allows none elsewhere.
"""

import threading
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder  # noqa: TID251 - here alone

T = TypeVar("T")

# Held while a decoder is created. Using one is safe in any number of threads.
CREATING = threading.Lock()
DECODERS: dict[Any, Decoder[Any]] = {}


def decoder_for(kind: type[T]) -> Decoder[T]:
    decoder = DECODERS.get(kind)
    if decoder is None:
        # Two threads may create a decoder of the same type one after the other: harmless, and both are equal.
        with CREATING:
            decoder = DECODERS[kind] = Decoder(kind)
    return decoder


def convert(plain: Any, kind: type[T], *, strict: bool = True) -> T:  # noqa: ANN401 - whatever a document contains
    """Convert plain values (dicts, lists, scalars) to a type; msgspec.ValidationError if they do not match it."""
    decoder_for(kind)  # inspects the type under the lock
    return msgspec.convert(plain, kind, strict=strict)  # noqa: TID251
