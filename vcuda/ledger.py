"""The ledger of a namespace: which pod is charged how much, and the quotas that limit it. One small document.

Each charged pod is an entry under its UID, so that it is charged once however often the API server asks, and released
once. An entry is *reserved* from the moment its pod is admitted until the controller has seen the pod, and *used* from
then on. The quotas are part of the document, so that every replica that writes a charge checks it against the same hard
limits, however old its own view of the quotas is. A compare-and-swap replaces the document as a whole.

    {"v": 1, "namespace": "<uid>", "state": "open", "quotasAt": 4711, "quotas": [...], "holders": [...],
     "groups": [{"charge": {"model": "A100", "cores": 50, "memoryMiB": 7680}, "since": 1700000000, "pods": "<uids>"}],
     "names": {"<uid>": "train-0"}, "schedule": {"writers": {"3f9c2a": [1700000000000, 30, 20]}}}

Pods with equal charges form a group, with 22 characters for each pod: 30,000 pods fit into one ConfigMap. Only a
reservation has its pod's name: by it the controller finds out that the pod cannot be created, because another one has
that name. Processes that write one ledger take turns by its schedule.
"""

import binascii
import re
import uuid
from collections.abc import Iterable, Iterator, KeysView, Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from vcuda.charging import Demand, fit_charge
from vcuda.decision import Reason
from vcuda.decoding import decoder_for
from vcuda.namespace_policy import Mode, NamespacePolicy, combine_policies
from vcuda.pod_options import PodOptions
from vcuda.quota import Quota
from vcuda.quota_refusals import (
    DEFAULT_REMEDIES,
    RemedyContext,
    ledger_full,
    ledger_missing,
    ledger_rebuilding,
)
from vcuda.quota_usage import Charge, Holder, QuotaUsage, Reserved, model_by_name, usage_of_charges
from vcuda.unconfirmed import Unconfirmed, add_expired, subtract_confirmed, unconfirmed_excess
from vcuda.write_schedule import WriteSchedule

VERSION = 1
UID_BYTES = 16
# 16 bytes in base64, without the padding.
KEY_WIDTH = 22
# A ConfigMap holds at most 1 MiB. A ledger that outgrew it could not be written any more, not even to release charges.
# Pods are admitted up to the first size; those that exist without having been admitted are charged up to the second.
MAX_BYTES, MAX_STORED_BYTES = 900_000, 1_000_000
MAX_HOLDERS = 8
# Tenants write owner references, whose length the API server does not check: a kind, a slash, and the longest name of
# an object.
MAX_HOLDER_NAME = 317
# Upper bounds for a group without its pods and its model's name, and for a holder: a character has up to 4 bytes.
GROUP_BYTES, HOLDER_BYTES = 160, 4 * MAX_HOLDER_NAME + 240

# What may be the name of a pod. Anything else is not recorded: names become parts of paths.
POD_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
# What the name of a reserved pod takes beside itself and the key: quotes, a colon, a comma.
NAME_BYTES = 6

# A pod's UID in base64.
PodKey = str


class LedgerState(StrEnum):
    """Only an open ledger admits pods."""

    # A webhook needs a ledger, and the controller has not created it yet.
    REQUESTED = "wanted"
    # It was lost: pods that the lost one admitted may still appear, and have to be counted first.
    REBUILDING = "closed"
    OPEN = "open"


class ChargeGroup(Struct, frozen=True, omit_defaults=True):
    """Pods with the same charge: reserved in the same second, or used if `since` is None."""

    charge: Charge
    pods: str
    since: int | None = None


