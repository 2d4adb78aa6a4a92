"""The webhook as a process: TLS, timeouts, limits, certificates that change, and an end that nobody notices."""

import json
import signal
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.running import HOST
from tests.waiting import eventually
from tests.webhook.load import Load, answer_on, request, tls
from tests.webhook.pods import gpu, pod
from tests.webhook.reviews import review
from tests.webhook.running import Authority, RunningWebhook
from tests.webhook.service import Service

BODY = json.dumps(review(pod(gpu()))).encode()
QUICK = ("webhook.handshakeTimeoutS=1", "webhook.bodyTimeoutS=1", "webhook.keepAliveS=2.5")

Start = Callable[..., RunningWebhook]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture(params=["true", "false"], ids=["short", "long"])
def start(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Start]:
    """Starts webhooks, the short path on or off, and ends them."""
    started: list[RunningWebhook] = []

    def begin(*settings: str, ready: bool = True) -> RunningWebhook:
        made = RunningWebhook(authority, None, f"webhook.shortPath={request.param}", *settings)
        started.append(made)
        return made.start(ready=ready)

    yield begin
    for each in started:
        each.stop(signal.SIGKILL)


def closed_within(connection: ssl.SSLSocket, seconds: float) -> bool:
    """Tell whether the server closes a connection by itself."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_requests_are_answered_however_they_arrive(start: Start, authority: Authority) -> None:
    """Whole, in pieces, one right behind another, or unusually written; always over the same connection."""
    webhook = start()
    with tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY))
        status, _, whole = answer_on(connection)
        assert status == 200
        assert json.loads(whole)["response"]["allowed"]
        for piece in (7, 50, 1000):
            sent = request(BODY)
            for at in range(0, len(sent), piece):
                connection.sendall(sent[at : at + piece])
                time.sleep(0.001 if at < 500 else 0)
            assert answer_on(connection)[2] == whole
        connection.sendall(request(BODY, "/mutate?timeout=10s", "Expect: 100-continue"))
        assert answer_after_continue(connection) == whole
        connection.sendall(request(b"{", "/validate"))
        assert answer_on(connection)[0] == 400
        connection.sendall(request(b"", "/elsewhere"))
        assert answer_on(connection)[0] == 404
        connection.sendall(request(BODY))
        assert answer_on(connection)[2] == whole


def answer_after_continue(connection: ssl.SSLSocket) -> bytes:
    """Read an answer that an interim one may precede."""
    data = connection.recv(65536)
    if data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2] or connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return body


def test_a_request_right_behind_another_is_answered_too(start: Start, authority: Authority) -> None:
    """In order."""
    webhook = start()
    with tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY) + request(BODY, "/validate"))
        first, second = both_answers(connection)
        assert b"JSONPatch" in first
        assert b"NotRewritten" in second


def both_answers(connection: ssl.SSLSocket) -> tuple[bytes, bytes]:
    """Read two answers that may come together."""
    data = b""
    while data.count(b"}}") < 1 or data.count(b"HTTP/1.1 200") < 2 or not data.rstrip().endswith(b"}}"):
        got = connection.recv(65536)
        assert got, data
        data += got
    _, first, second = data.split(b"HTTP/1.1 200")
    return first, second


def test_a_stalled_client_holds_up_nobody_and_is_cut_off(start: Start, authority: Authority) -> None:
    """In the handshake, in the head, in the body, or saying nothing at all."""
    webhook = start(*QUICK)
    import socket  # noqa: PLC0415

    raw = [socket.create_connection((HOST, webhook.port), timeout=10) for _ in range(20)]
    for each in raw:
        each.sendall(b"\x16\x03\x01")
    stalled = [tls(webhook.port, authority.client_context()) for _ in range(20)]
    for number, each in enumerate(stalled):
        each.sendall(
            (b"", b"POST /mut", request(BODY)[:200], b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n")[
                number % 4
            ]
        )
    began = time.monotonic()
    with tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY))
        assert answer_on(connection)[0] == 200
    assert time.monotonic() - began < 1.0, "others waited for stalled clients"
    for each in stalled:
        each.settimeout(10)
        ended = each.recv(65536)
        assert ended == b"" or ended.startswith(b"HTTP/1.1 408")
        each.close()
    for each in raw:
        each.settimeout(10)
        assert each.recv(1) == b""
        each.close()


def test_kept_connections_are_closed_when_nobody_uses_them(start: Start, authority: Authority) -> None:
    """But not while somebody does."""
    webhook = start(*QUICK)
    with tls(webhook.port, authority.client_context()) as connection:
        for path in ("/mutate", "/elsewhere"):
            connection.sendall(request(BODY, path))
            assert answer_on(connection)[0] in (200, 404)
            assert not closed_within(connection, 1.6), "closed sooner than it is kept"
        assert closed_within(connection, 10)


def test_a_client_that_drips_its_request_is_cut_off(start: Start, authority: Authority) -> None:
    """However steadily: a request has to be whole in time, whichever way it goes."""
    webhook = start(*QUICK)
    for sent in (request(BODY), request(BODY, "/elsewhere")):
        with tls(webhook.port, authority.client_context()) as connection:
            began, answer = time.monotonic(), b"x"
            connection.settimeout(0.05)
            for byte in sent:
                try:
                    connection.sendall(bytes([byte]))
                    answer = connection.recv(65536)
                    break
                except TimeoutError:
                    continue
                except OSError:
                    answer = b""
                    break
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408"), answer
            assert time.monotonic() - began < 5


def test_bodies_are_bounded(start: Start, authority: Authority) -> None:
    """In size; and how long they are has to be said."""
    webhook = start("webhook.maxBodyMib=1")
    assert webhook.post("/mutate", b"x" * 2**20)[0] == 400
    with tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(
            request(b"")[: -len("\r\n")].replace(b"Content-Length: 0", b"Content-Length: 1048577") + b"\r\n"
        )
        assert answer_on(connection)[0] == 413
        assert closed_within(connection, 5)
    with tls(webhook.port, authority.client_context()) as connection:
        chunked = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
        connection.sendall(chunked)
        assert answer_on(connection)[0] == 411


def test_a_binding_is_looked_up_in_the_cluster(start: Start) -> None:
    """Off the event loop, whichever way it came."""
    webhook = start()

    def bind(name: str) -> Any:
        made = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": "n"}}
        status, body = webhook.post("/validate?timeout=5s", json.dumps(review(made, subresource="binding")).encode())
        assert status == 200
        return json.loads(body)["response"]["allowed"]

    assert (bind("gpu"), bind("plain"), bind("gone")) == (False, True, False)


def test_probes_and_metrics_have_a_port_of_their_own(start: Start, authority: Authority) -> None:
    """And say what is amiss."""
    webhook = start()
    assert webhook.ops("/livez") == (200, "ok\n")
    assert webhook.ops("/readyz") == (200, "ok\n")
    assert webhook.ops("/")[0] == 404
    webhook.post("/mutate", BODY)
    webhook.post("/mutate", b"{")
    shown = webhook.ops("/metrics")[1]
    assert (
        'quotient_admission_decisions_total{decision="patched",kind="Pod",operation="CREATE",route="mutate"} 1.0'
        in shown
    )
    assert 'quotient_admission_failures_total{cause="bad-request",route="mutate"} 1.0' in shown
    assert 'quotient_admission_duration_seconds_count{route="mutate"} 1.0' in shown
    assert "quotient_certificate_not_after_seconds" in shown
    authority.issue("elsewhere.example.org")
    eventually(
        lambda: "quotient_certificate_refused 1.0" in webhook.ops("/metrics")[1], "the bad certificate to be counted"
    )
    assert webhook.ops("/readyz")[0] == 200


def test_it_waits_for_its_first_certificate(start: Start, authority: Authority) -> None:
    """Whoever makes it may start later."""
    (authority.folder / "..data").unlink()
    webhook = start(ready=False)
    eventually(lambda: webhook.ops("/readyz")[0] == 503, "the probes")
    assert "no valid certificate" in webhook.ops("/readyz")[1]
    assert webhook.ops("/livez")[0] == 200
    authority.issue()
    eventually(webhook.is_ready, "the certificate to be found")
    assert webhook.post("/mutate", BODY)[0] == 200


def test_certificates_change_under_load_without_a_failed_call(start: Start, authority: Authority) -> None:
    """Good ones are served to new connections; bad ones are not."""
    webhook = start()
    with Load(webhook.port, authority, BODY) as load:
        for spoiled in (False, True, False):
            before = served(webhook, authority)
            if spoiled:
                authority.put(b"half a cert", b"half a key")
                eventually(lambda: "quotient_certificate_refused 1.0" in webhook.ops("/metrics")[1], "the refusal")
                assert served(webhook, authority) == before
            else:
                authority.issue()
                eventually(lambda before=before: served(webhook, authority) != before, "the new certificate")  # type: ignore[misc]
    assert load.failures == []
    assert load.calls > 50


def served(webhook: RunningWebhook, authority: Authority) -> bytes:
    """Give the certificate that a new connection gets."""
    with tls(webhook.port, authority.client_context()) as connection:
        found = connection.getpeercert(binary_form=True)
        assert found
        return found


def test_a_drain_fails_no_call(start: Start, authority: Authority) -> None:
    """Replaced one after the other under load, over kept connections, new ones going to whoever is ready."""
    replicas = [start(), start()]
    with Service(*replicas) as service:
        eventually(lambda: len(service.ready) == 2, "both to be ready")
        with Load(service.port, authority, BODY) as load:
            eventually(lambda: load.calls > 100, "the load to run")
            for replica in replicas:
                assert replica.process is not None
                replica.process.send_signal(signal.SIGTERM)
                eventually(lambda replica=replica: "draining" in replica.ops("/readyz")[1], "the drain")  # type: ignore[misc]
                assert replica.process.wait(20) == 0
                replica.start()
                eventually(lambda: len(service.ready) == 2, "the new one to be ready")
            calls = load.calls
            eventually(lambda: load.calls > calls + 100, "the load to go on")
    assert load.failures == []
    assert load.closed >= 4, "connections are closed by an answer that says so"


def test_a_request_that_is_being_sent_when_the_end_comes_is_answered(start: Start, authority: Authority) -> None:
    """As long as it arrives in time."""
    webhook = start("webhook.drainS=1")
    with tls(webhook.port, authority.client_context()) as connection:
        sent = request(BODY)
        connection.sendall(sent[:300])
        assert webhook.process is not None
        webhook.process.send_signal(signal.SIGTERM)
        eventually(lambda: webhook.ops("/readyz")[0] == 503, "the drain")
        connection.sendall(sent[300:])
        status, head, _ = answer_on(connection)
        assert status == 200
        assert b"connection: close" in head.lower()
    assert webhook.process.wait(20) == 0


def test_callers_have_to_show_who_they_are_if_configured(start: Start, authority: Authority, tmp_path: Path) -> None:
    """By a certificate, and by the name in it."""
    trusted = tmp_path / "clients.pem"
    clients = trustme.CA()
    clients.cert_pem.write_to_path(str(trusted))
    webhook = start(f"webhook.clientCa={trusted}", 'webhook.clientNames=["kube-apiserver"]')

    def call(ca: trustme.CA | None, name: str = "") -> int:
        context = authority.client_context()
        if ca is not None:
            ca.issue_cert("x.example.org", common_name=name).configure_cert(context)
        try:
            with tls(webhook.port, context) as connection:
                connection.sendall(request(BODY))
                return answer_on(connection)[0]
        except (OSError, ConnectionError):
            return 0

    assert call(clients, "kube-apiserver") == 200
    assert call(clients, "somebody") == 0
    assert call(trustme.CA(), "kube-apiserver") == 0
    assert call(None) == 0
    others = trustme.CA()
    others.cert_pem.write_to_path(str(trusted))
    eventually(lambda: call(others, "kube-apiserver") == 200, "the new CA to be trusted")
    assert call(clients, "kube-apiserver") == 0, "and the old one no more"


def test_old_tls_and_plain_text_are_not_spoken(start: Start, authority: Authority) -> None:
    """1.2 at the least."""
    webhook = start()
    context = authority.client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        tls(webhook.port, context)
    import socket  # noqa: PLC0415

    with socket.create_connection((HOST, webhook.port), timeout=10) as plain:
        plain.sendall(request(BODY))
        assert b"200" not in plain.recv(100)


def test_memory_stays_where_it_is(start: Start, authority: Authority) -> None:
    """After thousands of calls, and within a tenth of a gigabyte in all."""
    webhook = start()
    with Load(webhook.port, authority, BODY) as load:
        eventually(lambda: load.calls > 500, "the load to run")
        before = webhook.memory_mib()
        eventually(lambda: load.calls > 3000, "more load")
    assert webhook.memory_mib() - before < 8
    assert webhook.memory_mib() < 100
