"""The hook that asks for a limit, the socket on which it asks, and peers that mean no good."""

import os
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from nodeplugin import memory_limit_server
from nodeplugin.memory_limit_hook import MemoryLimitHook
from nodeplugin.memory_limit_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, Apply, MemoryLimitServer
from nodeplugin.memory_limits import CannotLimit
from nodeplugin.runtime_hooks import read_static
from tests.nodeplugin.limit_bench import ID, PID, TOKEN, state
from tests.waiting import eventually

REQUEST = f'{{"token":"{TOKEN}","pid":{PID},"id":"{ID}"}}\n'.encode()
UID = os.geteuid()


@pytest.fixture
def folder() -> Iterator[Path]:
    """The plugin's folder; the path of a socket may have 107 characters only, so it is none of pytest's."""
    with tempfile.TemporaryDirectory(prefix="quotient-") as made:
        yield Path(made)


class Asked:
    """Records what hooks asked for, and answers with `reason`."""

    def __init__(self, reason: str = "") -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.reason = reason

    def apply(self, token: str, pid: int, container_id: str) -> None:
        self.calls.append((token, pid, container_id))
        if self.reason:
            raise CannotLimit(self.reason)


Serve = Callable[..., MemoryLimitServer]


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """Starts servers that are stopped at the end."""
    started: list[MemoryLimitServer] = []

    def start(apply: Apply, *, request_s: float = 5.0, allowed_uid: int = UID) -> MemoryLimitServer:
        server = MemoryLimitServer(socket_of(folder), apply, request_s=request_s, allowed_uid=allowed_uid)
        started.append(server.start())
        return server

    yield start
    for server in started:
        server.stop()


def socket_of(folder: Path) -> Path:
    return MemoryLimitHook(folder).socket


def connect(folder: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(socket_of(folder)))
    return client


def read_end(client: socket.socket) -> str:
    """Return all that the server sends until it closes the connection."""
    received = b""
    while chunk := client.recv(4096):
        received += chunk
    client.close()
    return received.decode()


def ask(folder: Path, *parts: bytes) -> str:
    client = connect(folder)
    for part in parts:
        client.sendall(part)
    return read_end(client)


# The server.


def test_a_request_is_answered_when_the_limit_is_in_force(folder: Path, serve: Serve) -> None:
    """It may arrive in parts."""
    asked = Asked()
    serve(asked.apply)
    assert ask(folder, REQUEST) == ask(folder, REQUEST[:20], REQUEST[20:]) == "ok\n"
    assert asked.calls == [(TOKEN, PID, ID)] * 2


def test_only_root_reaches_the_socket(folder: Path, serve: Serve) -> None:
    """By the mode of the socket."""
    serve(Asked().apply)
    status = socket_of(folder).stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_a_peer_that_is_not_root_is_refused(folder: Path, serve: Serve) -> None:
    """By the kernel's word on who it is, whatever the mode; it is not read."""
    asked = Asked()
    serve(asked.apply, allowed_uid=UID + 1)
    with capture_logs() as logs:
        assert read_end(connect(folder)) == "only root may ask for limits\n"
    assert asked.calls == []
    assert [(entry["event"], entry["uid"]) for entry in logs] == [("memory_limit_peer_refused", UID)]


def test_the_reason_of_a_refusal_is_one_line(folder: Path, serve: Serve) -> None:
    """However long."""
    serve(Asked("line\n" * 5000).apply)
    answer = ask(folder, REQUEST)
    assert (len(answer), answer.count("\n"), answer[:9]) == (4096, 1, "line line")


def test_a_failure_of_the_plugin_is_a_refusal(folder: Path, serve: Serve) -> None:
    """It is logged, and the next request is served."""

    def crash(*_: object) -> None:
        raise RuntimeError("broken")

    server = serve(crash)
    with capture_logs() as logs:
        assert ask(folder, REQUEST) == "the node plugin failed: RuntimeError('broken')\n"
    assert [entry["event"] for entry in logs] == ["memory_limit_failed"]
    assert server.alive


