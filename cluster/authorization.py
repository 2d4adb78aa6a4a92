"""Who asks, and whether he may: a bearer token, and a right on a path, both judged by the API server."""

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
REMEMBERED = 256
REMEMBERED_S, REFUSED_S = 120.0, 5.0

AuthorizationFailure = tuple[int, str]


def authorization_failure(cluster: Cluster, authorization: str, path: str) -> AuthorizationFailure | None:
    """Say why somebody may not get a path: HTTP status and words; None if he may."""
    if not authorization.startswith(BEARER):
        return 401, "send a bearer token: Authorization: Bearer ..."
    try:
        asked = TokenReview(spec=TokenReviewSpec(authorization.removeprefix(BEARER).strip()))
        who = cluster.create(TOKEN_REVIEWS, asked).status
        if not who.authenticated:
            return 401, "this token is not known to the cluster"
        spec = AccessReviewSpec(who.user.username, list(who.user.groups), NonResourceAttributes(path, "get"))
        if not cluster.create(ACCESS_REVIEWS, AccessReview(spec=spec)).status.allowed:
            return 403, f"{who.user.username} may not get {path}: that takes a ClusterRole on this nonResourceURL"
    except ApiError as refused:
        return 403, f"the cluster does not tell who this is: {refused}"
    return None


class CachedAuthorizer:
    """Remembers for a while who may, and shortly who may not: whoever measures comes again and again, on every node."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        # Guards what is remembered; the API server is asked outside of it.
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[float, AuthorizationFailure | None]] = OrderedDict()

    def refusal_of(self, authorization: str, path: str) -> AuthorizationFailure | None:
        """Say why somebody may not get a path; None if he may, or might a moment ago."""
        key = hashlib.sha256(f"{path}\0{authorization}".encode()).hexdigest()
        with self._lock:
            at, refusal = self._answers.get(key, (-REMEMBERED_S, None))
            if self._clock() - at < (REFUSED_S if refusal else REMEMBERED_S):
                return refusal
        refusal = authorization_failure(self._cluster, authorization, path)
        with self._lock:
            self._answers[key] = self._clock(), refusal
            self._answers.move_to_end(key)
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return refusal
