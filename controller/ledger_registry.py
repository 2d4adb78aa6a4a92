"""A record of the namespaces that have had a ledger, to tell a lost ledger from one that never existed.

A lost ledger may have admitted pods that do not exist yet, so its replacement stays closed for a while. A namespace
that never had a ledger has no such pods, and starts with an open one.
"""

import threading
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata, Owners
from cluster.retrying import LOST_RACE, retry_on_conflict
from vcuda.decision import Unavailable
from vcuda.decoding import decoder_for
from vcuda.names import LEDGER_REGISTRY, LEDGER_REGISTRY_KEY
from vcuda.quota_usage import RESERVATION_S

MAX_ATTEMPTS = 10

# Namespace name to uid: a namespace that is deleted and created again has another uid, and counts as new.
NamespaceUids = dict[str, str]


class LedgerRegistry:
    """Stored in a ConfigMap in Quotient's namespace, and cached until `invalidate`; safe for several threads.

    `any_ledger` says whether the cluster has ledgers: if it has, and the registry does not exist, it was lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        system_namespace: str,
        any_ledger: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        owners: Owners = list,
    ) -> None:
        self._cluster, self._system_namespace, self._owners = cluster, system_namespace, owners
        self._any_ledger, self._clock = any_ledger, clock
        # Until then every namespace counts as one that had a ledger: with the registry, ledgers may be lost as well.
        self._lost_until = float("-inf")
        # Guards the cache, and keeps it in step with the ConfigMap: so it is held during the calls to the API server,
        # which are one per new namespace, or batch of them.
        self._lock = threading.Lock()
        self._cache: NamespaceUids | None = None

    def has(self, namespace: str, uid: str) -> bool:
        """Whether exactly this namespace has had a ledger."""
        with self._lock:
            return self._load().get(namespace) == uid or self._clock() < self._lost_until

    def add(self, namespaces: NamespaceUids) -> NamespaceUids:
        """Add namespaces, and return those that were not in it. To be called before their ledgers are created.

        In the other order, a ledger lost after a crash in between would look as if it had never existed.
        """
        added: NamespaceUids = {}

        def change(known: NamespaceUids) -> NamespaceUids:
            added.clear()
            added.update({name: uid for name, uid in namespaces.items() if known.get(name) != uid})
            return known | namespaces

        self._update(change)
        return added

    def remove(self, namespace: str) -> None:
        self._update(lambda known: {name: uid for name, uid in known.items() if name != namespace})

    def invalidate(self) -> None:
        """Drop the cache: another process may have changed the registry."""
        with self._lock:
            self._cache = None

    def _load(self) -> NamespaceUids:
        if self._cache is None:
            try:
                self._cache = decode_registry(self._cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, self._system_namespace))
            except (NotFound, ValueError):
                self._cache = {}
                if self._any_ledger():
                    self._lost_until = self._clock() + RESERVATION_S
        return self._cache

    def _update(self, change: Callable[[NamespaceUids], NamespaceUids]) -> None:
        with self._lock:
            if change(self._load()) == self._load():
                return
            self._cache = self._write_with_retries(change)

    def _write_with_retries(self, change: Callable[[NamespaceUids], NamespaceUids]) -> NamespaceUids:
        try:
            return retry_on_conflict(lambda _: self._write(change), attempts=MAX_ATTEMPTS)
        except LOST_RACE as error:
            # Not a Conflict: the reconciler, which calls this, would take it for one of its ledger and retry at once.
            where = f"ConfigMap {self._system_namespace}/{LEDGER_REGISTRY}"
            raise Unavailable(f"too many conflicting writes to {where}: {error}") from None

    def _write(self, change: Callable[[NamespaceUids], NamespaceUids]) -> NamespaceUids:
        try:
            existing = self._cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, self._system_namespace)
        except NotFound:
            # Deleted while this process runs: the cache is the better copy.
            known = change(dict(self._cache or {}))
            metadata = Metadata(name=LEDGER_REGISTRY, namespace=self._system_namespace, owner_references=self._owners())
            self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=encode_registry(known)))
            return known
        try:
            before = decode_registry(existing)
        except ValueError:
            before = self._cache or {}
        known = change(before)
        self._cluster.update(CONFIG_MAPS, replace(existing, data=encode_registry(known)))
        return known


def decode_registry(config_map: ConfigMap) -> NamespaceUids:
    """Decode the registry; raises ValueError if the ConfigMap is not as `encode_registry` wrote it."""
    return decoder_for(NamespaceUids).decode(config_map.data.get(LEDGER_REGISTRY_KEY, ""))


def encode_registry(namespaces: NamespaceUids) -> dict[str, str]:
    return {LEDGER_REGISTRY_KEY: msgspec.json.encode(namespaces, order="sorted").decode()}
