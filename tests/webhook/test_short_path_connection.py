"""A connection changes between the short path and gunicorn only where a request ends."""

import asyncio
import json
import threading

from tests.webhook.in_process import connect_client, new_worker, run_loop_until
from tests.webhook.load import request
from tests.webhook.pods import gpu, pod
from tests.webhook.reviews import review

BINDING = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"name": "n"}}
BINDING_REQUEST = request(json.dumps(review(BINDING, subresource="binding")).encode(), "/validate?timeout=10s")
MUTATE_REQUEST = request(json.dumps(review(pod(gpu()))).encode())


def test_requests_alternate_between_both_paths() -> None:
    async def run() -> None:
        async with connect_client(new_worker()) as client:
            for _ in range(2):
                await client.send(MUTATE_REQUEST)
                head, _ = await client.read_answer()
                assert head.startswith(b"http/1.1 200")
                assert not client.server_side._is_on_gunicorn_path
                await client.send(BINDING_REQUEST)
                head, _ = await client.read_answer()
                assert head.startswith(b"http/1.1 200")
                await run_loop_until(lambda: not client.server_side._is_on_gunicorn_path)

    asyncio.run(run())


def test_the_rest_of_a_head_that_gunicorn_has_begun_to_parse_is_not_taken_for_a_request() -> None:
    """The client pipelines the first half of a request while gunicorn still answers the one before."""
    may_reply = threading.Event()

    def find_pod(*_: object) -> None:
        assert may_reply.wait(10)

    async def run() -> None:
        async with connect_client(new_worker(find_pod)) as client:
            connection = client.server_side
            await client.send(BINDING_REQUEST)
            await run_loop_until(lambda: not connection.is_idle)
            await client.send(b"POST /elsewhere HTTP/1.1\r\nX-Note: ")
            await run_loop_until(connection._callback_parser.remaining)
            may_reply.set()
            await client.read_answer()
            await run_loop_until(lambda: connection.is_idle)
            await client.send(b"POST /mutate HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
            head, _ = await client.read_answer()
            assert head.startswith(b"http/1.1 404"), head

    asyncio.run(run())