class LedgerDocument(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A ledger as it is stored. `namespace` is the UID of the namespace, not its name."""

    v: int
    namespace: str
    state: LedgerState
    quotas_at: int = 0
    quotas: tuple[Quota, ...] = ()
    versions: dict[str, int] = {}
    groups: tuple[ChargeGroup, ...] = ()
    holders: tuple[Holder, ...] = ()
    names: dict[PodKey, str] = {}
    unconfirmed: Unconfirmed | None = None
    schedule: WriteSchedule | None = None


DECODER = decoder_for(LedgerDocument)
# The charge of a pod, and the second since when it is reserved; None if it is used.
LedgerEntry = tuple[Charge, int | None]


class Reservation(Struct, frozen=True):
    """A pod that is charged, but not known to exist, or that is being moved to another model; `since` is in seconds."""

    pod: PodKey
    since: int
    is_move: bool = False


def pack_uid(uid: str) -> PodKey:
    """Return the key of a pod; raises a ValueError if the text is not a UID."""
    try:
        number = binascii.unhexlify(uid.replace("-", ""))
    except ValueError:
        number = b""
    if len(number) != UID_BYTES:
        raise ValueError(f"{uid!r} is not the UID of a pod")
    return binascii.b2a_base64(number, newline=False)[:KEY_WIDTH].decode()


def unpack_uid(key: PodKey) -> str:
    return str(uuid.UUID(bytes=binascii.a2b_base64(f"{key}==")))


class Ledger:
    """A ledger in memory. Not thread-safe: copy it, change the copy, and write the copy back as a whole."""

    def __init__(self, namespace: str = "", state: LedgerState = LedgerState.REQUESTED) -> None:
        self.namespace, self.state = namespace, state
        self.quotas: tuple[Quota, ...] = ()
        self.quotas_at = 0
        self.versions: dict[str, int] = {}
        self.holders: tuple[Holder, ...] = ()
        self.unconfirmed: Unconfirmed | None = None
        # Set when the ledger is written, which is no change in itself.
        self.schedule = WriteSchedule()
        # The same entries twice: the keys of each group in one text, as they are stored, and the entry of each pod.
        self._groups: dict[LedgerEntry, str] = {}
        self._entries: dict[PodKey, LedgerEntry] = {}
        # The names of reserved pods, and what they take in the document.
        self._names: dict[PodKey, str] = {}
        self._names_size = 0
        # Computed when needed, and dropped by the change that makes them obsolete.
        self._usage: QuotaUsage | None = None
        self._quotas_size: int | None = None
        # Of all groups, without their pods. Counted as they come and go: every charge asks for the ledger's size.
        self._groups_size = 0
        # Counts changes: a ledger with none need not be written back.
        self.changes = 0

    def copy(self) -> "Ledger":
        other = Ledger(self.namespace, self.state)
        other.quotas, other.quotas_at, other.holders = self.quotas, self.quotas_at, self.holders
        other.versions, other._quotas_size = self.versions, self._quotas_size
        other.unconfirmed, other.schedule = self.unconfirmed, self.schedule
        other._groups, other._entries = self._groups.copy(), self._entries.copy()
        other._names, other._names_size = self._names.copy(), self._names_size
        other._groups_size = self._groups_size
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and encode_ledger(self) == encode_ledger(other)

    __hash__ = None  # type: ignore[assignment] # it changes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, pod: PodKey) -> bool:
        return pod in self._entries

    def entry(self, pod: PodKey) -> LedgerEntry | None:
        """Return what a pod is charged, and since when it is reserved; None if it is not charged."""
        return self._entries.get(pod)

    def charge(self, pod: PodKey) -> Charge:
        """Return what a pod is charged; raises a KeyError if it is not."""
        return self._entries[pod][0]

    def reservations(self) -> Iterator[Reservation]:
        return reservations_of(self.groups())

    def reserved_names(self) -> Mapping[PodKey, str]:
        """Return the names of reserved pods, as far as they are known."""
        return self._names

    def count_reserved(self) -> int:
        """Return how many pods are reserved."""
        return sum(count_keys(pods) for (_, since), pods in self._groups.items() if since is not None)

    def pods(self) -> KeysView[PodKey]:
        """Return all charged pods, used and reserved."""
        return self._entries.keys()

    def groups(self) -> Iterator[ChargeGroup]:
        for (charge, since), pods in self._groups.items():
            yield ChargeGroup(charge, pods, since)

    def put(self, pod: PodKey, charge: Charge, since: int | None) -> None:
        """Set the entry of a pod without checking it against the quotas; `since` is None if it is used."""
        if since is None and self._is_new_reservation(pod):
            self.unconfirmed = subtract_confirmed(self.unconfirmed, self.charge(pod))
        self._delete(pod)
        entry = charge, since
        self._entries[pod] = entry
        self._add_to_group(entry, pod)
        self._mark_changed()

    def release(self, pod: PodKey) -> bool:
        """Delete the entry of a pod; returns whether it had one."""
        deleted = self._delete(pod)
        if deleted:
            self._mark_changed()
        return deleted

    def expire(self, pod: PodKey, now_s: int) -> None:
        """Release a pod that is not there. If it was never seen, that is recorded."""
        if self._is_new_reservation(pod):
            self.unconfirmed = add_expired(self.unconfirmed, self.charge(pod), now_s)
        self.release(pod)

    def _is_new_reservation(self, pod: PodKey) -> bool:
        charge, since = self._entries.get(pod, (None, None))
        return charge is not None and since is not None and charge.moved_from is None

    def set_quotas(self, quotas: Iterable[Quota], at: int, versions: Mapping[str, int] | None = None) -> None:
        """Replace the quotas. `versions` are their resource versions, and `at` the one up to which all are known."""
        self.quotas, self.quotas_at, self.versions = tuple(quotas), at, dict(versions or {})
        self._quotas_size = None
        self._mark_changed()

    def set_state(self, state: LedgerState, namespace: str) -> None:
        """Set the state, and the UID of the namespace for which it is valid."""
        if (state, namespace) != (self.state, self.namespace):
            self.state, self.namespace = state, namespace
            self._mark_changed()

    def set_holders(self, holders: Iterable[Holder]) -> None:
        """Set the largest holders; only the first `MAX_HOLDERS` are kept."""
        if (first := tuple(holders)[:MAX_HOLDERS]) != self.holders:
            self.holders = first
            self._mark_changed()

    @property
    def policy(self) -> NamespacePolicy:
        """The policies of all quotas combined."""
        return combine_policies([quota.policy for quota in self.quotas])

    @property
    def usage(self) -> QuotaUsage:
        if self._usage is None:
            charges = ((charge, since, count_keys(pods)) for (charge, since), pods in self._groups.items())
            self._usage = usage_of_charges(self.quotas, charges, self.holders)
        return self._usage

    def size(self) -> int:
        """Return an upper bound of the document's length in bytes, without encoding it."""
        holders = MAX_HOLDERS * HOLDER_BYTES
        pods = KEY_WIDTH * len(self._entries) + self._names_size
        models = self.unconfirmed.models if self.unconfirmed else ()
        unconfirmed = sum(GROUP_BYTES + len(model) for model in models)
        return pods + self._groups_size + self.quotas_size() + holders + unconfirmed

    def quotas_size(self) -> int:
        """Return how many bytes of the document are the quotas."""
        if self._quotas_size is None:
            self._quotas_size = len(msgspec.json.encode((self.quotas, self.versions)))
        return self._quotas_size

    def reserve(self, pod: PodKey, charge: Charge, now_s: int, name: str = "") -> None:
        """Add a reservation for a new pod without checking it against the quotas."""
        # A batch reserves many pods in a row: adding to the usage is much cheaper than computing it again for each.
        usage = self.usage
        self.put(pod, charge, now_s)
        self._set_name(pod, name)
        usage.reserve(model_by_name(charge.model), charge.amounts)
        usage.reservations.append(Reserved(charge, now_s))
        self._usage = usage

    def _add_to_group(self, entry: LedgerEntry, pods: str) -> None:
        if entry not in self._groups:
            self._groups_size += group_bytes(entry[0])
        self._groups[entry] = self._groups.get(entry, "") + pods

    def _mark_changed(self) -> None:
        self.changes += 1
        self._usage = None

    def _set_name(self, pod: PodKey, name: str) -> None:
        if POD_NAME.fullmatch(name):
            self._names[pod] = name
            self._names_size += name_size(name)

    def _delete(self, pod: PodKey) -> bool:
        entry = self._entries.pop(pod, None)
        if entry is None:
            return False
        if (name := self._names.pop(pod, None)) is not None:
            self._names_size -= name_size(name)
        pods = self._groups[entry]
        at = pods.find(pod)
        while at % KEY_WIDTH:  # a match of the end of one key and the beginning of the next
            at = pods.find(pod, at + 1)
        rest = pods[:at] + pods[at + KEY_WIDTH :]
        if rest:
            self._groups[entry] = rest
        else:
            del self._groups[entry]
            self._groups_size -= group_bytes(entry[0])
        return True


def name_size(name: str) -> int:
    return KEY_WIDTH + len(name) + NAME_BYTES


def group_bytes(charge: Charge) -> int:
    """Return an upper bound of the length of a group without its pods."""
    return GROUP_BYTES + len(charge.model) + (group_bytes(charge.moved_from) if charge.moved_from else 0)


def count_keys(pods: str) -> int:
    return len(pods) // KEY_WIDTH


def split_keys(pods: str) -> Iterator[PodKey]:
    for at in range(0, len(pods), KEY_WIDTH):
        yield pods[at : at + KEY_WIDTH]


def encode_ledger(ledger: Ledger) -> str:
    document = LedgerDocument(
        v=VERSION,
        namespace=ledger.namespace,
        state=ledger.state,
        quotas_at=ledger.quotas_at,
        quotas=ledger.quotas,
        versions=ledger.versions,
        groups=tuple(ledger.groups()),
        holders=ledger.holders,
        names=dict(ledger.reserved_names()),
        unconfirmed=ledger.unconfirmed,
        schedule=ledger.schedule if ledger.schedule.writers else None,
    )
    return msgspec.json.encode(document).decode()


def decode_ledger(text: str) -> Ledger:
    """Read a ledger; raises a ValueError that says what is wrong with it."""
    document = DECODER.decode(text)
    if document.v != VERSION:
        raise ValueError(f"ledger version {document.v} is not supported, expected {VERSION}")
    ledger = Ledger(document.namespace, document.state)
    ledger.holders, ledger.unconfirmed = document.holders, document.unconfirmed
    ledger.schedule = document.schedule or WriteSchedule()
    ledger.set_quotas(document.quotas, document.quotas_at, document.versions)
    # Filled directly: `put` would search and join the keys of a group once for each of its pods.
    for group in document.groups:
        if len(group.pods) % KEY_WIDTH:
            raise ValueError("the pods of a group are truncated")
        entry = group.charge, group.since
        ledger._add_to_group(entry, group.pods)  # noqa: SLF001 - our own
        for pod in split_keys(group.pods):
            if pod in ledger._entries:  # noqa: SLF001
                raise ValueError(f"pod {unpack_uid(pod)} is charged twice")
            ledger._entries[pod] = entry  # noqa: SLF001
    for pod, name in document.names.items():
        if pod in ledger:
            ledger._set_name(pod, name)  # noqa: SLF001
    return ledger


def reservations_in(text: str) -> Iterator[Reservation]:
    """Yield the reservations of a stored ledger; none if it is unreadable."""
    try:
        groups = DECODER.decode(text).groups
    except ValueError:
        return
    yield from reservations_of(groups)


def reservations_of(groups: Iterable[ChargeGroup]) -> Iterator[Reservation]:
    for group in groups:
        if group.since is not None:
            is_move = group.charge.moved_from is not None
            yield from (Reservation(pod, group.since, is_move) for pod in split_keys(group.pods))


class ChargeRequest(Struct, frozen=True):
    """A pod to be charged. `cards` is the memory of the largest GPU of each model that it can get.

    `name` is the pod's, if it is known. Without `is_known` it is not certain that an API server asks: refusals name no
    workloads, and less can be reserved.
    """

    pod: PodKey
    demand: Demand
    options: PodOptions
    cards: Mapping[str, int]
    dry_run: bool = False
    remedies: RemedyContext = DEFAULT_REMEDIES
    name: str = ""
    is_known: bool = True


class ChargeResult(Struct, frozen=True):
    """The outcome of a charge: refused exactly if there are reasons.

    `audited` are the reasons for which it would be refused if the quota were enforced.
    """

    charge: Charge | None = None
    reasons: tuple[Reason, ...] = ()
    audited: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()


def reserve(ledger: Ledger, request: ChargeRequest, now_s: int, cluster_mode: Mode) -> ChargeResult:
    """Charge a pod that is about to be created, or refuse it. A pod that is charged already keeps its charge."""
    enforced = ledger.policy.effective_mode(cluster_mode) is Mode.ENFORCE
    if ledger.state is not LedgerState.OPEN:
        closed = (ledger_not_open(ledger.state),)
        return ChargeResult(reasons=closed) if enforced else ChargeResult(audited=closed)
    if (entry := ledger.entry(request.pod)) is not None:
        return ChargeResult(entry[0])
    # Also in audit mode: what is not in the ledger could not be accounted for.
    if ledger.size() > MAX_BYTES:
        return ChargeResult(reasons=(ledger_full(len(ledger), ledger.quotas_size()),))
    usage = ledger.usage if request.is_known else ledger.usage.without_holders()
    remedies = replace(request.remedies, now_s=now_s)
    fit = fit_charge(usage, request.demand, request.options, request.cards, remedies)
    reasons: tuple[Reason, ...] = fit.reasons
    if not request.is_known and not reasons:
        reasons = unconfirmed_excess(usage, fit.charge, ledger.unconfirmed, ledger.count_reserved(), now_s)
    if reasons and enforced:
        return ChargeResult(reasons=reasons)
    if not request.dry_run:
        ledger.reserve(request.pod, fit.charge, now_s, request.name)
    return ChargeResult(fit.charge, audited=reasons)


def mark_used(ledger: Ledger, pod: PodKey) -> None:
    """Turn the reservation of a pod into usage, because the pod exists. Does nothing if it is not charged."""
    if (entry := ledger.entry(pod)) is not None:
        ledger.put(pod, entry[0], None)


def ledger_not_open(state: LedgerState) -> Reason:
    return ledger_rebuilding() if state is LedgerState.REBUILDING else ledger_missing()
