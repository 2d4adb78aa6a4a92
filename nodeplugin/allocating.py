"""Gives containers their GPUs: obeys placements, makes them where there are none, and never gives away too much.

The kubelet's calls come one at a time; restarts of containers come beside them. Everything that is given is on the disk
before the kubelet hears of it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin import identity
from nodeplugin.cards import Fleet
from nodeplugin.identity import Ambiguous, Call, Target
from nodeplugin.kubelet import Holding, Kept, Kubelet, KubeletError
from nodeplugin.offering import Resource, Stock, offer
from nodeplugin.pods import BoundPod, Known, Pods
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.records import BOOK, Allocation, BadCheckpoint, Book, Hold, read_book, write_book
from vcuda.language import Language
from vcuda.placement import Slice, decode_placement, encode_placement
from vcuda.placing import Held, NoRoom, Placed, Policy, Room, peaks, place, rooms_of, settled, why_not
from vcuda.request import memory_mib
from vcuda.vocabulary import WHOLE

# On the kubelet's record of a container, by which ours can be made again.
PLACEMENT, TOKEN = "quotient.dev/placement", "quotient.dev/allocation"
# The second call of a container follows the first at once; one that comes later is another's.
PAIR_S = 5.0
# How long an allocation waits for processes that are about to end, and how often it looks.
DYING_S, DYING_POLL_S = 10.0, 0.05


class Refused(Exception):  # noqa: N818 - not a fault of the program
    """The kubelet gets no GPU for this container; the message says why, and it shows it on the pod."""


class Injection(Protocol):
    """Makes a container's cards usable inside of it."""

    def answer(
        self, pod: BoundPod, container: str, token: str, slices: Sequence[Slice]
    ) -> api.ContainerAllocateResponse:
        """Say what the runtime has to do for a container, and prepare what it needs for that."""

    def prepare(self, pod: BoundPod, container: str, token: str, slices: Sequence[Slice]) -> None:
        """Make sure that everything is there which was promised, before the container starts again."""

    def forget(self, tokens: Collection[str]) -> None:
        """Remove what belongs to containers that are gone."""

    def kept(self) -> set[str]:
        """Name the containers for which something is kept."""


class Pending(Struct, frozen=True):
    """What was found out when the kubelet asked which ids we prefer; the allocation follows at once.

    `unlisted` says that the kubelet did not list its containers, so that counts have to tell all of them.
    """

    call: Call
    target: Target | None = None
    ambiguous: str = ""
    unlisted: bool = False


