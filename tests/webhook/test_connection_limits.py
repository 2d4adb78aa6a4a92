"""What one client takes, connections and memory, never keeps out another."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from settings.configuration import WebhookSettings
from tests.webhook.in_process import TIMEOUT_S, Client, new_worker, open_client, run_loop_until, serve
from tests.webhook.load import request
from tests.webhook.pods import gpu, pod
from tests.webhook.reviews import MIB, review
from tests.webhook.test_callers import BOTH_PATHS, CURRENT, caller_paths
from webhook import short_path_connection
from webhook.body_budget import LARGEST_BODIES, SMALL_BYTES
from webhook.decisions import PATH
from webhook.gunicorn_server import WebhookWorker

BODY = json.dumps(review(pod(gpu()))).encode()
KNOWN = request(BODY, f"/mutate/{CURRENT}")
OTHER = request(BODY)
LARGE = 8 * MIB
MAX_CONNECTIONS = 4


Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def clients(worker: WebhookWorker, count: int) -> AsyncIterator[tuple[Connect, list[Client]]]:
    """Serve some clients; more can be connected."""
    opened: list[Client] = []
    async with serve(worker) as port, asyncio.timeout(TIMEOUT_S):

        async def connect() -> Client:
            opened.append(await open_client(worker, port))
            return opened[-1]

        try:
            yield connect, [await connect() for _ in range(count)]
        finally:
            for each in opened:
                each.writer.close()
                with suppress(ConnectionError):
                    await each.writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def head_of(body_length: int, path: str = "/mutate", *headers: str) -> bytes:
    return request(b"", path, *headers).replace(b"Content-Length: 0", b"Content-Length: %d" % body_length)


@BOTH_PATHS
@pytest.mark.parametrize(
    "sent",
    [
        request(b"", "/x"),
        f"GET {PATH} HTTP/1.1\r\nHost: h\r\n\r\n".encode(),
        b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n",
        head_of(LARGE, "/x"),
        head_of(LARGE, "/mutate", "Connection: keep-alive").replace(b"POST", b"GET"),
    ],
    ids=["another path", "the decisions", "another method", "a large body", "a GET with a body"],
)
def test_only_the_paths_of_api_servers_keep_a_connection(sent: bytes, *, short_path: bool) -> None:
    """Anybody could hold a thousand for two minutes; a body on another path is not read."""

    async def run() -> None:
        worker = new_worker(settings=WebhookSettings(short_path=short_path))
        async with clients(worker, 1) as (_, (client,)):
            await client.send(sent)
            head, _ = await client.read_answer()
            assert head.startswith((b"http/1.1 404", b"http/1.1 400")), head
            assert b"connection: close" in head
            assert await is_closed(client.reader)

    asyncio.run(run())


@BOTH_PATHS
def test_a_new_connection_takes_the_place_of_one_that_no_api_server_uses(
    monkeypatch: pytest.MonkeyPatch, *, short_path: bool
) -> None:
    """Of the one that is idle for longest; one by which an API server has called stays."""
    monkeypatch.setattr(short_path_connection, "MAX_CONNECTIONS", MAX_CONNECTIONS)

    async def run() -> None:
        paths = caller_paths()
        worker = new_worker(paths=paths, settings=WebhookSettings(short_path=short_path))
        async with clients(worker, MAX_CONNECTIONS) as (connect, (known, oldest, *others)):
            await known.send(KNOWN)
            assert (await known.read_answer())[0].startswith(b"http/1.1 200")
            newcomer = await connect()
            assert await is_closed(oldest.reader)
            await newcomer.send(KNOWN)
            assert (await newcomer.read_answer())[0].startswith(b"http/1.1 200")
            assert {each.server_side for each in (known, newcomer, *others)} == worker.connections
            assert paths.report().failed == ()

    asyncio.run(run())


def test_a_connection_is_refused_while_api_servers_use_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is replaced then: the client that is refused may be an API server, which tells a user its URL."""
    monkeypatch.setattr(short_path_connection, "MAX_CONNECTIONS", MAX_CONNECTIONS)

    async def run() -> None:
        paths = caller_paths()
        worker = new_worker(paths=paths)
        async with clients(worker, MAX_CONNECTIONS) as (_, opened):
            for each in opened:
                await each.send(KNOWN)
                await each.read_answer()
            reader, writer = await asyncio.open_connection(*opened[0].writer.get_extra_info("peername"))
            assert await is_closed(reader)
            writer.close()
            assert paths.report().failed

    asyncio.run(run())


@BOTH_PATHS
def test_large_bodies_together_are_bounded_and_hold_up_no_small_one(*, short_path: bool) -> None:
    """Sixty of 8 MiB would end the process; the memory is free again when a connection is lost."""

    async def run() -> None:
        worker = new_worker(settings=WebhookSettings(short_path=short_path))
        async with clients(worker, LARGEST_BODIES + 2) as (connect, (small, late, *large)):
            for each in large:
                await each.send(head_of(LARGE) + b" " * MIB)
            budget = worker.service.asgi_app.budget
            await run_loop_until(lambda: not budget.reserve(SMALL_BYTES + 1))
            await late.send(head_of(LARGE))
            head, _ = await late.read_answer()
            assert head.startswith(b"http/1.1 503")
            assert b"connection: close" in head
            await small.send(OTHER)
            assert (await small.read_answer())[0].startswith(b"http/1.1 200")
            large[0].writer.close()
            await run_loop_until(lambda: len(worker.connections) == LARGEST_BODIES)
            again = await connect()
            await again.send(request(BODY + b" " * (LARGE - len(BODY))))
            assert (await again.read_answer())[0].startswith(b"http/1.1 200")

    asyncio.run(run())


def test_memory_of_bodies_is_free_after_the_answer() -> None:
    async def run() -> None:
        worker = new_worker()
        async with clients(worker, 1) as (_, (client,)):
            for _ in range(2 * LARGEST_BODIES):
                await client.send(request(BODY + b" " * (LARGE - len(BODY))))
                assert (await client.read_answer())[0].startswith(b"http/1.1 200")

    asyncio.run(run())


def test_no_large_request_is_read_before_the_one_before_is_answered() -> None:
    """API servers do not pipeline, and these bodies would not count."""

    async def run() -> None:
        worker = new_worker()
        async with clients(worker, 1) as (_, (client,)):
            client.server_side._is_reply_pending = True
            await client.send(b" " * MIB)
            assert await is_closed(client.reader)

    asyncio.run(run())
