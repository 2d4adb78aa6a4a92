"""gunicorn has the private parts that the webhook overrides, calls and reads, and uses them as the webhook expects.

A gunicorn that renames one would not fail: an override would silently no longer be called, and connections would be
closed without notice or never. So these tests fail instead.
"""

import asyncio
import inspect
import json
import re
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from gunicorn.config import Config
from gunicorn.workers.base import Worker

from tests.webhook.in_process import connect_client, new_worker, run_loop_until
from tests.webhook.load import request
from tests.webhook.reviews import review
from vcuda.decision import Unavailable
from webhook.gunicorn_server import GUNICORN_INTERNALS, GunicornInternal, GunicornLogger

ON_GUNICORN_PATH = request(b"", "/mutate", "Connection: keep-alive")
BINDING = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"name": "n"}}
BINDING_REQUEST = request(json.dumps(review(BINDING, subresource="binding")).encode(), "/validate?timeout=10s")


def problem_of(internal: GunicornInternal) -> str:
    """Return how gunicorn differs from what the webhook expects; "" if it does not."""
    owner, name, expected = internal
    if expected is None:
        sources = [inspect.getsource(each) for each in owner.__mro__[:-1] if each.__module__.startswith("gunicorn.")]
        is_set = any(re.search(rf"\bself\.{name} = ", source) for source in sources)
        return "" if is_set else f"{owner.__name__}.{name} is never set"
    method = getattr(owner, name, None)
    if method is None:
        return f"{owner.__name__}.{name} does not exist"
    actual = str(inspect.signature(method))
    return "" if actual == expected else f"{owner.__name__}.{name}{actual}, expected {expected}"


def test_gunicorn_has_all_parts_that_the_webhook_uses() -> None:
    assert [problem for each in GUNICORN_INTERNALS if (problem := problem_of(each))] == []


@pytest.mark.parametrize("internal", GUNICORN_INTERNALS, ids=lambda each: f"{each.owner.__name__}.{each.name}")
def test_a_renamed_or_changed_part_is_noticed(internal: GunicornInternal) -> None:
    assert problem_of(internal._replace(name=f"{internal.name}_renamed"))
    if internal.signature is not None:
        assert problem_of(internal._replace(signature="(self, something, new)"))


def test_gunicorn_uses_our_keep_alive_and_close_decisions() -> None:
    """`_arm_keepalive_timer` and `_will_close`, on a real connection."""

    async def run() -> None:
        worker = new_worker()
        async with connect_client(worker) as client:
            connection = client.server_side
            await client.send(ON_GUNICORN_PATH)
            head, _ = await client.read_answer()
            assert b"connection: close" not in head
            await run_loop_until(lambda: not connection._is_receiving)
            assert connection._timeout_s == worker.service.settings.keep_alive_s
            assert connection._keepalive_handle is None, "gunicorn has set a timer of its own"
            worker.is_terminating = True
            await client.send(ON_GUNICORN_PATH)
            head, _ = await client.read_answer()
            assert b"connection: close" in head
            assert await client.reader.read() == b"", "the connection was not closed"

    asyncio.run(run())


def test_a_connection_is_busy_while_gunicorn_answers_and_returns_to_the_short_path_afterwards() -> None:
    """`_current_request` is set for the time of a request."""
    may_reply = threading.Event()

    def find_pod(*_: object) -> None:
        assert may_reply.wait(10)
        raise Unavailable("no pod")

    async def run() -> None:
        async with connect_client(new_worker(find_pod)) as client:
            connection = client.server_side
            await client.send(BINDING_REQUEST)
            await run_loop_until(lambda: connection._is_on_gunicorn_path and not connection.is_idle)
            may_reply.set()
            _, body = await client.read_answer()
            assert body == b"cannot decide now: no pod\n"
            await run_loop_until(lambda: connection.is_idle)
            assert not connection._is_on_gunicorn_path

    asyncio.run(run())


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """`_pause_reading` and `_resume_reading`."""

    async def run() -> None:
        async with connect_client(new_worker()) as client:
            transport = client.server_side.transport
            client.server_side.pause_writing()
            assert not transport.is_reading()
            client.server_side.resume_writing()
            assert transport.is_reading()

    asyncio.run(run())


def test_a_connection_that_timed_out_is_closed() -> None:
    """`_close_transport`."""

    async def run() -> None:
        worker = new_worker()
        async with connect_client(worker) as client:
            client.server_side.close_if_timed_out(worker.loop.time())
            assert not client.server_side.transport.is_closing()
            client.server_side.close_if_timed_out(worker.loop.time() + 3600)
            assert await client.reader.read() == b""

    asyncio.run(run())


def test_the_worker_runs_our_serve_and_stops_at_once_on_sigint(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ASGIWorker.run` calls `_serve`; `handle_quit_signal` sets `_quick_shutdown`."""
    worker = new_worker()
    served = []

    async def serve() -> None:
        worker.load_wsgi()
        worker.handle_quit_signal()
        await worker._wait(3600, lambda: False)
        served.append(worker.alive)

    monkeypatch.setattr(worker, "_serve", serve)
    worker.loop = asyncio.new_event_loop()
    worker.run()
    worker.tmp.close()
    assert served == [False]


def test_sigterm_begins_termination_without_gunicorns_own_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """`init_signals` installs `handle_exit_signal`."""
    worker, handlers = new_worker(), dict[int, Callable[[], None]]()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    worker.loop = SimpleNamespace(add_signal_handler=handlers.__setitem__)
    worker.init_signals()
    worker.tmp.close()
    handlers[signal.SIGTERM]()
    assert worker.is_terminating
    assert worker.alive


def test_the_worker_process_calls_our_load_wsgi() -> None:
    """By its source: `init_process` changes the whole process. tests/webhook/test_serving.py runs it for real."""
    assert "self.load_wsgi()" in inspect.getsource(Worker.init_process)


def test_the_access_log_is_off_whatever_gunicorn_is_configured_to() -> None:
    """`Logger.__init__` calls `setup`, and `access_log_enabled` reads `_access_log_enabled`."""
    config = Config()
    config.set("accesslog", "-")
    logger = GunicornLogger(config)
    assert not logger.access_log_enabled
    assert logger.error_log.propagate
