"""GPU memory: counted in units on pods (1 = 256 MiB unless configured), in MiB inside Quotient."""

from vcuda.quantity import NANO, Family, Quantity, QuantityError

MIB = 2**20
DEFAULT_UNIT_MIB = 256
# The API server writes a plain 2000000 as "2M", and 8.1925G as "8192500k": how an amount was typed is lost, so its
# size decides. No pod counts a million units, nor 64 TiB in smaller ones; no pod asks for so few bytes.
COUNTS_BELOW = 10**6
COUNTS_BELOW_MIB = 64 * 2**20


def first_uncountable(unit_mib: int) -> int:
    """Give the number from which on an amount is no count of units any more."""
    return max(COUNTS_BELOW, COUNTS_BELOW_MIB // unit_mib)


def is_in_bytes(amount: Quantity, unit_mib: int) -> bool:
    """Tell bytes from a count of units: Ki, Mi, Gi are bytes, and so is what is too large to be a count (M, G, T)."""
    return amount.family is Family.BINARY or amount.nanos >= NANO * first_uncountable(unit_mib)


def requested_mib(amount: Quantity, unit_mib: int) -> int:
    """Read a memory request written in units of `unit_mib`, or in bytes with a suffix, as MiB rounded up."""
    if amount.nanos < 0:
        raise QuantityError("memory cannot be negative")
    if is_in_bytes(amount, unit_mib):
        return -(-amount.whole // MIB)
    if not amount.is_whole:
        raise QuantityError(f"units of {unit_mib} MiB are whole numbers")
    return amount.whole * unit_mib


def units_for(mib: int, unit_mib: int) -> int:
    """Count the units that hold this much memory, rounded up."""
    return -(-mib // unit_mib)


def checked_count(count: int, unit_mib: int) -> int:
    """Refuse a count of units that, written down, would be read as bytes; no node has so much memory."""
    if count >= first_uncountable(unit_mib):
        raise QuantityError("more memory than any node has")
    return count
