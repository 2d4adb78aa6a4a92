"""Kubernetes quantities, exactly: the grammar, the value, and the form in which the API server writes it.

The parsers of the Python clients accept NaN, underscores and digits of other alphabets, or reject valid exponents. This
one follows `k8s.io/apimachinery/pkg/api/resource`: a value is a whole number of nano-units (smaller amounts are rounded
away from zero), and keeps only the family of suffixes it was written with.
"""

import re
from enum import Enum
from functools import lru_cache

from msgspec import Struct

NANO = 10**9
MAX_VALUE = 2**63 - 1
# Bounds on what a user writes, so that no input is expensive to parse or to show.
MAX_LENGTH = 64
MAX_EXPONENT = 30
# An integer with more bits has more than MAX_LENGTH digits: a digit is less than 4 bits.
MAX_BITS = 4 * MAX_LENGTH

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
    """The kind of suffix a quantity was written with; Kubernetes keeps it when it formats the value."""

    DECIMAL = "decimal"
    EXPONENT = "exponent"
    BINARY = "binary"


class QuantityError(ValueError):
    """The text is not a valid quantity; the message is for the user who wrote it."""


class Quantity(Struct, frozen=True):
    """An exact amount. Two quantities are the same amount when their nanos are equal."""

    nanos: int
    family: Family = Family.DECIMAL

    @property
    def is_whole(self) -> bool:
        return self.nanos % NANO == 0

    @property
    def whole(self) -> int:
        """The value as an integer, rounded away from zero like Kubernetes' `Value()`."""
        return -(-self.nanos // NANO) if self.nanos >= 0 else self.nanos // NANO

    def __str__(self) -> str:
        return format_quantity(self)


@lru_cache(maxsize=4096, typed=True)  # a cluster's pods use few different amounts; texts are at most MAX_LENGTH long
def parse_quantity(text: str | float) -> Quantity:
    """Parse a quantity as the API server would; a number is one of JSON or YAML. QuantityError if invalid."""
    if isinstance(text, bool):
        raise QuantityError("a boolean is not a quantity")
    # Python refuses to convert integers of more than 4300 digits, so their size is checked before.
    if isinstance(text, int) and text.bit_length() > MAX_BITS:
        raise QuantityError(f"longer than {MAX_LENGTH} characters")
    written = text if isinstance(text, str) else repr(text)
    if len(written) > MAX_LENGTH:
        raise QuantityError(f"longer than {MAX_LENGTH} characters")
    if not written:
        raise QuantityError("is empty")
    match = GRAMMAR.fullmatch(written)
    if match is None or not (match["whole"] or match["part"]):
        raise QuantityError(
            "not a Kubernetes quantity, which is a number and at most one suffix of n u m k M G T P E Ki Mi Gi Ti Pi Ei"
        )
    nanos, family = unsigned_nanos(match["whole"], match["part"] or "", match["suffix"] or "", match["exponent"])
    return Quantity(-nanos if match["sign"] == "-" else nanos, family)


def unsigned_nanos(whole: str, part: str, suffix: str, exponent: str | None) -> tuple[int, Family]:
    """Return an unsigned quantity in nano-units, rounded up, and its family. `part` are the digits after the dot."""
    digits = int(whole + part)
    if suffix.endswith("i"):
        numerator = digits * KILO_BINARY ** BINARY.index(suffix) * NANO
        # Kubernetes caps too large binary amounts, and formats binary amounts below 1 as decimal.
        nanos = min(-(-numerator // 10 ** len(part)), MAX_VALUE * NANO)
        return nanos, Family.DECIMAL if 0 < nanos < NANO else Family.BINARY
    power = int(exponent) if exponent is not None else DECIMAL[suffix]
    if abs(power) > MAX_EXPONENT:
        raise QuantityError(f"the exponent must be between -{MAX_EXPONENT} and {MAX_EXPONENT}")
    power += 9 - len(part)
    nanos = digits * 10**power if power >= 0 else -(-digits // 10**-power)
    if nanos > MAX_VALUE * NANO:
        raise QuantityError("larger than 2^63-1, the maximum of a Kubernetes quantity")
    return nanos, Family.DECIMAL if exponent is None else Family.EXPONENT


def format_quantity(quantity: Quantity) -> str:
    """Format a quantity as the API server does: 1000 is 1k, 7.5Gi is 7680Mi, 0.3 is 300m."""
    if quantity.nanos == 0:
        return "0"
    sign, nanos = ("-", -quantity.nanos) if quantity.nanos < 0 else ("", quantity.nanos)
    # A binary form that is small or fractional would need rounding, so Kubernetes falls back to decimal.
    if quantity.family is Family.BINARY and nanos >= KILO_BINARY * NANO and nanos % NANO == 0:
        number, steps = divide_out(nanos // NANO, KILO_BINARY, len(BINARY) - 1)
        return f"{sign}{number}{BINARY[steps]}"
    number, steps = divide_out(nanos, 1000, len(DECIMAL) - 1)
    exponent = 3 * steps - 9
    if quantity.family is Family.EXPONENT:
        return f"{sign}{number}e{exponent}" if exponent else f"{sign}{number}"
    return f"{sign}{number}{DECIMAL_SUFFIX[exponent]}"


def divide_out(number: int, base: int, max_steps: int) -> tuple[int, int]:
    """Divide by a base while there is no remainder, at most `max_steps` times; return the quotient and the steps."""
    steps = 0
    while steps < max_steps and number % base == 0:
        number //= base
        steps += 1
    return number, steps
