"""Authorization of HTTP requests by the API server.

A TokenReview tells whose bearer token it is, a SubjectAccessReview whether that user may get the path.
"""

import base64
import hashlib
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from cluster.bounded_cache import BoundedCache
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
from cluster.review_turns import REVIEW_WAIT_S, ReviewTurns, TooManyRefusals
from vcuda.decoding import decoder_for

BEARER = "Bearer "
# A revoked right is honoured for two minutes at most. A right that was just granted should work soon.
ALLOWED_S, FAILED_S = 120.0, 5.0
# For how long a token is known to have been accepted, and whose it was: it is reviewed whatever else its address sends.
KNOWN_S = 86_400.0
# Longer claims are cut: they are kept in memory.
MAX_CLAIM_CHARS = 256

# HTTP status and message.
AuthorizationFailure = tuple[int, str]
NO_TOKEN: AuthorizationFailure = 401, "send a bearer token: Authorization: Bearer ..."


class Claims(Struct, frozen=True):
    """Whose token it claims to be; that is not verified."""

    iss: str = ""
    sub: str = ""


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

    A decision costs the API server two reviews, so `ReviewTurns` limits them. A client is an address, and behind an
    address each user whose token was accepted before: bad tokens of other pods, whose address may be the same behind a
    NAT, must not keep Prometheus out when its token is renewed. Who claims to be that user competes only with it.
    """

    def __init__(
        self, cluster: Cluster, clock: Callable[[], float] = time.monotonic, wait_s: float = REVIEW_WAIT_S
    ) -> None:
        self._cluster, self._clock = cluster, clock
        # Guards the caches; the API server is asked outside of it. Refusals are apart from the rest: a flood of bad
        # tokens must not displace the good ones.
        self._lock = threading.Lock()
        self._allowed: BoundedCache[None] = BoundedCache(ALLOWED_S)
        self._known: BoundedCache[None] = BoundedCache(KNOWN_S)
        self._known_users: BoundedCache[None] = BoundedCache(KNOWN_S)
        self._refused: BoundedCache[AuthorizationFailure] = BoundedCache(FAILED_S)
        self._turns = ReviewTurns(clock, wait_s)

    def failure(self, authorization: str, path: str, peer: str = "") -> AuthorizationFailure | None:
        """Return why the sender of an Authorization header may not get a path; None if that is allowed.

        `peer` is the address of the client. Raises Unavailable if the API server does not answer, or if too many
        reviews are in progress.
        """
        if not authorization.startswith(BEARER):
            return NO_TOKEN
        # Hashed, so that no token stays in memory.
        key = hashlib.sha256(f"{path}\0{authorization}".encode()).hexdigest()
        user = f"{path}\0{claimed_user(authorization)}"
        with self._lock:
            now = self._clock()
            if self._allowed.get(key, now) is not None:
                return None
            if refused := self._refused.get(key, now):
                return refused[1]
            if self._known.get(key, now) is not None:
                client = key
            elif self._known_users.get(user, now) is not None:
                client = f"{peer}\0{user}"
            else:
                client = peer
        try:
            self._turns.begin(client)
        except TooManyRefusals:
            return 429, "too many tokens from this address were refused: try again in a second"
        is_refused = False
        try:
            failure = authorization_failure(self._cluster, authorization, path)
            is_refused = failure is not None
        finally:
            self._turns.end(client, is_refused=is_refused)
        with self._lock:
            now = self._clock()
            if failure is None:
                self._allowed.put(key, None, now)
                self._known.put(key, None, now)
                self._known_users.put(user, None, now)
            else:
                self._known.remove(key)
                self._refused.put(key, failure, now)
        return failure


def claimed_user(authorization: str) -> str:
    """Return the issuer and subject that a token claims; the same for all tokens that claim none."""
    payload = authorization.partition(".")[2].partition(".")[0]
    try:
        claims = decoder_for(Claims).decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, msgspec.MsgspecError):
        claims = Claims()
    return f"{claims.iss[:MAX_CLAIM_CHARS]}\0{claims.sub[:MAX_CLAIM_CHARS]}"
