"""GPU memory: counted in units on pods (1 = 256 MiB unless configured), in MiB inside Quotient."""

from vcuda.quantity import NANO, Family, Quantity, QuantityError

MIB = 2**20
DEFAULT_UNIT_MIB = 256
# The API server writes a plain 1000000 as "1M", so how it was typed is lost; no pod has a million units.
BYTES_FROM = 10**6


def are_bytes(amount: Quantity) -> bool:
    """Tell bytes from a count of units: Ki, Mi, Gi and M, G, T are bytes; plain numbers and k are counts."""
    return amount.family is Family.BINARY or amount.nanos % (BYTES_FROM * NANO) == 0


def mib_asked(amount: Quantity, unit_mib: int) -> int:
    """Read a memory request written in units of `unit_mib`, or in bytes with a suffix, as MiB rounded up."""
    if amount.nanos < 0:
        raise QuantityError("memory cannot be negative")
    if are_bytes(amount):
        return -(-amount.whole // MIB)
    if not amount.is_whole:
        raise QuantityError(f"units of {unit_mib} MiB are whole numbers")
    return amount.whole * unit_mib


def units(mib: int, unit_mib: int) -> int:
    """Count the units that hold this much memory, rounded up."""
    return -(-mib // unit_mib)
