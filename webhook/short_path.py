"""The short path's part of HTTP: parsing the head of a plain admission request, and encoding replies.

gunicorn's HTTP parser and Flask cost three times what an admission decision costs. Nearly every request here is the
same few header lines from an API server, a Content-Length and a body; only those are parsed here. Any other request is
passed to gunicorn unchanged, byte for byte, and is answered by the same `Responder`.
"""

import re
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from msgspec import Struct

from vcuda.webhook_paths import MUTATE, VALIDATE, parse_path
from webhook.responding import HttpReply

# Deliberately narrow: no folded lines, no control characters, no space before the colon. A head that two parsers could
# read differently is the way into request smuggling, so it is left to gunicorn. No two parts of a line match the same
# character: otherwise the time to reject a head would double with each of its lines.
HEAD = re.compile(
    rb"POST (?P<path>/[a-z]+(?:/[0-9a-f]+)?)(?:\?(?P<query>[!-~]*))? HTTP/1\.1\r\n"
    rb"(?P<headers>(?:[A-Za-z-]+:[\t -~]*\r\n)*)\r\n"
)
FIELD = re.compile(rb"(?P<name>[A-Za-z-]+):(?P<value>[\t -~]*)\r\n")
CONTENT_LENGTH = re.compile(rb"[0-9]{1,9}")
HEAD_END = b"\r\n\r\n"
# An API server's head has about 300 bytes.
MAX_HEAD_BYTES = 4096
PREFIXES = tuple(f"POST /{route}".encode() for route in (MUTATE, VALIDATE))
# Headers that change where the body ends or what happens to the connection afterwards.
UNSUPPORTED_HEADERS = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"connection", b"te", b"trailer"))


class RequestHead(Struct, frozen=True):
    """The parsed head of a plain request; `length` is its Content-Length."""

    route: str
    secret: str
    query: str
    content_type: str
    length: int


@lru_cache(maxsize=512)  # API servers send the same few heads; only the Content-Length varies
def parse_head(head: bytes) -> RequestHead | None:
    """Parse a head, up to and including the empty line; None if the request has to go to gunicorn."""
    match = HEAD.fullmatch(head)
    path = parse_path(match["path"].decode()) if match else None
    if match is None or path is None:
        return None
    fields: dict[bytes, bytes] = {}
    for field in FIELD.finditer(match["headers"]):
        name = field["name"].lower()
        if name in UNSUPPORTED_HEADERS or name in fields:
            return None
        fields[name] = field["value"].strip()
    length = fields.get(b"content-length", b"")
    if b"host" not in fields or not CONTENT_LENGTH.fullmatch(length):
        return None
    content_type = fields.get(b"content-type", b"").decode("latin-1")
    return RequestHead(*path, (match["query"] or b"").decode("latin-1"), content_type, int(length))


def is_prefix_of_request(data: bytes) -> bool:
    """Whether the first few bytes of a request may still become one for the short path."""
    return any(prefix.startswith(data) for prefix in PREFIXES)


def encode_reply(reply: HttpReply, now: float, *, close: bool) -> bytes:
    return b"%s%d\r\n%s\r\n%s" % (
        encode_reply_start(reply.status, reply.content_type, int(now)),
        len(reply.body),
        b"Connection: close\r\n" if close else b"",
        reply.body,
    )


@lru_cache(maxsize=16)  # the same for all replies of one second
def encode_reply_start(status: int, content_type: str, now_s: int) -> bytes:
    """Encode the head of a reply up to the value of Content-Length, which is its last fixed header."""
    return b"HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\nContent-Length: " % (
        status,
        HTTPStatus(status).phrase.encode(),
        formatdate(now_s, usegmt=True).encode(),
        content_type.encode(),
    )
