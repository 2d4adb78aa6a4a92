"""The webhook under gunicorn: the worker with its event loop, TLS and draining, the logger, and the application.

There is one process, gunicorn's worker without its arbiter: quotas, the ledger committer and the decision log live in
its memory, and scaling out is done with replicas. A second process to restart the first would take a third of the
memory, and the kubelet restarts what ends or fails its liveness probe.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from gunicorn.app.base import BaseApplication
from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.glogging import Logger
from gunicorn.sock import create_sockets
from gunicorn.workers.gasgi import ASGIWorker

from settings.configuration import WebhookSettings
from vcuda.decision import Unavailable
from webhook.reply_pacing import MAX_IDLE_CONNECTIONS, ReplyPacer
from webhook.service import Service
from webhook.short_path_connection import ShortPathConnection

TICK_S = 0.25
TICKS_PER_CERTIFICATE_REFRESH = 4
GC_THRESHOLDS = (20_000, 20, 20)
# A process whose event loop hangs for this long ends itself, and prints where: it would not react to signals.
HANG_TIMEOUT_S = 30
# After the listeners are closed: for handshakes in progress, and for first requests on connections just made.
LAST_REQUESTS_S = 2.0
CLOSE_CONNECTIONS_S = 5
# Every worker of gunicorn creates a file, and the root file system is read-only.
WORKER_FOLDER = Path("/dev/shm")  # noqa: S108 - a file system in memory


class GunicornInternal(NamedTuple):
    """A method of gunicorn with its signature, or an instance attribute, which has none."""

    owner: type
    name: str
    signature: str | None = None


# What is overridden, called or read here and in short_path_connection.py although gunicorn does not promise to keep it.
# tests/webhook/test_gunicorn_internals.py fails when one changes or is no longer used; pyproject.toml caps the version.
GUNICORN_INTERNALS = (
    # Overridden, so gunicorn has to call them:
    GunicornInternal(ASGIProtocol, "_arm_keepalive_timer", "(self)"),
    GunicornInternal(ASGIProtocol, "_will_close", "(self, request, response_requires_close)"),
    GunicornInternal(ASGIWorker, "_serve", "(self)"),
    GunicornInternal(ASGIWorker, "load_wsgi", "(self)"),
    GunicornInternal(ASGIWorker, "handle_exit_signal", "(self)"),
    GunicornInternal(ASGIWorker, "init_signals", "(self)"),
    GunicornInternal(Logger, "setup", "(self, cfg)"),
    # Called:
    GunicornInternal(ASGIProtocol, "_close_transport", "(self)"),
    GunicornInternal(ASGIProtocol, "_pause_reading", "(self)"),
    GunicornInternal(ASGIProtocol, "_resume_reading", "(self)"),
    GunicornInternal(ASGIWorker, "__init__", "(self, *args, **kwargs)"),
    GunicornInternal(ASGIWorker, "init_process", "(self)"),
    # Read or set:
    GunicornInternal(ASGIProtocol, "_current_request"),
    GunicornInternal(ASGIProtocol, "transport"),
    GunicornInternal(ASGIProtocol, "worker"),
    GunicornInternal(ASGIWorker, "_quick_shutdown"),
    GunicornInternal(ASGIWorker, "alive"),
    GunicornInternal(ASGIWorker, "asgi"),
    GunicornInternal(ASGIWorker, "loop"),
    GunicornInternal(ASGIWorker, "servers"),
    GunicornInternal(ASGIWorker, "sockets"),
    GunicornInternal(Logger, "_access_log_enabled"),
    GunicornInternal(Logger, "error_log"),
)


class WebhookWorker(ASGIWorker):
    """gunicorn's asgi worker, with connection timeouts, certificates that are reloaded, and draining."""

    service: Service
    pacer: ReplyPacer

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.connections: set[ShortPathConnection] = set()
        # SIGTERM was received; requests are still answered. gunicorn's own flag (`alive`) cannot be used: clearing it
        # closes connections that the last reply promised to keep.
        self.is_terminating = False
        # The event loop ended as it should, and not by an exception.
        self.has_finished = False

    def init_signals(self) -> None:
        super().init_signals()
        # A terminal that is closed ends the process as SIGTERM does; gunicorn's worker would end at once.
        self.loop.add_signal_handler(signal.SIGHUP, self.handle_exit_signal)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def handle_exit_signal(self) -> None:
        self.is_terminating = True

    def load_wsgi(self) -> None:
        self.service = self.app.wsgi()
        self.asgi = self.service.asgi_app
        self.pacer = ReplyPacer(self.loop, self.connections, MAX_IDLE_CONNECTIONS)

    async def _serve(self) -> None:
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
        # Modules and caches made so far are never garbage; scanning them again and again would take a tenth of the
        # CPU time. A decision makes few cycles, so the thresholds can be high.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        ticks = 0
        while self.alive and not self.is_terminating:
            ticks += 1
            await self._tick()
            if ticks % TICKS_PER_CERTIFICATE_REFRESH == 0:
                await asyncio.to_thread(self.service.refresh_certificate)
        await self._drain()
        self.service.stop()
        faulthandler.cancel_dump_traceback_later()
        self.has_finished = True

    async def _tick(self) -> None:
        """Send heartbeats to the probes and the watchdog, and close connections that timed out.

        One sweep over all connections costs less than a timer for every request of each of them.
        """
        self.service.record_heartbeat()
        faulthandler.dump_traceback_later(HANG_TIMEOUT_S, exit=True, file=sys.__stderr__ or sys.stderr)
        now = self.loop.time()
        for connection in list(self.connections):
            connection.close_if_timed_out(now)
        await asyncio.sleep(TICK_S)

    async def _wait_for_certificate(self) -> None:
        """Wait for the first key pair: the controller that issues it may start later than the webhook."""
        while self.alive and not self.is_terminating:
            await asyncio.to_thread(self.service.refresh_certificate)
            if self.service.certificates.in_use is not None:
                return
            await self._tick()

    async def _drain(self) -> None:
        """Stop without a failed request.

        API servers keep connections open, and new ones arrive until every node has removed this endpoint from the
        Service. So requests are answered for `drainS` more, each reply closing its connection, before the listeners
        are closed.
        """
        self.is_terminating = self.service.is_draining = True
        settings = self.service.settings
        await self._wait(settings.drain_s, lambda: False)
        for server in self.servers:
            server.close()
        # asyncio does not tell how many handshakes are in progress, so this waits for a fixed time.
        await self._wait(min(LAST_REQUESTS_S, settings.drain_s), lambda: False)
        await self._wait(settings.answer_within_s, lambda: all(each.is_idle for each in self.connections))
        for connection in list(self.connections):
            connection.transport.close()
        await self._wait(CLOSE_CONNECTIONS_S, lambda: not self.connections)

    async def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        """Wait for a condition; returns at once after SIGINT or SIGQUIT."""
        deadline = self.loop.time() + timeout_s
        while self.loop.time() < deadline and not is_done() and not self._quick_shutdown:
            await self._tick()


