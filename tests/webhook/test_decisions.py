"""What is kept of a decision does not depend on how much a caller sent."""

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
        uid="u",
        kind=GroupVersionKind(kind="Pod"),
        name=LONG,
        namespace=LONG,
        operation="CREATE",
        user_info=User(LONG, (LONG,)),
        object=msgspec.Raw(b'"' + LONG.encode() + b'"'),
    )
    log = DecisionLog()
    log.record("validate", request, AdmissionOutcome(decision, [{"op": "remove", "path": LONG}]))
    (entry,) = log.recent()
    assert len(entry["reasons"]) == 20
    assert len(msgspec.json.encode(entry)) < 20 * 2 * 2100
    assert entry["name"].endswith("x…")
