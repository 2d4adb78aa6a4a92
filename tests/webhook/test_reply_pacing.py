"""Replies are delayed while enough connections are idle, and never for longer than the maximum."""

from collections.abc import Callable

import pytest

from webhook.reply_pacing import MAX_DELAY_S, ReplyPacer
from webhook.responding import HttpReply


class ManualLoop:
    """The two parts of an event loop that pacing needs, with a clock that the test advances."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.call_at(self._now_s + delay_s, callback)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        self._timers.append((when_s, callback))

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s
        due = [timer for timer in self._timers if timer[0] <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _, callback in due:
            callback()


class Connection:
    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def send_deferred_reply(self, reply: HttpReply) -> None:
        self._sent.append(reply.body)


class World:
    """A pacer that keeps at most two connections idle, of `connections` in total."""

    def __init__(self, connections: int) -> None:
        self.loop, self.sent = ManualLoop(), list[bytes]()
        self.connections = [Connection(self.sent) for _ in range(connections)]
        self.pacer = ReplyPacer(self.loop, self.connections, max_idle=2)  # type: ignore[arg-type]

    def start(self, requests: int) -> None:
        for _ in range(requests):
            self.pacer.start_request()

    def reply(self, *bodies: bytes) -> None:
        for connection, body in zip(self.connections, bodies, strict=False):
            self.pacer.submit(connection, HttpReply(200, body))


def test_a_reply_is_sent_at_once_while_few_connections_are_idle() -> None:
    world = World(connections=2)
    world.start(2)
    world.reply(b"a", b"b")
    assert world.sent == [b"a", b"b"]


def test_replies_beyond_the_idle_limit_wait_for_new_requests() -> None:
    """In order; each new request releases one."""
    world = World(connections=5)
    world.start(5)
    world.reply(b"a", b"b", b"c", b"d")
    assert world.sent == [b"a", b"b"]
    world.start(1)
    assert world.sent == [b"a", b"b", b"c"]
    world.start(1)
    assert world.sent == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("later", [0.0, MAX_DELAY_S / 2])
def test_no_reply_is_delayed_for_longer_than_the_maximum(later: float) -> None:
    world = World(connections=5)
    world.start(5)
    world.reply(b"a", b"b", b"c")
    world.loop.advance(later)
    world.reply(b"d")
    world.loop.advance(MAX_DELAY_S - later)
    assert world.sent[:3] == [b"a", b"b", b"c"]
    world.loop.advance(later)
    assert world.sent == [b"a", b"b", b"c", b"d"]
