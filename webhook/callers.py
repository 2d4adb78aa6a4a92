"""Who calls: which paths of the webhook are accepted, and how far their callers are trusted.

A replica accepts the secret that the webhook configurations have registered at the moment, and those that the
controller has recorded beside it: the next one, and former ones (see `vcuda/webhook_paths.py`). Without a secret, and
while a plain path is registered, as during an upgrade from a version that has no secrets, the plain paths are accepted.
So no order in which Quotient is upgraded, rolled back or stopped leaves API servers with a path that is refused.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from msgspec import Struct

from cluster.objects import RegisteredWebhook, WebhookConfiguration
from vcuda.names import PATHS_ANNOTATION
from vcuda.webhook_paths import (
    MUTATE,
    PLAIN,
    VALIDATE,
    PathRecord,
    PathReport,
    decode_record,
    digest_of,
    is_retired,
    secret_in,
)

FAIL = "Fail"


class Caller(Enum):
    """How far a caller is trusted.

    KNOWN: it is authenticated, or it knows the registered secret. ANONYMOUS: it came by a path that is accepted but
    that others may know. REFUSED: its path is not accepted.
    """

    KNOWN = "known"
    ANONYMOUS = "anonymous"
    REFUSED = "refused"


class RegisteredPaths(Struct, frozen=True):
    """What the webhook configurations say: registered secrets, the next one, former ones with when each was replaced.

    All by digest. `fails_closed`: no answer of the webhook is a refusal, because every failurePolicy is Fail.
    """

    registered: frozenset[str] = frozenset()
    expected: frozenset[str] = frozenset()
    former: dict[str, int] = {}
    fails_closed: bool = False

    @property
    def accepted(self) -> frozenset[str]:
        """The digests that are accepted without limit in time."""
        # Nothing is registered in a test, and before a first installation is complete.
        return self.registered | self.expected or frozenset((digest_of(PLAIN),))

    @property
    def known(self) -> tuple[str, ...]:
        """All digests, also those of former secrets that may be retired."""
        return tuple(sorted(self.accepted | self.former.keys()))


def registered_paths(configurations: Iterable[WebhookConfiguration]) -> RegisteredPaths:
    """Return what webhook configurations say about the webhook's paths."""
    all_configurations = list(configurations)
    hooks = [hook for each in all_configurations for hook in each.webhooks]
    records = [decode_record(each.metadata.annotations.get(PATHS_ANNOTATION, "")) for each in all_configurations]
    secrets = [secret for hook in hooks if (secret := secret_in(path_of(hook))) is not None]
    return RegisteredPaths(
        registered=frozenset(map(digest_of, secrets)),
        expected=frozenset(digest for each in records for digest in (each.current, each.next) if digest),
        former=latest_replacements(records),
        fails_closed=bool(hooks) and all(hook.failure_policy == FAIL for hook in hooks),
    )


def path_of(hook: RegisteredWebhook) -> str:
    """Return the path by which an API server calls a webhook; behind a proxy a URL may have more in front of it."""
    client = hook.client_config
    path = urlsplit(client.url).path if client.url else client.service.path
    at = max(path.rfind(f"/{MUTATE}"), path.rfind(f"/{VALIDATE}"))
    return path[at:] if at >= 0 else path


def latest_replacements(records: Iterable[PathRecord]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for record in records:
        for digest, at in record.former.items():
            latest[digest] = max(at, latest.get(digest, at))
    return latest


class CallerPaths:
    """The accepted paths of this process. Thread-safe.

    With `is_authenticated` every connection is: by a client certificate or by its address. Secrets still apply.
    """

    def __init__(self, *, is_authenticated: bool = False, now: Callable[[], float] = time.time) -> None:
        self._is_authenticated, self._now = is_authenticated, now
        self._instance = uuid.uuid4().hex
        # Guards what follows: the event loop, Flask's threads and an informer use it.
        self._lock = threading.Lock()
        self._paths = RegisteredPaths()
        # Computed once, not for each call.
        self._accepted, self._known = self._paths.accepted, self._paths.known
        self._last_used: dict[str, float] = {}
        self._failed: set[str] = set()

    def update(self, paths: RegisteredPaths) -> None:
        with self._lock:
            self._paths, self._accepted, self._known = paths, paths.accepted, paths.known
            self._last_used = {digest: at for digest, at in self._last_used.items() if digest in paths.known}
            self._failed.intersection_update(paths.known)

    @property
    def fails_closed(self) -> bool:
        """Whether the API server refuses an object if the webhook does not decide."""
        return self._paths.fails_closed

    def identify(self, secret: str) -> Caller:
        """Return how far the caller who came by this secret is trusted, and count that as a use of the secret."""
        digest, now = digest_of(secret), self._now()
        with self._lock:
            known = matching(digest, self._known)
            if not known or not self._is_usable(known, now):
                return Caller.REFUSED
            self._last_used[known] = now
            if self._is_authenticated or (secret and known in self._paths.registered):
                return Caller.KNOWN
            return Caller.ANONYMOUS

    def _is_usable(self, digest: str, now: float) -> bool:
        if digest in self._accepted:
            return True
        return not is_retired(self._paths.former[digest], self._last_used.get(digest, 0.0), now)

    def record_failure(self, secret: str | None = None) -> None:
        """Record that a call by this secret got no answer in time; without a secret: any call.

        An API server then prints the URL to the user whose request failed, so the controller replaces the secret.
        """
        with self._lock:
            digests = self._paths.registered if secret is None else self._paths.registered & {digest_of(secret)}
            self._failed |= digests

    def report(self) -> PathReport:
        now = self._now()
        with self._lock:
            accepted = tuple(digest for digest in self._known if self._is_usable(digest, now))
            return PathReport(self._instance, accepted, tuple(sorted(self._failed)))


def matching(digest: str, known: Iterable[str]) -> str:
    """Return the digest among those known, empty if it is not; the time this takes tells nothing about them."""
    found = ""
    for each in known:
        if compare_digest(each, digest):
            found = each
    return found


@lru_cache(maxsize=256)  # the same few API servers connect again and again
def is_in_networks(address: str, cidrs: tuple[str, ...]) -> bool:
    """Whether the address of a peer is in one of these networks."""
    try:
        # A link-local address may name its interface, as in fe80::1%eth0.
        peer = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    # So a socket for both families shows a peer that connects by IPv4.
    mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
    return any((mapped or peer) in ip_network(cidr, strict=False) for cidr in cidrs)
