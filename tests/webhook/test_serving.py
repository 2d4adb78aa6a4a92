"""The webhook as a process: TLS, timeouts, limits, reloaded certificates, and draining without a failed request."""

import json
import signal
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.running import HOST
from tests.waiting import eventually
from tests.webhook.load import RequestLoad, connect_tls, read_answer, request
from tests.webhook.pods import gpu, pod
from tests.webhook.reviews import review
from tests.webhook.running import Authority, RunningWebhook
from tests.webhook.service import Service
from vcuda.webhook_paths import PLAIN, decode_report, digest_of

BODY = json.dumps(review(pod(gpu()))).encode()
SHORT_TIMEOUTS = ("webhook.handshakeTimeoutS=1", "webhook.bodyTimeoutS=1", "webhook.keepAliveS=2.5")

Start = Callable[..., RunningWebhook]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture(params=["true", "false"], ids=["short path", "gunicorn"])
def start(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Start]:
    """Starts webhooks with the short path on or off, and stops them after the test."""
    started: list[RunningWebhook] = []

    def start_webhook(*settings: str, ready: bool = True) -> RunningWebhook:
        webhook = RunningWebhook(authority, None, f"webhook.shortPath={request.param}", *settings)
        started.append(webhook)
        return webhook.start(ready=ready)

    yield start_webhook
    for each in started:
        each.stop(signal.SIGKILL)


def is_closed_within(connection: ssl.SSLSocket, timeout_s: float) -> bool:
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_requests_are_answered_however_they_arrive(start: Start, authority: Authority) -> None:
    """In one piece or many, with an unusual header, or malformed; all on the same connection."""
    webhook = start()
    with connect_tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY))
        status, _, expected = read_answer(connection)
        assert status == 200
        assert json.loads(expected)["response"]["allowed"]
        for size in (7, 50, 1000):
            sent = request(BODY)
            for offset in range(0, len(sent), size):
                connection.sendall(sent[offset : offset + size])
                time.sleep(0.001 if offset < 500 else 0)
            assert read_answer(connection)[2] == expected
        connection.sendall(request(BODY, "/mutate?timeout=10s", "Expect: 100-continue"))
        assert read_body_after_continue(connection) == expected
        connection.sendall(request(b"{", "/validate"))
        assert read_answer(connection)[0] == 400
        connection.sendall(request(BODY))
        assert read_answer(connection)[2] == expected


def read_body_after_continue(connection: ssl.SSLSocket) -> bytes:
    """Read the body of an answer that `100 Continue` may precede."""
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


def test_pipelined_requests_are_answered_in_order(start: Start, authority: Authority) -> None:
    webhook = start()
    with connect_tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY) + request(BODY, "/validate"))
        first, second = read_two_answers(connection)
        assert b"JSONPatch" in first
        assert b"NotRewritten" in second


def read_two_answers(connection: ssl.SSLSocket) -> tuple[bytes, bytes]:
    """Read two answers that may arrive together."""
    data = b""
    while data.count(b"}}") < 1 or data.count(b"HTTP/1.1 200") < 2 or not data.rstrip().endswith(b"}}"):
        received = connection.recv(65536)
        assert received, data
        data += received
    _, first, second = data.split(b"HTTP/1.1 200")
    return first, second


def test_a_stalled_client_delays_no_other_and_is_disconnected(start: Start, authority: Authority) -> None:
    """Stalled in the handshake, before the request, in the head, or in the body."""
    webhook = start(*SHORT_TIMEOUTS)
    in_handshake = [socket.create_connection((HOST, webhook.port), timeout=10) for _ in range(20)]
    for each in in_handshake:
        each.sendall(b"\x16\x03\x01")
    stalled = [connect_tls(webhook.port, authority.client_context()) for _ in range(20)]
    for number, each in enumerate(stalled):
        each.sendall(
            (b"", b"POST /mut", request(BODY)[:200], request(BODY, "/mutate", "Connection: keep-alive")[:-9])[
                number % 4
            ]
        )
    started = time.monotonic()
    with connect_tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(request(BODY))
        assert read_answer(connection)[0] == 200
    assert time.monotonic() - started < 1.0, "a request waited for stalled clients"
    for each in stalled:
        each.settimeout(10)
        received = each.recv(65536)
        assert received == b"" or received.startswith(b"HTTP/1.1 408")
        each.close()
    for each in in_handshake:
        each.settimeout(10)
        assert each.recv(1) == b""
        each.close()


def test_idle_connections_are_closed_after_the_keep_alive_timeout(start: Start, authority: Authority) -> None:
    """Not sooner, whichever path answered the last request."""
    webhook = start(*SHORT_TIMEOUTS)
    with connect_tls(webhook.port, authority.client_context()) as connection:
        for header in ((), ("Expect: 100-continue",)):
            connection.sendall(request(BODY, "/mutate", *header))
            read_body_after_continue(connection)
            assert not is_closed_within(connection, 1.6), "closed before keepAliveS"
        assert is_closed_within(connection, 10)


