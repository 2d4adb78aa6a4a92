"""GPUs that are measured to be busy are ranked last, if that is configured."""

import itertools
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.objects import NODES
from scheduler.load_polling import LoadPoller
from tests.scheduler.world import World, container
from tests.waiting import eventually


@pytest.fixture
def aware() -> Iterator[World]:
    """A scheduler that knows which GPUs are busy; what it would read is set by the tests."""
    world = World(load_aware=True, load_interval_s=3600).start()
    yield world
    world.stop()


def test_a_gpu_that_is_busy_is_taken_last(aware: World) -> None:
    aware.add_node("n", 2)
    first = aware.add_pod("first", container(cores=10))
    assert aware.schedule(first) == "n"
    (busy,) = {each.uuid for each in aware.placed(first)["c0"]}
    aware.service.state.set_busy("n", {busy})
    second, third = (aware.add_pod(name, container(cores=cores)) for name, cores in (("second", 95), ("third", 50)))
    assert aware.schedule(second) == "n"
    assert aware.placed(second)["c0"][0].uuid != busy
    assert aware.schedule(third) == "n", "a busy GPU is better than none"
    assert aware.placed(third)["c0"][0].uuid == busy


def test_a_node_with_only_busy_gpus_is_taken_last(aware: World) -> None:
    aware.add_node("a", 1)
    aware.add_node("b", 1)
    aware.service.state.set_busy("a", {"GPU-a-0"})
    scores = ranks(aware)
    assert scores["b"] > scores["a"]
    aware.service.state.set_busy("a", ())
    scores = ranks(aware)
    assert scores["a"] > scores["b"]


def ranks(world: World) -> dict[str, int]:
    pod = world.add_pod(f"pod-{len(world.cluster.list(NODES).items)}-{id(object())}", container(cores=10))
    fitting = world.filter(pod)["NodeNames"]
    found = world.prioritize(pod, fitting)
    world.service.state.release_claim(pod.metadata.uid)
    return found


def test_without_configuration_nobody_looks(world: World) -> None:
    world.add_node("a", 1)
    world.add_node("b", 1)
    world.service.state.set_busy("a", {"GPU-a-0"})
    scores = ranks(world)
    assert scores["a"] > scores["b"]
    assert world.service.load is None


class Monitor:
    """A node plugin's /usage."""

    def __init__(self) -> None:
        self.body: Any = {}
        self.tokens: list[str] = []
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                monitor.tokens.append(self.headers.get("Authorization", ""))
                data = monitor.body if isinstance(monitor.body, bytes) else json.dumps(monitor.body).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    made = Monitor()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"cards": [{"uuid": "GPU-n-0", "utilization": 80}, {"uuid": "GPU-n-1", "utilization": 79}]}, [True, False]),
        ({"cards": [{"uuid": "GPU-n-0", "utilization": None}]}, [False, False]),
        (b"not json", [False, False]),
        ({"cards": [{"uuid": "GPU-other", "utilization": 100}]}, [False, False]),
    ],
    ids=["busy from 80 % on", "not measured", "not JSON", "of another node"],
)
def test_what_the_monitor_says_is_read(
    world: World, monitor: Monitor, tmp_path: Any, body: Any, expected: list[bool]
) -> None:
    world.add_node("n", 2)
    status = {"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}
    world.cluster.patch(NODES, "n", "", status, subresource="status")
    eventually(lambda: world.service.state.addresses() == {"n": "127.0.0.1"}, "the address")
    token = tmp_path / "token"
    token.write_text("secret\n")
    monitor.body = body
    poller = LoadPoller(
        world.service.state,
        port=monitor.server.server_port,
        busy_percent=80,
        interval_s=1,
        is_active=lambda: True,
        token_file=token,
    )
    world.service.state.set_busy("n", {"GPU-n-1"})
    with ThreadPoolExecutor(1) as pool:
        poller.poll(pool)
    assert [each.is_busy for each in world.service.state.available_gpus("n", "")] == expected
    assert monitor.tokens == ["Bearer secret"]


@pytest.mark.parametrize(
    ("name", "is_trusted", "expected"),
    [("monitors", True, True), ("others", True, False), ("monitors", False, False)],
    ids=["a node plugin", "another server of the CA", "of another CA"],
)
def test_a_token_is_sent_to_node_plugins_only(
    world: World, monitor: Monitor, tmp_path: Path, *, name: str, is_trusted: bool, expected: bool
) -> None:
    """They prove by their certificate that they are."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    monitor.server.socket = context.wrap_socket(monitor.server.socket, server_side=True)
    (authority if is_trusted else trustme.CA()).cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("secret")
    world.add_node("n", 1)
    status = {"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}
    world.cluster.patch(NODES, "n", "", status, subresource="status")
    eventually(lambda: world.service.state.addresses() == {"n": "127.0.0.1"}, "the address")
    monitor.body = {"cards": [{"uuid": "GPU-n-0", "utilization": 100}]}
    poller = LoadPoller(
        world.service.state,
        port=monitor.server.server_port,
        server_name="monitors",
        ca_file=tmp_path / "ca.crt",
        busy_percent=80,
        interval_s=1,
        is_active=lambda: True,
        token_file=tmp_path / "token",
    )
    with ThreadPoolExecutor(1) as pool:
        poller.poll(pool)
    assert [each.is_busy for each in world.service.state.available_gpus("n", "")] == [expected]
    assert monitor.tokens == ["Bearer secret"] * expected


def test_a_node_that_answers_byte_by_byte_holds_up_no_other(world: World, monitor: Monitor) -> None:
    """Its reads are ended with each poll, and take no thread from the next one."""
    for name, address in (("n", "127.0.0.1"), ("slow", "127.0.0.2")):
        world.add_node(name, 1)
        status = {"status": {"addresses": [{"type": "InternalIP", "address": address}]}}
        world.cluster.patch(NODES, name, "", status, subresource="status")
    eventually(lambda: len(world.service.state.addresses()) == 2, "the addresses")
    monitor.body = {"cards": [{"uuid": "GPU-n-0", "utilization": 100}]}
    port = monitor.server.server_port
    poller = LoadPoller(world.service.state, port=port, busy_percent=80, interval_s=1, is_active=lambda: True)
    ending = threading.Event()
    with socket.create_server(("127.0.0.2", port)) as slow, ThreadPoolExecutor(2) as pool:
        thread = threading.Thread(target=drip, args=(slow, ending), daemon=True)
        thread.start()
        for _ in range(4):
            world.service.state.set_busy("n", ())
            poller.poll(pool)
            assert [each.is_busy for each in world.service.state.available_gpus("n", "")] == [True]
        ending.set()
        thread.join(10)


def drip(server: socket.socket, ending: threading.Event) -> None:
    """Answer every connection with a byte now and then."""
    connections: list[socket.socket] = []
    answers: dict[socket.socket, Iterator[bytes]] = {}
    server.settimeout(0.1)
    while not ending.wait(0.1):
        with suppress(TimeoutError):
            accepted = server.accept()[0]
            # Also a head that is complete, after which the connection is not reused.
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" * (len(connections) % 2)
            answers[accepted] = itertools.chain([head or b"H"], itertools.repeat(b"x"))
            connections.append(accepted)
        for each in connections:
            with suppress(OSError):
                each.send(next(answers[each]))
    for each in connections:
        each.close()
