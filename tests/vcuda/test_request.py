"""The request of a pod: containers as Kubernetes counts them, and all mistakes in one answer."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.pods import CORE, MEMORY, NAMES, container, gpu_container, parse_pod, sidecar
from vcuda.amounts import Amounts
from vcuda.decision import Code, Decision, Reason, printable
from vcuda.dimensions import CORES
from vcuda.dimensions import MEMORY as MEMORY_MIB
from vcuda.request import ContainerRequest, PodRequest, Role, effective_amounts
from vcuda.vocabulary import Share


def test_a_pod_without_gpus_has_neither_request_nor_reasons() -> None:
    parsed = parse_pod(
        container(limits={"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}), container("c1"), {"name": "c2"}
    )
    assert not parsed.request.is_gpu
    assert parsed.reasons == ()
    assert parsed.request.resource_counts() == (0, 0)
    assert parsed.request.demand(40960, 256) == Amounts()


def test_containers_are_added_and_init_containers_are_not() -> None:
    """An init container runs before the others, so it counts only where it is larger."""
    parsed = parse_pod(
        gpu_container("a", core=30, memory=8),
        gpu_container("b", core=20, memory=4),
        init=[gpu_container("i", core=40, memory=20)],
    )
    assert parsed.request.resource_counts() == (50, 20)


def test_sidecars_count_beside_containers_and_beside_later_init_containers() -> None:
    """A sidecar keeps running once it is started."""
    first, last = gpu_container("i1", core=50, memory=1), gpu_container("i2", core=50, memory=1)
    parsed = parse_pod(
        gpu_container("a", core=10, memory=1), init=[first, sidecar(gpu_container("s", core=20, memory=1)), last]
    )
    assert [each.role for each in parsed.request.containers] == [Role.INIT, Role.SIDECAR, Role.INIT, Role.APP]
    assert parsed.request.resource_counts()[0] == 70


def test_whole_cards_and_following_shares_have_a_token_of_memory() -> None:
    """Every GPU container requests both resources: the node plugin identifies it by them."""
    assert parse_pod(gpu_container(core=300)).request.resource_counts() == (300, 3)
    assert parse_pod(gpu_container(cards="0.3")).request.resource_counts() == (30, 1)


def test_demand_depends_on_the_card_where_the_pod_sets_no_memory() -> None:
    """Whole cards take all their memory, following shares their part, others what they request."""
    whole, following = parse_pod(gpu_container(core=200)), parse_pod(gpu_container(cards="0.3"))
    explicit = parse_pod(gpu_container(core=50, memory=30))
    assert whole.request.demand(40960, 256)[MEMORY_MIB] == 81920
    assert following.request.demand(40960, 256)[MEMORY_MIB] == 12288
    assert explicit.request.demand(40960, 256) == Amounts({CORES: 50, MEMORY_MIB: 7680, "pods": 1})


def test_all_mistakes_are_reported_at_once() -> None:
    """A user does not have to apply a manifest once for each of them."""
    parsed = parse_pod(gpu_container("a", core=150), gpu_container("b", memory=1), init=[gpu_container("i", core="x")])
    assert [reason.field.split(".resources")[0] for reason in parsed.reasons] == [
        "spec.initContainers[0]",
        "spec.containers[0]",
        "spec.containers[1]",
    ]


def test_a_request_other_than_the_limit_is_rejected() -> None:
    """Kubernetes does not overcommit extended resources."""
    parsed = parse_pod(container(limits={CORE: 50, MEMORY: 8}, requests={CORE: 40, MEMORY: "8"}))
    assert [reason.code for reason in parsed.reasons] == [Code.REQUEST_DIFFERS]
    assert str(parsed.reasons[0]) == (
        f"spec.containers[0].resources.requests[{CORE}]: '40': must be equal to the limit of 50; "
        "remove the request: it defaults to the limit"
    )


def test_a_mistake_in_requests_is_reported_there() -> None:
    """Also if the container has limits."""
    parsed = parse_pod(container(limits={"cpu": 1}, requests={CORE: 150, MEMORY: 1}))
    assert [reason.field for reason in parsed.reasons] == [f"spec.containers[0].resources.requests[{CORE}]"]


def test_many_unknown_containers_in_the_annotation_are_one_reason() -> None:
    """An annotation may have 256 KiB; a message may not."""
    listed = ",".join(f"no-{number}" for number in range(10_000))
    (reason,) = parse_pod(gpu_container("main", core=100), annotations={NAMES.memory_follows_core: listed}).reasons
    assert len(str(reason)) < 1000


def test_requests_without_limits_are_read() -> None:
    """The webhook adds the limits."""
    assert parse_pod(container(requests={CORE: 50, MEMORY: 8})).request.containers[0].share == Share(50, 8)


def test_equal_amounts_in_different_notation_do_not_differ() -> None:
    """8Gi is 8192Mi."""
    parsed = parse_pod(container(limits={CORE: 50, MEMORY: "8Gi"}, requests={CORE: "50", MEMORY: "8192Mi"}))
    assert parsed.reasons == ()


def test_memory_follows_the_cores_of_listed_containers_only() -> None:
    annotations = {NAMES.memory_follows_core: "a, b"}
    parsed = parse_pod(
        gpu_container("a", core=50),
        gpu_container("b", core=20, memory=1),
        gpu_container("c", core=10),
        annotations=annotations,
    )
    assert [each.share for each in parsed.request.containers] == [
        Share(50, memory_follows_cores=True),
        Share(20, memory_follows_cores=True),
    ]
    assert [reason.code for reason in parsed.reasons] == [Code.MEMORY_MISSING]


def test_memory_conflicts_with_the_annotation() -> None:
    """More than one unit does: one unit is the token that the webhook writes."""
    parsed = parse_pod(gpu_container("a", core=50, memory=2), annotations={NAMES.memory_follows_core: "a"})
    (reason,) = parsed.reasons
    assert reason.code is Code.MEMORY_INVALID
    assert str(reason) == (
        f"spec.containers[0].resources.limits[{MEMORY}]: '2': conflicts with the annotation "
        f"{NAMES.memory_follows_core}, which sets the memory of this container; "
        f"remove {MEMORY}, or remove the container from the annotation"
    )


def test_a_listed_container_that_the_pod_does_not_have_is_rejected() -> None:
    """It is probably a typing error, and the real container would have no memory."""
    parsed = parse_pod(gpu_container("main", core=100), annotations={NAMES.memory_follows_core: "mainn"})
    assert [reason.code for reason in parsed.reasons] == [Code.CONTAINER_UNKNOWN]
    assert parsed.reasons[0].remedy == "list containers of the pod: main"


def test_the_keys_of_stored_requests_do_not_change() -> None:
    """The node plugin reads requests from pods.json, which an earlier version may have written."""
    request = PodRequest((ContainerRequest("c0", Role.APP, Share(50, memory_follows_cores=True), "inspur.com/vcuda"),))
    assert msgspec.to_builtins(request) == {
        "containers": (
            {
                "name": "c0",
                "role": "app",
                "share": {"cores": 50, "memory_units": 0, "follows": True},
                "vocabulary": "inspur.com/vcuda",
            },
        )
    }


parts = st.lists(st.tuples(st.sampled_from(Role), st.integers(0, 400).map(lambda cores: Amounts({CORES: cores}))))


@given(parts)
def test_effective_request_is_the_most_needed_at_any_time(listed: list[tuple[Role, Amounts]]) -> None:
    """Compared with a simulation that starts the containers in order and adds up what runs."""
    running = peak = 0
    inits = [part for part in listed if part[0] is not Role.APP]
    for role, amount in inits:
        peak = max(peak, running + amount[CORES])
        running += amount[CORES] if role is Role.SIDECAR else 0
    peak = max(peak, running + sum(amount[CORES] for role, amount in listed if role is Role.APP))
    assert effective_amounts(listed)[CORES] == peak


def test_a_decision_is_a_rejection_exactly_when_it_has_reasons() -> None:
    """Combining decisions keeps every reason."""
    reason = Reason(code=Code.CORE_INVALID, field="f", value="150", message="wrong", remedy="ask for 100")
    rejected = Decision((reason,))
    assert Decision(warnings=("careful",)).allowed
    assert not rejected.allowed
    assert not (Decision() + rejected).allowed
    assert (rejected + rejected).reasons == (reason, reason)
    assert "f: '150': wrong; ask for 100" in str(rejected)


@given(st.text())
def test_values_of_users_are_shown_short_and_printable(text: str) -> None:
    """No terminal escape sequence and no flood through a message."""
    assert len(printable(text)) <= 120
    assert printable(text).isprintable()
