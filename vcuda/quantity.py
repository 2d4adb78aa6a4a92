"""Kubernetes quantities, exactly: the grammar, the value, and the form in which the API server writes it.

The parsers of the Python clients accept NaN, underscores and digits of other alphabets, or refuse valid
exponents. This one follows `k8s.io/apimachinery/pkg/api/resource`: a value is a whole number of nano-units
(smaller amounts are rounded away from zero), and remembers only in which family it was written.
"""

import re
from enum import Enum
from functools import lru_cache

from msgspec import Struct

NANO = 10**9
MAX_VALUE = 2**63 - 1
MAX_LENGTH = 64
MAX_EXPONENT = 30

GRAMMAR = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]+))?",
    re.ASCII,
)
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
DECIMAL_SUFFIX = {exponent: suffix for suffix, exponent in DECIMAL.items()}
BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
KILO_BINARY = 1024


class Family(Enum):
    """How a quantity was written; Kubernetes keeps it when it writes the value back."""

    DECIMAL = "decimal"
    EXPONENT = "exponent"
    BINARY = "binary"


class QuantityError(ValueError):
    """The text is not a quantity; the message says why, in the words of a user's mistake."""


class Quantity(Struct, frozen=True):
    """An exact amount. Two quantities are the same amount when their nanos are equal."""

    nanos: int
    family: Family = Family.DECIMAL

    @property
    def is_whole(self) -> bool:
        """Whether it counts whole things."""
        return self.nanos % NANO == 0

    @property
    def whole(self) -> int:
        """The number of whole things, rounded away from zero, as Kubernetes' `Value()`."""
        return -(-self.nanos // NANO) if self.nanos >= 0 else self.nanos // NANO

    def __str__(self) -> str:
        return canonical(self)


@lru_cache(maxsize=4096, typed=True)  # the same few amounts come again and again; a text is at most MAX_LENGTH long
def parse(text: str | float) -> Quantity:
    """Read a quantity as the API server would; numbers are those of JSON or YAML."""
    if isinstance(text, bool):
        raise QuantityError("a truth value is not an amount")
    written = text if isinstance(text, str) else repr(text)
    if len(written) > MAX_LENGTH:
        raise QuantityError(f"longer than {MAX_LENGTH} characters")
    found = GRAMMAR.fullmatch(written)
    if found is None or not (found["whole"] or found["part"]):
        raise QuantityError(
            "not a Kubernetes quantity: digits, then at most one of n u m k M G T P E Ki Mi Gi Ti Pi Ei"
        )
    nanos, family = magnitude(found["whole"], found["part"] or "", found["suffix"] or "", found["exponent"])
    return Quantity(-nanos if found["sign"] == "-" else nanos, family)


def magnitude(whole: str, part: str, suffix: str, exponent: str | None) -> tuple[int, Family]:
    """Compute the amount of an unsigned quantity in nano-units, rounded up, and its family."""
    digits = int(whole + part)
    if suffix.endswith("i"):
        numerator = digits * KILO_BINARY ** BINARY.index(suffix) * NANO
        nanos = min(-(-numerator // 10 ** len(part)), MAX_VALUE * NANO)
        return nanos, Family.DECIMAL if 0 < nanos < NANO else Family.BINARY
    power = int(exponent) if exponent is not None else DECIMAL[suffix]
    if abs(power) > MAX_EXPONENT:
        raise QuantityError(f"an exponent beyond {MAX_EXPONENT}")
    power += 9 - len(part)
    nanos = digits * 10**power if power >= 0 else -(-digits // 10**-power)
    if nanos > MAX_VALUE * NANO:
        raise QuantityError("more than can be counted, 2^63-1")
    return nanos, Family.DECIMAL if exponent is None else Family.EXPONENT


def canonical(quantity: Quantity) -> str:
    """Write a quantity as the API server does: 1000 is 1k, 7.5Gi is 7680Mi, 0.3 is 300m."""
    if quantity.nanos == 0:
        return "0"
    sign, nanos = ("-", -quantity.nanos) if quantity.nanos < 0 else ("", quantity.nanos)
    # A binary form that is small or fractional would need rounding, so Kubernetes falls back to decimal.
    if quantity.family is Family.BINARY and nanos >= KILO_BINARY * NANO and nanos % NANO == 0:
        number, steps = strip(nanos // NANO, KILO_BINARY, len(BINARY) - 1)
        return f"{sign}{number}{BINARY[steps]}"
    number, steps = strip(nanos, 1000, len(DECIMAL) - 1)
    exponent = 3 * steps - 9
    if quantity.family is Family.EXPONENT:
        return f"{sign}{number}e{exponent}" if exponent else f"{sign}{number}"
    return f"{sign}{number}{DECIMAL_SUFFIX[exponent]}"


def strip(number: int, base: int, most: int) -> tuple[int, int]:
    """Divide out a base as often as it goes without remainder, at most so many times."""
    steps = 0
    while steps < most and number % base == 0:
        number //= base
        steps += 1
    return number, steps
