"""Ledgers of this process alone: for commands that work on files, for benchmarks and for tests."""

import threading
from collections.abc import Callable, Sequence

from ledger.committing import LedgerChange, OnResult
from vcuda.ledger import ChargeResult, Ledger, LedgerState
from vcuda.quota import Quota


class InMemoryLedgers:
    """A LedgerWriter whose ledgers are created open, with the quotas that `quotas` returns for a namespace."""

    def __init__(self, quotas: Callable[[str], Sequence[Quota]] = lambda _: ()) -> None:
        self._quotas = quotas
        # Guards `ledgers` and their content: changes are applied one at a time.
        self._lock = threading.Lock()
        self.ledgers: dict[str, Ledger] = {}

    def ledger(self, namespace: str) -> Ledger:
        """Return the ledger of a namespace, created at the first call."""
        ledger = self.ledgers.get(namespace)
        if ledger is None:
            ledger = self.ledgers[namespace] = Ledger(namespace, LedgerState.OPEN)
            ledger.set_quotas(self._quotas(namespace), 0)
        return ledger

    def submit(
        self, namespace: str, change: LedgerChange, timeout_s: float, on_result: OnResult, *, read_only: bool = False
    ) -> None:
        """Apply a change; `on_result` is called before this returns."""
        try:
            result: ChargeResult | Exception = self.apply(namespace, change, timeout_s, read_only=read_only)
        except Exception as error:  # reported through the callback, as LedgerCommitter does
            result = error
        on_result(result)

    def apply(
        self,
        namespace: str,
        change: LedgerChange,
        timeout_s: float,  # noqa: ARG002 - there is nothing to wait for
        *,
        read_only: bool = False,
    ) -> ChargeResult:
        with self._lock:
            return change(self.ledger(namespace).copy() if read_only else self.ledger(namespace))
