"""Serving with gunicorn: one process, an event loop, TLS, and an end that no caller notices."""

import asyncio
import gc
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.glogging import Logger
from gunicorn.workers.gasgi import ASGIWorker

from settings.configuration import WebhookSettings
from vcuda.decision import Unavailable
from webhook.responding import Deferred, HttpReply
from webhook.service import Service
from webhook.short_path import END, MAX_HEAD, PREFIXES, encode_reply, is_begun, read_head

TICK_S = 0.25
GARBAGE = (20_000, 20, 20)
TICKS_PER_REFRESH = 4
FROZEN_AFTER_S = 30
LAST_WORD_S = 2.0
# Far more than API servers open; beyond it somebody is only filling the memory.
MAX_CONNECTIONS = 1000
AFTER_DRAIN_S = 5
# Below the 25 that an API server keeps; and no answer is held back for longer.
MOST_IDLE = 24
HELD_S = 0.25
IN_MEMORY = Path("/dev/shm")  # noqa: S108 - for gunicorn's heartbeat, where the root file system is read-only


class ShortPathConnection(ASGIProtocol):
    """One client. It has to say what it wants soon, and if configured so, who it is.

    Between requests nothing is held. A plain admission request is held until it is whole, answered, and forgotten. Any
    other goes to gunicorn, and with it the connection: only there is it known where the next request begins.
    """

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - gunicorn's protocol has no types
        """Take a client in."""
        self._service: Service = self.worker.service
        self._held: bytes | bytearray = b""
        self._whole = 0  # how long the held request will be; 0 while that is not known
        self._is_long_way = not self._service.settings.short_path
        self._is_receiving = self._is_waiting = self._is_gone = False
        self._comes_back = False
        self._judged, self._is_last = None, False
        # When the client's turn began, and how long it may take.
        self._since, self._patience_s = self.worker.loop.time(), self._service.settings.body_timeout_s
        self.worker.connections.add(self)
        self._service.metrics.connections += 1
        super().connection_made(transport)
        if len(self.worker.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        names = self._service.settings.client_names
        if names and (caller := common_name(transport.get_extra_info("peercert"))) not in names:
            self.worker.log.warning("caller %r is not among webhook.clientNames", caller)
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what a client sends, the short way or the long."""
        if not self._is_receiving:
            self._is_receiving = True
            self._since, self._patience_s = self.worker.loop.time(), self._service.settings.body_timeout_s
        if self._is_long_way:
            super().data_received(data)
            return
        if self._is_waiting and len(self._held) + len(data) > MAX_HEAD + self._service.front.max_body:
            self._close_transport()
            return
        if not self._held:
            self._held = data
        else:
            if isinstance(self._held, bytes):
                self._held = bytearray(self._held)
            self._held += data
        if not self._is_waiting:
            self._go_on()

    def _go_on(self) -> None:
        """Look whether what is held is a request."""
        if len(self._held) >= self._whole and not self._take_short_way():
            self._take_long_way(stay=True)

    def _take_short_way(self) -> bool:
        """Answer what is held if it is a plain request, or wait for the rest of it; False if it is not plain."""
        held = self._held
        if (end := held.find(END) + len(END)) < len(END):
            return len(held) <= MAX_HEAD and (held.startswith(PREFIXES) or is_begun(bytes(held)))
        head = read_head(bytes(held[:end]))
        if head is None or head.length > self._service.front.max_body or len(held) > end + head.length:
            return False
        if len(held) < end + head.length:
            self._whole = end + head.length
            return True
        reply = self._service.responder.reply_soon(
            head.route, head.content_type, head.query, bytes(held[end:]), self._answer_later
        )
        if reply is Deferred.BLOCKING:
            # It has to wait for the cluster. What is held is this one request, so the next one may be short again.
            self._take_long_way(stay=False)
            return True
        self._held, self._whole = b"", 0
        if isinstance(reply, Deferred):
            self._is_waiting = True
            self.worker.gate.waits()
        else:
            self._answer(reply)
        return True

    def _answer_later(self, reply: HttpReply) -> None:
        """Answer from another thread."""
        with suppress(RuntimeError):  # the loop has ended, and the client with it
            self.worker.loop.call_soon_threadsafe(self.worker.gate.let_out, self, reply)

    def answer_waiting(self, reply: HttpReply) -> None:
        """Answer a client that had to wait, and look at what it sent meanwhile."""
        self._is_waiting = False
        if self._is_gone:
            return
        self._answer(reply)
        if self._held:
            self._go_on()

    def _answer(self, reply: HttpReply) -> None:
        is_last = self.worker.is_leaving
        self.transport.write(encode_reply(reply, time.time(), close=is_last))
        if is_last:
            self._close_transport()
        self._wait_for_next()

    def _take_long_way(self, *, stay: bool) -> None:
        """Give what is held to gunicorn, and all that follows; unless told to stay there, until it is answered."""
        held, self._held, self._whole = bytes(self._held), b"", 0
        self._is_long_way, self._comes_back = True, not stay
        super().data_received(held)

    def _arm_keepalive_timer(self) -> None:
        """Wait for the next request, after gunicorn has answered one; the worker's sweep ends what waits too long."""
        self._wait_for_next()
        if self._comes_back:
            self._is_long_way = self._comes_back = False

    def _wait_for_next(self) -> None:
        """Give the client all the time in which API servers keep a connection."""
        self._is_receiving = False
        self._since, self._patience_s = self.worker.loop.time(), self._service.settings.keep_alive_s

    def end_if_overdue(self, now: float) -> None:
        """Close the connection of a client that has been waited for long enough."""
        if self.is_idle and now > self._since + self._patience_s:
            self._close_transport()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self._current_request is None and not self._is_waiting

    def _will_close(self, request: Any, response_requires_close: bool) -> bool:  # noqa: ANN401, FBT001 - gunicorn's
        """Say whether an answer on the long way is the last one; once said, it stays so, whatever happens meanwhile."""
        if self._judged is not request:
            self._judged, self._is_last = request, self.worker.is_leaving
        return self._is_last or bool(super()._will_close(request, response_requires_close))

    def pause_writing(self) -> None:
        """Read no more from a client that does not take its answers."""
        super().pause_writing()
        self._pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        super().resume_writing()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let a client go."""
        self.worker.connections.discard(self)
        self._is_gone = True
        super().connection_lost(exc)


class ReplyPacer:
    """Lets answers out so that callers need not make new connections.

    A batch of charges is answered all at once. An API server keeps 25 idle connections and closes what is beyond, to
    open others a moment later, each with a handshake that costs more than the call. So answers are held back, for some
    milliseconds at the most, while that many connections are idle; each new call lets the next answer out.
    """

    def __init__(self, worker: "WebhookWorker", most_idle: int) -> None:
        self._worker, self._most_idle = worker, most_idle
        self._held: deque[tuple[float, ShortPathConnection, HttpReply]] = deque()
        self._waiting = 0

    def waits(self) -> None:
        """Count a client that waits for its answer."""
        self._waiting += 1
        self._release()

    def let_out(self, connection: ShortPathConnection, reply: HttpReply) -> None:
        """Answer a client now or soon."""
        self._held.append((self._worker.loop.time() + HELD_S, connection, reply))
        if len(self._held) == 1:
            self._worker.loop.call_later(HELD_S, self._overdue)
        self._release()

    def _overdue(self) -> None:
        self._release()
        if self._held:
            self._worker.loop.call_at(self._held[0][0], self._overdue)

    def _release(self) -> None:
        now = self._worker.loop.time()
        while self._held:
            due, connection, reply = self._held[0]
            if due > now and len(self._worker.connections) - self._waiting >= self._most_idle:
                return
            self._held.popleft()
            self._waiting -= 1
            connection.answer_waiting(reply)


def common_name(certificate: dict[str, Any] | None) -> str:
    """Give the common name of a client's certificate, as Python's ssl shows it."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""


class WebhookWorker(ASGIWorker):
    """gunicorn's asgi worker, with timeouts from the first byte on, followed certificates, and a drain."""

    service: Service

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.connections: set[ShortPathConnection] = set()
        self.gate = ReplyPacer(self, MOST_IDLE)
        # Told to end, and still answering. gunicorn's own flag closes connections that an answer just promised to keep.
        self.is_leaving = False

    def handle_exit_signal(self) -> None:
        """Begin to end."""
        self.is_leaving = True

    def load_wsgi(self) -> None:
        """Put the webhook together, in this process and no other."""
        self.service = self.app.wsgi()
        self.asgi = self.service.front

    async def _serve(self) -> None:
        """Serve until told to end, then drain."""
        self.service.start()
        await self._wait_for_certificate()
        for listener in self.sockets:
            server = await self.loop.create_server(
                lambda: ShortPathConnection(self),
                sock=listener.sock,
                ssl=self.service.certificates.context,
                ssl_handshake_timeout=self.service.settings.handshake_timeout_s,
                ssl_shutdown_timeout=1,
            )
            self.servers.append(server)
        self.log.info("serving on %s", ", ".join(map(str, self.sockets)))
        # What was made until now stays: looking through it for garbage again and again would cost a tenth of all time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GARBAGE)
        ticks = 0
        while self.alive and not self.is_leaving and self.ppid == os.getppid():
            ticks += 1
            await self._tick()
            if ticks % TICKS_PER_REFRESH == 0:
                await asyncio.to_thread(self.service.refresh_certificate)
        await self._drain()
        self.service.stop()

    async def _tick(self) -> None:
        """Say that this process runs, to gunicorn and to the probes, and let others run."""
        self.notify()
        self.service.beat()
        now = self.loop.time()
        for connection in list(self.connections):
            connection.end_if_overdue(now)
        await asyncio.sleep(TICK_S)

    async def _wait_for_certificate(self) -> None:
        """Wait for a first pair: whoever makes it may start later than we."""
        while self.alive and not self.is_leaving:
            await asyncio.to_thread(self.service.refresh_certificate)
            if self.service.certificates.in_use is not None:
                return
            await self._tick()

    async def _drain(self) -> None:
        """End without a failed call.

        API servers hold on to open connections, and new ones arrive until the cluster has learned that we go. So we
        go on answering, each answer closing its connection, and only then stop.
        """
        self.is_leaving = self.service.draining = True
        settings = self.service.settings
        await self._wait(settings.drain_s, lambda: False)
        for server in self.servers:
            server.close()
        # Somebody may have connected a moment ago, be in the handshake, which nobody counts, or be about to ask.
        await self._wait(min(LAST_WORD_S, settings.drain_s), lambda: False)
        await self._wait(settings.answer_within_s, lambda: all(each.is_idle for each in self.connections))
        for connection in list(self.connections):
            connection.transport.close()
        await self._wait(AFTER_DRAIN_S, lambda: not self.connections)

    async def _wait(self, most_s: float, is_over: Callable[[], bool]) -> None:
        """Wait for something, unless told to end at once."""
        until = self.loop.time() + most_s
        while self.loop.time() < until and not is_over() and not self._quick_shutdown:
            await self._tick()


class GunicornLogger(Logger):
    """gunicorn's own words, in the log of the process."""

    def setup(self, cfg: Any) -> None:  # noqa: ANN401
        """Leave level, form and target to the log that is set up already."""
        self.cfg = cfg
        self._access_log_enabled = False
        self.error_log.propagate = True
        self.error_log.setLevel(logging.NOTSET)


class GunicornApplication(BaseApplication):
    """The webhook as gunicorn runs it."""

    def __init__(self, settings: WebhookSettings, build: Callable[[], Service]) -> None:
        self._settings, self._build = settings, build
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn up."""
        settings = self._settings
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        for name, value in {
            "bind": f"{host}:{settings.port}",
            "workers": 1,
            "worker_class": WebhookWorker,
            "worker_tmp_dir": str(IN_MEMORY) if IN_MEMORY.is_dir() else None,
            "timeout": FROZEN_AFTER_S,
            "graceful_timeout": int(settings.drain_s + LAST_WORD_S + settings.answer_within_s + 2 * AFTER_DRAIN_S),
            "keepalive": max(1, int(settings.keep_alive_s)),
            "control_socket_disable": True,
            "logger_class": GunicornLogger,
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Service:
        """Build the webhook; called in the process that serves."""
        try:
            return self._build()
        except (Unavailable, OSError, ssl.SSLError) as wrong:
            structlog.get_logger().error("cannot_start", cause=str(wrong))
            raise SystemExit(Arbiter.APP_LOAD_ERROR) from None
