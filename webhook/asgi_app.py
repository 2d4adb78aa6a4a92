"""The ASGI application that gunicorn serves: it reads a request completely and passes it to Flask.

Flask runs on a few threads. The body is read here, on the event loop and with limits on size and time, so that a slow
client never occupies one of them. Nor does one whose path is not accepted: it gets its 404 here, before its body is
read. All replies but those of the admission routes close the connection (`ShortPathConnection._will_close`).
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from a2wsgi import WSGIMiddleware
from flask import Flask

from vcuda.webhook_paths import secret_in
from webhook.body_budget import BodyBudget
from webhook.callers import Caller, CallerPaths
from webhook.decisions import PATH
from webhook.responding import TEXT, HttpError, HttpReply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# They wait for the API server and the ledger most of the time.
FLASK_THREADS = 8
# An API server may learn of a changed path a moment before this process does.
UNKNOWN_PATH_WAIT_S, UNKNOWN_PATH_POLL_S = 1.0, 0.05
NOT_FOUND = HttpReply(404, b"404 Not Found\n", TEXT)
OVERLOADED = HttpReply(503, b"too many large requests at the same time; retry\n", TEXT)


class ClientDisconnected(Exception):  # noqa: N818 - not an error: nothing is left to be answered
    """The client closed the connection before its request was complete."""


class AsgiApp:
    def __init__(self, app: Flask, *, max_body: int, body_timeout_s: float, paths: CallerPaths | None = None) -> None:
        self._flask = WSGIMiddleware(app.wsgi_app, workers=FLASK_THREADS)  # type: ignore[arg-type]
        self.max_body, self._body_timeout_s = max_body, body_timeout_s
        self._paths = paths or CallerPaths()
        self.budget = BodyBudget(max_body)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        secret = secret_in(scope["path"])
        is_refused = scope["path"] != PATH if secret is None else await self._is_refused(secret)
        if is_refused:
            await send_reply(send, NOT_FOUND, close=True)
            return
        try:
            length = self._body_length(scope)
        except HttpError as error:
            await send_reply(send, HttpReply(error.status, f"{error}\n".encode(), TEXT), close=True)
            return
        if not self.budget.reserve(length):
            await send_reply(send, OVERLOADED, close=True)
            return
        try:
            await self._answer(scope, receive, send)
        finally:
            self.budget.release(length)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await read_body(receive)
        except TimeoutError:
            message = f"request body not received within {self._body_timeout_s:g} s\n"
            await send_reply(send, HttpReply(408, message.encode(), TEXT), close=True)
            return
        except ClientDisconnected:
            return
        await self._flask(scope, replay(body), send)  # type: ignore[arg-type]

    async def _is_refused(self, secret: str) -> bool:
        """Whether a path is not accepted, and does not become so within a moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + UNKNOWN_PATH_WAIT_S
        while self._paths.identify(secret) is Caller.REFUSED:
            if loop.time() >= deadline:
                return True
            await asyncio.sleep(UNKNOWN_PATH_POLL_S)
        return False

    def _body_length(self, scope: Message) -> int:
        """Return the length of a request's body; raises HttpError if it is not accepted."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        # A chunked body has no known size; API servers always send a Content-Length.
        if length is None and b"transfer-encoding" in headers:
            raise HttpError(411, "Transfer-Encoding is not supported: send a Content-Length")
        if length is not None and int(length) > self.max_body:
            raise HttpError(413, f"Content-Length: {int(length)} bytes; the maximum is {self.max_body} bytes")
        if length is not None and int(length) > 0 and scope["method"] != "POST":
            raise HttpError(400, f"a {scope['method']} has no body here")
        return int(length or 0)


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        parts.append(message["body"])
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def replay(body: bytes) -> Receive:
    """Return an ASGI receive function for a body that is already read."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def send_reply(send: Send, reply: HttpReply, *, close: bool = False) -> None:
    """Send a reply. After a body that was not read completely, `close` is required: its rest is no new request."""
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