INVALID = {
    "no JSON": b"limit me\n",
    "not text": b"\xff\xfe\n",
    "nesting": b"[" * 400 + b"\n",
    "another type": REQUEST.replace(str(PID).encode(), b'"1"'),
    "an unknown field": REQUEST.replace(b"}", b',"limit":1}'),
    "a field that is missing": b'{"pid":1}\n',
    "nothing but the end": b"\n",
}


@pytest.mark.parametrize("request_", INVALID.values(), ids=INVALID.keys())
def test_a_request_that_is_not_valid_sets_nothing(folder: Path, serve: Serve, request_: bytes) -> None:
    asked = Asked()
    serve(asked.apply)
    assert ask(folder, request_) == "the request is not valid; the hook may be of another version\n"
    assert asked.calls == []


def test_a_request_has_a_size_limit(folder: Path, serve: Serve) -> None:
    """The rest is not read."""
    serve(Asked().apply)
    assert ask(folder, b"x" * (MAX_REQUEST_BYTES + 1)) == f"the request is larger than {MAX_REQUEST_BYTES} bytes\n"


def test_a_request_without_its_end_is_none(folder: Path, serve: Serve) -> None:
    serve(Asked().apply)
    client = connect(folder)
    client.sendall(REQUEST[:-1])
    client.shutdown(socket.SHUT_WR)
    assert read_end(client) == "the request is incomplete\n"


def test_a_peer_that_is_slow_is_ended(folder: Path, serve: Serve) -> None:
    """The time is for the whole request, not for each byte."""
    serve(Asked().apply, request_s=0.3)
    began = time.monotonic()
    with connect(folder) as client:

        def is_refused() -> bool:
            try:
                return client.send(b" ") == 0
            except OSError:
                return True

        eventually(is_refused, "the connection to be closed")
    assert time.monotonic() - began < 5


def test_silent_peers_hold_up_no_hook(folder: Path, serve: Serve) -> None:
    """More of them than connections: the others wait in the queue until the first ones have had their time."""
    asked = Asked()
    serve(asked.apply, request_s=0.3)
    silent = [connect(folder) for _ in range(MAX_CONNECTIONS + 4)]
    assert ask(folder, REQUEST) == "ok\n"
    assert {read_end(each) for each in silent} == {"the request did not arrive in time\n"}
    assert ask(folder, REQUEST) == "ok\n"


def test_peers_that_go_away_are_forgotten(folder: Path, serve: Serve) -> None:
    """Before and after their request."""
    asked = Asked()
    server = serve(asked.apply)
    for parts in ((), (REQUEST,), (b"x",)):
        client = connect(folder)
        for part in parts:
            client.sendall(part)
        client.close()
    assert ask(folder, REQUEST) == "ok\n"
    eventually(lambda: not server._peers, "the connections to be closed")


def test_a_plugin_replaces_the_socket_of_the_one_before(folder: Path, serve: Serve) -> None:
    """Which was killed, or still runs; and one that stops leaves the socket of its successor."""
    first, second = Asked(), Asked()
    socket_of(folder).touch()
    old = serve(first.apply)
    serve(second.apply)
    assert ask(folder, REQUEST) == "ok\n"
    old.stop()
    assert not old.alive
    assert ask(folder, REQUEST) == "ok\n"
    assert (len(first.calls), len(second.calls)) == (0, 2)


def test_a_plugin_that_stops_removes_its_socket(folder: Path, serve: Serve) -> None:
    server = serve(Asked().apply)
    waiting = connect(folder)
    server.stop()
    assert not socket_of(folder).exists()
    assert read_end(waiting) == ""


