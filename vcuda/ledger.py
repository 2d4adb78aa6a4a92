"""The ledger of a namespace: which pod holds how much of which quota. One small document, changed as a whole.

Each pod that was charged is in it by its uid, so that it is charged once however often somebody asks, and freed when
it is gone and not before. A charge is a *reservation* from the moment a pod is admitted until the controller has seen
the pod, and *usage* from then on. Pods with equal charges stand together, each in 22 characters: a namespace of ten
thousand pods fits a ConfigMap with room to spare. The quotas stand in it, too, so that who writes a charge holds
to the same ceilings as everybody else, whatever he has heard of.

    {"v": 1, "namespace": "<uid>", "state": "open", "quotasAt": 4711, "quotas": [...], "holders": [...],
     "groups": [{"charge": {"model": "A100", "cores": 50, "memoryMiB": 7680}, "since": 1700000000, "pods": "<uids>"}]}
"""

import binascii
import uuid
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.charging import (
    DEFAULT_REMEDIES,
    Charge,
    ChargeFit,
    Demand,
    Holder,
    QuotaUsage,
    RemedyContext,
    exceeded,
    fit_charge,
    model_by_name,
)
from vcuda.decision import Code, Reason
from vcuda.decoding import decoder_for
from vcuda.namespace_policy import Mode, NamespacePolicy, combine_policies
from vcuda.pod_options import PodOptions
from vcuda.quota import Quota

VERSION = 1
# 16 bytes in base64, without its padding.
UID_BYTES = 16
WIDTH = 22
# ConfigMaps hold a mebibyte; what is beyond it could not be written, and nothing could be freed any more.
MAX_BYTES = 900_000
MAX_HOLDERS = 8
# What stands around the pods of a group beside the model's name, and what one holder takes: names have their limits.
GROUP_BYTES, HOLDER_BYTES = 160, 600

# A pod's uid as it is written here.
PodKey = str


class LedgerState(StrEnum):
    """A ledger is wanted by who needs one, closed while it is rebuilt, and open when it is known to be right."""

    WANTED = "wanted"
    CLOSED = "closed"
    OPEN = "open"


class ChargeGroup(Struct, frozen=True, omit_defaults=True):
    """Pods with the same charge, reserved in the same second or, with none, in use."""

    charge: Charge
    pods: str
    since: int | None = None


