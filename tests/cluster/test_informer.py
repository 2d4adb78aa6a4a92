"""Informers: a cache that is right again after anything that can happen to a connection."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.api import ApiCluster, connect
from cluster.errors import Expired
from cluster.in_memory import InMemoryCluster
from cluster.informer import Informer, InformerTimings
from cluster.interface import Cluster, Watch
from cluster.objects import CONFIG_MAPS, PODS, ConfigMap, Pod
from tests.cluster.objects import config_map, pod
from tests.cluster.real import RealCluster
from tests.waiting import eventually
from vcuda.decision import Unavailable

QUICK = InformerTimings(watch_s=60, silence_s=60, relist_s=600, retry_s=0.01, most_retry_s=0.05)


@pytest.fixture
def started() -> Iterator[list[Informer[Any]]]:
    """Informers put in here are stopped at the end."""
    informers: list[Informer[Any]] = []
    yield informers
    for informer in informers:
        informer.stop()
        assert not informer.alive


class Told:
    """What a handler heard, as (name, had an old state, has a new one)."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bool, bool]] = []

    def __call__(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        known = new or old
        assert known is not None
        if known.metadata.name != "kube-root-ca.crt":
            self.changes.append((known.metadata.name, old is not None, new is not None))


def names(informer: Informer[ConfigMap]) -> set[str]:
    return {item.metadata.name for item in informer.all()} - {"kube-root-ca.crt"}


def test_it_lists_follows_and_tells(cluster: Cluster, namespace: str, started: list[Informer[Any]]) -> None:
    """What is there, what comes, what changes, what goes."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "old"))
    told = Told()
    informer = Informer(cluster, CONFIG_MAPS, namespace, pace=QUICK)
    informer.on_change(told)
    started.append(informer.start())
    assert informer.wait_synced(10)
    assert names(informer) == {"old"}
    cluster.create(CONFIG_MAPS, config_map(namespace, "new"))
    cluster.patch(CONFIG_MAPS, "new", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "old", namespace)
    eventually(lambda: names(informer) == {"new"}, "the cache to follow")
    eventually(lambda: len(told.changes) == 4, "the handler to hear")
    assert told.changes == [("old", False, True), ("new", False, True), ("new", True, True), ("old", True, False)]
    newest = informer.get("new", namespace)
    assert newest is not None
    assert newest.data == {"n": "1"}
    assert informer.age_s() < 20


def test_indexes_follow_the_objects(cluster: Cluster, namespace: str, started: list[Informer[Any]]) -> None:
    """The pods of a node, found without looking at all of them."""
    informer: Informer[Pod] = Informer(
        cluster, PODS, namespace, indexes={"node": lambda each: each.spec.node_name or ""}, pace=QUICK
    )
    started.append(informer.start())
    made = cluster.create(PODS, pod(namespace, "p"))
    eventually(lambda: len(informer.indexed("node", "")) == 1, "the pod to be seen")
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    eventually(lambda: len(informer.indexed("node", "node-x")) == 1, "the pod to be filed under its node")
    assert informer.indexed("node", "") == []
    cluster.delete(PODS, "p", namespace, grace_s=0)
    eventually(lambda: not informer.indexed("node", "node-x"), "the pod to be gone")


class Unreliable(InMemoryCluster):
    """A cluster that can be made to refuse lists and to call every version expired."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.lists = self.refused = 0
        self.watches: list[Watch[Any]] = []

    def list(self, *arguments: Any, **options: Any) -> Any:
        self.lists += 1
        if self.broken:
            self.refused += 1
            raise Unavailable("connection refused")
        return super().list(*arguments, **options)

    def watch(self, *arguments: Any, **options: Any) -> Any:
        if self.broken:
            raise Expired("too old resource version", code=410, reason="Expired")
        self.watches.append(super().watch(*arguments, **options))
        return self.watches[-1]

    def break_off(self) -> None:
        """End the watch that runs, and let nothing through until told otherwise."""
        eventually(lambda: self.watches, "a watch")
        self.broken = True
        self.watches[-1].close()
        eventually(lambda: self.refused, "a list to be refused")


def test_what_was_deleted_while_it_could_not_see_is_told_as_deleted(started: list[Informer[Any]]) -> None:
    """After an expired version it lists again and works out what it missed."""
    cluster = Unreliable()
    cluster.create(CONFIG_MAPS, config_map("default", "kept"))
    cluster.create(CONFIG_MAPS, config_map("default", "lost"))
    told = Told()
    informer = Informer(cluster, CONFIG_MAPS, pace=QUICK)
    informer.on_change(told)
    started.append(informer.start())
    cluster.break_off()
    cluster.delete(CONFIG_MAPS, "lost", "default")
    cluster.create(CONFIG_MAPS, config_map("default", "found"))
    cluster.broken = False
    eventually(lambda: names(informer) == {"kept", "found"}, "the cache to be right again")
    eventually(lambda: len(told.changes) >= 4, "the handler to hear")
    assert told.changes == [("kept", False, True), ("lost", False, True), ("lost", True, False), ("found", False, True)]


def test_a_successor_of_the_same_name_is_another_object(started: list[Informer[Any]]) -> None:
    """What was replaced unseen is told as one that went and one that came, or its charge would live on."""
    cluster = Unreliable()
    first = cluster.create(CONFIG_MAPS, config_map("default", "one"))
    told: list[tuple[str, str]] = []
    informer: Informer[ConfigMap] = Informer(cluster, CONFIG_MAPS, pace=QUICK)
    informer.on_change(lambda old, new: told.append((old.metadata.uid if old else "", new.metadata.uid if new else "")))
    started.append(informer.start())
    cluster.break_off()
    cluster.delete(CONFIG_MAPS, "one", "default")
    second = cluster.create(CONFIG_MAPS, config_map("default", "one"))
    cluster.broken = False
    eventually(lambda: len(told) == 3, "the handler to hear")
    assert told == [("", first.metadata.uid), (first.metadata.uid, ""), ("", second.metadata.uid)]


def test_it_keeps_what_it_knows_and_tells_its_age_while_the_cluster_is_away(started: list[Informer[Any]]) -> None:
    """And does not hammer: it waits longer after each failure."""
    cluster = Unreliable()
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    informer = Informer(cluster, CONFIG_MAPS, pace=msgspec.structs.replace(QUICK, retry_s=0.05, most_retry_s=0.4))
    started.append(informer.start())
    assert informer.wait_synced(10)
    cluster.break_off()
    before = cluster.lists
    eventually(lambda: informer.age_s() > 1.5, "time to pass without a word")
    assert names(informer) == {"one"}
    assert cluster.lists - before <= 12, "1.5 s at 0.05, 0.1, 0.2, 0.4, 0.4, … each cut by half at the most"
    cluster.broken = False
    cluster.create(CONFIG_MAPS, config_map("default", "two"))
    eventually(lambda: names(informer) == {"one", "two"}, "the cache to be right again")
    eventually(lambda: informer.age_s() < 1.5, "its age to be small again")


def test_a_handler_that_raises_harms_nobody_else(started: list[Informer[Any]]) -> None:
    """It is counted; the cache and the other handlers go on."""
    cluster = InMemoryCluster()
    told = Told()

    def broken(*_: object) -> None:
        raise RuntimeError("a fault in a handler")

    informer = Informer(cluster, CONFIG_MAPS, pace=QUICK)
    informer.on_change(broken)
    informer.on_change(told)
    started.append(informer.start())
    assert informer.wait_synced(10)
    cluster.create(CONFIG_MAPS, config_map("default", "one"))
    eventually(lambda: told.changes == [("one", False, True)], "the other handler to hear")
    assert informer.handler_errors == 1


def test_a_watch_that_ends_at_once_is_not_begun_again_and_again(started: list[Informer[Any]]) -> None:
    """As behind a proxy that closes every connection."""
    watches = 0

    class Closing(InMemoryCluster):
        def watch(self, *arguments: Any, **options: Any) -> Any:
            nonlocal watches
            watches += 1
            made = super().watch(*arguments, **options)
            made.close()
            return made

    informer = Informer(Closing(), CONFIG_MAPS, pace=msgspec.structs.replace(QUICK, retry_s=0.05, most_retry_s=0.4))
    started.append(informer.start())
    eventually(lambda: watches > 3, "some watches")
    begun = time.monotonic()
    eventually(lambda: time.monotonic() - begun > 1.5, "time to pass")
    assert watches < 20


def test_a_relist_replaces_the_cache_at_once(started: list[Informer[Any]]) -> None:
    """A handler that looks around sees the new state whole, never a mixture."""
    cluster = Unreliable()
    for name in ("a", "b"):
        cluster.create(CONFIG_MAPS, config_map("default", name))
    seen: list[set[str]] = []
    informer = Informer(cluster, CONFIG_MAPS, pace=QUICK)
    informer.on_change(lambda *_: seen.append(names(informer)))
    started.append(informer.start())
    eventually(lambda: len(seen) == 2, "the first list")
    cluster.break_off()
    cluster.delete(CONFIG_MAPS, "a", "default")
    cluster.create(CONFIG_MAPS, config_map("default", "c"))
    cluster.broken = False
    eventually(lambda: len(seen) == 4, "the second list")
    assert seen == [{"a", "b"}, {"a", "b"}, {"b", "c"}, {"b", "c"}]


def test_an_object_that_an_index_cannot_file_is_kept_all_the_same(started: list[Informer[Any]]) -> None:
    """One odd object must not keep the others out."""
    cluster = InMemoryCluster()
    for name in ("good", "odd"):
        cluster.create(CONFIG_MAPS, config_map("default", name, **({"key": "x"} if name == "good" else {})))
    informer = Informer(cluster, CONFIG_MAPS, indexes={"key": lambda each: each.data["key"]}, pace=QUICK)
    started.append(informer.start())
    assert informer.wait_synced(10)
    assert names(informer) == {"good", "odd"}
    assert [each.metadata.name for each in informer.indexed("key", "x")] == ["good"]
    assert informer.handler_errors == 1


def test_a_quiet_cluster_is_not_taken_for_dead(started: list[Informer[Any]]) -> None:
    """Its watch ends by itself before its silence would mean anything."""
    assert InformerTimings().watch_s < InformerTimings().silence_s
    cluster = Unreliable()
    informer = Informer(cluster, CONFIG_MAPS, pace=msgspec.structs.replace(QUICK, watch_s=0.3))
    started.append(informer.start())
    eventually(lambda: len(cluster.watches) > 3, "several watches")
    assert (informer.relists, informer.age_s() < 5) == (1, True)


def test_it_lists_anew_from_time_to_time(started: list[Informer[Any]]) -> None:
    """A watch that lost an event for whatever reason is found out."""
    cluster = Unreliable()
    informer = Informer(cluster, CONFIG_MAPS, pace=msgspec.structs.replace(QUICK, watch_s=0.05, relist_s=0.1))
    started.append(informer.start())
    eventually(lambda: cluster.lists > 3, "several lists")


class Line:
    """A wire between a client and a server that can fall silent, or be cut, without a word to either side."""

    def __init__(self, port: int) -> None:
        self._port, self._silent = port, threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="line", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), name="line", daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self._silent.is_set():
                    target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def fall_silent(self) -> None:
        """Swallow everything from now on, on connections old and new."""
        self._silent.set()

    def recover(self) -> None:
        """Carry again; connections that were silent stay broken, as after a firewall forgot them."""
        for each in self._sockets:
            each.close()
        self._silent.clear()

    def close(self) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def line(control_plane: RealCluster) -> Iterator[Line]:
    made = Line(control_plane.kept()["port"])
    yield made
    made.close()


