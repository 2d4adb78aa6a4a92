"""The webhook configurations as the API server has them now, followed by informers."""

import threading
from collections.abc import Callable

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS, WebhookConfiguration
from vcuda.names import WEBHOOK_CONFIGURATION
from webhook.callers import RegisteredPaths, registered_paths

KINDS = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)


class RegistrationCache:
    """Passes the registered paths to `on_change` when they change."""

    def __init__(self, cluster: Cluster, on_change: Callable[[RegisteredPaths], None]) -> None:
        selector = Selector(fields=f"metadata.name={WEBHOOK_CONFIGURATION}")
        self._on_change = on_change
        # Two informers call the handler: without it, what the slower one read earlier could be passed on last.
        self._lock = threading.Lock()
        self._informers: list[Informer[WebhookConfiguration]] = [
            Informer(cluster, kind, selector=selector) for kind in KINDS
        ]
        for informer in self._informers:
            informer.on_change(lambda *_: self._pass_on())

    def start(self) -> None:
        for informer in self._informers:
            informer.start()

    def stop(self) -> None:
        for informer in self._informers:
            informer.stop()

    @property
    def synced(self) -> bool:
        return all(informer.synced for informer in self._informers)

    def _pass_on(self) -> None:
        with self._lock:
            self._on_change(registered_paths(each for informer in self._informers for each in informer.all()))
