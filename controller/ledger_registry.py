"""Which namespaces have had a ledger: so that a ledger that is missing can be told from one that never was.

Where one is missing that was there, pods may be on their way that it had admitted; where none was, there are none.
"""

import threading
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from cluster.errors import AlreadyExists, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata, Owners
from controller.accounting import RESERVATION_S
from vcuda.decision import Unavailable
from vcuda.decoding import decoder_for
from vcuda.names import LEDGER_REGISTRY, LEDGER_REGISTRY_KEY

TRIES = 10

Known = dict[str, str]


class LedgerRegistry:
    """Namespaces by name, each with the uid of the one that had a ledger; kept in a ConfigMap of Quotient's own."""

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
        # Until when every namespace counts as one that had a ledger: this list was lost, and so may be others' ledgers.
        self._suspect_until = float("-inf")
        # Guards what is remembered, and that one write at a time is made of it.
        self._lock = threading.Lock()
        self._known: Known | None = None

    def has(self, namespace: str, uid: str) -> bool:
        """Tell whether this very namespace has had a ledger."""
        with self._lock:
            return self._loaded().get(namespace) == uid or self._clock() < self._suspect_until

    def add(self, beginning: Known) -> Known:
        """Note that namespaces have a ledger; to be done before they have. Gives those that had none until now."""
        added: Known = {}

        def change(known: Known) -> Known:
            added.clear()
            added.update({name: uid for name, uid in beginning.items() if known.get(name) != uid})
            return known | beginning

        self._change(change)
        return added

    def remove(self, namespace: str) -> None:
        """Forget a namespace that is gone."""
        self._change(lambda known: {name: uid for name, uid in known.items() if name != namespace})

    def forget(self) -> None:
        """Read it anew when it is next needed: another process may have changed it."""
        with self._lock:
            self._known = None

    def _loaded(self) -> Known:
        if self._known is None:
            try:
                self._known = read(self._cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, self._system_namespace))
            except (NotFound, ValueError):
                self._known = {}
                if self._any_ledger():
                    self._suspect_until = self._clock() + RESERVATION_S
        return self._known

    def _change(self, change: Callable[[Known], Known]) -> None:
        with self._lock:
            if change(self._loaded()) == self._loaded():
                return
            for _ in range(TRIES):
                try:
                    self._known = self._write(change)
                except (Conflict, AlreadyExists, NotFound):
                    continue
                return
        raise Unavailable(f"{LEDGER_REGISTRY}: others write it all the time")

    def _write(self, change: Callable[[Known], Known]) -> Known:
        try:
            found = self._cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, self._system_namespace)
        except NotFound:
            # If it was deleted, what is remembered of it still counts.
            known = change(dict(self._known or {}))
            metadata = Metadata(name=LEDGER_REGISTRY, namespace=self._system_namespace, owner_references=self._owners())
            self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=written(known)))
            return known
        try:
            before = read(found)
        except ValueError:
            before = self._known or {}
        known = change(before)
        self._cluster.update(CONFIG_MAPS, replace(found, data=written(known)))
        return known


def read(found: ConfigMap) -> Known:
    """Read it; a ValueError if it is not as it was written."""
    return decoder_for(Known).decode(found.data.get(LEDGER_REGISTRY_KEY, ""))


def written(known: Known) -> dict[str, str]:
    """Write it as a ConfigMap holds it."""
    return {LEDGER_REGISTRY_KEY: msgspec.json.encode(known, order="sorted").decode()}
