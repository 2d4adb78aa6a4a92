"""Authorization of HTTP requests by the API server.

A TokenReview tells whose bearer token it is, a SubjectAccessReview whether that user may get the path.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

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

BEARER = "Bearer "
MAX_CACHED = 256
# A revoked right is honoured for two minutes at most. A right that was just granted should work soon.
ALLOWED_S, FAILED_S = 120.0, 5.0

# HTTP status and message.
AuthorizationFailure = tuple[int, str]


def authorization_failure(cluster: Cluster, authorization: str, path: str) -> AuthorizationFailure | None:
    """Return why the sender of an Authorization header may not get a path; None if that is allowed."""
    if not authorization.startswith(BEARER):
        return 401, "send a bearer token: Authorization: Bearer ..."
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
    """Caches decisions: Prometheus scrapes every node every few seconds, with the same token. Thread-safe."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        # Guards the cache; the API server is asked outside of it.
        self._lock = threading.Lock()
        self._decisions: OrderedDict[str, tuple[float, AuthorizationFailure | None]] = OrderedDict()

    def failure(self, authorization: str, path: str) -> AuthorizationFailure | None:
        """Return why the sender of an Authorization header may not get a path; None if that is allowed."""
        # Hashed, so that no token stays in memory.
        key = hashlib.sha256(f"{path}\0{authorization}".encode()).hexdigest()
        with self._lock:
            decided_at, failure = self._decisions.get(key, (-ALLOWED_S, None))
            if self._clock() - decided_at < (FAILED_S if failure else ALLOWED_S):
                return failure
        failure = authorization_failure(self._cluster, authorization, path)
        with self._lock:
            self._decisions[key] = self._clock(), failure
            self._decisions.move_to_end(key)
            if len(self._decisions) > MAX_CACHED:
                self._decisions.popitem(last=False)
        return failure
