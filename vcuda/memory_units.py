"""GPU memory: counted in units on pods (1 = 256 MiB unless configured), in MiB inside Quotient."""

from vcuda.quantity import NANO, Family, Quantity, QuantityError

MIB = 2**20
MIB_PER_GIB = 1024
DEFAULT_UNIT_MIB = 256
# The API server rewrites a plain 2000000 to "2M" and 8.1925G to "8192500k", so the suffix does not tell bytes from
# units: the size does. No pod requests a million units, nor 64 TiB in smaller units, and none so few bytes.
MIN_BYTES = 10**6
MIN_BYTES_MIB = 64 * 2**20
# A CUDA context takes about this much before the program allocates anything.
MIN_USEFUL_MIB = 512


def bytes_from(unit_mib: int) -> int:
    """Return the number from which an amount is bytes; below it is a count of units."""
    return max(MIN_BYTES, MIN_BYTES_MIB // unit_mib)


def is_in_bytes(amount: Quantity, unit_mib: int) -> bool:
    """Whether an amount is bytes, by its binary suffix (Ki, Mi, Gi) or by its size; otherwise it counts units."""
    return amount.family is Family.BINARY or amount.nanos >= NANO * bytes_from(unit_mib)


def requested_mib(amount: Quantity, unit_mib: int) -> int:
    """Return a memory request, in units of `unit_mib` or in bytes, as MiB rounded up; QuantityError if invalid."""
    if amount.nanos < 0:
        raise QuantityError("must not be negative")
    if is_in_bytes(amount, unit_mib):
        return -(-amount.whole // MIB)
    if not amount.is_whole:
        raise QuantityError(f"must be a whole number of {unit_mib} MiB units")
    return amount.whole * unit_mib


def units_for(mib: int, unit_mib: int) -> int:
    """Return how many units hold this much memory, rounded up."""
    return -(-mib // unit_mib)


def check_unit_count(count: int, unit_mib: int) -> int:
    """Return a count of units; QuantityError if, written to a pod, it would be read as bytes."""
    if count >= bytes_from(unit_mib):
        raise QuantityError(f"more than the maximum of {bytes_from(unit_mib) - 1} units of {unit_mib} MiB")
    return count


def describe_mib(mib: int) -> str:
    """Return memory as people read it: in GiB from one on, with at most one decimal, rounded down."""
    if mib < MIB_PER_GIB:
        return f"{mib} MiB"
    tenths = mib * 10 // MIB_PER_GIB
    return f"{tenths // 10}.{tenths % 10} GiB".replace(".0 ", " ")