def test_a_client_that_sends_its_request_too_slowly_is_disconnected(start: Start, authority: Authority) -> None:
    """The timeout is for the complete request, on both paths; single bytes do not extend it."""
    webhook = start(*SHORT_TIMEOUTS)
    for sent in (request(BODY), request(BODY, "/elsewhere")):
        with connect_tls(webhook.port, authority.client_context()) as connection:
            started, answer = time.monotonic(), b"x"
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
            assert time.monotonic() - started < 5


def test_a_body_needs_a_content_length_within_the_limit(start: Start, authority: Authority) -> None:
    webhook = start("webhook.maxBodyMib=1")
    assert webhook.post("/mutate", b"x" * 2**20)[0] == 400
    with connect_tls(webhook.port, authority.client_context()) as connection:
        connection.sendall(
            request(b"")[: -len("\r\n")].replace(b"Content-Length: 0", b"Content-Length: 1048577") + b"\r\n"
        )
        assert read_answer(connection)[0] == 413
        assert is_closed_within(connection, 5)
    with connect_tls(webhook.port, authority.client_context()) as connection:
        chunked = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
        connection.sendall(chunked)
        assert read_answer(connection)[0] == 411


def test_the_pod_of_a_binding_is_read_from_the_cluster(start: Start) -> None:
    webhook = start()

    def bind(name: str) -> Any:
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": "n"}}
        status, body = webhook.post("/validate?timeout=5s", json.dumps(review(binding, subresource="binding")).encode())
        assert status == 200
        return json.loads(body)["response"]["allowed"]

    assert (bind("gpu"), bind("plain"), bind("missing")) == (False, True, False)


def test_probes_and_metrics_are_served_on_the_ops_port(start: Start, authority: Authority) -> None:
    webhook = start()
    assert webhook.ops("/livez") == (200, "ok\n")
    assert webhook.ops("/readyz") == (200, "ok\n")
    assert webhook.ops("/")[0] == 404
    webhook.post("/mutate", BODY)
    webhook.post("/mutate", b"{")
    metrics = webhook.ops("/metrics")[1]
    assert (
        'quotient_admission_decisions_total{decision="patched",kind="Pod",operation="CREATE",route="mutate"} 1.0'
        in metrics
    )
    assert 'quotient_admission_failures_total{cause="bad-request",route="mutate"} 1.0' in metrics
    assert 'quotient_admission_duration_seconds_count{route="mutate"} 1.0' in metrics
    assert "quotient_certificate_not_after_seconds" in metrics
    authority.issue("elsewhere.example.org")
    eventually(
        lambda: "quotient_certificate_refused 1.0" in webhook.ops("/metrics")[1],
        "the rejected certificate to be counted",
    )
    assert webhook.ops("/readyz")[0] == 200


def test_the_webhook_waits_for_its_first_certificate(start: Start, authority: Authority) -> None:
    """The controller that issues it may start later."""
    (authority.folder / "..data").unlink()
    webhook = start(ready=False)
    eventually(lambda: webhook.ops("/readyz")[0] == 503, "the probes")
    assert "no valid certificate" in webhook.ops("/readyz")[1]
    assert webhook.ops("/livez")[0] == 200
    authority.issue()
    eventually(webhook.is_ready, "the certificate to be loaded")
    assert webhook.post("/mutate", BODY)[0] == 200


def test_certificates_are_reloaded_under_load_without_a_failed_request(start: Start, authority: Authority) -> None:
    """New connections get a new valid certificate, and never an invalid one."""
    webhook = start()
    with RequestLoad(webhook.port, authority, BODY) as load:
        for is_invalid in (False, True, False):
            before = served_certificate(webhook, authority)
            if is_invalid:
                authority.put(b"half a cert", b"half a key")
                eventually(lambda: "quotient_certificate_refused 1.0" in webhook.ops("/metrics")[1], "the rejection")
                assert served_certificate(webhook, authority) == before
            else:
                authority.issue()
                eventually(
                    lambda before=before: served_certificate(webhook, authority) != before,  # type: ignore[misc]
                    "the new certificate",
                )
    assert load.failures == []
    assert load.calls > 50


def served_certificate(webhook: RunningWebhook, authority: Authority) -> bytes:
    with connect_tls(webhook.port, authority.client_context()) as connection:
        certificate = connection.getpeercert(binary_form=True)
        assert certificate
        return certificate


def test_draining_fails_no_request(start: Start, authority: Authority) -> None:
    """Two replicas are restarted one after the other under load, behind a Service that follows their readiness."""
    replicas = [start(), start()]
    with Service(*replicas) as service:
        eventually(lambda: len(service.ready) == 2, "both replicas to be ready")
        with RequestLoad(service.port, authority, BODY) as load:
            eventually(lambda: load.calls > 100, "the load to run")
            for replica in replicas:
                assert replica.process is not None
                replica.process.send_signal(signal.SIGTERM)
                eventually(lambda replica=replica: "draining" in replica.ops("/readyz")[1], "draining")  # type: ignore[misc]
                assert replica.process.wait(20) == 0
                replica.start()
                eventually(lambda: len(service.ready) == 2, "the new replica to be ready")
            calls = load.calls
            eventually(lambda: load.calls > calls + 100, "the load to continue")
    assert load.failures == []
    assert load.closed >= 4, "connections were closed without Connection: close"


