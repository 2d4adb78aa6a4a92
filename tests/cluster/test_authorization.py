"""How often the API server is asked about bearer tokens."""

import base64
import json
import threading
import time
from collections import Counter
from random import Random
from typing import Any, cast

import pytest

from cluster.authorization import CachedAuthorizer
from cluster.bounded_cache import MAX_CACHED
from cluster.interface import Cluster
from cluster.objects import TOKEN_REVIEWS, AccessReview, AccessReviewStatus, TokenReview, TokenReviewStatus
from cluster.review_turns import MAX_REVIEWS, MAX_REVIEWS_OF_CLIENT, REFUSALS, ReviewTurns, TooManyRefusals, is_drawn
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
        status = TokenReviewStatus(authenticated="good" in review.spec.token)
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
    """It does not wait."""
    return CachedAuthorizer(cast("Cluster", cluster), clock, 0.0)


def token_of(user: str, signature: str) -> str:
    """A token that claims to be of a user."""
    claims = base64.urlsafe_b64encode(json.dumps({"iss": "cluster", "sub": user}).encode()).decode().rstrip("=")
    return f"e30.{claims}.{signature}"


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


def test_few_reviews_are_in_progress_at_once(authorizer: CachedAuthorizer, cluster: ReviewingCluster) -> None:
    """An API server that is slow does not get more of them, and a client is told to try again."""
    cluster.may_answer.clear()
    threads = [
        threading.Thread(target=ask, args=(authorizer, f"t{number}", f"10.0.0.{number}"))
        for number in range(MAX_REVIEWS)
    ]
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


def test_a_new_token_of_an_accepted_user_is_reviewed_whatever_its_address_sends(
    authorizer: CachedAuthorizer, clock: Clock
) -> None:
    """Prometheus' token is renewed every hour, and behind a NAT it has the address of others."""
    for second in range(3 * 3600):
        clock.now = float(second)
        for number in range(3):
            assert ask(authorizer, token_of(f"pod-{number}", f"bad-{second}"), "node") != 200
        if second % 15 == 0:
            assert ask(authorizer, token_of("prometheus", f"good-{second // 3600}"), "node") == 200


def test_who_claims_to_be_an_accepted_user_gets_few_reviews(
    authorizer: CachedAuthorizer, cluster: ReviewingCluster
) -> None:
    """Anybody can write a token that does: its refusals are counted like those of an address."""
    assert ask(authorizer, token_of("prometheus", "good"), "node") == 200
    statuses = Counter(ask(authorizer, token_of("prometheus", f"bad-{number}"), "node") for number in range(100))
    assert statuses == {401: REFUSALS, 429: 100 - REFUSALS}
    assert cluster.reviewed.total() == REFUSALS + 1


@pytest.mark.parametrize("token", ["", "a.b", "a.!!.c", "a.bnVsbA.c", "a.eyJzdWIiOjF9.c", "." * 9000, "a.\xff\u20ac.c"])
def test_a_token_that_claims_nothing_is_reviewed_like_any_other(authorizer: CachedAuthorizer, token: str) -> None:
    assert ask(authorizer, token, "node") == 401


def wait_in_line(turns: ReviewTurns, client: str, results: list[str], name: str) -> threading.Thread:
    """Ask for a turn on a thread, which notes whether it got one."""

    def run() -> None:
        try:
            turns.begin(client)
        except (TooManyRefusals, Unavailable) as error:
            results.append(f"{name}: {type(error).__name__}")
        else:
            results.append(f"{name}: begins")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def refuse(turns: ReviewTurns, client: str, count: int) -> None:
    for _ in range(count):
        turns.begin(client)
        turns.end(client, is_refused=True)


@pytest.mark.parametrize(("random", "winner"), [(0.0, 4), (0.99, 0)], ids=["the last", "the first"])
def test_of_the_tokens_of_an_address_one_waits_and_is_drawn(random: float, winner: int) -> None:
    """The others are refused at once; it begins when the address may have a refusal again."""
    turns = ReviewTurns(time.monotonic, 20.0, lambda: random)
    refuse(turns, "node", REFUSALS)
    results: list[str] = []
    threads = []
    for number in range(5):
        threads.append(wait_in_line(turns, "node", results, str(number)))
        eventually(lambda: len(results) + len(turns._waiting) > number, "its place")  # noqa: B023
    for each in threads:
        each.join(20)
    assert sorted(results) == [
        f"{number}: {'begins' if number == winner else 'TooManyRefusals'}" for number in range(5)
    ]


def test_every_arrival_is_drawn_with_the_same_chance() -> None:
    random, rounds, arrivals = Random(1), 20_000, 10
    winners: Counter[int] = Counter()
    for _ in range(rounds):
        winners[max(number for number in range(1, arrivals + 1) if is_drawn(number, random.random()))] += 1
    assert all(abs(winners[number] - rounds / arrivals) < rounds / arrivals / 5 for number in range(1, arrivals + 1))


def test_reviews_of_an_address_that_take_long_leave_turns_to_others() -> None:
    """At most one more waits, so that an address holds few threads."""
    turns = ReviewTurns(time.monotonic, 0.0)
    for _ in range(MAX_REVIEWS_OF_CLIENT):
        turns.begin("attacker")
    with pytest.raises(Unavailable):
        turns.begin("attacker")
    turns.begin("prometheus")
    turns.end("attacker", is_refused=True)
    turns.begin("attacker")


def test_reviews_in_progress_count_as_refused_until_they_are_not() -> None:
    """Otherwise slow reviews would let through more than an address may have."""
    turns = ReviewTurns(lambda: 0.0, 0.0)
    refuse(turns, "node", REFUSALS - 1)
    turns.begin("node")
    with pytest.raises(TooManyRefusals):
        turns.begin("node")
    turns.end("node", is_refused=False)
    turns.begin("node")