class Allocator:
    """Keeps the book of this node's GPUs."""

    def __init__(
        self,
        folder: Path,
        spoken: Language,
        fleet: Fleet,
        *,
        pods: Pods,
        kubelet: Kubelet,
        injection: Injection,
        policy: Policy = Policy.BINPACK,
        running: Callable[[Collection[str]], set[str]] = lambda _: set(),
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._spoken, self._fleet, self._pods = folder / BOOK, spoken, fleet, pods
        self._kubelet, self._injection, self._policy = kubelet, injection, policy
        self._running, self._clock, self._boot = running, clock, boot
        # Guards the book and what is remembered between the kubelet's calls.
        self._lock = threading.RLock()
        self._holds: dict[str, Hold] = {}
        self._pending: Pending | None = None
        self._before: tuple[Call, float] | None = None
        self._unconfirmed: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self.deviations: Callable[[Hold], None] = lambda _: None
        self._log = structlog.get_logger()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Be told when what is offered or held has changed."""
        self._listeners.append(listener)

    def holds(self) -> Mapping[str, Hold]:
        """Give what pods hold."""
        with self._lock:
            return dict(self._holds)

    # What is offered.

    def devices(self, resource: Resource) -> dict[str, bool]:
        """Give all ids of a resource, and whether each is healthy."""
        held: dict[str, set[str]] = {}
        for hold in self.holds().values():
            for name, allocation in hold.containers.items():
                cards = hold.cards_of(name)
                for card, ids in zip(cards, shared_out(allocation.ids.get(resource, ()), len(cards)), strict=False):
                    held.setdefault(card, set()).update(ids)
        return offer(
            resource,
            [
                Stock(
                    resource.units_of(card, self._spoken.unit_mib),
                    self._fleet.condition(card.uuid),
                    frozenset(held.get(card.uuid, ())),
                )
                for card in self._fleet.cards()
            ],
        )

    # The kubelet's calls.

    def preferred(self, resource: Resource, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """Choose ids, and use the occasion to find out for whom; never fails, for that would refuse the pod."""
        rest = sorted(set(available).difference(must), key=id_order)
        chosen = [*must, *rest[: max(0, size - len(must))]]
        call = Call(resource, frozenset(chosen))
        try:
            pending = self._recognised(call)
        except Exception:  # the outermost frame of the call: an error would cost the pod its life
            self._log.exception("not_recognised", resource=resource, count=size)
            pending = Pending(call)
        with self._lock:
            self._pending = pending
        return chosen

    def allocate(self, resource: Resource, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Answer an allocation: nothing for the first of a container's two, everything for the second."""
        call = Call(resource, frozenset(ids))
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None or pending.call != call:
            # No preference was asked for: an init container's ids are used again.
            pending = self._recognised_by_reuse(call)
        self.confirm()
        if pending.ambiguous:
            raise Refused(pending.ambiguous)
        target = pending.target or self._told_by_counts(call, unlisted=pending.unlisted)
        with self._lock:
            self._before = None if target else (call, self._clock())
        if target is None:
            return api.ContainerAllocateResponse()
        return self._give(target, call)

    def prestart(self, resource: Resource, ids: Sequence[str]) -> None:
        """Check that a container which is about to start has what was given to it, and nothing else."""
        self.confirm()
        wanted, name = frozenset(ids), resource.name_in(self._spoken.names)
        kept = self._kubelet.kept()
        owners = [each for each in kept if each.resource == name and each.ids == wanted]
        if not owners:
            owners = self._owners_in_book(resource, wanted)
        if not owners:
            raise Refused(f"nobody knows to which container these {len(wanted)} {name} were given; delete the pod")
        known = self._pods.known()
        # Ids may be an init container's and then its pod's others'; what is right for all is right for the one.
        for uid, container in dict.fromkeys((each.uid, each.container) for each in owners):
            self._check_start(
                uid, container, known, [each for each in kept if each.uid == uid], single=len(owners) == 1
            )

    # Who is it?

    def _recognised(self, call: Call) -> Pending:
        known = self._pods.known()
        try:
            listed = self._kubelet.listed()
        except KubeletError as away:
            self._log.warning("kubelet_does_not_list", cause=str(away))
            return Pending(call, unlisted=True)
        return self._second_call(call, listed, known)

    def _second_call(self, call: Call, listed: Sequence[Holding], known: Known) -> Pending:
        names = self._spoken.names
        if identity.unknown_halves(listed, call.resource, names, known):
            known = self._pods.asked() or known
        found = identity.halves(listed, call.resource, names, known)
        try:
            return Pending(call, identity.second_call(found, call.resource, call.count, self._call_before()))
        except Ambiguous as ambiguous:
            return Pending(call, ambiguous=str(ambiguous))

    def _recognised_by_reuse(self, call: Call) -> Pending:
        """Ask about the pods whose init containers held these ids; if there is none, about all that wait."""
        known, holds = self._pods.known(), self.holds()
        reusing = [
            hold.uid
            for hold in holds.values()
            if call.ids & {each for given in hold.containers.values() for each in given.ids.get(call.resource, ())}
        ]
        listed: list[Holding] = []
        unlisted = False
        for uid in reusing or waiting(known, holds):
            if (pod := known.get(uid)) is not None:
                try:
                    listed += self._kubelet.held_by(pod.metadata.namespace, pod.metadata.name)
                except KubeletError as away:
                    unlisted = True
                    self._log.warning("kubelet_does_not_tell", pod=pod.title, cause=str(away))
        return replace(self._second_call(call, listed, known), unlisted=unlisted)

    def _call_before(self) -> Call | None:
        with self._lock:
            if self._before is None or self._clock() - self._before[1] > PAIR_S:
                return None
            return self._before[0]

    def _told_by_counts(self, call: Call, *, unlisted: bool) -> Target | None:
        """Find a plain init container or one with a single resource; None for the first of two calls."""
        before = self._call_before()
        allocated = {uid: hold.containers for uid, hold in self.holds().items()}
        for known in (self._pods.known(), None):
            view = self._pods.asked() if known is None else known
            if view is None:
                continue
            firsts = identity.first_calls(view, call, allocated)
            found = identity.by_counts(view, call, before, allocated, unlisted=unlisted)
            singles = [each for each in found if len(each.pod.counts[each.container]) == 1]
            if found and not (len(singles) == len(found) and firsts):
                try:
                    chosen = identity.the_one(found)
                except Ambiguous as ambiguous:
                    raise Refused(str(ambiguous)) from None
                with self._lock:
                    self._unconfirmed |= {each.pod.uid for each in found} if len(found) > 1 else set()
                return chosen
            if firsts:
                return None
        return None

    # What does it get?

    def _give(self, target: Target, call: Call) -> api.ContainerAllocateResponse:
        pod, container = target.pod, target.container
        if pod.mistake:
            raise Refused(f"{target.title}: {pod.mistake}")
        ids = {call.resource: tuple(sorted(call.ids, key=id_order))}
        if target.other_ids:
            ids[call.resource.other] = tuple(sorted(target.other_ids, key=id_order))
        hold = self._held_with(pod, container, ids)
        allocation = hold.containers[container]
        try:
            answer = self._injection.answer(pod, container, allocation.token, hold.placed[container])
        except OSError as wrong:
            raise Refused(f"{target.title}: what it needs cannot be prepared on this node: {wrong}") from None
        answer.annotations[PLACEMENT] = encode_placement(hold.placed)
        answer.annotations[TOKEN] = allocation.token
        self._log.info(
            "allocated",
            pod=pod.title,
            uid=pod.uid,
            container=container,
            cards=hold.cards_of(container),
            chosen_here=hold.chosen_here,
        )
        if hold.chosen_here:
            self.deviations(hold)
        self._tell()
        return answer

    def _held_with(self, pod: BoundPod, container: str, ids: dict[Resource, tuple[str, ...]]) -> Hold:
        """Place a pod, once, and note what a container of it gets; where there seems to be no room, look again at who
        has ended.
        """  # noqa: D205
        try:
            return self._noted(pod, container, ids, self._pods.known())
        except NoRoom:
            pass
        fresh = self._pods.asked()
        deadline = self._clock() + DYING_S
        while True:
            dying = self.collect(fresh)
            try:
                return self._noted(pod, container, ids, fresh or self._pods.known())
            except NoRoom as full:
                wrong = str(full)
            # A pod that was deleted without grace is gone before its processes are; they will be in a moment.
            if not dying or self._clock() > deadline:
                raise Refused(f"{pod.title}: {wrong}")
            time.sleep(DYING_POLL_S)

    def _noted(self, pod: BoundPod, container: str, ids: dict[Resource, tuple[str, ...]], known: Known) -> Hold:
        """Decide and write down in one go: between the two nobody else may be given the same."""
        with self._lock:
            hold = self._holds.get(pod.uid) or self._decided(pod, known)
            before = hold.containers.get(container)
            allocation = Allocation(before.token if before else secrets.token_hex(8), ids)
            hold = replace(hold, containers=hold.containers | {container: allocation})
            self._put(hold)
            return hold

    def _decided(self, pod: BoundPod, known: Known) -> Hold:
        unit_mib = self._spoken.unit_mib
        rooms = self._rooms()
        placed, chosen_here = pod.placed, False
        wrong = "" if placed is None else why_not(pod.request, placed, rooms, unit_mib=unit_mib, wishes=pod.wishes)
        if placed is None or wrong:
            if wrong:
                self._log.warning("placement_impossible", pod=pod.title, uid=pod.uid, cause=wrong)
            try:
                placed = place(
                    pod.request,
                    self._rooms(self._expected(pod, known)),
                    unit_mib=unit_mib,
                    wishes=pod.wishes,
                    policy=self._policy,
                )
            except NoRoom as full:
                raise NoRoom(f"its placement is impossible ({wrong}), and {full}" if wrong else str(full)) from None
            chosen_here = True
        else:
            placed = settled(pod.request, placed, rooms, unit_mib)
        return Hold(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            held=peaks(pod.request, placed),
            chosen_here=chosen_here,
        )

    def _rooms(self, others: Iterable[Mapping[str, Held]] = ()) -> list[Room]:
        held = [hold.held for hold in self._holds.values()]
        return rooms_of(self._fleet.gpus(), [*held, *others], lambda gpu: self._fleet.condition(gpu.uuid).closed)

    def _expected(self, pod: BoundPod, known: Known) -> list[Mapping[str, Held]]:
        """List what other pods were promised that are bound here and have not come yet."""
        return [
            peaks(other.request, other.placed)
            for other in known.values()
            if other.placed and not other.has_ended and other.uid != pod.uid and other.uid not in self._holds
        ]

    # May it start?

    def _check_start(self, uid: str, container: str, known: Known, kept: Sequence[Kept], *, single: bool) -> None:
        hold = self.holds().get(uid)
        pod = known.get(uid)
        title = f"{pod.title if pod else uid} container {container}"
        if hold is None or container not in hold.containers:
            hold = self._recovered(uid, kept, pod)
            if hold is not None:
                with self._lock:
                    self._put(hold)
                self._tell()
            if hold is None or container not in hold.containers:
                raise Refused(f"{title}: no GPU was given to it here; delete the pod, and it is given one")
        tokens = {each.answer.annotations.get(TOKEN, "") for each in kept if each.container == container} - {""}
        if tokens and tokens != {hold.containers[container].token}:
            raise Refused(f"{title}: the kubelet holds another container's answer for it; delete the pod")
        for uuid in hold.cards_of(container) if single else ():
            card, fault = self._fleet.get(uuid), self._fleet.condition(uuid).fault
            if card is None or fault:
                raise Refused(f"{title}: its GPU {uuid} cannot be used: {fault or 'it is not on this node any more'}")
        if pod is not None:
            try:
                self._injection.prepare(pod, container, hold.containers[container].token, hold.placed[container])
            except OSError as wrong:
                raise Refused(f"{title}: what it needs cannot be prepared on this node: {wrong}") from None

    def _owners_in_book(self, resource: Resource, ids: frozenset[str]) -> list[Kept]:
        return [
            Kept(uid, name, resource, ids, api.ContainerAllocateResponse())
            for uid, hold in self.holds().items()
            for name, allocation in hold.containers.items()
            if frozenset(allocation.ids.get(resource, ())) == ids
        ]

    # The book.

    def _put(self, *holds: Hold, dropping: Collection[str] = ()) -> None:
        """Change the book, on the disk first; the lock is held."""
        changed = {uid: hold for uid, hold in self._holds.items() if uid not in dropping}
        changed |= {hold.uid: hold for hold in holds}
        try:
            write_book(self._file, Book(changed, self._fleet.cards(), self._boot))
        except OSError as wrong:
            raise Refused(f"{self._file} cannot be written: {wrong}") from None
        self._holds = changed

    def recover(self) -> None:
        """Take up the book of the plugin before, or make it again from what the kubelet and the pods say."""
        try:
            book = read_book(self._file)
        except BadCheckpoint as wrong:
            self._log.warning("book_is_rebuilt", cause=str(wrong))
            book = Book()
        with self._lock:
            self._holds = dict(book.holds)
        known = self._pods.known()
        by_pod: dict[str, list[Kept]] = {}
        for each in self._kubelet.kept():
            by_pod.setdefault(each.uid, []).append(each)
        found = [
            hold
            for uid, kept in by_pod.items()
            if any(each.container not in self._containers_of(uid) for each in kept if TOKEN in each.answer.annotations)
            if (hold := self._recovered(uid, kept, known.get(uid))) is not None
        ]
        if found:
            with self._lock:
                self._put(*found)
            self._log.info("recovered", pods=[hold.title for hold in found])
            self._tell()

    def _containers_of(self, uid: str) -> Collection[str]:
        hold = self.holds().get(uid)
        return hold.containers if hold else ()

    def _recovered(self, uid: str, kept: Sequence[Kept], pod: BoundPod | None) -> Hold | None:
        """Make a pod's hold again from the answers that the kubelet kept."""
        placed: Placed = {}
        tokens: dict[str, str] = {}
        ids: dict[str, dict[Resource, tuple[str, ...]]] = {}
        resources = {resource.name_in(self._spoken.names): resource for resource in Resource}
        for each in kept:
            if each.resource in resources:
                ids.setdefault(each.container, {})[resources[each.resource]] = tuple(sorted(each.ids, key=id_order))
            if token := each.answer.annotations.get(TOKEN):
                tokens[each.container] = token
                placed |= decode_placement(each.answer.annotations.get(PLACEMENT, "")) or {}
        if not tokens or any(name not in placed for name in tokens):
            return None
        hold = self.holds().get(uid) or Hold(
            uid=uid,
            namespace=pod.metadata.namespace if pod else "",
            name=pod.metadata.name if pod else "",
            placed=placed,
            held=peaks(pod.request, placed) if pod else all_together(placed),
        )
        made = {name: Allocation(token, ids[name]) for name, token in tokens.items()}
        return replace(hold, containers=hold.containers | made)

    def confirm(self) -> None:
        """Look at the kubelet's own record where only counts told who was meant; alike pods may have been taken one
        for another, and then what is written of them is exchanged.
        """  # noqa: D205
        with self._lock:
            if not self._unconfirmed:
                return
        owner = {
            token: (each.uid, each.container)
            for each in self._kubelet.kept()
            if (token := each.answer.annotations.get(TOKEN))
        }
        known = self._pods.known()
        with self._lock:
            for uid in list(self._unconfirmed):
                hold = self._holds.get(uid)
                if hold is None:
                    continue
                truth = {owner.get(given.token, ("", ""))[0] for given in hold.containers.values()} - {""}
                if not truth:
                    continue
                self._unconfirmed.discard(uid)
                (other,) = truth if len(truth) == 1 else (uid,)
                if other != uid:
                    self._rename(hold, other, known)

    def _rename(self, hold: Hold, uid: str, known: Known) -> None:
        """Give a hold to the pod whose it really is; that one's, if it has any, goes the other way."""
        pod, before = known.get(uid), known.get(hold.uid)
        changed = [
            replace(hold, uid=uid, **({"namespace": pod.metadata.namespace, "name": pod.metadata.name} if pod else {}))
        ]
        if (its := self._holds.get(uid)) is not None:
            changed.append(replace(its, uid=hold.uid, namespace=hold.namespace, name=hold.name))
        self._log.info("taken_one_for_another", was=hold.title, now=changed[0].title)
        self._put(*changed, dropping=[hold.uid])
        for each, owner in zip(changed, (pod, before), strict=False):
            for name, allocation in each.containers.items():
                if owner is not None:
                    self._injection.prepare(owner, name, allocation.token, each.placed[name])

    def collect(self, known: Known | None = None) -> set[str]:
        """Let go of what pods held that are gone, and take up what ancestors gave to pods that still run.

        Gives those that are gone and whose processes are not, yet.
        """
        if known is None:
            if not self._pods.informer.synced:
                return set()
            known = self._pods.known()
        gone = [uid for uid in self.holds() if uid not in known]
        # A pod that was deleted by force is gone from the API server while its processes run on.
        still = self._running(gone) if gone else set()
        dropping = [uid for uid in self.holds() if uid not in still and (uid not in known or known[uid].has_ended)]
        adopted = [
            hold
            for pod in known.values()
            if pod.predicates and not pod.has_ended and pod.uid not in self._holds and not pod.counts
            if (hold := self._inherited(pod)) is not None
        ]
        if dropping or adopted:
            with self._lock:
                tokens = [
                    given.token
                    for uid in dropping
                    if uid in self._holds
                    for given in self._holds[uid].containers.values()
                ]
                self._put(*adopted, dropping=dropping)
                self._unconfirmed -= set(dropping)
            self._injection.forget(tokens)
            self._log.info("released", pods=dropping, adopted=[hold.title for hold in adopted])
            self._tell()
        return still

    def sweep(self) -> None:
        """Remove what is kept for containers that nobody knows."""
        known = {given.token for hold in self.holds().values() for given in hold.containers.values()}
        known |= {each.answer.annotations.get(TOKEN, "") for each in self._kubelet.kept()}
        self._injection.forget(self._injection.kept() - known)

    def _inherited(self, pod: BoundPod) -> Hold | None:
        """Read what an ancestor gave to a pod: cards by minor number."""
        by_minor = {card.minor: card for card in self._fleet.cards() if not card.is_mig}
        placed: Placed = {}
        for each in pod.request.containers:
            cards = [by_minor[minor] for minor in pod.predicates.get(each.name, ()) if minor in by_minor]
            share = each.share
            placed[each.name] = tuple(
                Slice(
                    card.uuid,
                    WHOLE if share.cards else share.cores,
                    card.memory_mib if share.cards else memory_mib(share, card.memory_mib, self._spoken.unit_mib),
                )
                for card in cards
            )
        held = peaks(pod.request, placed)
        if not held:
            return None
        return Hold(uid=pod.uid, namespace=pod.metadata.namespace, name=pod.metadata.name, placed=placed, held=held)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def waiting(known: Known, holds: Mapping[str, Hold]) -> list[str]:
    """Name the pods of which some container has nothing yet."""
    return [
        pod.uid
        for pod in known.values()
        if not pod.has_ended and (pod.uid not in holds or pod.counts.keys() - holds[pod.uid].containers.keys())
    ]


def shared_out(ids: Sequence[str], cards: int) -> list[Sequence[str]]:
    """Say which of a container's ids stand for which of its cards: nobody else does, so evenly."""
    if cards < 1:
        return []
    size = -(-len(ids) // cards)
    return [ids[start : start + size] for start in range(0, size * cards, size or 1)][:cards] if ids else []


def all_together(placed: Placed) -> dict[str, Held]:
    """Count all containers of a pod as if they ran at once: no less than they ever hold."""
    held: dict[str, Held] = {}
    for slices in placed.values():
        for given in slices:
            cores, mib = held.get(given.uuid, (0, 0))
            held[given.uuid] = cores + given.cores, mib + given.memory_mib
    return held


def id_order(device: str) -> tuple[str, int, str]:
    """Order ids by their number."""
    head, _, number = device.rpartition("-")
    return (head, int(number), "") if number.isdecimal() else ("", 0, device)