class LedgerDocument(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A ledger as it is written."""

    v: int
    namespace: str
    state: LedgerState
    quotas_at: int = 0
    quotas: tuple[Quota, ...] = ()
    versions: dict[str, int] = {}
    groups: tuple[ChargeGroup, ...] = ()
    holders: tuple[Holder, ...] = ()


DECODER = decoder_for(LedgerDocument)
# Where a charge stands: what is charged, and since when it is only reserved.
LedgerEntry = tuple[Charge, int | None]


def pack_uid(uid: str) -> PodKey:
    """Write a pod's uid short; a ValueError if it is none."""
    try:
        number = binascii.unhexlify(uid.replace("-", ""))
    except ValueError:
        number = b""
    if len(number) != UID_BYTES:
        raise ValueError(f"{uid!r} is no uid of a pod")
    return binascii.b2a_base64(number, newline=False)[:WIDTH].decode()


def unpack_uid(short: PodKey) -> str:
    """Give the uid again."""
    return str(uuid.UUID(bytes=binascii.a2b_base64(f"{short}==")))


class Ledger:
    """A ledger to be changed, by one who then writes it back as a whole. Copy it before a change that may be undone."""

    def __init__(self, namespace: str = "", state: LedgerState = LedgerState.WANTED) -> None:
        self.namespace, self.state = namespace, state
        self.quotas: tuple[Quota, ...] = ()
        self.quotas_at = 0
        self.versions: dict[str, int] = {}
        self.holders: tuple[Holder, ...] = ()
        self._groups: dict[LedgerEntry, str] = {}
        self._places: dict[PodKey, LedgerEntry] = {}
        self._usage: QuotaUsage | None = None
        self._quotas_size: int | None = None
        # Counts what was changed, so that who wrote nothing into it need not write it back.
        self.changes = 0

    def copy(self) -> "Ledger":
        """Give an independent one."""
        other = Ledger(self.namespace, self.state)
        other.quotas, other.quotas_at, other.holders = self.quotas, self.quotas_at, self.holders
        other.versions, other._quotas_size = self.versions, self._quotas_size
        other._groups, other._places = self._groups.copy(), self._places.copy()
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and encode_ledger(self) == encode_ledger(other)

    __hash__ = None  # type: ignore[assignment] # it changes

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, pod: PodKey) -> bool:
        return pod in self._places

    def place(self, pod: PodKey) -> LedgerEntry | None:
        """Give what a pod is charged, and since when it is reserved; None if it is not charged."""
        return self._places.get(pod)

    def charge(self, pod: PodKey) -> Charge:
        """Give what a pod is charged; a KeyError if it is not."""
        return self._places[pod][0]

    def reservations(self) -> Iterator[tuple[PodKey, int]]:
        """Give the pods that nobody has seen yet, and since when they are expected."""
        for (_, since), pods in self._groups.items():
            if since is not None:
                for pod in split_uids(pods):
                    yield pod, since

    def pods(self) -> KeysView[PodKey]:
        """Give all pods that are charged."""
        return self._places.keys()

    def groups(self) -> Iterator[ChargeGroup]:
        """Give all charges, equal ones together."""
        for (charge, since), pods in self._groups.items():
            yield ChargeGroup(charge, pods, since)

    def put(self, pod: PodKey, charge: Charge, since: int | None) -> None:
        """Charge a pod, or change its charge."""
        self._take_out(pod)
        place = charge, since
        self._places[pod] = place
        self._groups[place] = self._groups.get(place, "") + pod
        self._touch()

    def remove(self, pod: PodKey) -> bool:
        """Free what a pod held; False if it held nothing."""
        found = self._take_out(pod)
        if found:
            self._touch()
        return found

    def set_quotas(self, quotas: Iterable[Quota], at: int, versions: Mapping[str, int] | None = None) -> None:
        """Hold to these quotas; `at` is the version up to which they are known, `versions` that of each."""
        self.quotas, self.quotas_at, self.versions = tuple(quotas), at, dict(versions or {})
        self._quotas_size = None
        self._touch()

    def set_state(self, state: LedgerState, namespace: str) -> None:
        """Open or close it, for one very namespace."""
        if (state, namespace) != (self.state, self.namespace):
            self.state, self.namespace = state, namespace
            self._touch()

    def set_holders(self, holders: Iterable[Holder]) -> None:
        """Name those who hold most."""
        if (told := tuple(holders)[:MAX_HOLDERS]) != self.holders:
            self.holders = told
            self._touch()

    @property
    def policy(self) -> NamespacePolicy:
        """What the quotas say together."""
        return combine_policies([quota.policy for quota in self.quotas])

    @property
    def usage(self) -> QuotaUsage:
        """Where the namespace stands now."""
        if self._usage is None:
            used: dict[str, Amounts] = {}
            reserved: dict[str, Amounts] = {}
            for (charge, since), pods in self._groups.items():
                into, count = (used if since is None else reserved), len(pods) // WIDTH
                total = charge.amounts.times(count)
                into[charge.model] = into.get(charge.model, Amounts()) + total
            self._usage = QuotaUsage(self.quotas, used, reserved, self.holders)
        return self._usage

    def size(self) -> int:
        """Say how long the document can be at the most: pods, what stands around them, quotas and holders."""
        if self._quotas_size is None:
            self._quotas_size = len(msgspec.json.encode((self.quotas, self.versions)))
        around = sum(GROUP_BYTES + len(charge.model) for charge, _ in self._groups)
        return WIDTH * len(self._places) + around + self._quotas_size + MAX_HOLDERS * HOLDER_BYTES

    def reserve(self, pod: PodKey, charge: Charge, now_s: int) -> None:
        """Charge a new pod, keeping what is known of the standing: many are reserved in a row."""
        usage = self.usage
        self.put(pod, charge, now_s)
        usage.take(model_by_name(charge.model), charge.amounts)
        self._usage = usage

    def _touch(self) -> None:
        self.changes += 1
        self._usage = None

    def _take_out(self, pod: PodKey) -> bool:
        place = self._places.pop(pod, None)
        if place is None:
            return False
        pods = self._groups[place]
        at = pods.find(pod)
        while at % WIDTH:  # somebody else's end and the next one's beginning
            at = pods.find(pod, at + 1)
        rest = pods[:at] + pods[at + WIDTH :]
        if rest:
            self._groups[place] = rest
        else:
            del self._groups[place]
        return True


