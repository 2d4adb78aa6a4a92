"""The request of a pod: containers as Kubernetes counts them, mistakes all at once."""

from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.pods import CORE, MEMORY, NAMES, asking, container, read, sidecar
from vcuda.amounts import Amounts
from vcuda.decision import Code, Decision, Denied, Reason, printable
from vcuda.dimensions import CORES
from vcuda.dimensions import MEMORY as MEMORY_MIB
from vcuda.request import Role, effective_amounts
from vcuda.vocabulary import Share


def test_a_pod_without_gpus_is_none_of_our_business() -> None:
    """No request, no reason."""
    reading = read(
        container(limits={"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}), container("c1"), {"name": "c2"}
    )
    assert not reading.request.is_gpu
    assert reading.reasons == ()
    assert reading.request.resources() == (0, 0)
    assert reading.request.demand(40960, 256) == Amounts()


def test_containers_are_added_and_init_containers_are_not() -> None:
    """An init container runs before the others, so it counts only where it is larger."""
    reading = read(
        asking("a", core=30, memory=8), asking("b", core=20, memory=4), init=[asking("i", core=40, memory=20)]
    )
    assert reading.request.resources() == (50, 20)


def test_sidecars_count_beside_containers_and_beside_later_init_containers() -> None:
    """A sidecar keeps running from its turn on."""
    first, last = asking("i1", core=50, memory=1), asking("i2", core=50, memory=1)
    reading = read(asking("a", core=10, memory=1), init=[first, sidecar(asking("s", core=20, memory=1)), last])
    assert [each.role for each in reading.request.containers] == [Role.INIT, Role.SIDECAR, Role.INIT, Role.APP]
    assert reading.request.resources()[0] == 70


def test_whole_cards_and_following_shares_carry_a_token_of_memory() -> None:
    """Every GPU container asks for both resources, or the node could not recognise it."""
    assert read(asking(core=300)).request.resources() == (300, 3)
    assert read(asking(cards="0.3")).request.resources() == (30, 1)


def test_demand_depends_on_the_card_where_the_pod_does_not_say() -> None:
    """Whole cards take all their memory, following shares their part, others what they asked for."""
    whole, follows, says = read(asking(core=200)), read(asking(cards="0.3")), read(asking(core=50, memory=30))
    assert whole.request.demand(40960, 256)[MEMORY_MIB] == 81920
    assert follows.request.demand(40960, 256)[MEMORY_MIB] == 12288
    assert says.request.demand(40960, 256) == Amounts({CORES: 50, MEMORY_MIB: 7680, "pods": 1})


def test_all_mistakes_come_at_once() -> None:
    """A user should not have to apply a manifest once for each of them."""
    reading = read(asking("a", core=150), asking("b", memory=1), init=[asking("i", core="x")])
    assert [reason.field.split(".resources")[0] for reason in reading.reasons] == [
        "spec.initContainers[0]",
        "spec.containers[0]",
        "spec.containers[1]",
    ]


def test_requests_that_differ_from_limits_are_refused() -> None:
    """Kubernetes does not overcommit such resources."""
    reading = read(container(limits={CORE: 50, MEMORY: 8}, requests={CORE: 40, MEMORY: "8"}))
    assert [reason.code for reason in reading.reasons] == [Code.REQUEST_DIFFERS]
    assert reading.reasons[0].field == f"spec.containers[0].resources.requests[{CORE}]"


def test_a_mistake_is_shown_where_it_stands() -> None:
    """Among the requests, if it is there, although there are limits too."""
    reading = read(container(limits={"cpu": 1}, requests={CORE: 150, MEMORY: 1}))
    assert [reason.field for reason in reading.reasons] == [f"spec.containers[0].resources.requests[{CORE}]"]


def test_many_unknown_followers_are_one_reason() -> None:
    """An annotation may have 256 KiB; a message may not."""
    listed = ",".join(f"no-{number}" for number in range(10_000))
    (reason,) = read(asking("main", core=100), annotations={NAMES.memory_follows_core: listed}).reasons
    assert len(str(reason)) < 1000


def test_requests_alone_are_read_too() -> None:
    """The webhook will complete them."""
    assert read(container(requests={CORE: 50, MEMORY: 8})).request.containers[0].share == Share(50, 8)


def test_equal_amounts_in_different_spelling_do_not_differ() -> None:
    """8Gi is 8192Mi."""
    assert read(container(limits={CORE: 50, MEMORY: "8Gi"}, requests={CORE: "50", MEMORY: "8192Mi"})).reasons == ()


def test_a_fraction_may_let_memory_follow_by_annotation() -> None:
    """For the containers that are named, and only for them."""
    annotations = {NAMES.memory_follows_core: "a, b"}
    reading = read(asking("a", core=50), asking("b", core=20, memory=1), asking("c", core=10), annotations=annotations)
    assert [each.share for each in reading.request.containers] == [Share(50, follows=True), Share(20, follows=True)]
    assert [reason.code for reason in reading.reasons] == [Code.MEMORY_MISSING]


def test_memory_and_following_contradict_each_other() -> None:
    """One of the two has to go; one unit is the token that the webhook writes."""
    reading = read(asking("a", core=50, memory=2), annotations={NAMES.memory_follows_core: "a"})
    assert [reason.code for reason in reading.reasons] == [Code.MEMORY_INVALID]


def test_a_follower_that_is_not_in_the_pod_is_refused() -> None:
    """Probably a typing error, and the memory would be missing."""
    reading = read(asking("main", core=100), annotations={NAMES.memory_follows_core: "mainn"})
    assert [reason.code for reason in reading.reasons] == [Code.CONTAINER_UNKNOWN]
    assert "main" in reading.reasons[0].remedy


parts = st.lists(st.tuples(st.sampled_from(Role), st.integers(0, 400).map(lambda cores: Amounts({CORES: cores}))))


@given(parts)
def test_effective_request_is_the_most_ever_needed_at_once(listed: list[tuple[Role, Amounts]]) -> None:
    """Against a simulation: start containers in order, ask at every moment what runs."""
    running = most = 0
    inits = [part for part in listed if part[0] is not Role.APP]
    for role, amount in inits:
        most = max(most, running + amount[CORES])
        running += amount[CORES] if role is Role.SIDECAR else 0
    most = max(most, running + sum(amount[CORES] for role, amount in listed if role is Role.APP))
    assert effective_amounts(listed)[CORES] == most


def test_a_decision_is_refused_exactly_when_it_has_reasons() -> None:
    """They cannot contradict each other, and joining keeps every reason."""
    reason = Reason(code=Code.CORE_INVALID, field="f", value="150", message="wrong", remedy="ask for 100")
    refused = Decision((reason,))
    assert Decision(warnings=("careful",)).allowed
    assert not refused.allowed
    assert not (Decision() + refused).allowed
    assert "f: '150': wrong; ask for 100" in str(refused)
    assert Denied(reason, reason).reasons == (reason, reason)


@given(st.text())
def test_what_users_write_is_shown_short_and_printable(text: str) -> None:
    """No terminal escape and no flood through a message."""
    assert len(printable(text)) <= 120
    assert printable(text).isprintable()
