"""Informers: a cache that catches up after anything that can happen to a connection."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.api import ApiCluster, connect
from cluster.backoff import Backoff
from cluster.errors import Expired
from cluster.in_memory import InMemoryCluster
from cluster.informer import Informer, InformerTimings
from cluster.interface import Cluster, Watch
from cluster.objects import CONFIG_MAPS, PODS, ConfigMap, Pod
from tests.cluster.objects import config_map, pod
from tests.cluster.real import RealCluster
from tests.waiting import eventually
from vcuda.decision import Unavailable

QUICK = InformerTimings(watch_s=60, idle_timeout_s=60, relist_s=600, backoff=Backoff(0.01, 0.05))
SLOWER = msgspec.structs.replace(QUICK, backoff=Backoff(0.05, 0.4))


@pytest.fixture
def started() -> Iterator[list[Informer[Any]]]:
    """Informers appended to this list are stopped at the end."""
    informers: list[Informer[Any]] = []
    yield informers
    for informer in informers:
        informer.stop()
        assert not informer.alive


class RecordedChanges:
    """A handler that records its calls as (name, had an old state, has a new one)."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bool, bool]] = []

    def __call__(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        known = new or old
        assert known is not None
        if known.metadata.name != "kube-root-ca.crt":
            self.changes.append((known.metadata.name, old is not None, new is not None))


def names(informer: Informer[ConfigMap]) -> set[str]:
    return {item.metadata.name for item in informer.all()} - {"kube-root-ca.crt"}


def test_cache_and_handlers_follow_every_change(cluster: Cluster, namespace: str, started: list[Informer[Any]]) -> None:
    cluster.create(CONFIG_MAPS, config_map(namespace, "old"))
    handler = RecordedChanges()
    informer = Informer(cluster, CONFIG_MAPS, namespace, timings=QUICK)
    informer.on_change(handler)
    started.append(informer.start())
    assert informer.wait_synced(10)
    assert names(informer) == {"old"}
    cluster.create(CONFIG_MAPS, config_map(namespace, "new"))
    cluster.patch(CONFIG_MAPS, "new", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "old", namespace)
    eventually(lambda: names(informer) == {"new"}, "the cache to follow")
    eventually(lambda: len(handler.changes) == 4, "the handler to be called")
    assert handler.changes == [("old", False, True), ("new", False, True), ("new", True, True), ("old", True, False)]
    newest = informer.get("new", namespace)
    assert newest is not None
    assert newest.data == {"n": "1"}
    assert informer.age_s() < 20


def test_indexes_follow_the_objects(cluster: Cluster, namespace: str, started: list[Informer[Any]]) -> None:
    """So that the pods of a node are found without a search through all pods."""
    informer: Informer[Pod] = Informer(
        cluster, PODS, namespace, indexes={"node": lambda each: each.spec.node_name or ""}, timings=QUICK
    )
    started.append(informer.start())
    made = cluster.create(PODS, pod(namespace, "p"))
    eventually(lambda: len(informer.by_index("node", "")) == 1, "the pod to be cached")
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    eventually(lambda: len(informer.by_index("node", "node-x")) == 1, "the pod to be indexed by its node")
    assert informer.by_index("node", "") == []
    cluster.delete(PODS, "p", namespace, grace_s=0)
    eventually(lambda: not informer.by_index("node", "node-x"), "the pod to be gone")


class Unreliable(InMemoryCluster):
    """A cluster whose lists can be made to fail, and whose watches to expire."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.lists = self.failed_lists = 0
        self.watches: list[Watch[Any]] = []

    def list(self, *arguments: Any, **options: Any) -> Any:
        self.lists += 1
        if self.broken:
            self.failed_lists += 1
            raise Unavailable("connection refused")
        return super().list(*arguments, **options)

    def watch(self, *arguments: Any, **options: Any) -> Any:
        if self.broken:
            raise Expired("too old resource version", code=410, reason="Expired")
        self.watches.append(super().watch(*arguments, **options))
        return self.watches[-1]

    def interrupt(self) -> None:
        """End the running watch, and fail every call until `broken` is reset."""
        eventually(lambda: self.watches, "a watch")
        self.broken = True
        self.watches[-1].close()
        eventually(lambda: self.failed_lists, "a list to fail")


def test_deletions_during_an_interruption_are_reported_by_the_next_list(started: list[Informer[Any]]) -> None:
    cluster = Unreliable()
    cluster.create(CONFIG_MAPS, config_map("default", "kept"))
    cluster.create(CONFIG_MAPS, config_map("default", "lost"))
    handler = RecordedChanges()
    informer = Informer(cluster, CONFIG_MAPS, timings=QUICK)
    informer.on_change(handler)
    started.append(informer.start())
    cluster.interrupt()
    cluster.delete(CONFIG_MAPS, "lost", "default")
    cluster.create(CONFIG_MAPS, config_map("default", "found"))
    cluster.broken = False
    eventually(lambda: names(informer) == {"kept", "found"}, "the cache to catch up")
    eventually(lambda: len(handler.changes) >= 4, "the handler to be called")
    assert handler.changes == [
        ("kept", False, True),
        ("lost", False, True),
        ("lost", True, False),
        ("found", False, True),
    ]


def test_an_object_recreated_during_an_interruption_is_reported_as_deleted_and_added(
    started: list[Informer[Any]],
) -> None:
    """As one change it would look like an update, and the first object's charge would never be released."""
    cluster = Unreliable()
    first = cluster.create(CONFIG_MAPS, config_map("default", "one"))
    changes: list[tuple[str, str]] = []
    informer: Informer[ConfigMap] = Informer(cluster, CONFIG_MAPS, timings=QUICK)
    informer.on_change(
        lambda old, new: changes.append((old.metadata.uid if old else "", new.metadata.uid if new else ""))
    )
    started.append(informer.start())
    cluster.interrupt()
    cluster.delete(CONFIG_MAPS, "one", "default")
    second = cluster.create(CONFIG_MAPS, config_map("default", "one"))
    cluster.broken = False
    eventually(lambda: len(changes) == 3, "the handler to be called")
    assert changes == [("", first.metadata.uid), (first.metadata.uid, ""), ("", second.metadata.uid)]


def test_while_the_cluster_is_unreachable_the_cache_ages_and_retries_back_off(started: list[Informer[Any]]) -> None:
    cluster = Unreliable()
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    informer = Informer(cluster, CONFIG_MAPS, timings=SLOWER)
    started.append(informer.start())
    assert informer.wait_synced(10)
    cluster.interrupt()
    before = cluster.lists
    eventually(lambda: informer.age_s() > 1.5, "time without contact")
    assert names(informer) == {"one"}
    assert cluster.lists - before <= 12, "delays of 0.05, 0.1, 0.2, 0.4, 0.4, … s, each halved at most by jitter"
    cluster.broken = False
    cluster.create(CONFIG_MAPS, config_map("default", "two"))
    eventually(lambda: names(informer) == {"one", "two"}, "the cache to catch up")
    eventually(lambda: informer.age_s() < 1.5, "contact")


def test_a_handler_that_raises_is_counted_and_the_others_are_called(started: list[Informer[Any]]) -> None:
    cluster = InMemoryCluster()
    handler = RecordedChanges()

    def failing_handler(*_: object) -> None:
        raise RuntimeError("a bug in a handler")

    informer = Informer(cluster, CONFIG_MAPS, timings=QUICK)
    informer.on_change(failing_handler)
    informer.on_change(handler)
    started.append(informer.start())
    assert informer.wait_synced(10)
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    eventually(lambda: handler.changes == [("one", False, True)], "the other handler to be called")
    assert informer.handler_errors == 1


def test_watches_that_end_at_once_are_retried_with_backoff(started: list[Informer[Any]]) -> None:
    """As behind a proxy that closes every connection."""
    watches = 0

    class Closing(InMemoryCluster):
        def watch(self, *arguments: Any, **options: Any) -> Any:
            nonlocal watches
            watches += 1
            made = super().watch(*arguments, **options)
            made.close()
            return made

    informer = Informer(Closing(), CONFIG_MAPS, timings=SLOWER)
    started.append(informer.start())
    eventually(lambda: watches > 3, "some watches")
    begun = time.monotonic()
    eventually(lambda: time.monotonic() - begun > 1.5, "time to pass")
    assert watches < 20


def test_a_relist_replaces_the_cache_before_any_handler_is_called(started: list[Informer[Any]]) -> None:
    """A handler that reads the cache sees the new state, never a mixture."""
    cluster = Unreliable()
    for name in ("a", "b"):
        cluster.create(CONFIG_MAPS, config_map("default", name))
    seen: list[set[str]] = []
    informer = Informer(cluster, CONFIG_MAPS, timings=QUICK)
    informer.on_change(lambda *_: seen.append(names(informer)))
    started.append(informer.start())
    eventually(lambda: len(seen) == 2, "the first list")
    cluster.interrupt()
    cluster.delete(CONFIG_MAPS, "a", "default")
    cluster.create(CONFIG_MAPS, config_map("default", "c"))
    cluster.broken = False
    eventually(lambda: len(seen) == 4, "the second list")
    assert seen == [{"a", "b"}, {"a", "b"}, {"b", "c"}, {"b", "c"}]


def test_an_object_for_which_an_index_raises_is_still_cached(started: list[Informer[Any]]) -> None:
    """One malformed object must not keep the others out."""
    cluster = InMemoryCluster()
    for name in ("good", "odd"):
        cluster.create(CONFIG_MAPS, config_map("default", name, **({"key": "x"} if name == "good" else {})))
    informer = Informer(cluster, CONFIG_MAPS, indexes={"key": lambda each: each.data["key"]}, timings=QUICK)
    started.append(informer.start())
    assert informer.wait_synced(10)
    assert names(informer) == {"good", "odd"}
    assert [each.metadata.name for each in informer.by_index("key", "x")] == ["good"]
    assert informer.handler_errors == 1


def test_a_cluster_without_changes_is_not_taken_for_unreachable(started: list[Informer[Any]]) -> None:
    """A watch ends regularly before it would reach its idle timeout."""
    assert InformerTimings().watch_s < InformerTimings().idle_timeout_s
    cluster = Unreliable()
    informer = Informer(cluster, CONFIG_MAPS, timings=msgspec.structs.replace(QUICK, watch_s=0.3))
    started.append(informer.start())
    eventually(lambda: len(cluster.watches) > 3, "several watches")
    assert (informer.relists, informer.age_s() < 5) == (1, True)


def test_the_cache_is_relisted_periodically(started: list[Informer[Any]]) -> None:
    """So that an event which a watch lost is noticed in the end."""
    cluster = Unreliable()
    informer = Informer(cluster, CONFIG_MAPS, timings=msgspec.structs.replace(QUICK, watch_s=0.05, relist_s=0.1))
    started.append(informer.start())
    eventually(lambda: cluster.lists > 3, "several lists")


class Proxy:
    """A TCP proxy that can drop all data without closing a connection, as a firewall does."""

    def __init__(self, port: int) -> None:
        self._port, self._dropping = port, threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, target), name="proxy", daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self._dropping.is_set():
                    target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def drop_data(self) -> None:
        """Drop everything from now on, on open connections and new ones."""
        self._dropping.set()

    def recover(self) -> None:
        """Forward again; connections that lost data are closed."""
        for each in self._sockets:
            each.close()
        self._dropping.clear()

    def close(self) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def proxy(control_plane: RealCluster) -> Iterator[Proxy]:
    made = Proxy(control_plane.supervisor_info()["port"])
    yield made
    made.close()


