"""Authorization of HTTP requests by the API server.

A TokenReview tells whose bearer token it is, a SubjectAccessReview whether that user may get the path.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import (
    ACCESS_REVIEWS,
    TOKEN_REVIEWS,
    AccessReview,
    AccessReviewSpec,
    NonResourceAttributes,
    TokenReview,
    TokenReviewSpec,
)
from vcuda.decision import Unavailable

BEARER = "Bearer "
MAX_CACHED = 256
# A revoked right is honoured for two minutes at most. A right that was just granted should work soon.
ALLOWED_S, FAILED_S = 120.0, 5.0
# For how long a token is known to have been accepted: it is reviewed again whatever else its address has sent. Bad
# tokens of other pods, whose address may be the same behind a NAT, must not keep Prometheus out.
KNOWN_S = 86_400.0
# How many refusals a client may have at once, and then again with time.
REFUSALS, REFUSALS_PER_S = 10, 1.0
# How many reviews may be in progress, and how long others wait for them.
MAX_REVIEWS, REVIEW_WAIT_S = 4, 1.0

# HTTP status and message.
AuthorizationFailure = tuple[int, str]
NO_TOKEN: AuthorizationFailure = 401, "send a bearer token: Authorization: Bearer ..."

T = TypeVar("T")


def authorization_failure(cluster: Cluster, authorization: str, path: str) -> AuthorizationFailure | None:
    """Return why the sender of an Authorization header may not get a path; None if that is allowed."""
    if not authorization.startswith(BEARER):
        return NO_TOKEN
    try:
        review = TokenReview(spec=TokenReviewSpec(authorization.removeprefix(BEARER).strip()))
        token = cluster.create(TOKEN_REVIEWS, review).status
        if not token.authenticated:
            return 401, "the cluster does not accept this token"
        user = token.user
        spec = AccessReviewSpec(user.username, list(user.groups), NonResourceAttributes(path, "get"))
        if not cluster.create(ACCESS_REVIEWS, AccessReview(spec=spec)).status.allowed:
            return 403, f"{user.username} may not get {path}: bind a ClusterRole with this nonResourceURL"
    except ApiError as error:
        # Unavailable is not caught: without a decision the caller answers 503, not 403.
        return 403, f"the token cannot be checked: {error}"
    return None


class CachedAuthorizer:
    """Caches decisions: Prometheus scrapes every node every few seconds, with the same token. Thread-safe.

    A decision costs the API server two reviews. So after REFUSALS a client gets no more tokens reviewed than
    REFUSALS_PER_S, and few reviews run at once.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        # Guards the four caches; the API server is asked outside of it. Refusals are apart from the rest: a flood of
        # bad tokens must not displace the good ones.
        self._lock = threading.Lock()
        self._allowed: BoundedCache[None] = BoundedCache(ALLOWED_S)
        self._known: BoundedCache[None] = BoundedCache(KNOWN_S)
        self._refused: BoundedCache[AuthorizationFailure] = BoundedCache(FAILED_S)
        # How many more refusals a client may have, by its address.
        self._refusals_left: BoundedCache[float] = BoundedCache(REFUSALS / REFUSALS_PER_S)
        self._reviews = threading.BoundedSemaphore(MAX_REVIEWS)

    def failure(self, authorization: str, path: str, peer: str = "") -> AuthorizationFailure | None:
        """Return why the sender of an Authorization header may not get a path; None if that is allowed.

        `peer` is the address of the client; without it, its refusals are not counted. Raises Unavailable if the API
        server does not answer, or if too many reviews are in progress.
        """
        if not authorization.startswith(BEARER):
            return NO_TOKEN
        # Hashed, so that no token stays in memory.
        key = hashlib.sha256(f"{path}\0{authorization}".encode()).hexdigest()
        with self._lock:
            now = self._clock()
            if self._allowed.get(key, now) is not None:
                return None
            if refused := self._refused.get(key, now):
                return refused[1]
            if peer and self._left(peer, now) < 1 and self._known.get(key, now) is None:
                return 429, "too many tokens from this address were refused: try again in a second"
        if not self._reviews.acquire(timeout=REVIEW_WAIT_S):
            raise Unavailable("too many tokens are being reviewed")
        try:
            failure = authorization_failure(self._cluster, authorization, path)
        finally:
            self._reviews.release()
        with self._lock:
            now = self._clock()
            if failure is None:
                self._allowed.put(key, None, now)
                self._known.put(key, None, now)
            else:
                self._known.remove(key)
                self._refused.put(key, failure, now)
                self._refusals_left.put(peer, self._left(peer, now) - 1, now)
        return failure

    def _left(self, peer: str, now: float) -> float:
        # One that is not cached any more has all of them again.
        stored_at, left = self._refusals_left.get(peer, now) or (now, float(REFUSALS))
        return min(REFUSALS, left + (now - stored_at) * REFUSALS_PER_S)


class BoundedCache(Generic[T]):
    """The latest MAX_CACHED values, for `keep_s` seconds each, with the time at which they were stored."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._entries: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def get(self, key: str, now: float) -> tuple[float, T] | None:
        entry = self._entries.get(key)
        return entry if entry is not None and now - entry[0] < self._keep_s else None

    def remove(self, key: str) -> None:
        self._entries.pop(key, None)

    def put(self, key: str, value: T, now: float) -> None:
        self._entries[key] = now, value
        self._entries.move_to_end(key)
        if len(self._entries) > MAX_CACHED:
            self._entries.popitem(last=False)
