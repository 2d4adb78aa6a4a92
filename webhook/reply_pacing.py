"""Pacing of replies, so that API servers reuse their connections instead of opening new ones.

The ledger commits reservations in batches, so a batch of requests is answered in one moment and all its connections
become idle at once. An API server keeps at most 25 idle connections per webhook (`idleConnsPerHost` in client-go),
closes the rest, and opens new ones for its next requests. Each needs a TLS handshake, which costs more than the
request itself.
"""

import asyncio
from collections import deque
from collections.abc import Sized
from typing import Protocol

from webhook.responding import HttpReply

# One below the API server's limit of 25.
MAX_IDLE_CONNECTIONS = 24
# An upper bound for the latency that pacing adds. Under load the next request releases a reply within milliseconds;
# this is reached only when no further request arrives.
MAX_DELAY_S = 0.25


class PacedConnection(Protocol):
    def send_deferred_reply(self, reply: HttpReply) -> None: ...


class ReplyPacer:
    """Delays replies while `max_idle` connections are idle already; each new request releases the next reply.

    Not thread-safe: all methods run on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Sized, max_idle: int) -> None:
        self._loop, self._connections, self._max_idle = loop, connections, max_idle
        # Deadline and reply, in order of arrival, which is also the order of the deadlines.
        self._delayed: deque[tuple[float, PacedConnection, HttpReply]] = deque()
        self._requests_in_progress = 0

    def start_request(self) -> None:
        """Count a request whose reply will be submitted later."""
        self._requests_in_progress += 1
        self._release()

    def submit(self, connection: PacedConnection, reply: HttpReply) -> None:
        """Send the reply to a started request, now or within `MAX_DELAY_S`."""
        self._delayed.append((self._loop.time() + MAX_DELAY_S, connection, reply))
        # One timer is enough: it is set again for the oldest reply as long as there is one.
        if len(self._delayed) == 1:
            self._loop.call_later(MAX_DELAY_S, self._release_overdue)
        self._release()

    def _release_overdue(self) -> None:
        self._release()
        if self._delayed:
            self._loop.call_at(self._delayed[0][0], self._release_overdue)

    def _release(self) -> None:
        now = self._loop.time()
        while self._delayed:
            deadline, connection, reply = self._delayed[0]
            if deadline > now and len(self._connections) - self._requests_in_progress >= self._max_idle:
                return
            self._delayed.popleft()
            self._requests_in_progress -= 1
            connection.send_deferred_reply(reply)
