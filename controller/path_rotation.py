"""The order in which one secret in the webhook's path replaces another, so that no API server meets a refused path.

1. ANNOUNCE: record the next secret, by digest, in the webhook configurations. Replicas accept it from then on.
2. REGISTER: once every replica says so, write the paths with it, and record the former one.

Which step comes next is derived from what the configurations and the replicas show. Only the next secret itself is in
no object; a controller that does not know it announces another one.

A secret is replaced when it is old, after a call that failed, and when a replica is gone, whose calls may have failed,
or may have gone before the controller looked: the API server prints the URL of a failed call to the user whose request
it was.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from vcuda.webhook_paths import PLAIN, PathRecord, PathReport, digest_of

# At most this often, whatever happens: each time is four writes of webhook configurations.
MIN_AGE_S = 60


class PathStep(StrEnum):
    """What to do next; the values are values of a log field."""

    ANNOUNCE = "announce"
    REGISTER = "register"
    WAIT = "wait"
    REST = "rest"


class NextPathStep(Struct, frozen=True):
    """The next step and its reason; `secret` is the one to be registered."""

    step: PathStep
    why: str
    secret: str = PLAIN


class ObservedPaths(Struct, frozen=True, kw_only=True):
    """What configurations and replicas show.

    `registered` has the secret of each webhook, None for a missing or foreign path; the first is that of the
    configuration that is written first. `reports` has None for a replica that does not answer. `is_supported`: the
    Deployment and all replicas are of a version that reads the record.
    """

    registered: Sequence[str | None]
    records: Sequence[PathRecord]
    reports: Sequence[PathReport | None] = ()
    is_supported: bool = True
    has_lost_replica: bool = False
    # The next secret, if this process has announced one.
    announced: str = PLAIN

    @property
    def record(self) -> PathRecord:
        return self.records[0]


def next_path_step(observed: ObservedPaths, rotation_s: float, now: float) -> NextPathStep:
    registered = observed.registered
    if not observed.is_supported:
        # Replicas of a version without secrets serve the plain paths only, and this version serves what is registered.
        is_plain = all(secret == PLAIN for secret in registered)
        return NextPathStep(PathStep.REST if is_plain else PathStep.REGISTER, "not every replica serves secret paths")
    known = next((secret for secret in registered if secret is not None), PLAIN)
    if any(secret != known for secret in registered) or any(record != observed.record for record in observed.records):
        return NextPathStep(PathStep.REGISTER, "not every webhook has the same path and record", known)
    if not (why := reason_to_rotate(observed, known, rotation_s, now)):
        return NextPathStep(PathStep.REST, "the path is in order")
    if not observed.announced or observed.record.next != digest_of(observed.announced):
        return NextPathStep(PathStep.ANNOUNCE, why)
    if is_accepted_by_all(observed.record.next, observed.reports):
        return NextPathStep(PathStep.REGISTER, why, observed.announced)
    return NextPathStep(PathStep.WAIT, "not every replica accepts the next path yet")


def reason_to_rotate(observed: ObservedPaths, secret: str, rotation_s: float, now: float) -> str:
    """Return why the registered secret has to be replaced; empty if it can stay."""
    record = observed.record
    if secret == PLAIN:
        return "the path has no secret"
    if record.current != digest_of(secret):
        return "another client has written the path"
    age_s = now - record.since
    if age_s >= rotation_s:
        return "the path is old"
    # Also with a clock that was set back.
    if 0 <= age_s < MIN_AGE_S:
        return ""
    if any(report is not None and record.current in report.failed for report in observed.reports):
        return "a call failed"
    return "a replica is or may be gone" if observed.has_lost_replica else ""


def is_accepted_by_all(digest: str, reports: Sequence[PathReport | None]) -> bool:
    """Whether there are replicas, and all of them accept a secret."""
    return bool(reports) and all(report is not None and digest in report.accepted for report in reports)