def test_a_request_that_is_half_sent_when_draining_begins_is_answered(start: Start, authority: Authority) -> None:
    webhook = start("webhook.drainS=1")
    with connect_tls(webhook.port, authority.client_context()) as connection:
        sent = request(BODY)
        connection.sendall(sent[:300])
        assert webhook.process is not None
        webhook.process.send_signal(signal.SIGTERM)
        eventually(lambda: webhook.ops("/readyz")[0] == 503, "draining")
        connection.sendall(sent[300:])
        status, head, _ = read_answer(connection)
        assert status == 200
        assert b"connection: close" in head.lower()
    assert webhook.process.wait(20) == 0


def test_a_webhook_whose_event_loop_hangs_ends_itself(authority: Authority) -> None:
    """It would not react to SIGTERM, and the API server would wait for it; the log shows where it hangs."""
    webhook = RunningWebhook(authority, None)
    webhook._module[0] = "tests.webhook.hanging"
    webhook.start()
    assert webhook.process is not None
    assert webhook.process.wait(30) == 1
    assert "tests/webhook/hanging.py" in webhook.log.read_text()


def test_a_closed_terminal_ends_a_webhook_as_sigterm_does(start: Start) -> None:
    webhook = start("webhook.drainS=0.5")
    assert webhook.process is not None
    webhook.process.send_signal(signal.SIGUSR2)
    webhook.process.send_signal(signal.SIGHUP)
    assert webhook.process.wait(20) == 0


def test_callers_need_a_client_certificate_if_configured(start: Start, authority: Authority, tmp_path: Path) -> None:
    """One signed by clientCa with one of clientNames; a new CA in the file replaces the old one."""
    client_ca = tmp_path / "clients.pem"
    clients = trustme.CA()
    clients.cert_pem.write_to_path(str(client_ca))
    webhook = start(f"webhook.clientCa={client_ca}", 'webhook.clientNames=["kube-apiserver"]')

    def call(ca: trustme.CA | None, name: str = "") -> int:
        context = authority.client_context()
        if ca is not None:
            ca.issue_cert("x.example.org", common_name=name).configure_cert(context)
        try:
            with connect_tls(webhook.port, context) as connection:
                connection.sendall(request(BODY))
                return read_answer(connection)[0]
        except (OSError, ConnectionError):
            return 0

    assert call(clients, "kube-apiserver") == 200
    assert call(clients, "another") == 0
    assert call(trustme.CA(), "kube-apiserver") == 0
    assert call(None) == 0
    new_clients = trustme.CA()
    new_clients.cert_pem.write_to_path(str(client_ca))
    eventually(lambda: call(new_clients, "kube-apiserver") == 200, "the new CA to be trusted")
    assert call(clients, "kube-apiserver") == 0, "the old CA is still trusted"


def test_only_addresses_of_api_servers_are_served_if_configured(start: Start, authority: Authority) -> None:
    """The handshake may succeed: the controller makes one to see which certificate is served."""
    for cidrs, expected in (('["10.0.0.0/28", "::/0"]', 0), ('["10.0.0.0/28", "127.0.0.0/8"]', 200)):
        webhook = start(f"webhook.apiServerCidrs={cidrs}")
        status = 0
        with suppress(OSError), connect_tls(webhook.port, authority.client_context()) as connection:
            connection.sendall(request(BODY))
            status = read_answer(connection)[0]
        assert status == expected
        assert webhook.ops("/readyz")[0] == 200


def test_a_replica_reports_which_paths_it_accepts(start: Start) -> None:
    """On its operations port, by digest; here the plain ones, because nothing is registered."""
    status, body = start().ops("/paths")
    report = decode_report(body.encode())
    assert status == 200
    assert report is not None
    assert (report.accepted, report.failed) == ((digest_of(PLAIN),), ())


def test_tls_before_1_2_and_plain_http_are_rejected(start: Start, authority: Authority) -> None:
    webhook = start()
    context = authority.client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connect_tls(webhook.port, context)
    with socket.create_connection((HOST, webhook.port), timeout=10) as plain:
        plain.sendall(request(BODY))
        assert b"200" not in plain.recv(100)


def test_memory_does_not_grow_with_the_number_of_requests(start: Start, authority: Authority) -> None:
    """And stays below 100 MiB in total."""
    webhook = start()
    with RequestLoad(webhook.port, authority, BODY) as load:
        eventually(lambda: load.calls > 500, "the load to run")
        before = webhook.memory_mib()
        eventually(lambda: load.calls > 3000, "more load")
    assert webhook.memory_mib() - before < 8
    assert webhook.memory_mib() < 100
