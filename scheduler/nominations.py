"""Pods for which others are evicted: they get the GPUs that become free.

kube-scheduler's own nomination of a pod only reserves counts of a node. A *nomination* here holds particular GPUs from
the moment that the victims are chosen: as long as these still run, what is free of the GPUs is less than nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from scheduler.holdings import Holdings
from scheduler.pods import OtherPod, SchedulerPod
from vcuda.gpu_availability import NO_USAGE, sum_usage
from vcuda.gpu_table import GpuTable
from vcuda.placement import PlacedSlices, peak_usage
from vcuda.recent import keep_recent

# How long a pod keeps its GPUs after the last victim has begun to end.
NOMINATED_S = 180.0
# How long victims may take to end: their owners choose their grace periods.
MAX_ENDING_S = 900.0
# Pods that were nominated: a nomination that has ended is not restored.
MAX_KNOWN = 10_000


class Nomination(Struct):
    """The GPUs that a pod will get when its victims have ended: no pod of the same or a lower priority may take them.

    It lasts until the pod is bound or deleted, or a pod of higher priority takes the GPUs; or until the time is over in
    which the victims should have been evicted, or the pod bound after their end.
    """

    pod: SchedulerPod
    node: str
    placed: PlacedSlices
    # The pods whose end it waits for, and those of them that are evicted for it.
    victims: frozenset[str]
    evicted: frozenset[str]
    since: float
    expires_at: float
    # Until when victims that are ending are waited for.
    last_at: float = 0.0
    # Whether all victims have ended, and when that was noticed.
    is_free: bool = False
    free_since: float = 0.0


class Nominations:
    """The nominations of a cluster. A pod holds what it is nominated for unless it has a claim. Not thread-safe."""

    def __init__(self, table: GpuTable, holdings: Holdings, has_claim: Callable[[str], bool]) -> None:
        self._table, self._holdings, self._has_claim = table, holdings, has_claim
        self._by_pod: dict[str, Nomination] = {}
        self._known: dict[tuple[str, str], None] = {}

    def __iter__(self) -> Iterator[Nomination]:
        return iter(list(self._by_pod.values()))

    def get(self, uid: str) -> Nomination | None:
        return self._by_pod.get(uid)

    def add(self, nomination: Nomination) -> None:
        self._by_pod[nomination.pod.uid] = nomination
        self.note_known(nomination.pod.uid, nomination.node)
        self.hold(nomination.pod.uid)

    def note_known(self, uid: str, node: str) -> None:
        """Note that a pod need not be nominated for a node because an earlier process did that."""
        keep_recent(self._known, (uid, node), None, MAX_KNOWN)

    def is_known(self, uid: str, node: str) -> bool:
        return (uid, node) in self._known

    def evicted(self, without: str) -> set[str]:
        """Return the pods that are evicted for others than this one."""
        return {uid for pod, each in self._by_pod.items() if pod != without for uid in each.evicted}

    def remove(self, uid: str) -> Nomination | None:
        """Forget a nomination; what the pod holds stays."""
        return self._by_pod.pop(uid, None)

    def hold(self, uid: str) -> None:
        """Take what a pod is nominated for, if it holds nothing."""
        nomination = self._by_pod.get(uid)
        if nomination is not None and self._holdings.get(uid) is None and nomination.node in self._table:
            usage = peak_usage(nomination.pod.request, nomination.placed)
            self._holdings.take(nomination.pod, nomination.node, usage)

    @contextmanager
    def suspended(self, uids: Iterable[str]) -> Iterator[list[str]]:
        """Decide as if these pods were not nominated; at the end the list has those whose GPUs were taken meanwhile."""
        known = [uid for uid in uids if uid in self._by_pod and not self._has_claim(uid)]
        # The most important ones take their GPUs again first.
        suspended = sorted(known, key=lambda uid: self._by_pod[uid].pod.queue_position)
        outranked: list[str] = []
        for uid in suspended:
            self._holdings.give_back(uid)
        try:
            yield outranked
        finally:
            for uid in suspended:
                self.hold(uid)
                if self.is_outranked(uid):
                    outranked.append(uid)

    def is_outranked(self, uid: str) -> bool:
        """Whether the GPUs of a nomination would not be free although all victims had ended."""
        nomination = self._by_pod[uid]
        if self._has_claim(uid):
            return False
        # Those of other nominations as well: two pods may wait for two parts of one GPU.
        victims = {victim for each in self._by_pod.values() for victim in each.victims}
        ending = sum_usage(held.usage for each in victims if (held := self._holdings.get(each)) is not None)
        used = peak_usage(nomination.pod.request, nomination.placed)
        for each in self._table.available_gpus(nomination.node):
            cores, mib = ending.get(each.gpu.uuid, NO_USAGE)
            if each.gpu.uuid in used and (each.free_cores + cores < 0 or each.free_memory_mib + mib < 0):
                return True
        return False

    def below(self, priority: int) -> list[str]:
        """Return the nominated pods of a lower priority, which may not keep GPUs from a pod of this one."""
        return [uid for uid, each in self._by_pod.items() if each.pod.priority < priority]

    def expired(self, now: float, running: Callable[[str], SchedulerPod | OtherPod | None]) -> list[Nomination]:
        """Return those whose time is over. `running` returns a victim that has not ended yet."""
        expired = []
        for uid, each in self._by_pod.items():
            victims = [pod for victim in each.victims if (pod := running(victim)) is not None]
            if not victims and not each.is_free:
                each.expires_at, each.is_free, each.free_since = now + NOMINATED_S, True, now
            elif victims and all(pod.is_deleting for pod in victims) and now < each.last_at:
                # The time begins again as long as victims are ending. If one was not evicted, another plan is needed.
                each.expires_at = now + NOMINATED_S
            elif each.expires_at <= now and not self._has_claim(uid):
                expired.append(each)
        return expired