class GunicornLogger(Logger):
    """Passes gunicorn's messages to the process's own log."""

    def setup(self, cfg: Any) -> None:  # noqa: ANN401
        # Does not call super, which would add handlers of its own. Level and format are those of the root logger.
        self.cfg = cfg
        self._access_log_enabled = False
        self.error_log.propagate = True
        self.error_log.setLevel(logging.NOTSET)


class GunicornApplication(BaseApplication):
    """Configures gunicorn from the webhook's settings, and runs its worker here; `build` makes the webhook."""

    def __init__(self, settings: WebhookSettings, build: Callable[[], Service]) -> None:
        self._settings, self._build = settings, build
        super().__init__()

    def load_config(self) -> None:
        settings = self._settings
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        for name, value in {
            "bind": f"{host}:{settings.port}",
            "worker_tmp_dir": str(WORKER_FOLDER) if WORKER_FOLDER.is_dir() else None,
            "keepalive": max(1, int(settings.keep_alive_s)),
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Service:
        try:
            return self._build()
        except (Unavailable, OSError, ssl.SSLError) as error:
            structlog.get_logger().error("webhook_start_failed", error=str(error))
            raise SystemExit(1) from None

    def run(self) -> None:
        """Serve until a signal ends the process."""
        log = GunicornLogger(self.cfg)
        worker = WebhookWorker(1, os.getppid(), create_sockets(self.cfg, log), self, self.cfg.timeout, self.cfg, log)
        worker.init_process()
        if not worker.has_finished:
            raise SystemExit(1)  # the event loop ended by an exception, which gunicorn has logged
