"""The short path answers plain requests only; every other request goes to gunicorn."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhook.responding import HttpReply
from webhook.short_path import RequestHead, encode_reply, is_prefix_of_request, parse_head

# As Go's HTTP client in an API server sends it.
PLAIN = (
    b"POST /mutate?timeout=10s HTTP/1.1\r\nHost: quotient-webhook.quotient-system.svc:443\r\n"
    b"User-Agent: kube-apiserver-admission\r\nContent-Length: 12\r\nAccept: application/json, */*\r\n"
    b"Content-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
)


def test_the_request_of_an_api_server_is_plain() -> None:
    secret = "a1" * 16
    assert parse_head(PLAIN) == RequestHead("mutate", "", "timeout=10s", "application/json", 12)
    assert parse_head(PLAIN.replace(b"/mutate?timeout=10s", b"/validate/" + secret.encode())) == RequestHead(
        "validate", secret, "", "application/json", 12
    )
    assert all(is_prefix_of_request(PLAIN[:length]) for length in range(len("POST /mutate")))
    assert not is_prefix_of_request(b"POST /x")
    assert not is_prefix_of_request(b"GET")


NOT_PLAIN = {
    "another path": (b"/mutate?", b"/other?"),
    "a path with something else than a secret": (b"/mutate?", b"/mutate/abc?"),
    "a percent-encoded path": (b"/mutate?", b"/%6dutate?"),
    "another method": (b"POST", b"PUT"),
    "another version of HTTP": (b"HTTP/1.1", b"HTTP/1.0"),
    "no Content-Length": (b"Content-Length: 12\r\n", b""),
    "two Content-Lengths": (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Length: 13"),
    "a Content-Length that is not a number": (b"Content-Length: 12", b"Content-Length: 12, 12"),
    "a signed Content-Length": (b"Content-Length: 12", b"Content-Length: +12"),
    "a chunked body": (b"Accept-Encoding: gzip", b"Transfer-Encoding: chunked"),
    "an expectation": (b"Accept-Encoding: gzip", b"Expect: 100-continue"),
    "an upgrade": (b"Accept-Encoding: gzip", b"Upgrade: h2c"),
    "a connection to be closed": (b"Accept-Encoding: gzip", b"Connection: close"),
    "a folded line": (b"Accept-Encoding: gzip", b"X: a\r\n b"),
    "a space before the colon": (b"Content-Length: 12", b"Content-Length : 12"),
    "a bare line feed": (b"Accept-Encoding: gzip\r\n", b"Accept-Encoding: gzip\n"),
    "a control character": (b"gzip", b"g\x00zip"),
    "no Host": (b"Host: quotient-webhook.quotient-system.svc:443\r\n", b""),
}


@pytest.mark.parametrize(("original", "changed"), NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_any_other_request_is_left_to_gunicorn(original: bytes, changed: bytes) -> None:
    assert original in PLAIN
    assert parse_head(PLAIN.replace(original, changed)) is None


@given(st.integers(0, len(PLAIN) - 1), st.binary(max_size=2), st.integers(0, 2))
def test_a_damaged_head_is_parsed_as_it_is_or_not_at_all(position: int, inserted: bytes, removed: int) -> None:
    """Never with another length than that of its only Content-Length header."""
    damaged = PLAIN[:position] + inserted + PLAIN[position + removed :]
    head = parse_head(damaged)
    if head is not None:
        lengths = re.findall(rb"content-length:[ \t]*([0-9]+)", damaged.lower())
        assert [int(length) for length in lengths] == [head.length]


@pytest.mark.parametrize("status", [200, 400, 415, 500, 503])
def test_replies_are_delimited_by_their_content_length(status: int) -> None:
    reply = HttpReply(status, b"x\r\n\r\ny")
    encoded = encode_reply(reply, 0.0, close=False)
    assert encoded.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n" in encoded
    assert encoded.endswith(b"Content-Length: 6\r\n\r\nx\r\n\r\ny")
    assert b"Connection: close\r\n" in encode_reply(reply, 0.0, close=True)
