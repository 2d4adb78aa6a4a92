"""The short path takes plain requests only, and what is not plain goes the long way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhook.responding import HttpReply
from webhook.short_path import RequestHead, encode_reply, is_begun, read_head

PLAIN = (
    b"POST /mutate?timeout=10s HTTP/1.1\r\nHost: quotient-webhook.quotient-system.svc:443\r\n"
    b"User-Agent: kube-apiserver-admission\r\nContent-Length: 12\r\nAccept: application/json, */*\r\n"
    b"Content-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
)


def test_the_request_of_an_api_server_is_plain() -> None:
    """As Go writes it."""
    assert read_head(PLAIN) == RequestHead("mutate", "timeout=10s", "application/json", 12)
    assert read_head(PLAIN.replace(b"/mutate?timeout=10s", b"/validate")) == RequestHead(
        "validate", "", "application/json", 12
    )
    assert all(is_begun(PLAIN[:length]) for length in range(len("POST /mutate")))
    assert not is_begun(b"POST /x")
    assert not is_begun(b"GET")


NOT_PLAIN = {
    "another path": (b"/mutate?", b"/other?"),
    "a path in another spelling": (b"/mutate?", b"/%6dutate?"),
    "another method": (b"POST", b"PUT"),
    "another version of HTTP": (b"HTTP/1.1", b"HTTP/1.0"),
    "no length": (b"Content-Length: 12\r\n", b""),
    "two lengths": (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Length: 13"),
    "a length that is no number": (b"Content-Length: 12", b"Content-Length: 12, 12"),
    "a signed length": (b"Content-Length: 12", b"Content-Length: +12"),
    "chunks": (b"Accept-Encoding: gzip", b"Transfer-Encoding: chunked"),
    "an expectation": (b"Accept-Encoding: gzip", b"Expect: 100-continue"),
    "an upgrade": (b"Accept-Encoding: gzip", b"Upgrade: h2c"),
    "a connection that is to be closed": (b"Accept-Encoding: gzip", b"Connection: close"),
    "a folded line": (b"Accept-Encoding: gzip", b"X: a\r\n b"),
    "a space before the colon": (b"Content-Length: 12", b"Content-Length : 12"),
    "a bare line feed": (b"Accept-Encoding: gzip\r\n", b"Accept-Encoding: gzip\n"),
    "a control character": (b"gzip", b"g\x00zip"),
    "no host": (b"Host: quotient-webhook.quotient-system.svc:443\r\n", b""),
}


@pytest.mark.parametrize(("this", "that"), NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_whatever_differs_is_not_plain(this: bytes, that: bytes) -> None:
    """Nothing that two readers could read in two ways is read here."""
    assert this in PLAIN
    assert read_head(PLAIN.replace(this, that)) is None


@given(st.integers(0, len(PLAIN) - 1), st.binary(max_size=2), st.integers(0, 2))
def test_a_damaged_head_is_read_as_it_stands_or_not_at_all(place: int, put: bytes, taken: int) -> None:
    """It never names another length than the one field it has."""
    head = PLAIN[:place] + put + PLAIN[place + taken :]
    found = read_head(head)
    if found is not None:
        assert head.lower().count(b"content-length:") == 1
        assert b"content-length: %d" % found.length in head.lower().replace(b":1", b": 1")


@pytest.mark.parametrize("status", [200, 400, 415, 500, 503])
def test_replies_are_framed_by_their_length(status: int) -> None:
    """Whatever they say."""
    reply = HttpReply(status, b"x\r\n\r\ny")
    whole = encode_reply(reply, 0.0, close=False)
    assert whole.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n" in whole
    assert whole.endswith(b"Content-Length: 6\r\n\r\nx\r\n\r\ny")
    assert b"Connection: close\r\n" in encode_reply(reply, 0.0, close=True)
