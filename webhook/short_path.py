"""The short path: a whole admission request, answered where it arrives.

gunicorn's HTTP and Flask's are general, and cost three times what a decision costs. Nearly every request here is the
same few lines from an API server, with a Content-Length and a body. Those are taken apart here; whatever differs in any
way goes the long way, byte for byte, and gets the same answer from the same functions.
"""

import re
from email.utils import formatdate
from functools import lru_cache

from msgspec import Struct

from webhook.responding import ROUTES, HttpReply

# A request line and plain header lines: no folding, no control characters, nothing that could be read in two ways.
HEAD = re.compile(
    rb"POST (?P<path>/[a-z]+)(?:\?(?P<query>[!-~]*))? HTTP/1\.1\r\n(?P<headers>(?:[A-Za-z-]+: ?[\t -~]*\r\n)*)\r\n"
)
FIELD = re.compile(rb"(?P<name>[A-Za-z-]+): ?(?P<value>[\t -~]*)\r\n")
LENGTH = re.compile(rb"[0-9]{1,9}")
END = b"\r\n\r\n"
MAX_HEAD = 4096
PREFIXES = tuple(f"POST {path}".encode() for path in ROUTES)
# With any of these a request is not the plain one: how long it is, or what follows it, is said elsewhere.
SPECIAL = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"connection", b"te", b"trailer"))
REASONS = {200: b"OK", 400: b"Bad Request", 415: b"Unsupported Media Type", 500: b"Internal Server Error"}


class RequestHead(Struct, frozen=True):
    """What the head of a plain request says."""

    route: str
    query: str
    content_type: str
    length: int


@lru_cache(maxsize=512)  # API servers send the same few heads, apart from the length
def read_head(head: bytes) -> RequestHead | None:
    """Take a head apart; None if it is not a plain one."""
    found = HEAD.fullmatch(head)
    route = ROUTES.get(found["path"].decode()) if found else None
    if found is None or route is None:
        return None
    fields: dict[bytes, bytes] = {}
    for field in FIELD.finditer(found["headers"]):
        name = field["name"].lower()
        if name in SPECIAL or name in fields:
            return None
        fields[name] = field["value"].strip()
    length = fields.get(b"content-length", b"")
    if b"host" not in fields or not LENGTH.fullmatch(length):
        return None
    content_type = fields.get(b"content-type", b"").decode("latin-1")
    return RequestHead(route, (found["query"] or b"").decode("latin-1"), content_type, int(length))


def is_begun(data: bytes) -> bool:
    """Tell whether a few first bytes may become a request for the short way."""
    return any(each.startswith(data) for each in PREFIXES)


def encode_reply(reply: HttpReply, now: float, *, close: bool) -> bytes:
    """Write a reply as it goes over the wire."""
    return b"%s%d\r\n%s\r\n%s" % (
        opening(reply.status, reply.content_type, int(now)),
        len(reply.body),
        b"Connection: close\r\n" if close else b"",
        reply.body,
    )


@lru_cache(maxsize=16)
def opening(status: int, content_type: str, now_s: int) -> bytes:
    """Write the head of a reply up to its length; the same for all replies of a second."""
    reason = REASONS.get(status, b"Service Unavailable")
    date = formatdate(now_s, usegmt=True)
    return b"HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\nContent-Length: " % (
        status,
        reason,
        date.encode(),
        content_type.encode(),
    )