def test_a_failure_of_the_server_ends_neither_it_nor_its_thread(
    folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(Asked().apply, request_s=0.1)
    accept, failures = server._accept, [RuntimeError("broken")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()
        accept()

    monkeypatch.setattr(server, "_accept", fail_once)
    with capture_logs() as logs:
        assert ask(folder, REQUEST) == "ok\n"
    assert "memory_limit_server_failed" in [entry["event"] for entry in logs]


def test_a_driver_that_hangs_is_reported(folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it hangs; the hooks have given up by then."""
    monkeypatch.setattr(memory_limit_server, "ANSWER_S", 0.05)
    hanging = threading.Event()
    server = serve(lambda *_: hanging.wait(20) or None)
    assert server.problem() == ""
    with connect(folder) as client:
        client.sendall(REQUEST)
        eventually(server.problem, "the problem to be reported")
        assert server.problem() == "the driver has not answered for 0 s, to set a memory limit"
        hanging.set()
        assert client.recv(100) == b"ok\n"
    assert server.problem() == ""


# The hook.


@pytest.fixture
def hook(folder: Path) -> MemoryLimitHook:
    """The hook as it is installed on a host."""
    made = MemoryLimitHook(folder)
    made.install()
    return made


def run(hook: MemoryLimitHook, text: str = "", token: str = TOKEN) -> "subprocess.CompletedProcess[str]":
    """Run the hook as a runtime does: with only the hook's own environment."""
    described = hook.hook(token)
    return subprocess.run(
        [described["path"], *described["args"][1:]],
        input=text or state(),
        env=dict(each.split("=", 1) for each in described["env"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=described["timeout"],
    )


PREFIX = "quotient: the driver's memory limit of the container cannot be set: "


def test_a_container_starts_when_its_limit_is_set(folder: Path, serve: Serve, hook: MemoryLimitHook) -> None:
    """The plugin gets its token, its first process and its id."""
    asked = Asked()
    serve(asked.apply)
    done = run(hook)
    assert (done.returncode, done.stderr) == (0, "")
    assert asked.calls == [(TOKEN, PID, ID)]


def test_a_container_does_not_start_without_its_limit(folder: Path, serve: Serve, hook: MemoryLimitHook) -> None:
    """Its events show the plugin's reason."""
    serve(Asked("GPU GPU-0: the driver has the hard limit none").apply)
    done = run(hook)
    assert (done.returncode, done.stderr) == (1, f"{PREFIX}GPU GPU-0: the driver has the hard limit none\n")


def test_strings_of_the_tenant_are_not_taken_for_the_runtimes(serve: Serve, hook: MemoryLimitHook) -> None:
    """Such as annotations, and keys of that name elsewhere."""
    asked = Asked()
    serve(asked.apply)
    hostile = {"pid": "1", "id": "x", "a": '","pid":1,"id":"y"}', "b": "\\"}
    text = state(pid=None, id=None, annotations=hostile)[:-1] + f', "pid": {PID}, "id": "{ID}"}}'
    assert run(hook, text).returncode == 0
    assert asked.calls == [(TOKEN, PID, ID)]


STATES = {
    "no process": (state(pid=None), "no process in the state"),
    "process 0": (state(pid=0), "no process in the state"),
    "a negative process": (state(pid=-1), "no process in the state"),
    "a process that is text": (state(pid="1"), "no process in the state"),
    "a huge process": (state(pid=10**9), "no process in the state"),
    "half a number": (state(pid=1.5), "no process in the state"),
    "no id": (state(id=None), "no id in the state"),
    "an id with an escape": (state(id='a"b'), "no id in the state"),
    "a huge id": (state(id="x" * 1000), "the token or the container's id is too long"),
    "no JSON": ("{", "no process in the state"),
    "nothing at all": (" ", "no process in the state"),
    "deep nesting": ("[" * 100_000, "no process in the state"),
}


@pytest.mark.parametrize(("text", "reason"), STATES.values(), ids=STATES.keys())
def test_a_state_that_cannot_be_read_ends_the_start(hook: MemoryLimitHook, text: str, reason: str) -> None:
    """The plugin is not asked."""
    done = run(hook, text)
    assert (done.returncode, done.stderr) == (1, f"{PREFIX}{reason}\n")


@pytest.mark.parametrize("token", ['a","pid":1,"x":"', "a\\", "a\nb"])
def test_a_token_cannot_change_the_request(hook: MemoryLimitHook, token: str) -> None:
    done = run(hook, token=token)
    assert (done.returncode, done.stderr) == (1, f"{PREFIX}the token is not valid\n")


@contextmanager
def listening(folder: Path, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """A plugin that handles one connection by `serve`, and keeps it open until the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_of(folder)))
        listener.listen()
        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])
            serve(accepted[0])

        thread = threading.Thread(target=accept)
        thread.start()
        yield
        thread.join()
        for each in accepted:
            each.close()


def timed(hook: MemoryLimitHook) -> str:
    began = time.monotonic()
    done = run(hook)
    assert done.returncode == 1
    assert 4.5 < time.monotonic() - began < 9
    return done.stderr


def test_a_plugin_that_hangs_ends_the_start_after_five_seconds(folder: Path, hook: MemoryLimitHook) -> None:
    """Also if it began an answer, even with what would be one."""
    with listening(folder, lambda connection: connection.sendall(b"ok")):
        assert timed(hook) == (
            f"{PREFIX}Quotient's node plugin, which sets it, did not answer within 5 s; "
            "see the log of Quotient's node plugin on this node\n"
        )


@pytest.mark.parametrize("left", ["nothing", "a dead socket"])
def test_without_a_plugin_nothing_starts(folder: Path, hook: MemoryLimitHook, left: str) -> None:
    if left == "a dead socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_of(folder)))
    assert "node plugin, which sets it, did not accept a connection within 5 s" in timed(hook)


def test_a_start_waits_for_a_plugin_that_is_being_replaced(folder: Path, serve: Serve, hook: MemoryLimitHook) -> None:
    """An upgrade of the plugin fails no container."""
    asked = Asked()
    timer = threading.Timer(0.5, lambda: serve(asked.apply))
    timer.start()
    assert run(hook).returncode == 0
    timer.join()
    assert len(asked.calls) == 1


@pytest.mark.parametrize("answer", [b"", b"ok", b"o"], ids=["nothing", "no end", "a part"])
def test_a_plugin_that_dies_ends_the_start(folder: Path, hook: MemoryLimitHook, answer: bytes) -> None:
    """A part of an answer is none."""

    def die(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)
        connection.close()

    with listening(folder, die):
        done = run(hook)
    assert done.returncode == 1
    assert done.stderr == f"{PREFIX}the node plugin closed the connection without an answer\n"


def test_the_time_limit_holds_whatever_the_runtime_leaves_blocked(folder: Path, hook: MemoryLimitHook) -> None:
    """Ignored signals are inherited; and a runtime that keeps stdin open is waited for no longer than a plugin."""
    described = hook.hook(TOKEN)
    program = f"trap '' ALRM; exec {described['path']} {described['args'][1]} {TOKEN}"
    with subprocess.Popen(["sh", "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.wait(9) == 1
        assert started.stderr is not None
        assert f"{PREFIX}the runtime has sent no state within 5 s" in started.stderr.read()


def test_the_hook_is_static_and_has_an_environment_of_its_own(hook: MemoryLimitHook) -> None:
    """Otherwise runc passes the container's, and with it LD_PRELOAD."""
    described = hook.hook(TOKEN)
    assert described["hookName"] == "createRuntime"
    assert described["env"]
    assert read_static(Path(described["path"])) is not None


def test_a_hook_that_cannot_be_run_is_not_promised(
    folder: Path, hook: MemoryLimitHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's files are then not created, so it does not start."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not hook.is_usable()
    with pytest.raises(OSError, match="the hook that limits memory cannot be run"):
        hook.hook(TOKEN)


@pytest.mark.parametrize("problem", ["the program is missing", "the folder cannot be written"])
def test_a_hook_that_cannot_be_installed_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    if problem == "the program is missing":
        monkeypatch.setattr("nodeplugin.memory_limit_hook.read_static", lambda _: None)
    else:
        (folder / "hooks").touch()
    with capture_logs() as logs:
        MemoryLimitHook(folder).install()
    assert [entry["event"] for entry in logs] in (["memory_limit_hook_missing"], ["memory_limit_hook_not_installed"])
    assert not MemoryLimitHook(folder).is_usable()


def test_usage_is_refused_without_arguments(hook: MemoryLimitHook) -> None:
    done = subprocess.run([hook.hook(TOKEN)["path"]], capture_output=True, text=True, check=False, timeout=10)
    assert (done.returncode, "usage: apply-memory-limit SOCKET TOKEN" in done.stderr) == (1, True)
