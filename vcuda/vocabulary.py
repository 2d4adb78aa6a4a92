"""The vocabularies in which pods request GPUs: resource names of several systems, read into one kind of share.

A vocabulary is the set of resource names of one system and a function from their amounts to a `Share`. To support
another system, add its names to `vcuda.names` and an entry to `build_vocabularies`.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from vcuda import names as known
from vcuda.decision import Code
from vcuda.memory_units import DEFAULT_UNIT_MIB, check_unit_count, requested_mib, units_for
from vcuda.names import Names
from vcuda.quantity import NANO, Quantity, QuantityError

CORES_PER_CARD = 100
# Far beyond any node: bounds the numbers that reach the ledger and the kubelet.
MAX_CARDS = 1024
# The GPUs of the largest common node. A fraction of cores below this, such as 1.5, was meant as a number of GPUs.
MAX_CARDS_OF_A_NODE = 16
WHOLE_CARDS_ADVICE = "write a number of GPUs such as 2"
# What 1 of `vcuda-memory` is under tencent.com and under nvidia.com.
ANCESTOR_UNITS_MIB = dict(zip(known.ANCESTOR_DOMAINS, (256, 1), strict=True))


class Share(Struct, frozen=True):
    """What one container requests of its node's GPUs, in whatever vocabulary it was written.

    `memory_units` is 0 for whole cards without a minimum, and where `memory_follows_cores`: such a container gets the
    same share of its card's memory as of its cores. `bursts`: it may use all cores of its card that are free, unless
    the pod or its namespace says otherwise.
    """

    cores: int
    memory_units: int = 0
    # The node plugin stores shares in pods.json; this is the key there.
    memory_follows_cores: bool = field(default=False, name="follows")
    # Canonical resources cannot express it, so the webhook writes a core limit on the pod instead. Unset, it is not
    # stored.
    bursts: bool | UnsetType = UNSET

    @property
    def whole_cards(self) -> int:
        """How many whole cards it requests; 0 for part of a card."""
        return self.cores // CORES_PER_CARD

    @property
    def memory_count(self) -> int:
        """The amount of the memory resource on the pod: as requested, or a token of one unit per card.

        Every GPU container has both resources, because the node plugin identifies it by the pair.
        """
        return self.memory_units or max(1, self.whole_cards)


class InvalidAmount(Exception):  # noqa: N818 - a mistake in a manifest, not a fault of the program
    """An amount that its vocabulary does not allow, and its resource name; `others` are further ones, if any."""

    def __init__(self, code: Code, key: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.code, self.key, self.message, self.remedy = code, key, message, remedy
        self.others: list[InvalidAmount] = []


ReadShare = Callable[[Mapping[str, Quantity]], Share]


class Vocabulary(Struct, frozen=True):
    """The resource names of one system. `read` gets the non-zero amounts under `keys`, at least one of them.

    `advice` says for each key what to write there.
    """

    name: str
    keys: tuple[str, ...]
    read: ReadShare
    advice: tuple[str, ...]

    def advice_for(self, key: str) -> str:
        return self.advice[self.keys.index(key)]


class VocabularyOptions(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which optional vocabularies a cluster accepts, and how many virtual GPUs make one GPU."""

    vgpu_per_gpu: Annotated[int, Meta(ge=1, le=CORES_PER_CARD)] = 10
    nvidia_gpu: bool = False
    hami: bool = False


