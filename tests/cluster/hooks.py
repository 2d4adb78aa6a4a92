"""Webhooks on a real API server: each is served over HTTPS and registered with a webhook configuration."""

import json
import ssl
import tempfile
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import trustme

from cluster.in_memory_admission import InMemoryWebhook, Review
from tests.cluster.real import RealCluster
from tests.waiting import eventually

CONFIGURATIONS = {True: "MutatingWebhookConfiguration", False: "ValidatingWebhookConfiguration"}


class RealHooks:
    """Serves webhooks within a context, and unregisters them at its end."""

    def __init__(self, real: RealCluster) -> None:
        self._real = real
        self._servers: list[ThreadingHTTPServer] = []
        self._registered: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for kind, name in self._registered:
            self._real.kubectl("delete", kind, name)
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, hook: InMemoryWebhook) -> None:
        """Serve a webhook, register it, and wait until the API server calls it."""
        authority = trustme.CA()
        server = serve(hook, authority)
        self._servers.append(server)
        address = self._real.expose(server.server_address[1])
        kind = CONFIGURATIONS[hook.mutating]
        self._real.kubectl("apply", "-f-", stdin=json.dumps(configuration(hook, address, authority)))
        self._registered.append((kind, hook.name))
        self._await_call(hook, server)

    def _await_call(self, hook: InMemoryWebhook, server: ThreadingHTTPServer) -> None:
        """Create pods until the webhook is called: a configuration takes effect with some delay."""
        probe = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "probe-", "namespace": "default"},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        }

        def called() -> bool:
            self._real.kubectl("create", "--dry-run=server", "-f-", stdin=json.dumps(probe), check=False)
            return bool(getattr(server, "probed", False))

        if "pods" in hook.resources and "CREATE" in hook.operations:
            eventually(called, f"{hook.name} to be called")


def respond(review: Review, **response: Any) -> Review:
    """Return the response to a review; it allows the request by default."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": review["request"]["uid"], "allowed": True, **response},
    }


def serve(hook: InMemoryWebhook, authority: trustme.CA) -> ThreadingHTTPServer:
    """Serve one webhook over HTTPS on loopback; requests of `_await_call` are allowed without calling it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if (review["request"].get("object") or {}).get("metadata", {}).get("generateName") == "probe-":
                self.server.probed = True  # type: ignore[attr-defined]
                answer = respond(review)
            else:
                try:
                    answer = hook.call(review)
                except Exception:  # some tests use a webhook that raises
                    self.send_error(500)
                    return
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = authority.issue_cert("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(str(file))
        context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, name=f"hook-{hook.name}", daemon=True).start()
    return server


def configuration(hook: InMemoryWebhook, address: str, authority: trustme.CA) -> dict[str, Any]:
    webhook = {
        "name": hook.name,
        "clientConfig": {"url": f"https://{address}/", "caBundle": b64encode(authority.cert_pem.bytes()).decode()},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": list(hook.resources),
                "operations": list(hook.operations),
            }
        ],
        "failurePolicy": "Fail" if hook.fail_closed else "Ignore",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    if hook.mutating:
        webhook["reinvocationPolicy"] = "IfNeeded" if hook.reinvoke else "Never"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": CONFIGURATIONS[hook.mutating],
        "metadata": {"name": hook.name},
        "webhooks": [webhook],
    }
