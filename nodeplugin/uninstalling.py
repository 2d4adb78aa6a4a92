"""Tells whether the node plugin is being uninstalled, rather than restarted or upgraded."""

import threading
from collections.abc import Callable
from enum import Enum

from cluster.errors import ApiError, NotFound
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import DAEMON_SETS, NAMESPACES, Namespace, Workload
from vcuda.names import NODE_PLUGIN

TIMEOUT_S = 5.0
FORBIDDEN = 403


class Uninstalled(Enum):
    """Whether the plugin is being uninstalled. What it published itself comes back, if it is not: a cordon does not."""

    NO = "no"
    MAYBE = "maybe"
    YES = "yes"


class Uninstallation:
    """Watches Quotient's namespace, and calls `on_start` when it is being deleted.

    The DaemonSet is read only when the plugin is stopped. In a namespace that is deleted that may be too late: the
    plugin's service account may be deleted before its pod.
    """

    def __init__(self, cluster: Cluster, namespace: str, on_start: Callable[[], None]) -> None:
        self._cluster, self._namespace, self._on_start = cluster.with_timeout(TIMEOUT_S), namespace, on_start
        self.has_started = threading.Event()
        # A plugin that was not installed by a DaemonSet is not uninstalled with one. None: not known yet.
        self._was_installed: bool | None = None
        selector = Selector(fields=f"metadata.name={namespace}")
        self._namespaces: Informer[Namespace] = Informer(cluster, NAMESPACES, selector=selector)
        self._namespaces.on_change(lambda _old, new: self._on_namespace_change(new))

    def start(self) -> None:
        self._namespaces.start()

    def stop(self) -> None:
        self._namespaces.stop()

    def _on_namespace_change(self, namespace: Namespace | None) -> None:
        if namespace is not None and namespace.metadata.deletion_timestamp:
            self.has_started.set()
            self._on_start()

    def find_daemon_set(self) -> bool:
        """Find out once whether the plugin was installed by a DaemonSet; always True. Raises Unavailable."""
        if self._was_installed is None:
            self._was_installed = self._daemon_set() is not None
        return True

    def check(self) -> "Uninstalled":
        """Return whether the DaemonSet is gone or being deleted; raises Unavailable."""
        if self.has_started.is_set():
            return Uninstalled.YES
        try:
            daemon_set = self._daemon_set()
        except ApiError as error:
            # Its roles are deleted together with it; but they may also be replaced by an upgrade.
            return Uninstalled.MAYBE if error.code == FORBIDDEN and self._was_installed else Uninstalled.NO
        if daemon_set is None:
            return Uninstalled.YES if self._was_installed else Uninstalled.NO
        return Uninstalled.YES if daemon_set.metadata.deletion_timestamp else Uninstalled.NO

    def _daemon_set(self) -> Workload | None:
        try:
            return self._cluster.get(DAEMON_SETS, NODE_PLUGIN, self._namespace)
        except NotFound:
            return None
