"""Gives containers their GPUs: obeys placements, makes them where there are none, and never gives away too much.

The kubelet's calls come one at a time; restarts of containers come beside them. Everything that is given is on the disk
before the kubelet hears of it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.cards import Fleet
from nodeplugin.identity import Call, First, Listed, Target, Verdict, judged, several
from nodeplugin.kubelet import Holding, Kept, Kubelet, KubeletError, UnknownPod
from nodeplugin.offering import Resource, Stock, offer
from nodeplugin.pods import BoundPod, Known, Pods
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.records import BOOK, Allocation, BadCheckpoint, Book, Hold, Way, read_book, write_book
from vcuda.language import Language
from vcuda.placement import Slice, decode_placement, encode_placement
from vcuda.placing import Held, NoRoom, Placed, Policy, Room, peaks, place, promised, rooms_of, settled, why_not
from vcuda.request import Role, memory_mib
from vcuda.vocabulary import WHOLE

# On the kubelet's record of a container, by which ours can be made again.
PLACEMENT, TOKEN, OWNER = "quotient.dev/placement", "quotient.dev/allocation", "quotient.dev/container"
# The second call of a container follows the first at once; one that comes later is another's.
PAIR_S = 5.0
# How many pods the kubelet is asked about, one by one; it answers 10 at once.
MOST_ASKED = 8
# How long an allocation waits for processes that are about to end, and how often it looks.
DYING_S, DYING_POLL_S = 10.0, 0.05


class Refused(Exception):  # noqa: N818 - not a fault of the program
    """The kubelet gets no GPU for this container; the message says why, and it shows it on the pod."""


class Injection(Protocol):
    """Makes a container's cards usable inside of it, in one way or another."""

    way: Way

    def answer(
        self, pod: BoundPod, container: str, allocation: Allocation, slices: Sequence[Slice]
    ) -> api.ContainerAllocateResponse:
        """Say what the runtime has to do for a container, and prepare what it needs for that."""

    def prepare(self, pod: BoundPod, container: str, allocation: Allocation, slices: Sequence[Slice]) -> None:
        """Make sure that everything is there which was promised, before the container starts again."""

    def forget(self, tokens: Collection[str]) -> None:
        """Remove what belongs to containers that are gone."""

    def kept(self) -> set[str]:
        """Name the containers for which something is kept."""