def build_vocabularies(
    names: Names, unit_mib: int = DEFAULT_UNIT_MIB, options: VocabularyOptions | None = None
) -> tuple[Vocabulary, ...]:
    """Return the vocabularies of a cluster, the canonical one first. No resource name is in two of them."""
    options = options or VocabularyOptions()
    vocabularies = [vcuda_vocabulary(names.domain, unit_mib, unit_mib)]
    vocabularies += [
        vcuda_vocabulary(domain, own_unit_mib, unit_mib)
        for domain, own_unit_mib in ANCESTOR_UNITS_MIB.items()
        if domain != names.domain
    ]
    # With the domain nvidia.com our resource for cards has the name of NVIDIA's own: it needs the same opt-in.
    if names.cards != known.NVIDIA_GPU or (options.nvidia_gpu and not options.hami):
        vocabularies.append(cards_vocabulary(names.cards))
    vocabularies += [vgpu_vocabulary(key, options.vgpu_per_gpu) for key in known.AWS_VGPU]
    vocabularies.append(percent_vocabulary(known.NANO_PERCENT))
    if options.hami:
        vocabularies.append(hami_vocabulary(unit_mib))
    elif options.nvidia_gpu and names.cards != known.NVIDIA_GPU:
        vocabularies.append(nvidia_vocabulary(known.NVIDIA_GPU))
    return tuple(vocabularies)


def vcuda_vocabulary(domain: str, own_unit_mib: int, unit_mib: int) -> Vocabulary:
    """`vcuda-core` and `vcuda-memory` of a domain, with memory in the domain's own unit."""
    names = Names(domain)

    def read(amounts: Mapping[str, Quantity]) -> Share:
        if names.core not in amounts:
            raise InvalidAmount(
                Code.CORE_MISSING,
                names.memory,
                "memory is requested without cores",
                f"add {names.core}: 1 to 99, or a multiple of 100",
            )
        cores, memory_units = read_all(
            lambda: read_cores(names.core, amounts[names.core]),
            lambda: read_memory_units(names.memory, amounts.get(names.memory), own_unit_mib, unit_mib),
        )
        return Share(cores, memory_units)

    advice = part_or_whole_advice(CORES_PER_CARD), memory_advice(own_unit_mib)
    return Vocabulary(f"{domain}/vcuda", (names.core, names.memory), read, advice)