def split_uids(pods: str) -> Iterator[PodKey]:
    """Give the pods of a group."""
    for at in range(0, len(pods), WIDTH):
        yield pods[at : at + WIDTH]


def encode_ledger(ledger: Ledger) -> str:
    """Write a ledger."""
    document = LedgerDocument(
        v=VERSION,
        namespace=ledger.namespace,
        state=ledger.state,
        quotas_at=ledger.quotas_at,
        quotas=ledger.quotas,
        versions=ledger.versions,
        groups=tuple(ledger.groups()),
        holders=ledger.holders,
    )
    return msgspec.json.encode(document).decode()


def decode_ledger(text: str) -> Ledger:
    """Read a ledger; a ValueError says what is wrong with it."""
    document = DECODER.decode(text)
    if document.v != VERSION:
        raise ValueError(f"ledger version {document.v} is not known here, {VERSION} is")
    ledger = Ledger(document.namespace, document.state)
    ledger.holders = document.holders
    ledger.set_quotas(document.quotas, document.quotas_at, document.versions)
    for group in document.groups:
        if len(group.pods) % WIDTH:
            raise ValueError("a group of pods is cut off")
        place = group.charge, group.since
        ledger._groups[place] = ledger._groups.get(place, "") + group.pods  # noqa: SLF001 - our own
        for pod in split_uids(group.pods):
            if pod in ledger._places:  # noqa: SLF001
                raise ValueError(f"pod {unpack_uid(pod)} is charged twice")
            ledger._places[pod] = place  # noqa: SLF001
    return ledger


def reserved_pods_in(text: str) -> Iterator[PodKey]:
    """Give the pods that are reserved in a ledger as it is written; none if it is no ledger."""
    try:
        groups = DECODER.decode(text).groups
    except ValueError:
        return
    for group in groups:
        if group.since is not None:
            yield from split_uids(group.pods)


class ChargeRequest(Struct, frozen=True):
    """A pod that wants to be charged: what it needs on cards of a size, and where it may run."""

    pod: PodKey
    demand: Demand
    options: PodOptions
    cards: Mapping[str, int]
    dry_run: bool = False
    remedies: RemedyContext = DEFAULT_REMEDIES


class ChargeResult(Struct, frozen=True):
    """What a ledger says to a claim. `audited` are reasons that would refuse it if its quota were enforced."""

    charge: Charge | None = None
    reasons: tuple[Reason, ...] = ()
    audited: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()


def reserve(ledger: Ledger, claim: ChargeRequest, now_s: int, cluster_mode: Mode) -> ChargeResult:
    """Charge a pod that is about to be created, once; refuse it if there is no room."""
    enforced = ledger.policy.effective_mode(cluster_mode) is Mode.ENFORCE
    if ledger.state is not LedgerState.OPEN:
        told = (ledger_not_open(ledger.state),)
        return ChargeResult(reasons=told) if enforced else ChargeResult(audited=told)
    if (found := ledger.place(claim.pod)) is not None:
        return ChargeResult(found[0])
    if ledger.size() > MAX_BYTES:
        return ChargeResult(reasons=(ledger_full(ledger),))
    found_fit: ChargeFit = fit_charge(ledger.usage, claim.demand, claim.options, claim.cards, claim.remedies)
    if found_fit.reasons and enforced:
        return ChargeResult(reasons=found_fit.reasons)
    if not claim.dry_run:
        ledger.reserve(claim.pod, found_fit.charge, now_s)
    return ChargeResult(found_fit.charge, audited=found_fit.reasons)


def mark_used(ledger: Ledger, pod: PodKey) -> None:
    """Make a reservation usage: its pod is there."""
    if (found := ledger.place(pod)) is not None:
        ledger.put(pod, found[0], None)


