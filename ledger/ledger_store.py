"""Ledgers where they are kept: one ConfigMap for each namespace, in Quotient's own namespace.

Every write is a compare-and-swap on the whole ledger, so that of two who read the same state only one succeeds.
"""

from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from cluster.errors import AlreadyExists, NotFound
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata, Owners
from vcuda.decision import Unavailable
from vcuda.ledger import Ledger, LedgerState, decode_ledger, encode_ledger
from vcuda.names import LEDGER_KEY, LEDGER_LABEL, LEDGER_PREFIX
from vcuda.quota import Quota

LEDGER_SELECTOR = Selector(labels=LEDGER_LABEL)


class UnreadableLedger(Unavailable):
    """A ledger that cannot be read: somebody else wrote it, or an older or newer Quotient."""

    def __init__(self, found: ConfigMap, wrong: ValueError) -> None:
        self.found = found
        super().__init__(
            f"the ledger in {found.metadata.namespace}/{found.metadata.name} cannot be read ({wrong}); Quotient's "
            "controller makes it anew"
        )


class StoredLedger(Struct, frozen=True):
    """A ledger as it was read, with the ConfigMap that it is written back to."""

    ledger: Ledger
    written: ConfigMap


def ledger_namespace(found: ConfigMap) -> str:
    """Say whose ledger a ConfigMap is."""
    return found.metadata.name.removeprefix(LEDGER_PREFIX)


def read_ledger(found: ConfigMap) -> StoredLedger:
    """Read a ledger from its ConfigMap; Unreadable if it is none."""
    try:
        return StoredLedger(decode_ledger(found.data.get(LEDGER_KEY, "")), found)
    except ValueError as wrong:
        raise UnreadableLedger(found, wrong) from None


class LedgerStore:
    """All ledgers of a cluster."""

    def __init__(self, cluster: Cluster, system_namespace: str, owners: Owners = list) -> None:
        self._cluster, self._system_namespace, self._owners = cluster, system_namespace, owners

    def bounded(self, timeout_s: float) -> "LedgerStore":
        """Give the same books with calls that take no longer than this."""
        return LedgerStore(self._cluster.with_timeout(timeout_s), self._system_namespace, self._owners)

    def read(self, namespace: str) -> StoredLedger | None:
        """Read the ledger of a namespace; None if there is none."""
        try:
            return read_ledger(self._cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, self._system_namespace))
        except NotFound:
            return None

    def quotas_named(self, quota: str, namespace: str = "") -> dict[str, tuple[Quota, int]]:
        """Find a quota as ledgers hold it, with its version: in that of one namespace, or in all."""
        found: dict[str, tuple[Quota, int]] = {}
        fields = f"metadata.name={LEDGER_PREFIX}{namespace}" if namespace else ""
        ledgers = Selector(labels=LEDGER_LABEL, fields=fields)
        for each in self._cluster.list(CONFIG_MAPS, self._system_namespace, ledgers).items:
            with suppress(UnreadableLedger):
                ledger = read_ledger(each).ledger
                held = [one for one in ledger.quotas if one.name == quota]
                found |= {ledger_namespace(each): (one, ledger.versions.get(quota, 0)) for one in held}
        return found

    def write(self, page: StoredLedger, ledger: Ledger) -> StoredLedger:
        """Write a ledger back, if it is still as it was read; Conflict if not."""
        metadata = page.written.metadata
        owned = replace(metadata, owner_references=metadata.owner_references or self._owners())
        changed = replace(page.written, metadata=owned, data=ledger_data(ledger))
        return StoredLedger(ledger, self._cluster.update(CONFIG_MAPS, changed))

    def create(self, namespace: str, ledger: Ledger) -> StoredLedger:
        """Begin a ledger; Conflict if there is one."""
        metadata = Metadata(
            name=LEDGER_PREFIX + namespace,
            namespace=self._system_namespace,
            labels={LEDGER_LABEL: "true"},
            owner_references=self._owners(),
        )
        return StoredLedger(
            ledger, self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=ledger_data(ledger)))
        )

    def want(self, namespace: str) -> None:
        """Ask for a ledger: the controller makes it, from what the namespace holds already."""
        with suppress(AlreadyExists):
            self.create(namespace, Ledger(state=LedgerState.WANTED))

    def delete(self, found: ConfigMap) -> None:
        """Remove a ledger whose namespace is gone."""
        self._cluster.delete(CONFIG_MAPS, found.metadata.name, found.metadata.namespace, uid=found.metadata.uid)


def ledger_data(ledger: Ledger) -> dict[str, str]:
    """Write a ledger as a ConfigMap holds it."""
    return {LEDGER_KEY: encode_ledger(ledger)}