def through(line: Line, real: RealCluster, folder: Path) -> ApiCluster:
    """Connect over a line."""
    text = real.kubeconfig.read_text().replace(f":{real.kept()['port']}", f":{line.port}")
    (folder / "kubeconfig").write_text(text)
    return connect(str(folder / "kubeconfig"))


@pytest.mark.kubernetes
def test_a_silent_connection_is_noticed(
    control_plane: RealCluster, line: Line, tmp_path: Path, started: list[Informer[Any]]
) -> None:
    """No error, no end, no bytes: after the silence it allows, it begins anew and catches up."""
    cluster = through(line, control_plane, tmp_path)
    informer = Informer(cluster, CONFIG_MAPS, "default", pace=msgspec.structs.replace(QUICK, silence_s=1))
    started.append(informer.start())
    assert informer.wait_synced(10)
    line.fall_silent()
    control_plane.kubectl("create", "configmap", "while-silent")
    eventually(lambda: informer.age_s() > 1, "silence")
    assert "while-silent" not in names(informer)
    line.recover()
    eventually(lambda: "while-silent" in names(informer), "the cache to catch up", 60)
    control_plane.kubectl("delete", "configmap", "while-silent")
    eventually(lambda: "while-silent" not in names(informer), "the cache to follow again")


@pytest.mark.kubernetes
def test_a_restarted_api_server_is_followed_again(control_plane: RealCluster, started: list[Informer[Any]]) -> None:
    """Killed without a word and started again; changes made meanwhile by others are seen."""
    informer = Informer(connect(str(control_plane.kubeconfig)), CONFIG_MAPS, "default", pace=QUICK)
    started.append(informer.start())
    assert informer.wait_synced(10)
    control_plane.kubectl("create", "configmap", "before-restart")
    eventually(lambda: "before-restart" in names(informer), "the cache to follow")
    control_plane.restart("kube-apiserver")
    control_plane.kubectl("delete", "configmap", "before-restart")
    control_plane.kubectl("create", "configmap", "after-restart")
    eventually(
        lambda: names(informer) >= {"after-restart"} and "before-restart" not in names(informer),
        "the cache to be right",
    )
    control_plane.kubectl("delete", "configmap", "after-restart")
