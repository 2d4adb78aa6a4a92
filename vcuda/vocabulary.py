"""The vocabularies in which pods ask for GPUs, and what each means in Quotient's own terms.

A vocabulary is the set of resource names it speaks and a function from their amounts to a share. Adding one
is adding an entry to `vocabularies`; nothing else in Quotient knows their names.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from vcuda import names as known
from vcuda.decision import Code
from vcuda.memory_units import DEFAULT_UNIT_MIB, checked_count, requested_mib, units_for
from vcuda.names import Names
from vcuda.quantity import NANO, Quantity, QuantityError

CORES_PER_CARD = 100
MAX_CARDS = 1024
ANCESTOR_UNITS_MIB = dict(zip(known.ANCESTOR_DOMAINS, (256, 1), strict=True))


class Share(Struct, frozen=True):
    """What one container asks of its node's GPUs: cores, and memory in units or following the cores."""

    cores: int
    memory_units: int = 0
    follows: bool = False

    @property
    def cards(self) -> int:
        """How many whole cards it asks for; 0 for a fraction."""
        return self.cores // CORES_PER_CARD

    @property
    def memory_count(self) -> int:
        """The amount of the memory resource: what was asked, or a token of one unit per card.

        Every GPU container carries both resources, because that is how the node recognises it.
        """
        return self.memory_units or max(1, self.cards)


