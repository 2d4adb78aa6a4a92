"""A worker with its connections in the test's own process, without TLS.

Everything between the socket and `Responder` is real: `ShortPathConnection`, gunicorn's protocol and parser, Flask.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

from gunicorn.config import Config

from settings.configuration import WebhookSettings
from tests.running import HOST
from tests.webhook.reviews import MIB, caller
from webhook.asgi_app import AsgiApp
from webhook.callers import CallerPaths
from webhook.flask_app import create_app
from webhook.gunicorn_server import GunicornLogger, WebhookWorker
from webhook.metrics import Metrics
from webhook.responding import FindPod, Responder
from webhook.short_path_connection import ShortPathConnection

TIMEOUT_S = 10.0


def new_worker(
    find_pod: FindPod = lambda *_: None,
    *,
    responder: Responder | None = None,
    paths: CallerPaths | None = None,
    settings: WebhookSettings | None = None,
) -> WebhookWorker:
    """Build a worker as `GunicornApplication` does; `find_pod` reads the pods of Bindings."""
    responder, paths = responder or caller("short")._responder, paths or CallerPaths()
    responder._find_pod = find_pod
    service = SimpleNamespace(
        settings=settings or WebhookSettings(),
        metrics=Metrics(),
        responder=responder,
        paths=paths,
        asgi_app=AsgiApp(
            create_app(responder, 8 * MIB, paths=paths), max_body=8 * MIB, body_timeout_s=5.0, paths=paths
        ),
        record_heartbeat=lambda: None,
    )
    config = Config()
    return WebhookWorker(1, 0, [], SimpleNamespace(wsgi=lambda: service), 30, config, GunicornLogger(config))


class Client:
    """One client connection, with the server's side of it."""

    def __init__(
        self, server_side: ShortPathConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server_side, self.reader, self.writer = server_side, reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_answer(self) -> tuple[bytes, bytes]:
        """Read one answer: head, in lower case, and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = (line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        return head, await self.reader.readexactly(int(length))


async def open_client(worker: WebhookWorker, port: int) -> Client:
    """Connect a client whose connection is accepted."""
    before = set(worker.connections)
    reader, writer = await asyncio.open_connection(HOST, port)
    await run_loop_until(lambda: worker.connections - before)
    (server_side,) = worker.connections - before
    return Client(server_side, reader, writer)


async def run_loop_until(condition: Callable[[], object]) -> None:
    """Let the event loop run until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - conditions of the server, which sets no events
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serve(worker: WebhookWorker) -> AsyncIterator[int]:
    """Serve on a free port."""
    worker.loop = asyncio.get_running_loop()
    worker.load_wsgi()
    server = await worker.loop.create_server(lambda: ShortPathConnection(worker), HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await run_loop_until(lambda: not worker.connections)
        worker.tmp.close()


@asynccontextmanager
async def connect_client(worker: WebhookWorker) -> AsyncIterator[Client]:
    """Serve on a free port, and connect one client."""
    async with serve(worker) as port, asyncio.timeout(TIMEOUT_S):
        client = await open_client(worker, port)
        try:
            yield client
        finally:
            client.writer.close()
