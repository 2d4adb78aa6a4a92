"""What is kept of a decision does not depend on how much a caller sent."""

import tracemalloc

import msgspec

from vcuda.decision import Code, Decision, Reason
from webhook.admission import AdmissionOutcome
from webhook.decisions import DecisionLog
from webhook.review import GroupVersionKind, Request, User

LONG = "x" * 100_000


def test_a_remembered_decision_is_small() -> None:
    """A thousand of them are kept, and a caller may send 8 MiB each."""
    reasons = [Reason(code=Code.TOO_LARGE, field=LONG, value="1", message="m", remedy="r") for _ in range(100)]
    decision = Decision(tuple(reasons), (LONG,) * 100)
    request = Request(
        uid=LONG,
        kind=GroupVersionKind(LONG, LONG, LONG),
        sub_resource=LONG,
        name=LONG,
        namespace=LONG,
        operation=LONG,
        user_info=User(LONG, (LONG,)),
        object=msgspec.Raw(b'"' + LONG.encode() + b'"'),
    )
    log = DecisionLog()
    log.record("validate", request, AdmissionOutcome(decision, [{"op": "remove", "path": LONG}]))
    (entry,) = log.recent()
    assert len(entry["reasons"]) == 20
    assert len(msgspec.json.encode(entry)) < 20 * 2 * 2100
    assert entry["name"].endswith("x…")


def test_a_thousand_remembered_requests_are_small() -> None:
    """Whatever is long in them, shown or not."""
    log = DecisionLog()
    tracemalloc.start()
    try:
        for number in range(1000):
            long = f"{number}" * 1000
            kind = GroupVersionKind(long + "g", long + "v", long + "k")
            request = Request(uid=long + "u", kind=kind, sub_resource=long + "s", operation=long + "o")
            log.record("validate", request, AdmissionOutcome(Decision(), []))
        assert tracemalloc.get_traced_memory()[0] < 3 * 2**20
    finally:
        tracemalloc.stop()