class Pending(Struct, frozen=True):
    """The kubelet's listing when it asked which ids we prefer; the allocation follows at once. None: it gave none."""

    call: Call
    listed: tuple[Holding, ...] | None


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
        self._before: tuple[First, float] | None = None
        # Pods that the informer has shown: those can be missed when they are gone.
        self._shown: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
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
        # One id is as good as another, and there may be thousands.
        needed = frozenset(must)
        rest = islice((each for each in available if each not in needed), max(0, size - len(needed)))
        chosen = [*must, *rest]
        try:
            listed: tuple[Holding, ...] | None = tuple(self._kubelet.listed())
        except Exception as away:  # the outermost frame of the call: an error would cost the pod its life
            self._log.warning("kubelet_does_not_list", cause=str(away))
            listed = None
        with self._lock:
            self._pending = Pending(Call(resource, frozenset(chosen)), listed)
        return chosen

    def allocate(self, resource: Resource, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Answer an allocation: nothing for the first of a container's two, everything for the second."""
        call = Call(resource, frozenset(ids))
        with self._lock:
            pending, self._pending = self._pending, None
            before, self._before = self._call_before(), None
        # No preference is asked for where an init container's ids are used again.
        same = pending if pending is not None and pending.call == call else None
        target, firsts = self._recognised(call, before, same.listed if same else None)
        if target is None:
            with self._lock:
                self._before = First(call, firsts), self._clock()
            return api.ContainerAllocateResponse()
        return self._give(target, call)

    def prestart(self, resource: Resource, ids: Sequence[str]) -> None:
        """Check that a container which is about to start has what was given to it, and nothing else."""
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

    def _recognised(
        self, call: Call, before: First | None, listed: Sequence[Holding] | None
    ) -> tuple[Target | None, frozenset[str]]:
        """Say for whom a call is: a container that gets everything now; or nobody yet, and the pods it may be of.

        What the informer has heard is asked first. If that leaves a doubt, the API server itself is: the kubelet may
        have heard of a pod before us, or of another one under the same name.
        """
        verdict: Verdict | None = None
        for is_fresh in (False, True):
            known = self._pods.asked() if is_fresh else self._pods.known()
            if known is None:
                continue
            seen = self._listed(call, known) if listed is None else Listed(self._spoken.names, listed)
            if seen is None:
                continue
            allocated = {uid: hold.containers for uid, hold in self.holds().items()}
            verdict = judged(call, before, seen, known, allocated)
            if not (verdict.lasts or verdict.firsts) and is_fresh:
                verdict = judged(call, before, seen, known, allocated, again=True)
            if verdict.is_clear and (verdict.lasts or verdict.firsts):
                break
        if verdict is None:
            return self._unlisted(call, before)
        if len(verdict.lasts) == 1 and not verdict.firsts:
            self._check_left_out(verdict.lasts[0])
            return verdict.lasts[0], frozenset()
        if verdict.lasts:
            raise Refused(several((*verdict.lasts, *verdict.firsts)))
        if not verdict.firsts:
            name = call.resource.name_in(self._spoken.names)
            raise Refused(f"no pod that is known on this node waits for {call.count} {name}; static pods get no GPUs")
        return None, frozenset(each.pod.uid for each in verdict.firsts)

    def _listed(self, call: Call, known: Known) -> Listed | None:
        """Ask about the pods whose ids are used again, or that wait; None if the kubelet tells nothing of them.

        Kubelets before 1.34 cannot be asked about one pod: then it is one of those whose ids these were.
        """
        holds = self.holds()
        reusing = [
            hold.uid
            for hold in holds.values()
            if call.ids & {each for given in hold.containers.values() for each in given.ids.get(call.resource, ())}
        ]
        told: list[Holding] = []
        answered = False
        for uid in (reusing or waiting(known, holds))[:MOST_ASKED]:
            if (pod := known.get(uid)) is None:
                continue
            try:
                told += self._kubelet.held_by(pod.metadata.namespace, pod.metadata.name)
                answered = True
            except UnknownPod:
                answered = True
            except KubeletError as away:
                self._log.warning("kubelet_does_not_tell", pod=pod.title, cause=str(away))
        if answered:
            return Listed(self._spoken.names, told)
        found = [known[uid].metadata for uid in reusing if uid in known]
        return Listed(self._spoken.names, bare=[(each.namespace, each.name) for each in found]) if found else None

    def _unlisted(self, call: Call, before: First | None) -> tuple[None, frozenset[str]]:
        """Answer where the kubelet lists nobody: a first call needs no name, a second cannot do without."""
        if before is not None and before.call.resource is call.resource.other:
            raise Refused("the kubelet does not list its containers, so it cannot be told which one this is for")
        return None, frozenset(self._pods.known())

    def _call_before(self) -> First | None:
        if self._before is None or self._clock() - self._before[1] > PAIR_S:
            return None
        return self._before[0]

    def _check_left_out(self, target: Target) -> None:
        """Refuse a pod whose init container was given nothing, because this plugin began between its two calls."""
        if not any(each.role is Role.INIT for each in target.pod.request.containers):
            return
        # The kubelet writes a container down when it is done with it.
        done = {each.container for each in self._kubelet.kept() if each.uid == target.pod.uid}
        if left_out := done.difference(self._containers_of(target.pod.uid)):
            raise Refused(f"{target.pod.title}: {', '.join(sorted(left_out))} was given nothing; make the pod again")

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
            answer = self._injection.answer(pod, container, allocation, hold.placed[container])
        except OSError as wrong:
            raise Refused(f"{target.title}: what it needs cannot be prepared on this node: {wrong}") from None
        answer.annotations[PLACEMENT] = encode_placement(hold.placed)
        answer.annotations[TOKEN] = allocation.token
        answer.annotations[OWNER] = owner_of(pod.uid, container)
        self._log.info(
            "allocated",
            pod=pod.title,
            uid=pod.uid,
            container=container,
            cards=hold.cards_of(container),
            chosen_here=hold.chosen_here,
        )
        # What was given was offered before; only beside a card that is closed does that change what is offered.
        if hold.chosen_here or any(self._fleet.condition(card.uuid).closed for card in self._fleet.cards()):
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
            allocation = Allocation(before.token if before else secrets.token_hex(8), ids, self._injection.way)
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
        gpus, unit_mib = self._fleet.gpus(), self._spoken.unit_mib
        return [
            promised(other.request, other.placed, gpus, unit_mib)
            for other in known.values()
            if other.placed and not other.has_ended and other.uid != pod.uid and other.uid not in self._holds
        ]

    # May it start?

    def _check_start(self, uid: str, container: str, known: Known, kept: Sequence[Kept], *, single: bool) -> None:
        pod = known.get(uid)
        title = f"{pod.title if pod else uid} container {container}"
        answers = [each.answer for each in kept if each.container == container]
        owners = {each.annotations[OWNER] for each in answers if OWNER in each.annotations}
        if owners - {owner_of(uid, container)}:
            raise Refused(f"{title}: the kubelet holds another container's answer for it; delete the pod")
        hold = self._hold_of(uid, container, kept, pod)
        if hold is None:
            raise Refused(
                f"{title}: no GPU was given to it here; delete the pod, and it is given one (static pods are not)"
            )
        allocation = hold.containers[container]
        tokens = {each.annotations[TOKEN] for each in answers if TOKEN in each.annotations}
        if tokens - {allocation.token}:
            raise Refused(f"{title}: the kubelet holds an older answer for it; delete the pod")
        for uuid in hold.cards_of(container) if single else ():
            card, fault = self._fleet.get(uuid), self._fleet.condition(uuid).fault
            if card is None or fault:
                raise Refused(f"{title}: its GPU {uuid} cannot be used: {fault or 'it is not on this node any more'}")
        if pod is not None and allocation.token:
            try:
                self._injection.prepare(pod, container, allocation, hold.placed[container])
            except OSError as wrong:
                raise Refused(f"{title}: what it needs cannot be prepared on this node: {wrong}") from None

    def _hold_of(self, uid: str, container: str, kept: Sequence[Kept], pod: BoundPod | None) -> Hold | None:
        """Give the hold of a container that is about to start; one that was lost is made again, if there is room."""
        with self._lock:
            hold = self._holds.get(uid)
            if hold is not None and container in hold.containers:
                return hold
            made = self._recovered(uid, kept, pod)
            if made is None or container not in made.containers:
                return None
            others = [other.held for other in self._holds.values() if other.uid != uid]
            rooms = rooms_of(self._fleet.gpus(), [*others, made.held])
            if any(room.cores < 0 or room.memory_mib < 0 for room in rooms if room.gpu.uuid in made.held):
                return None
            self._put(made)
        self._tell()
        return made

    def _owners_in_book(self, resource: Resource, ids: frozenset[str]) -> list[Kept]:
        return [
            Kept(uid, name, resource, ids)
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
            write_book(self._file, Book(changed, self._fleet.cards(), self._boot, self._injection.way))
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
        ways: dict[str, Way] = {}
        ids = self._ids_in(kept)
        for each in kept:
            answer = each.answer
            token, owner = (answer.annotations.get(key, "") for key in (TOKEN, OWNER))
            if token and owner == owner_of(uid, each.container):
                tokens[each.container] = token
                ways[each.container] = "cdi" if answer.cdi_devices else "native"
                placed |= decode_placement(answer.annotations.get(PLACEMENT, "")) or {}
        if not tokens or any(name not in placed for name in tokens):
            return None
        hold = self.holds().get(uid) or Hold(
            uid=uid,
            namespace=pod.metadata.namespace if pod else "",
            name=pod.metadata.name if pod else "",
            placed=placed,
            held=peaks(pod.request, placed) if pod else all_together(placed),
        )
        made = {name: Allocation(token, ids[name], ways[name]) for name, token in tokens.items()}
        return replace(hold, containers=hold.containers | made)

    def collect(self, known: Known | None = None) -> set[str]:
        """Let go of what pods held that are gone, and take up what ancestors gave to pods that still run.

        Gives those that are gone and whose processes are not, yet.
        """
        is_fresh = known is not None
        if known is None:
            if not self._pods.informer.synced:
                return set()
            known = self._pods.known()
        self._shown |= known.keys() & self.holds().keys()
        gone = {uid for uid in self.holds() if uid not in known}
        if not is_fresh and gone - self._shown:
            # Served before the informer had heard of it, or gone while no plugin ran: only the API server knows.
            fresh = self._pods.asked()
            gone = {uid for uid in gone if uid in self._shown or (fresh is not None and uid not in fresh)}
        # A pod that was deleted by force is gone from the API server while its processes run on.
        still = self._running(gone) if gone else set()
        ended = {uid for uid in self.holds() if uid in known and known[uid].has_ended}
        dropping = ended | (gone - still)
        adopted = self._adopted(known)
        if dropping or adopted:
            with self._lock:
                tokens = [
                    given.token
                    for uid in dropping
                    if uid in self._holds
                    for given in self._holds[uid].containers.values()
                    if given.token  # what an ancestor gave has no folder of ours
                ]
                self._put(*adopted, dropping=dropping)
                self._shown -= dropping
            self._injection.forget(tokens)
            self._log.info("released", pods=sorted(dropping), adopted=[hold.title for hold in adopted])
            self._tell()
        return still

    def sweep(self) -> None:
        """Remove what is kept for containers that nobody knows."""
        there = self._injection.kept()
        known = {given.token for hold in self.holds().values() for given in hold.containers.values()}
        known |= {each.answer.annotations.get(TOKEN, "") for each in self._kubelet.kept()}
        self._injection.forget(there - known)

    def _adopted(self, known: Known) -> list[Hold]:
        """Find the pods that an ancestor started and that still run, whatever domain they speak."""
        found = [pod for pod in known.values() if pod.predicates and not pod.has_ended and pod.uid not in self.holds()]
        kept = self._kubelet.kept() if found else []
        ours = {each.uid for each in kept if TOKEN in each.answer.annotations}
        held = [self._inherited(pod, kept) for pod in found if pod.uid not in ours]
        return [hold for hold in held if hold is not None]

    def _inherited(self, pod: BoundPod, kept: Sequence[Kept]) -> Hold | None:
        """Read what an ancestor gave to a pod: cards by minor number; and the ids by which the kubelet knows it."""
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
        ids = self._ids_in([each for each in kept if each.uid == pod.uid])
        return Hold(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            held=held,
            containers={name: Allocation("", given) for name, given in ids.items()},
        )

    def _ids_in(self, kept: Iterable[Kept]) -> dict[str, dict[Resource, tuple[str, ...]]]:
        """File the ids that the kubelet keeps for a pod by container and resource."""
        resources = {resource.name_in(self._spoken.names): resource for resource in Resource}
        ids: dict[str, dict[Resource, tuple[str, ...]]] = {}
        for each in kept:
            if each.resource in resources:
                ids.setdefault(each.container, {})[resources[each.resource]] = tuple(sorted(each.ids, key=id_order))
        return ids

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def owner_of(uid: str, container: str) -> str:
    """Name a container in the kubelet's record."""
    return f"{uid}/{container}"


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
