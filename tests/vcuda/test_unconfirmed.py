"""What callers may reserve who may not be an API server."""

import uuid

import pytest

from tests.vcuda.demands import fixed, quota
from vcuda.decision import Code
from vcuda.ledger import (
    ChargeRequest,
    ChargeResult,
    Ledger,
    LedgerState,
    PodKey,
    decode_ledger,
    encode_ledger,
    mark_used,
    pack_uid,
    reserve,
)
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.quota_usage import Charge, Holder
from vcuda.unconfirmed import MAX_MODELS, MAX_PODS, TIMES, WINDOW_S, add_expired

NOW = 1_000_000


def open_ledger(text: str = "types: {A100: {cores: 400}}") -> Ledger:
    ledger = Ledger("namespace-uid", LedgerState.OPEN)
    ledger.set_quotas([quota(text)], 1)
    return ledger


def pod() -> PodKey:
    return pack_uid(str(uuid.uuid4()))


def charge(
    ledger: Ledger, key: PodKey, cores: int, now_s: int = NOW, mode: Mode = Mode.ENFORCE, *, is_known: bool = False
) -> ChargeResult:
    request = ChargeRequest(key, fixed(cores), PodOptions(models=("A100",)), {}, is_known=is_known)
    return reserve(ledger, request, now_s, mode)


def forge(ledger: Ledger, cores: int, now_s: int = NOW) -> None:
    """Reserve for a pod that is never created, and let that expire."""
    key = pod()
    assert not charge(ledger, key, cores, now_s).reasons
    ledger.expire(key, now_s)


def test_forged_reviews_cannot_take_a_quota_again_and_again() -> None:
    """A few times in a window, and then nothing until it is over; callers who are known are not held up."""
    ledger = open_ledger()
    for _ in range(4 * TIMES):
        forge(ledger, 100)
    (reason,) = charge(ledger, pod(), 100).reasons
    assert reason.code is Code.TOO_MANY_UNCONFIRMED
    assert reason.numbers == {"asked": 100, "reserved": 0, "expired": 1200, "hard": 1200}
    assert reason.message.startswith(
        "1200 cores (100 = one GPU) were reserved in the last 10 minutes for pods that were "
    )
    assert "webhook.apiServerCidrs" in reason.remedy
    assert not charge(ledger, pod(), 100, is_known=True).reasons
    assert not charge(ledger, pod(), 100, NOW + WINDOW_S).reasons


def test_what_is_reserved_counts_with_what_expired() -> None:
    ledger = open_ledger()
    for cores in (400, 400, 300):
        forge(ledger, cores)
    assert not charge(ledger, pod(), 100).reasons
    assert [reason.code for reason in charge(ledger, pod(), 1).reasons] == [Code.TOO_MANY_UNCONFIRMED]


def test_a_burst_of_real_pods_is_not_held_up() -> None:
    """Not even after creates that failed: a pod that is seen takes nothing of what may be reserved."""
    ledger = open_ledger("types: {A100: {cores: 1000}}")
    for cores in (1000, 1000, 900):
        forge(ledger, cores)
    for _ in range(100):
        key = pod()
        assert not charge(ledger, key, 10).reasons
        mark_used(ledger, key)
    assert [reason.code for reason in charge(ledger, pod(), 10).reasons] == [Code.QUOTA_EXCEEDED]


def test_pods_that_appear_make_up_for_reservations_that_expired() -> None:
    """Some creates always fail after they were charged, and in a busy namespace that adds up."""
    ledger = open_ledger()
    for _ in range(20 * TIMES):
        forge(ledger, 100)
        key = pod()
        assert not charge(ledger, key, 100).reasons
        mark_used(ledger, key)
        ledger.release(key)
    assert ledger.unconfirmed is None


@pytest.mark.parametrize("is_known", [False, True])
def test_the_ledger_of_a_namespace_without_limits_cannot_be_filled(*, is_known: bool) -> None:
    ledger = open_ledger("types: {T4: {cores: 100}}\nunlisted: allow")
    for _ in range(1000):
        assert not charge(ledger, pod(), 10).reasons, "a burst of a Deployment"
    for index in range(1000, MAX_PODS):
        ledger.reserve(pack_uid(str(uuid.UUID(int=index))), Charge("A100", 1, 1), NOW)
    assert bool(charge(ledger, pod(), 10, is_known=is_known).reasons) is not is_known


def test_in_audit_mode_nothing_is_refused() -> None:
    ledger = open_ledger()
    for _ in range(TIMES):
        forge(ledger, 400)
    result = charge(ledger, pod(), 100, mode=Mode.AUDIT)
    assert not result.reasons
    assert [reason.code for reason in result.audited] == [Code.TOO_MANY_UNCONFIRMED]


def test_only_reservations_expire_unconfirmed() -> None:
    """A pod that was seen has ended; one that is being moved to another model exists."""
    ledger = open_ledger()
    used, moving = pod(), pod()
    ledger.put(used, Charge("A100", 100, 0), None)
    ledger.put(moving, Charge("A100", 100, 0, Charge("T4", 100, 0)), NOW)
    for key in (used, moving, pod()):
        ledger.expire(key, NOW)
    assert ledger.unconfirmed is None
    assert len(ledger) == 0


def test_what_expired_is_stored_with_the_ledger() -> None:
    ledger = open_ledger()
    empty = ledger.size()
    forge(ledger, 100)
    stored = decode_ledger(encode_ledger(ledger))
    assert stored.unconfirmed == ledger.unconfirmed == ledger.copy().unconfirmed
    assert ledger.size() > empty


def test_a_create_that_failed_blocks_its_quota_until_its_reservation_ends() -> None:
    """And not for the rest of the window: the same pod may be created right after."""
    ledger = open_ledger()
    for _ in range(TIMES - 1):
        forge(ledger, 400)
    assert not charge(ledger, pod(), 400).reasons


def test_names_of_models_cannot_make_a_ledger_grow() -> None:
    """Users choose them."""
    unconfirmed = None
    for index in range(100):
        unconfirmed = add_expired(unconfirmed, Charge(f"GPU-{index}", 10, 0), NOW)
    assert unconfirmed is not None
    assert len(unconfirmed.models) == MAX_MODELS + 1
    assert sum(each.pods for each in unconfirmed.models.values()) == 100


def test_only_known_callers_learn_who_holds_a_quota() -> None:
    ledger = open_ledger()
    ledger.put(pod(), Charge("A100", 400, 0), None)
    ledger.set_holders([Holder("Deployment/secret-project", "A100", cores=400, pods=1, memory_mib=0)])
    (known,), (unknown,) = (charge(ledger, pod(), 100, is_known=known).reasons for known in (True, False))
    assert "largest holders: Deployment/secret-project (400)" in known.message
    assert "holders" not in unknown.message
    assert known.numbers == unknown.numbers
