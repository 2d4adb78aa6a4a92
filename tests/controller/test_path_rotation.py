"""Which step of replacing the secret in the webhook's path comes next."""

from typing import Any

import pytest

from controller.path_rotation import MIN_AGE_S, ObservedPaths, PathStep, next_path_step
from vcuda.webhook_paths import PLAIN, PathRecord, PathReport, digest_of

OLD, NEW = "0" * 32, "1" * 32
ROTATION_S = 3600.0
SINCE = 1000
RECORD = PathRecord(current=digest_of(OLD), since=SINCE)
ANNOUNCED = PathRecord(current=digest_of(OLD), since=SINCE, next=digest_of(NEW))
NEVER_OLD, LATER = SINCE + MIN_AGE_S, SINCE + ROTATION_S


def report(*accepted: str, failed: tuple[str, ...] = (), instance: str = "a") -> PathReport:
    return PathReport(instance, tuple(map(digest_of, accepted)), tuple(map(digest_of, failed)))


def observed(*registered: str | None, **fields: Any) -> ObservedPaths:
    record = fields.pop("record", RECORD)
    return ObservedPaths(**{"registered": registered or (OLD, OLD), "records": (record, record), **fields})


@pytest.mark.parametrize(
    ("seen", "now", "step"),
    [
        pytest.param(observed(), NEVER_OLD, (PathStep.REST, PLAIN), id="a secret is kept while it is new"),
        pytest.param(observed(), LATER, (PathStep.ANNOUNCE, PLAIN), id="an old one is replaced"),
        pytest.param(
            observed(reports=[report(OLD, failed=(OLD,))]),
            NEVER_OLD,
            (PathStep.ANNOUNCE, PLAIN),
            id="so is one by which a call failed",
        ),
        pytest.param(
            observed(reports=[report(OLD, failed=(OLD,))]),
            NEVER_OLD - 1,
            (PathStep.REST, PLAIN),
            id="but not again at once, however many calls fail",
        ),
        pytest.param(
            observed(reports=[report(OLD, failed=(NEW,))]),
            NEVER_OLD,
            (PathStep.REST, PLAIN),
            id="a failed call by a former secret is no reason",
        ),
        pytest.param(
            observed(has_lost_replica=True),
            NEVER_OLD,
            (PathStep.ANNOUNCE, PLAIN),
            id="so is one that may have been printed because a replica died",
        ),
        pytest.param(observed(PLAIN, PLAIN), NEVER_OLD, (PathStep.ANNOUNCE, PLAIN), id="a plain path gets a secret"),
        pytest.param(
            observed(NEW, NEW), SINCE, (PathStep.ANNOUNCE, PLAIN), id="a path that another client wrote is replaced"
        ),
        pytest.param(observed(None, None), SINCE, (PathStep.REGISTER, PLAIN), id="a missing path is written at once"),
        pytest.param(observed(OLD, None), SINCE, (PathStep.REGISTER, OLD), id="and with the secret that others have"),
        pytest.param(
            observed(NEW, OLD, records=(ANNOUNCED, RECORD)),
            SINCE,
            (PathStep.REGISTER, NEW),
            id="a write of only one configuration is completed",
        ),
        pytest.param(
            observed(records=(ANNOUNCED, RECORD)),
            SINCE,
            (PathStep.REGISTER, OLD),
            id="an announcement in one is not one",
        ),
        pytest.param(
            observed(record=ANNOUNCED, announced=NEW, reports=[report(OLD, NEW), report(OLD)]),
            LATER,
            (PathStep.WAIT, PLAIN),
            id="a secret is not registered before all replicas accept it",
        ),
        pytest.param(
            observed(record=ANNOUNCED, announced=NEW, reports=[report(OLD, NEW), None]),
            LATER,
            (PathStep.WAIT, PLAIN),
            id="one that does not answer may not accept it",
        ),
        pytest.param(
            observed(record=ANNOUNCED, announced=NEW), LATER, (PathStep.WAIT, PLAIN), id="nor before there is a replica"
        ),
        pytest.param(
            observed(record=ANNOUNCED, announced=NEW, reports=[report(OLD, NEW), report(NEW)]),
            LATER,
            (PathStep.REGISTER, NEW),
            id="it is registered when all replicas accept it",
        ),
        pytest.param(
            observed(record=ANNOUNCED, reports=[report(OLD, NEW)]),
            LATER,
            (PathStep.ANNOUNCE, PLAIN),
            id="a new leader does not know the secret that the last one announced",
        ),
        pytest.param(
            observed(is_supported=False),
            NEVER_OLD,
            (PathStep.REGISTER, PLAIN),
            id="the plain path is restored before a replica that has no secrets is called",
        ),
        pytest.param(
            observed(PLAIN, PLAIN, is_supported=False),
            LATER,
            (PathStep.REST, PLAIN),
            id="and kept until all such replicas are gone",
        ),
    ],
)
def test_next_step(seen: ObservedPaths, now: float, step: tuple[PathStep, str]) -> None:
    """A secret is replaced for a reason, and never by one that a replica refuses."""
    following = next_path_step(seen, ROTATION_S, now)
    assert (following.step, following.secret) == step
    assert OLD not in following.why
    assert NEW not in following.why
