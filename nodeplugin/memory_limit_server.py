"""Answers the hook that container runtimes run before a container's first program: sets the driver's memory limit.

A unix socket for root only. One thread serves all connections, so a driver call that hangs makes the hooks give up, and
their containers do not start. Peers that send nothing, or too much, hold up no other: connections are bounded in
number, and each in time and size. While all are in use, others wait in the listening socket's queue.
"""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from nodeplugin.memory_limits import CannotLimit
from vcuda.decoding import decoder_for

MAX_CONNECTIONS, MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 16, 512, 4096
# A hook sends its request at once.
REQUEST_S = 1.0
# Then the hook gives up: a driver call takes so long only if it hangs.
ANSWER_S = 5.0
BACKLOG = 64
# struct ucred: process, user and group.
CREDENTIALS = struct.Struct("3i")
OK = "ok"


class HookRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A container that is about to start: its token, its first process, and its id at the runtime."""

    token: str
    pid: int
    id: str


# Raises CannotLimit: (token, pid, id).
Apply = Callable[[str, int, str], None]


class Peer(Struct, eq=False):
    """An open connection, and what it has sent so far."""

    socket: socket.socket
    deadline: float
    received: bytes = b""


class MemoryLimitServer:
    """Serves `apply` on a socket that is created at `path`; OSError if it cannot be."""

    def __init__(self, path: Path, apply: Apply, *, request_s: float = REQUEST_S, allowed_uid: int = 0) -> None:
        self._path, self._apply, self._request_s, self._allowed_uid = path, apply, request_s, allowed_uid
        self._peers: dict[int, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._stopping, self._inode = threading.Event(), 0
        # When the request began that is being answered, on the monotonic clock.
        self._busy_since: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="memory-limits", daemon=True)
        self._log = structlog.get_logger()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def problem(self) -> str:
        """Return why no container with a limit can start now; empty if they can."""
        since = self._busy_since
        busy_s = 0.0 if since is None else time.monotonic() - since
        return f"the driver has not answered for {busy_s:.0f} s, to set a memory limit" if busy_s > ANSWER_S else ""

    def start(self) -> "MemoryLimitServer":
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Of a plugin before this one. Bound under another name first: a hook must not meet the socket before its mode
        # is set.
        scratch = self._path.with_name(f".{self._path.name}")
        scratch.unlink(missing_ok=True)
        self._listener.bind(str(scratch))
        scratch.chmod(0o600)
        self._listener.listen(BACKLOG)
        self._listener.settimeout(0)
        self._inode = scratch.stat().st_ino
        scratch.replace(self._path)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving; the socket is removed, unless another plugin has replaced it. Safe to call again."""
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._serve()
                except Exception:  # the outermost frame of the thread, which must not end
                    self._log.exception("memory_limit_server_failed")
                    self._stopping.wait(self._request_s)
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        for each in (*(peer.socket for peer in self._peers.values()), self._listener, self._wake, self._woken):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        """Wait for the next event, and handle what is ready."""
        deadlines = [peer.deadline for peer in self._peers.values()]
        wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (peer := self._peers.get(key.fd)) is not None:
                self._receive(peer)
        now = time.monotonic()
        for peer in [each for each in self._peers.values() if each.deadline <= now]:
            self._end(peer, "the request did not arrive in time")

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the peer is gone, or this process has no file descriptor left
        accepted.settimeout(0)
        peer = Peer(accepted, time.monotonic() + self._request_s)
        self._peers[accepted.fileno()] = peer
        self._selector.register(accepted, selectors.EVENT_READ)
        if len(self._peers) == MAX_CONNECTIONS:
            self._selector.unregister(self._listener)
        # The mode of the socket keeps others out already, but not after a mistake with it or its folder.
        if (uid := peer_uid(accepted)) != self._allowed_uid:
            self._log.warning("memory_limit_peer_refused", uid=uid)
            self._end(peer, "only root may ask for limits")

    def _receive(self, peer: Peer) -> None:
        try:
            chunk = peer.socket.recv(MAX_REQUEST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        peer.received += chunk
        if len(peer.received) > MAX_REQUEST_BYTES:
            self._end(peer, f"the request is larger than {MAX_REQUEST_BYTES} bytes")
        elif peer.received.endswith(b"\n"):
            self._end(peer, self._answer(peer.received))
        elif not chunk:
            self._end(peer, "the request is incomplete")

    def _answer(self, received: bytes) -> str:
        try:
            request = decoder_for(HookRequest).decode(received)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return "the request is not valid; the hook may be of another version"
        self._busy_since = time.monotonic()
        try:
            self._apply(request.token, request.pid, request.id)
        except CannotLimit as error:
            self._log.warning("memory_limit_refused", pid=request.pid, id=request.id, reason=str(error))
            return str(error)
        except Exception as error:  # the outermost frame of the request
            self._log.exception("memory_limit_failed", pid=request.pid)
            return f"the node plugin failed: {error!r}"
        finally:
            self._busy_since = None
        return OK

    def _end(self, peer: Peer, answer: str) -> None:
        line = " ".join(answer.split()).encode()[: MAX_ANSWER_BYTES - 1] + b"\n"
        # It fits the socket's buffer, which is empty: nothing was sent yet. A peer that has gone needs none.
        with suppress(OSError):
            peer.socket.send(line)
        self._selector.unregister(peer.socket)
        if len(self._peers) == MAX_CONNECTIONS:
            self._selector.register(self._listener, selectors.EVENT_READ)
        del self._peers[peer.socket.fileno()]
        peer.socket.close()


def peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[1])