def connect_through(proxy: Proxy, real: RealCluster, folder: Path) -> ApiCluster:
    text = real.kubeconfig.read_text().replace(f":{real.supervisor_info()['port']}", f":{proxy.port}")
    (folder / "kubeconfig").write_text(text)
    return connect(str(folder / "kubeconfig"))


@pytest.mark.kubernetes
def test_a_connection_that_delivers_nothing_is_replaced(
    control_plane: RealCluster, proxy: Proxy, tmp_path: Path, started: list[Informer[Any]]
) -> None:
    """Without an error and without an end: after its idle timeout the informer connects again and catches up."""
    cluster = connect_through(proxy, control_plane, tmp_path)
    informer = Informer(cluster, CONFIG_MAPS, "default", timings=msgspec.structs.replace(QUICK, idle_timeout_s=1))
    started.append(informer.start())
    assert informer.wait_synced(10)
    proxy.drop_data()
    control_plane.kubectl("create", "configmap", "while-silent")
    eventually(lambda: informer.age_s() > 1, "a second without contact")
    assert "while-silent" not in names(informer)
    proxy.recover()
    eventually(lambda: "while-silent" in names(informer), "the cache to catch up", 60)
    control_plane.kubectl("delete", "configmap", "while-silent")
    eventually(lambda: "while-silent" not in names(informer), "the cache to follow again")


@pytest.mark.kubernetes
def test_changes_around_a_restart_of_the_api_server_are_seen(
    control_plane: RealCluster, started: list[Informer[Any]]
) -> None:
    informer = Informer(connect(str(control_plane.kubeconfig)), CONFIG_MAPS, "default", timings=QUICK)
    started.append(informer.start())
    assert informer.wait_synced(10)
    control_plane.kubectl("create", "configmap", "before-restart")
    eventually(lambda: "before-restart" in names(informer), "the cache to follow")
    control_plane.restart("kube-apiserver")
    control_plane.kubectl("delete", "configmap", "before-restart")
    control_plane.kubectl("create", "configmap", "after-restart")
    eventually(
        lambda: names(informer) >= {"after-restart"} and "before-restart" not in names(informer),
        "the cache to catch up",
    )
    control_plane.kubectl("delete", "configmap", "after-restart")
