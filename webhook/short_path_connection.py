"""A connection to the webhook: plain admission requests are answered here, all others by gunicorn.

`ShortPathConnection` is gunicorn's asyncio protocol with a check in front of it. While requests are plain, their bytes
never reach gunicorn's HTTP parser; the first request that is not plain is handed over to gunicorn, and the connection
with it, because from then on only gunicorn's parser knows where the next request begins.
"""

import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.glogging import Logger

from vcuda.webhook_paths import secret_in
from webhook.asgi_app import OVERLOADED
from webhook.body_budget import SMALL_BYTES
from webhook.callers import Caller, is_in_networks
from webhook.responding import Deferred, HttpReply
from webhook.service import Service
from webhook.short_path import (
    HEAD_END,
    MAX_HEAD_BYTES,
    PREFIXES,
    RequestHead,
    encode_reply,
    is_prefix_of_request,
    parse_head,
)

# An API server opens a few dozen; more than this is a client that leaks connections, or an attack on memory.
MAX_CONNECTIONS = 1000


class ShortPathConnection(ASGIProtocol):
    """One client connection, with timeouts from the first byte on.

    The worker gives it `service`, `connections`, `pacer`, `loop` and `is_terminating`. All methods run on the event
    loop, except `_submit_reply`. Overrides of gunicorn's private methods are listed in
    `gunicorn_server.GUNICORN_INTERNALS`.
    """

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - gunicorn's protocol has no types
        self._service: Service = self.worker.service
        # bytes as long as a request arrives in one piece, which is the usual case: no copy is made then.
        self._buffer: bytes | bytearray = b""
        self._request_length = 0  # of the request in the buffer, head and body; 0 while unknown
        self._is_on_gunicorn_path = not self._service.settings.short_path
        self._returns_to_short_path = False
        self._is_receiving = self._is_reply_pending = self._is_lost = False
        # Of the request that is being received or answered, if it came by an accepted path.
        self._secret: str | None = None
        # The length of its body for which memory is reserved.
        self._reserved = 0
        # Whether the last request came from an API server.
        self.is_known = False
        # gunicorn asks twice whether a reply closes the connection; see _will_close.
        self._close_decided_for, self._closes_after_reply = None, False
        # The client has this long for its next step: to send a whole request, or to begin the next one.
        self._timeout_started, self._timeout_s = self.worker.loop.time(), self._service.settings.body_timeout_s
        self.worker.connections.add(self)
        self._service.metrics.connections += 1
        super().connection_made(transport)
        if len(self.worker.connections) > MAX_CONNECTIONS and not self._abort_idle_connection():
            # It may be an API server's, which then tells a user the path of its call.
            self._service.paths.record_failure()
            transport.abort()
            return
        cidrs = self._service.settings.api_server_cidrs
        if cidrs and not is_in_networks(address := transport.get_extra_info("peername")[0], cidrs):
            log_rejected_address(self.worker.log, address)
            transport.abort()
            return
        names = self._service.settings.client_names
        if names and (caller := common_name(transport.get_extra_info("peercert"))) not in names:
            self.worker.log.warning("client certificate rejected: common name %r is not in webhook.clientNames", caller)
            transport.abort()

    def _abort_idle_connection(self) -> bool:
        """Abort the connection that waits longest for a request of an unknown client; False if there is none."""
        others = self.worker.connections - {self}
        idle = [each for each in others if each.is_idle and not each.is_known and not each.transport.is_closing()]
        if idle:
            min(idle, key=lambda each: each.waiting_since).transport.abort()
        return bool(idle)

    def data_received(self, data: bytes) -> None:
        if not self._is_receiving:
            self._is_receiving = True
            self._timeout_started, self._timeout_s = self.worker.loop.time(), self._service.settings.body_timeout_s
        if self._is_on_gunicorn_path:
            # Data that arrives before the reply is pipelined and may be only the first part of a request. Its rest
            # has to go to the same parser.
            self._returns_to_short_path = False
            super().data_received(data)
            return
        # A client may pipeline its next request while the reply is pending, if that is small. API servers do not.
        if self._is_reply_pending and len(self._buffer) + len(data) > MAX_HEAD_BYTES + SMALL_BYTES:
            self._close_transport()
            return
        if not self._buffer:
            self._buffer = data
        else:
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data
        if not self._is_reply_pending:
            self._process_buffer()

    def _process_buffer(self) -> None:
        if len(self._buffer) >= self._request_length and not self._answer_if_complete():
            self._hand_over_to_gunicorn(return_after_reply=False)

    def _answer_if_complete(self) -> bool:
        """Answer the request in the buffer, or wait for the rest of it; False if it is not for the short path."""
        buffer = self._buffer
        if (end := buffer.find(HEAD_END) + len(HEAD_END)) < len(HEAD_END):
            return len(buffer) <= MAX_HEAD_BYTES and (
                buffer.startswith(PREFIXES) or is_prefix_of_request(bytes(buffer))
            )
        head = parse_head(bytes(buffer[:end]))
        # A second request behind the first is left to gunicorn, which answers both in order.
        if head is None or head.length > self._service.asgi_app.max_body or len(buffer) > end + head.length:
            return False
        is_complete = len(buffer) == end + head.length
        caller = self._service.paths.identify(head.secret)
        if caller is Caller.REFUSED:
            # It may be accepted in a moment, for which the event loop must not wait here.
            self._hand_over_to_gunicorn(return_after_reply=is_complete)
            return True
        if not self._request_length and not self._reserve(head.length):
            self._send_reply(OVERLOADED, close=True)
            return True
        self._secret, self.is_known = head.secret, caller is Caller.KNOWN
        if is_complete:
            self._answer(head, bytes(buffer[end:]), caller)
        else:
            self._request_length = end + head.length
        return True

    def _answer(self, head: RequestHead, body: bytes, caller: Caller) -> None:
        """Answer the request in the buffer, which holds nothing else."""
        reply = self._service.responder.reply_soon(
            head.route, head.content_type, head.query, body, self._submit_reply, is_known=caller is Caller.KNOWN
        )
        if reply is Deferred.BLOCKING:
            # The API server has to be asked, on one of Flask's threads. The buffer holds exactly one request, so
            # gunicorn's parser is empty after the reply and the connection may return to the short path.
            self._hand_over_to_gunicorn(return_after_reply=True)
            return
        self._buffer, self._request_length = b"", 0
        if isinstance(reply, Deferred):
            self._is_reply_pending = True
            self.worker.pacer.start_request()
        else:
            self._send_reply(reply)

    def _submit_reply(self, reply: HttpReply) -> None:
        """Pass a deferred reply to the event loop; called on a thread of the ledger committer."""
        with suppress(RuntimeError):  # the loop is closed, and with it the connection
            self.worker.loop.call_soon_threadsafe(self.worker.pacer.submit, self, reply)

    def send_deferred_reply(self, reply: HttpReply) -> None:
        self._is_reply_pending = False
        if self._is_lost:
            return
        self._send_reply(reply)
        if self._buffer:  # pipelined while the reply was pending
            self._process_buffer()

    def _reserve(self, length: int) -> bool:
        """Reserve memory for a body until it is answered."""
        if not self._service.asgi_app.budget.reserve(length):
            return False
        self._reserved = length
        return True

    def _release(self) -> None:
        self._service.asgi_app.budget.release(self._reserved)
        self._reserved = 0

    def _send_reply(self, reply: HttpReply, *, close: bool = False) -> None:
        self._secret = None
        self._release()
        close = close or self.worker.is_terminating
        self.transport.write(encode_reply(reply, time.time(), close=close))
        if close:
            self._close_transport()
        self._await_next_request()

    def _hand_over_to_gunicorn(self, *, return_after_reply: bool) -> None:
        """Pass the buffer and all further data to gunicorn, for one request or for the rest of the connection."""
        data, self._buffer, self._request_length = bytes(self._buffer), b"", 0
        self._secret = None
        self._release()
        self._is_on_gunicorn_path, self._returns_to_short_path = True, return_after_reply
        super().data_received(data)

    def _arm_keepalive_timer(self) -> None:
        """Wait for the next request; gunicorn calls this after each of its replies.

        Does not set gunicorn's own timer, because the worker checks the timeouts of all connections.
        """
        self._await_next_request()
        if self._returns_to_short_path:
            self._is_on_gunicorn_path = self._returns_to_short_path = False

    def _await_next_request(self) -> None:
        self._is_receiving = False
        self._timeout_started, self._timeout_s = self.worker.loop.time(), self._service.settings.keep_alive_s

    def close_if_timed_out(self, now: float) -> None:
        if self.is_idle and now > self._timeout_started + self._timeout_s:
            self._close_transport()

    @property
    def waiting_since(self) -> float:
        """Since when the client owes its next step."""
        return float(self._timeout_started)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered; one may be partly received."""
        return self._current_request is None and not self._is_reply_pending

    def _will_close(self, request: Any, response_requires_close: bool) -> bool:  # noqa: ANN401, FBT001 - gunicorn's
        """Whether gunicorn closes the connection after its reply to `request`.

        gunicorn calls this before it writes the head (Connection: close) and may call it again after the body. Both
        calls must return the same, or a connection is closed that the reply promised to keep; termination may begin in
        between.
        """
        if self._close_decided_for is not request:
            self._close_decided_for = request
            self._closes_after_reply = not self._keeps_alive(request.path) or self.worker.is_terminating
        return self._closes_after_reply or bool(super()._will_close(request, response_requires_close))

    def _keeps_alive(self, path: str) -> bool:
        """Whether a client that came by this path may send more requests: any client can keep a connection open."""
        secret = secret_in(path)
        caller = Caller.REFUSED if secret is None else self._service.paths.identify(secret)
        self.is_known = caller is Caller.KNOWN
        return caller is not Caller.REFUSED

    def pause_writing(self) -> None:
        super().pause_writing()
        # Backpressure: a client that does not read its replies could fill the memory by sending more requests.
        self._pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.connections.discard(self)
        self._is_lost = True
        self._release()
        request = self._current_request
        secret = self._secret if request is None else secret_in(request.path)
        if secret is not None:
            # Closed before the answer, most likely at the API server's timeout.
            self._service.paths.record_failure(secret)
        super().connection_lost(exc)


@lru_cache(maxsize=256)  # once for each: the controller connects every minute, to see which certificate is served
def log_rejected_address(log: Logger, address: str) -> None:
    log.warning("connection rejected: %s is not in webhook.apiServerCidrs", address)


def common_name(certificate: dict[str, Any] | None) -> str:
    """Return the common name in a client certificate as `ssl` decodes it; "" if it has none."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""
