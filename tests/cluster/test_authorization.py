"""How often the API server is asked about bearer tokens."""

import threading
from collections import Counter
from typing import Any, cast

import pytest

from cluster.authorization import MAX_CACHED, MAX_REVIEWS, REFUSALS, CachedAuthorizer
from cluster.interface import Cluster
from cluster.objects import TOKEN_REVIEWS, AccessReview, AccessReviewStatus, TokenReview, TokenReviewStatus
from tests.waiting import eventually
from vcuda.decision import Unavailable


class ReviewingCluster:
    """Accepts the token `good`, counts the reviews, and takes as long for one as a test wants."""

    def __init__(self) -> None:
        self.reviewed: Counter[str] = Counter()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def create(self, kind: Any, review: Any) -> Any:
        if kind is not TOKEN_REVIEWS:
            return AccessReview(spec=review.spec, status=AccessReviewStatus(allowed=True))
        self.reviewed[review.spec.token] += 1
        self.may_answer.wait(30)
        status = TokenReviewStatus(authenticated=review.spec.token == "good")  # noqa: S105
        return TokenReview(spec=review.spec, status=status)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cluster() -> ReviewingCluster:
    return ReviewingCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authorizer(cluster: ReviewingCluster, clock: Clock) -> CachedAuthorizer:
    return CachedAuthorizer(cast("Cluster", cluster), clock)


def ask(authorizer: CachedAuthorizer, token: str, peer: str = "") -> int:
    """The status of a request with this token; 200 if it is allowed."""
    refused = authorizer.failure(f"Bearer {token}", "/metrics", peer)
    return refused[0] if refused else 200


def test_a_token_is_reviewed_once_whether_accepted_or_refused(
    authorizer: CachedAuthorizer, cluster: ReviewingCluster, clock: Clock
) -> None:
    """Until its decision is too old; a refusal becomes old sooner."""
    for _ in range(20):
        assert (ask(authorizer, "good"), ask(authorizer, "bad")) == (200, 401)
    assert cluster.reviewed == {"good": 1, "bad": 1}
    clock.now = 6
    ask(authorizer, "good")
    ask(authorizer, "bad")
    assert cluster.reviewed == {"good": 1, "bad": 2}
    clock.now = 121
    ask(authorizer, "good")
    assert cluster.reviewed["good"] == 2


def test_a_flood_of_bad_tokens_displaces_no_accepted_one(
    authorizer: CachedAuthorizer, cluster: ReviewingCluster
) -> None:
    ask(authorizer, "good")
    for number in range(2 * MAX_CACHED):
        ask(authorizer, f"bad-{number}", f"10.0.0.{number}")
    assert ask(authorizer, "good") == 200
    assert cluster.reviewed["good"] == 1


def test_a_client_gets_few_tokens_reviewed_that_are_refused(
    authorizer: CachedAuthorizer, cluster: ReviewingCluster, clock: Clock
) -> None:
    """Each is another one, so no cache helps. Other clients, and accepted tokens, are not affected."""
    ask(authorizer, "good", "10.0.0.9")
    statuses = Counter(ask(authorizer, f"bad-{number}", "10.0.0.9") for number in range(100))
    assert statuses == {401: REFUSALS, 429: 100 - REFUSALS}
    assert cluster.reviewed.total() == REFUSALS + 1
    assert ask(authorizer, "good", "10.0.0.9") == 200
    assert ask(authorizer, "bad", "10.0.0.10") == 401
    clock.now = 3
    assert Counter(ask(authorizer, f"more-{number}", "10.0.0.9") for number in range(9)) == {401: 3, 429: 6}


def test_bad_tokens_of_an_address_keep_out_no_token_that_was_accepted(
    authorizer: CachedAuthorizer, clock: Clock
) -> None:
    """Behind a NAT, Prometheus has the address of the pods that send them."""
    assert authorizer.failure("Bearer good", "/metrics", "node") is None
    for second in range(600):
        clock.now = float(second)
        for number in range(3):
            assert authorizer.failure(f"Bearer bad-{second}-{number}", "/metrics", "node") is not None
        if second % 15 == 0:
            assert authorizer.failure("Bearer good", "/metrics", "node") is None


def test_few_reviews_are_in_progress_at_once(
    authorizer: CachedAuthorizer, cluster: ReviewingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that is slow does not get more of them, and a client is told to try again."""
    monkeypatch.setattr("cluster.authorization.REVIEW_WAIT_S", 0.01)
    cluster.may_answer.clear()
    threads = [threading.Thread(target=ask, args=(authorizer, f"t{number}")) for number in range(MAX_REVIEWS)]
    for each in threads:
        each.start()
    eventually(lambda: cluster.reviewed.total() == MAX_REVIEWS, "the reviews to begin")
    with pytest.raises(Unavailable, match="too many tokens are being reviewed"):
        ask(authorizer, "one more")
    cluster.may_answer.set()
    for each in threads:
        each.join(30)
    assert ask(authorizer, "good") == 200


def test_a_request_without_a_token_costs_nothing(authorizer: CachedAuthorizer, cluster: ReviewingCluster) -> None:
    assert authorizer.failure("", "/metrics") == (401, "send a bearer token: Authorization: Bearer ...")
    assert authorizer.failure("Basic YTpi", "/metrics") == (401, "send a bearer token: Authorization: Bearer ...")
    assert not cluster.reviewed