class InvalidAmount(Exception):  # noqa: N818 - not a fault of the program
    """An amount that its vocabulary does not allow, with the key it stands under; `also` holds further ones."""

    def __init__(self, code: Code, key: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.code, self.key, self.message, self.remedy = code, key, message, remedy
        self.also: list[InvalidAmount] = []


Read = Callable[[Mapping[str, Quantity]], Share]


class Vocabulary(Struct, frozen=True):
    """One way of asking. `read` gets the non-zero amounts under `keys`, at least one of them."""

    name: str
    keys: tuple[str, ...]
    read: Read


class VocabularyOptions(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which vocabularies a cluster accepts beside the canonical one, and how they are measured."""

    vgpu_per_gpu: Annotated[int, Meta(ge=1, le=CORES_PER_CARD)] = 10
    nvidia_gpu: bool = False
    hami: bool = False


def vocabularies(
    names: Names, unit_mib: int = DEFAULT_UNIT_MIB, dialects: VocabularyOptions | None = None
) -> tuple[Vocabulary, ...]:
    """List the vocabularies of a cluster, the canonical one first."""
    dialects = dialects or VocabularyOptions()
    scheme = [vcuda(names.domain, unit_mib, unit_mib)]
    scheme += [vcuda(domain, own, unit_mib) for domain, own in ANCESTOR_UNITS_MIB.items() if domain != names.domain]
    # Under NVIDIA's own domain the name for people is NVIDIA's resource, which is read only where that is wanted.
    if names.cards != known.NVIDIA_GPU or (dialects.nvidia_gpu and not dialects.hami):
        scheme.append(Vocabulary(names.cards, (names.cards,), lambda asked: cards(names.cards, asked[names.cards])))
    scheme += [vgpu(key, dialects.vgpu_per_gpu) for key in known.AWS_VGPU]
    scheme.append(percent(known.NANO_PERCENT))
    if dialects.hami:
        scheme.append(hami(unit_mib))
    elif dialects.nvidia_gpu and names.cards != known.NVIDIA_GPU:
        scheme.append(whole_cards(known.NVIDIA_GPU))
    return tuple(scheme)


def vcuda(domain: str, own_unit_mib: int, unit_mib: int) -> Vocabulary:
    """`vcuda-core` and `vcuda-memory`, memory in the domain's own unit."""
    names = Names(domain)

    def read(asked: Mapping[str, Quantity]) -> Share:
        if names.core not in asked:
            raise InvalidAmount(
                Code.CORE_MISSING,
                names.memory,
                "memory without cores",
                f"add {names.core}: 1 to 99, or a multiple of 100",
            )
        cores, held = all_of(
            lambda: check_cores(names.core, whole_number(names.core, as_cores(names.core, asked[names.core]))),
            lambda: memory(names.memory, asked.get(names.memory), own_unit_mib, unit_mib),
        )
        return Share(cores, held)

    return Vocabulary(f"{domain}/vcuda", (names.core, names.memory), read)


def vgpu(key: str, per_gpu: int) -> Vocabulary:
    """Read AWS's virtual GPUs: so many make one card."""

    def read(asked: Mapping[str, Quantity]) -> Share:
        count = check_cores(key, whole_number(key, asked[key], per_gpu), per_gpu)
        return share_following_cores(max(1, count * CORES_PER_CARD // per_gpu))

    return Vocabulary(key, (key,), read)


def percent(key: str) -> Vocabulary:
    """Read nano-gpu's percentage of one GPU."""
    return Vocabulary(key, (key,), lambda asked: share_following_cores(check_cores(key, whole_number(key, asked[key]))))


def cards(key: str, amount: Quantity) -> Share:
    """Read cards as people write them: "0.3", or "2"."""
    positive(key, amount)
    hundredths, beyond = divmod(amount.nanos * CORES_PER_CARD, NANO)
    bounded(key, hundredths // CORES_PER_CARD, 1)
    if beyond or (hundredths > CORES_PER_CARD and hundredths % CORES_PER_CARD):
        message = (
            "finer than a hundredth of a card"
            if hundredths < CORES_PER_CARD
            else "neither a part of one card nor whole cards"
        )
        near = [f'"{cores / CORES_PER_CARD:g}"' for cores in valid_near(hundredths)]
        raise InvalidAmount(Code.CORE_INVALID, key, message, f"ask for {' or '.join(near)}")
    return share_following_cores(hundredths)


def whole_cards(key: str) -> Vocabulary:
    """Read NVIDIA's own resource: whole cards only."""
    return Vocabulary(key, (key,), lambda asked: Share(whole_number(key, asked[key], 1) * CORES_PER_CARD))


def hami(unit_mib: int) -> Vocabulary:
    """Read HAMi's trio: cards, MiB on each, percent of each."""
    gpu, mem, cores, part = known.NVIDIA_GPU, known.HAMI_MEMORY, known.HAMI_CORES, known.HAMI_MEMORY_PERCENT

    def read(asked: Mapping[str, Quantity]) -> Share:
        count, fraction, each = all_of(
            lambda: whole_number(gpu, asked[gpu], 1) if gpu in asked else 1,
            lambda: whole_number(cores, asked[cores]) if cores in asked else CORES_PER_CARD,
            lambda: memory(mem, asked.get(mem), 1, unit_mib),
        )
        if fraction > CORES_PER_CARD:
            raise InvalidAmount(Code.CORE_INVALID, cores, "more than one card's cores", "ask for 1 to 100")
        if part in asked and whole_number(part, asked[part]) != fraction:
            raise InvalidAmount(
                Code.MEMORY_INVALID, part, "another part of the memory than of the cores", f"ask in {mem} instead"
            )
        if cores not in asked and mem in asked:
            raise InvalidAmount(
                Code.CORE_MISSING, mem, "a share of memory without a share of cores", f"add {cores}: 1 to 99"
            )
        if count > 1 and fraction < CORES_PER_CARD:
            raise InvalidAmount(
                Code.CORE_INVALID, gpu, "a fraction of each of several cards", f"ask for one card, or leave {cores} out"
            )
        try:
            held = checked_count(each * count, unit_mib)
        except QuantityError as wrong:
            raise InvalidAmount(Code.MEMORY_INVALID, mem, str(wrong), "ask for less on each card") from None
        return Share(count * fraction, held, follows=fraction < CORES_PER_CARD and not each)

    return Vocabulary("hami", (gpu, mem, cores, part), read)


def all_of(*reads: Callable[[], int]) -> list[int]:
    """Read several amounts; whatever is wrong with any of them is raised together."""
    values: list[int] = []
    wrong: list[InvalidAmount] = []
    for read in reads:
        try:
            values.append(read())
        except InvalidAmount as misread:
            wrong.append(misread)
    if wrong:
        wrong[0].also += wrong[1:]
        raise wrong[0]
    return values


def share_following_cores(cores: int) -> Share:
    """Give a share in a vocabulary that knows no memory: as much of the card's memory as of its cores."""
    return Share(cores, follows=cores < CORES_PER_CARD)


def positive(key: str, amount: Quantity) -> None:
    """Refuse a negative amount."""
    if amount.nanos < 0:
        raise InvalidAmount(Code.QUANTITY_INVALID, key, "an amount cannot be negative", "ask for a positive amount")


def whole_number(key: str, amount: Quantity, step: int = CORES_PER_CARD) -> int:
    """Take an amount that only makes sense as a whole, positive number; `step` of them make a card."""
    positive(key, amount)
    if not amount.is_whole:
        raise InvalidAmount(Code.QUANTITY_INVALID, key, "not a whole number", advice(amount.whole, step))
    return bounded(key, amount.whole, step)


def as_cores(key: str, amount: Quantity) -> Quantity:
    """Refuse 0.5 for half a card with the number that was meant: cores are hundredths."""
    if 0 < amount.nanos < NANO:
        meant = max(1, amount.nanos * CORES_PER_CARD // NANO)
        raise InvalidAmount(Code.QUANTITY_INVALID, key, "not a whole number; 100 is one GPU", f"ask for {meant}")
    return amount


def bounded(key: str, count: int, step: int) -> int:
    """Refuse more cards than there can be on one node."""
    if count > MAX_CARDS * step:
        raise InvalidAmount(
            Code.CORE_INVALID, key, "more cards than any node has", f"ask for at most {MAX_CARDS * step}"
        )
    return count


def check_cores(key: str, count: int, step: int = CORES_PER_CARD) -> int:
    """Hold an amount to what one container can get: a part of one GPU, or whole GPUs; `step` make one."""
    if count > step and count % step:
        message = f"neither a part of one GPU (1 to {step - 1}) nor whole GPUs (multiples of {step})"
        raise InvalidAmount(Code.CORE_INVALID, key, message, advice(count, step))
    return count


def advice(count: int, step: int) -> str:
    """Say what to ask for instead."""
    return f"ask for {' or '.join(map(str, valid_near(count, step)))}"


def valid_near(count: int, step: int = CORES_PER_CARD) -> list[int]:
    """Give the amounts nearest to a wrong one that would be right: part of a card, or whole cards."""
    if count <= step or count % step == 0:
        return [max(1, count)]
    return [count // step * step, -(-count // step) * step]


def memory(key: str, amount: Quantity | None, own_unit_mib: int, unit_mib: int) -> int:
    """Convert a memory amount of a vocabulary into canonical units; absent is 0."""
    if amount is None:
        return 0
    try:
        return checked_count(units_for(requested_mib(amount, own_unit_mib), unit_mib), unit_mib)
    except QuantityError as wrong:
        raise InvalidAmount(
            Code.MEMORY_INVALID,
            key,
            str(wrong),
            f"ask for a whole number of {own_unit_mib} MiB units, or for bytes such as 8Gi",
        ) from None
