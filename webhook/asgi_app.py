"""The ASGI application that gunicorn serves: it takes a request in whole, and gives it to Flask.

Reading is bounded in size and time before any thread waits for it, so that a stalled client holds up only itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from a2wsgi import WSGIMiddleware
from flask import Flask

from webhook.responding import TEXT, HttpError, HttpReply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FLASK_THREADS = 8


class ClientGone(Exception):  # noqa: N818
    """The caller left before its request was whole."""


class AsgiApp:
    """Serves one application."""

    def __init__(self, app: Flask, *, max_body: int, body_timeout_s: float) -> None:
        self._flask = WSGIMiddleware(app.wsgi_app, workers=FLASK_THREADS)  # type: ignore[arg-type]
        self.max_body, self._body_timeout_s = max_body, body_timeout_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await self._read(headers, receive)
        except TimeoutError:
            await write(send, HttpReply(408, b"the body did not arrive in time\n", TEXT), close=True)
            return
        except HttpError as wrong:
            await write(send, HttpReply(wrong.status, f"{wrong}\n".encode(), TEXT), close=True)
            return
        except ClientGone:
            return
        await self._flask(scope, replay(body), send)  # type: ignore[arg-type]

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the body, no more than is allowed."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" in headers:
            raise HttpError(411, "send the review with a Content-Length")
        if length is not None and int(length) > self.max_body:
            raise HttpError(413, f"a review of {int(length)} bytes; at most {self.max_body} are read")
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            parts.append(message["body"])
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)


def replay(body: bytes) -> Receive:
    """Give a body that has been read to one who wants to read it."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def write(send: Send, reply: HttpReply, *, close: bool = False) -> None:
    """Send a reply; after a body that was not read to its end the connection cannot be used again."""
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
