"""Which waiting workloads are retried, and how often."""

from msgspec.structs import replace

from cluster.objects import Metadata
from controller.choosing_retries import (
    BACKOFF,
    MAX_RETRIES,
    MAX_TRIED,
    SETTLE_S,
    Attempts,
    Choice,
    Room,
    choose_retries,
)
from controller.waiting_workloads import WaitingWorkload
from vcuda.amounts import Amounts
from vcuda.dimensions import CORES, PODS
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota
from vcuda.quota_usage import QuotaUsage
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share

ONE_CARD = PodRequest((ContainerRequest("c", Role.APP, Share(100, 4), "vcuda"),))
NOW = 1000.0


def waiting(
    name: str, *, missing: int = 1, progress: int = 0, model: str = "A100", has_failed: bool = True
) -> WaitingWorkload:
    """Return a workload that lacks pods of one card each; those with smaller names are older."""
    return WaitingWorkload(
        metadata=Metadata(name=name, uid=name),
        kind="ReplicaSet",
        created=name,
        missing=missing,
        progress=progress,
        has_failed=has_failed,
        request=ONE_CARD,
        options=PodOptions(models=(model,)),
    )


def room(cards: int, quota: str = "types: {A100: {cores: 1000}, T4: {cores: 1000}}") -> Room:
    """Return a namespace with so many cards free of 10 A100, and of as many T4."""
    used = {model: Amounts({CORES: 1000 - 100 * cards, PODS: 1}) for model in ("A100", "T4")}
    return Room(QuotaUsage([parse_quota(quota, "team/q")], used), {}, 256)


def choose(workloads: list[WaitingWorkload], cards: int, now: float = NOW, **attempts: Attempts) -> Choice:
    known = {each.metadata.uid: Attempts(0) for each in workloads} | attempts
    return choose_retries(workloads, known, room(cards), now)


def names(choice: Choice) -> list[str]:
    return [each.metadata.name for each in choice.retries]


def test_as_many_workloads_are_retried_as_there_is_room_for_the_oldest_first() -> None:
    """A hundred Deployments must not be updated for one free card."""
    workloads = [waiting(f"{number:03}") for number in range(100)]
    assert names(choose(workloads[::-1], 1)) == ["000"]
    assert names(choose(workloads, 3)) == ["000", "001", "002"]
    assert choose(workloads, 0) == Choice()


def test_a_workload_takes_room_for_all_of_its_pods_or_for_those_that_fit() -> None:
    assert names(choose([waiting("a", missing=2), waiting("b"), waiting("c")], 3)) == ["a", "b"]
    assert names(choose([waiting("a", missing=9), waiting("b")], 3)) == ["a"]


def test_room_of_another_model_is_left_to_others() -> None:
    assert names(choose([waiting("a", missing=9), waiting("b", model="T4")], 3)) == ["a", "b"]


def test_the_room_of_a_retry_that_is_underway_counts_as_taken() -> None:
    """A change of the ledger meanwhile must not retry others for the same room."""
    tried = Attempts(0).after_retry(waiting("a"), NOW)
    choice = choose([waiting("a"), waiting("b")], 1, NOW + 0.5, a=tried)
    assert names(choice) == []
    assert choice.next_at == NOW + SETTLE_S


def test_retries_that_create_no_pod_back_off_and_leave_the_room_to_others() -> None:
    """They would go in a circle: a retry that is refused changes the workload's status."""
    attempt = Attempts(0).after_retry(waiting("a"), NOW)
    attempt = attempt.after_retry(waiting("a"), NOW)
    waits = [BACKOFF.delay_s(tries) for tries in range(1, 12)]
    assert waits == [3, 6, 12, 24, 48, 96, 192, 384, 600, 600, 600]
    choice = choose([waiting("a"), waiting("b")], 1, NOW + SETTLE_S, a=attempt)
    assert names(choice) == ["b"]
    assert choice.next_at == NOW + 6
    assert names(choose([waiting("a"), waiting("b")], 1, NOW + 6, a=attempt)) == ["a"]


def test_a_retry_that_lost_its_room_is_made_again_as_soon_as_there_is_room() -> None:
    """Not up to ten minutes later; while it is underway, its own pods may have taken the room."""
    attempt = replace(Attempts(0), tries=9, tried_at=NOW)
    assert choose([waiting("a")], 0, NOW + 1, a=attempt).without_room == frozenset()
    choice = choose([waiting("a"), waiting("b")], 0, NOW + SETTLE_S, a=attempt)
    assert choice == Choice(without_room=frozenset({"a"}))
    assert names(choose([waiting("a")], 1, NOW + SETTLE_S, a=attempt.without_room())) == ["a"]


def test_room_that_another_retry_of_the_round_takes_is_no_lack_of_room() -> None:
    """Two workloads that fail for another reason would reset each other in a circle."""
    attempt = replace(Attempts(0), tries=9, tried_at=NOW)
    assert choose([waiting("a"), waiting("b")], 1, NOW + SETTLE_S, b=attempt).without_room == frozenset()


def test_a_workload_that_has_created_a_pod_since_is_retried_at_once() -> None:
    attempt = replace(Attempts(0), tries=5, tried_at=NOW, progress=1)
    again = waiting("a", progress=2)
    assert names(choose([again], 1, NOW + 0.1, a=attempt)) == ["a"]
    assert attempt.after_retry(again, NOW + 0.1).tries == 1


def test_a_new_workload_is_left_to_its_controller_for_a_while() -> None:
    """Nothing shows yet that creating its pods has failed; a ReplicaSet has a condition that does."""
    new = Attempts(NOW)
    choice = choose([waiting("a", has_failed=False), waiting("b")], 2, NOW, a=new, b=new)
    assert (names(choice), choice.next_at) == (["b"], NOW + SETTLE_S)
    assert names(choose([waiting("a", has_failed=False)], 1, NOW + SETTLE_S, a=new)) == ["a"]


def test_a_namespace_gets_a_limited_number_of_retries_in_one_round() -> None:
    """The others follow in the next; other namespaces have their turn in between."""
    choice = choose([waiting(f"{number:03}") for number in range(100)], 10_000)
    assert len(choice.retries) == MAX_RETRIES
    assert choice.next_at == NOW


def test_many_different_requests_that_do_not_fit_are_not_tried_again_and_again() -> None:
    """Only after the next change: a tenant must not keep the controller busy with workloads that wait for ever."""
    workloads = [sized(f"{number:04}", number) for number in range(1, 3 * MAX_TRIED)]
    assert choose(workloads, 0) == Choice()


def sized(name: str, memory_units: int) -> WaitingWorkload:
    request = PodRequest((ContainerRequest("c", Role.APP, Share(50, memory_units), "vcuda"),))
    return replace(waiting(name), request=request)


def test_a_workload_whose_model_is_not_granted_is_not_retried() -> None:
    assert names(choose([waiting("a", model="H100")], 5)) == []


def test_without_a_quota_there_is_always_room() -> None:
    """Its pods were refused for another reason, such as a ledger that was being rebuilt."""
    unlimited = Room(QuotaUsage([]), {}, 256)
    assert names(choose_retries([waiting("a", missing=50)], {"a": Attempts(0)}, unlimited, NOW)) == ["a"]