def vgpu_vocabulary(key: str, per_gpu: int) -> Vocabulary:
    """AWS's virtual GPUs: `per_gpu` of them make one GPU."""

    def read(amounts: Mapping[str, Quantity]) -> Share:
        count = check_part_or_whole(key, whole_number(key, amounts[key], per_gpu), per_gpu)
        return share_following_cores(max(1, count * CORES_PER_CARD // per_gpu))

    return Vocabulary(key, (key,), read, (part_or_whole_advice(per_gpu),))


def percent_vocabulary(key: str) -> Vocabulary:
    """nano-gpu's percentage of one GPU."""

    def read(amounts: Mapping[str, Quantity]) -> Share:
        return share_following_cores(check_part_or_whole(key, whole_number(key, amounts[key])))

    return Vocabulary(key, (key,), read, (part_or_whole_advice(CORES_PER_CARD),))


def cards_vocabulary(key: str) -> Vocabulary:
    """Cards: "0.3" is part of a card, "2" is two whole cards."""

    def read(amounts: Mapping[str, Quantity]) -> Share:
        amount = amounts[key]
        check_not_negative(key, amount)
        hundredths, rest = divmod(amount.nanos * CORES_PER_CARD, NANO)
        check_maximum(key, hundredths // CORES_PER_CARD, 1)
        if rest or (hundredths > CORES_PER_CARD and hundredths % CORES_PER_CARD):
            message = (
                "part of one GPU must be a multiple of 0.01"
                if hundredths < CORES_PER_CARD
                else "must be less than 1 (part of one GPU) or a whole number (whole GPUs)"
            )
            valid = [f'"{cores / CORES_PER_CARD:g}"' for cores in nearest_valid(hundredths)]
            raise InvalidAmount(Code.CORE_INVALID, key, message, f"ask for {' or '.join(valid)}")
        return share_following_cores(hundredths)

    return Vocabulary(key, (key,), read, ('write part of one GPU such as "0.3", or whole GPUs such as "2"',))


def nvidia_vocabulary(key: str) -> Vocabulary:
    """NVIDIA's own resource: whole cards only."""

    def read(amounts: Mapping[str, Quantity]) -> Share:
        return Share(whole_number(key, amounts[key], 1) * CORES_PER_CARD)

    return Vocabulary(key, (key,), read, (WHOLE_CARDS_ADVICE,))


def hami_vocabulary(unit_mib: int) -> Vocabulary:
    """HAMi's resources: a number of cards, MiB on each, percent of the cores of each, percent of its memory."""
    gpus, mib, cores, percent = known.NVIDIA_GPU, known.HAMI_MEMORY, known.HAMI_CORES, known.HAMI_MEMORY_PERCENT

    def read(amounts: Mapping[str, Quantity]) -> Share:
        if amounts.keys() <= {known.HAMI_PRIORITY}:
            message, remedy = "a priority is requested without GPUs", f"add {gpus}, or remove {known.HAMI_PRIORITY}"
            raise InvalidAmount(Code.CORE_MISSING, known.HAMI_PRIORITY, message, remedy)
        count, per_card, units, memory_percent = read_all(
            lambda: whole_number(gpus, amounts[gpus], 1) if gpus in amounts else 1,
            lambda: read_percent(cores, amounts.get(cores)),
            lambda: read_memory_units(mib, amounts.get(mib), 1, unit_mib),
            lambda: read_percent(percent, amounts.get(percent)),
        )
        if units:
            memory_percent = 0  # as HAMi does, if both are set
        # As HAMi does: all cores if all memory is requested, which is the default, and otherwise any that are free.
        bursts = not per_card and bool(units or memory_percent % CORES_PER_CARD)
        per_card = per_card or (memory_percent or 1 if bursts else CORES_PER_CARD)
        if count > 1 and per_card < CORES_PER_CARD:
            parts = ", ".join(key for key in (mib, cores, percent) if key in amounts)
            message, remedy = "a container cannot have parts of several GPUs", f"ask for 1, or remove {parts}"
            raise InvalidAmount(Code.CORE_INVALID, gpus, message, f"{remedy} to get whole GPUs")
        # Memory in percent has no meaning in MiB until the card is known, unless it follows the cores.
        if memory_percent not in (0, per_card):
            message = f"the percentage of memory must equal the percentage of cores, {per_card}"
            remedy = f"ask for {per_card}, use {mib} instead, or remove {cores if count == 1 else percent}"
            raise InvalidAmount(Code.MEMORY_INVALID, percent, message, remedy)
        try:
            memory_units = check_unit_count(units * count, unit_mib)
        except QuantityError as error:
            raise InvalidAmount(Code.MEMORY_INVALID, mib, str(error), "ask for less memory per GPU") from None
        follows = per_card < CORES_PER_CARD and not units
        return Share(count * per_card, memory_units, memory_follows_cores=follows, bursts=bursts or UNSET)

    advice = (
        WHOLE_CARDS_ADVICE,
        memory_advice(1),
        f"write 1 to {CORES_PER_CARD}",
        f"write 1 to {CORES_PER_CARD}; beside {cores}, the same number",
        "write 0 or 1",
    )
    return Vocabulary("hami", (gpus, mib, cores, percent, known.HAMI_PRIORITY), read, advice)


def read_percent(key: str, amount: Quantity | None) -> int:
    """Return a percentage of one card; 0 if absent."""
    percent = 0 if amount is None else whole_number(key, amount)
    if percent > CORES_PER_CARD:
        message, remedy = f"more than {CORES_PER_CARD} percent of one GPU", f"ask for 1 to {CORES_PER_CARD}"
        raise InvalidAmount(Code.CORE_INVALID, key, message, remedy)
    return percent


def part_or_whole_advice(per_card: int) -> str:
    return f"write 1 to {per_card - 1}, or a multiple of {per_card}" if per_card > 1 else WHOLE_CARDS_ADVICE


def memory_advice(own_unit_mib: int) -> str:
    unit = "MiB" if own_unit_mib == 1 else f"{own_unit_mib} MiB units"
    return f"write a number of {unit}, or bytes such as 8Gi"


def read_all(*reads: Callable[[], int]) -> list[int]:
    """Read several amounts; if any is invalid, raise one InvalidAmount that carries all errors."""
    values: list[int] = []
    errors: list[InvalidAmount] = []
    for read in reads:
        try:
            values.append(read())
        except InvalidAmount as error:
            errors.append(error)
    if errors:
        errors[0].others += errors[1:]
        raise errors[0]
    return values


def share_following_cores(cores: int) -> Share:
    """Return a share of a vocabulary without memory: part of a card has the same part of its memory."""
    return Share(cores, memory_follows_cores=cores < CORES_PER_CARD)


def check_not_negative(key: str, amount: Quantity) -> None:
    if amount.nanos < 0:
        raise InvalidAmount(Code.QUANTITY_INVALID, key, "must not be negative", "ask for a positive amount")


def whole_number(key: str, amount: Quantity, per_card: int = CORES_PER_CARD) -> int:
    """Return an amount as an integer; InvalidAmount if it is negative, fractional or too large.

    `per_card` of them make a card, here and below.
    """
    check_not_negative(key, amount)
    if not amount.is_whole:
        raise InvalidAmount(Code.QUANTITY_INVALID, key, "must be a whole number", ask_for_valid(amount.whole, per_card))
    return check_maximum(key, amount.whole, per_card)


def read_cores(key: str, amount: Quantity) -> int:
    # 0.5 and 1.5 are cards to their author: rounding them up to 1 or 2 cores would be the wrong advice.
    if 0 < amount.nanos < MAX_CARDS_OF_A_NODE * NANO and not amount.is_whole:
        message = f"must be a whole number, where {CORES_PER_CARD} is one GPU"
        cards, rest = divmod(amount.nanos, NANO)
        remedy = f"ask for {max(1, rest * CORES_PER_CARD // NANO)}"
        if cards:
            written = f"{Decimal(amount.nanos).scaleb(-9).normalize():f}"
            valid = f"{cards * CORES_PER_CARD} or {(cards + 1) * CORES_PER_CARD}"
            remedy = f"{written} GPUs cannot be requested: ask for {valid}"
        raise InvalidAmount(Code.QUANTITY_INVALID, key, message, remedy)
    return check_part_or_whole(key, whole_number(key, amount))


def check_maximum(key: str, count: int, per_card: int) -> int:
    maximum = MAX_CARDS * per_card
    if count > maximum:
        message = f"more than the maximum of {MAX_CARDS} GPUs per container"
        raise InvalidAmount(Code.CORE_INVALID, key, message, f"ask for at most {maximum}")
    return count


def check_part_or_whole(key: str, count: int, per_card: int = CORES_PER_CARD) -> int:
    """Return a count that is part of one card, or whole cards; InvalidAmount otherwise."""
    if count > per_card and count % per_card:
        message = f"must be 1 to {per_card - 1} (part of one GPU) or a multiple of {per_card} (whole GPUs)"
        raise InvalidAmount(Code.CORE_INVALID, key, message, ask_for_valid(count, per_card))
    return count


def ask_for_valid(count: int, per_card: int) -> str:
    return f"ask for {' or '.join(map(str, nearest_valid(count, per_card)))}"


def nearest_valid(count: int, per_card: int = CORES_PER_CARD) -> list[int]:
    """Return the valid amounts nearest to a count: the count itself, or the whole cards below and above."""
    if count <= per_card or count % per_card == 0:
        return [max(1, count)]
    return [count // per_card * per_card, -(-count // per_card) * per_card]


def read_memory_units(key: str, amount: Quantity | None, own_unit_mib: int, unit_mib: int) -> int:
    """Convert an amount of memory, in a vocabulary's own unit or in bytes, into canonical units; 0 if absent."""
    if amount is None:
        return 0
    try:
        return check_unit_count(units_for(requested_mib(amount, own_unit_mib), unit_mib), unit_mib)
    except QuantityError as error:
        remedy = f"ask for {own_unit_mib} MiB units such as 32, or for bytes such as 8Gi"
        raise InvalidAmount(Code.MEMORY_INVALID, key, str(error), remedy) from None