def adjust_charge(ledger: Ledger, pod: PodKey, charge: Charge, cluster_mode: Mode = Mode.ENFORCE) -> ChargeResult:
    """Make a pod's charge what it will really hold, as usage: turn, move, lower or obtain it; or refuse.

    For whoever is about to give the pod its GPUs. What it held before counts as free, and what does not grow is
    never refused: lowering a charge must work in a namespace that is over its quota.
    """
    if ledger.state is not LedgerState.OPEN:
        return ChargeResult(reasons=(ledger_not_open(ledger.state),))
    before = ledger.place(pod)
    if before is None and ledger.size() > MAX_BYTES:
        return ChargeResult(reasons=(ledger_full(ledger),))
    trial = ledger.copy()
    trial.remove(pod)
    usage, model = trial.usage, model_by_name(charge.model)
    held = usage.charged(model_by_name(before[0].model), before[0].amounts) if before else Amounts()
    asked = usage.charged(model, charge.amounts)
    missing = [key for key in usage.short(model, charge.amounts) if asked[key] > held[key]]
    reasons = tuple(exceeded(key, charge.amounts, model, usage) for key in missing)
    enforced = ledger.policy.effective_mode(cluster_mode) is Mode.ENFORCE
    if reasons and enforced:
        return ChargeResult(reasons=reasons)
    ledger.put(pod, charge, None)
    return ChargeResult(charge, audited=reasons)


def merge_newer_quotas(ledger: Ledger, quotas: Iterable[Quota], versions: Mapping[str, int]) -> None:
    """Take quotas over that are newer than those in the ledger, each by itself; take none away.

    For who hears of quotas from several sides, some of them late. That one is gone is for the controller to say; what
    it took away does not come back by one who has not heard of it.
    """
    known = ledger.versions
    newer = {each.name: each for each in quotas if versions.get(each.name, 0) > known.get(each.name, ledger.quotas_at)}
    if not newer:
        return
    held = {quota.name: quota for quota in ledger.quotas}
    # A quota of its own takes the place of the default one, which has no version.
    kept = {name: quota for name, quota in held.items() if ledger.versions.get(name)}
    merged = kept | newer
    current = {name: max(versions.get(name, 0), known.get(name, 0)) for name in merged}
    ledger.set_quotas([merged[name] for name in sorted(merged)], ledger.quotas_at, current)


def reconcile_quotas(
    ledger: Ledger, quotas: Iterable[Quota], versions: Mapping[str, int], at: int, is_gone: Callable[[str], bool]
) -> None:
    """Make the quotas those there are: what is older than in the ledger does not count, what is missing is asked for.

    `is_gone` is asked of each quota in the ledger that was not heard of, and has to know.
    """
    found = {quota.name: quota for quota in quotas}
    known = {name: versions.get(name, 0) for name in found}
    for quota in ledger.quotas:
        version = ledger.versions.get(quota.name, 0)
        if quota.name in found:
            if version > known[quota.name]:
                found[quota.name], known[quota.name] = quota, version
        elif version and not is_gone(quota.name):
            found[quota.name], known[quota.name] = quota, version
    wanted = tuple(found[name] for name in sorted(found))
    # Their versions count even where they say the same: what was said in between must not come back.
    if (wanted, known) != (ledger.quotas, ledger.versions):
        ledger.set_quotas(wanted, at, known)


def ledger_not_open(state: LedgerState) -> Reason:
    """Say that nothing is charged while it is not known what is charged already."""
    lost = state is LedgerState.CLOSED
    return Reason(
        code=Code.LEDGER_NOT_OPEN,
        field="metadata.namespace",
        value="",
        message="the ledger of this namespace was lost and is being rebuilt; it opens when no pod that was admitted "
        "before can appear any more"
        if lost
        else "this namespace has no ledger yet; Quotient's controller makes it",
        remedy="try again in a minute" if lost else "try again; if it stays so, see whether the controller runs",
    )


def ledger_full(ledger: Ledger) -> Reason:
    """Say that a namespace has more pods than can be kept account of."""
    return Reason(
        code=Code.QUOTA_EXCEEDED,
        field="metadata.namespace",
        value=str(len(ledger)),
        message=f"this namespace holds {len(ledger)} pods with GPUs, and its ledger has no room for more",
        remedy="use another namespace, or wait until pods have ended",
        numbers={"asked": 1, "used": len(ledger)},
    )
