"""Which waiting workloads are retried: as many as there is room for, the oldest first. A pure function of values.

A retry whose workload creates no pod backs off, so that a workload that fails for another reason is not retried in a
circle; once there is no room for it, it starts again. While a retry is on its way, its room counts as taken.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from cluster.backoff import Backoff
from controller.waiting_workloads import WaitingWorkload
from vcuda.charging import PodDemand, count_fitting, fill
from vcuda.quota_usage import QuotaUsage

# How long a workload's controller may take to create pods, and to show that in the status: after a retry, and where
# nothing shows that it has tried. A Job takes one second, and its status another.
SETTLE_S = 3.0
BACKOFF = Backoff(first_s=SETTLE_S, max_s=600.0, jitter=(1.0, 1.0))
# Limits for one namespace in one round: a tenant may have any number of workloads, each with another request.
MAX_RETRIES, MAX_TRIED = 10, 200


class Attempts(Struct, frozen=True):
    """What is remembered of a waiting workload.

    `tries` counts retries since it last created a pod, `tried_at` is the time of the last one, and `progress` was its
    own then. Times are on one clock.
    """

    seen_at: float
    tries: int = 0
    tried_at: float = float("-inf")
    progress: int = 0

    def after_retry(self, workload: WaitingWorkload, now: float) -> "Attempts":
        tries = self.tries + 1 if self.tries and self.progress == workload.progress else 1
        return replace(self, tries=tries, tried_at=now, progress=workload.progress)

    def without_room(self) -> "Attempts":
        """Return the attempts for when there is room again: what failed for the lack of it says nothing about that."""
        return replace(self, tries=0)

    def has_failed(self, workload: WaitingWorkload, now: float) -> bool:
        """Whether the last retry has created no pod."""
        return bool(self.tries) and self.progress == workload.progress and not self.is_underway(workload, now)

    def is_underway(self, workload: WaitingWorkload, now: float) -> bool:
        """Whether the last retry may still create pods."""
        return bool(self.tries) and self.progress == workload.progress and now < self.tried_at + SETTLE_S

    def due_at(self, workload: WaitingWorkload) -> float:
        """Return when the workload may be retried, given that there is room."""
        if self.tries and self.progress == workload.progress:
            return self.tried_at + BACKOFF.delay_s(self.tries)
        return self.seen_at + (0.0 if workload.has_failed else SETTLE_S)


class Room(Struct, frozen=True):
    """What is left of a namespace's quotas; `cards` is the memory of the largest GPU of each model."""

    usage: QuotaUsage
    cards: Mapping[str, int]
    unit_mib: int


class Choice(Struct, frozen=True):
    """Workloads to retry now, and when the next one may be due; None if none is.

    `without_room` are the UIDs of workloads that were retried and have no room now: others have taken it.
    """

    retries: tuple[WaitingWorkload, ...] = ()
    next_at: float | None = None
    without_room: frozenset[str] = frozenset()


def demand_key(workload: WaitingWorkload) -> tuple[object, ...]:
    """Return what workloads have in common of which none fits if one does not."""
    return tuple((each.role, each.share) for each in workload.request.containers), workload.options


def workloads_without_room(
    workloads: Collection[WaitingWorkload], attempts: Mapping[str, Attempts], room: Room, now: float
) -> frozenset[str]:
    """Return the UIDs of workloads whose retry has failed, and for which there is no room before a round of retries."""
    has_room: dict[tuple[object, ...], bool] = {}
    failed = [each for each in workloads if attempts[each.metadata.uid].has_failed(each, now)]
    for each in failed:
        if (key := demand_key(each)) not in has_room and len(has_room) < MAX_TRIED:
            demand = PodDemand(each.request, room.unit_mib)
            has_room[key] = count_fitting(room.usage, demand, each.options, room.cards, 1) > 0
    return frozenset(each.metadata.uid for each in failed if not has_room.get(demand_key(each), True))


def choose_retries(
    workloads: Collection[WaitingWorkload], attempts: Mapping[str, Attempts], room: Room, now: float
) -> Choice:
    """Choose from the waiting workloads of a namespace; `attempts` is by UID."""
    usage = room.usage
    retries: list[WaitingWorkload] = []
    later: list[float] = []
    # Room only shrinks: where one workload does not fit, an equal one does not either.
    refused: set[tuple[object, ...]] = set()
    tried = 0
    without_room = workloads_without_room(workloads, attempts, room, now)
    candidates = [each for each in workloads if each.metadata.uid not in without_room]
    for each in sorted(candidates, key=lambda workload: (workload.created, workload.metadata.name)):
        attempt, key = attempts[each.metadata.uid], demand_key(each)
        due_at, underway = attempt.due_at(each), attempt.is_underway(each, now)
        if due_at > now:
            later.append(due_at)
            if not underway:
                continue
        if key in refused:
            continue
        if len(retries) >= MAX_RETRIES:
            later.append(now)
            break
        if tried >= MAX_TRIED:
            break  # until the next change: trying on would take time from other namespaces for ever
        tried += 1
        fitting, usage = fill(usage, PodDemand(each.request, room.unit_mib), each.options, room.cards, each.missing)
        if fitting < each.missing:
            refused.add(key)
        if fitting and not underway:
            retries.append(each)
    return Choice(tuple(retries), min(later, default=None), without_room)
