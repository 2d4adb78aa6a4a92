"""The webhook as a separate process with certificates, as it runs in a cluster, and its registration."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from settings.configuration import Configuration
from tests.cluster.quotient import is_called
from tests.cluster.real import RealCluster
from tests.running import HOST, Running, RunningController, flags, free_port
from tests.waiting import eventually
from webhook.registration import registration
from webhook.service import admission_config_of


class Authority:
    """A CA, and a folder laid out like a mounted Secret: all files are replaced at once by moving a link."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._generation = 0
        self.issue()

    def issue(self, *names: str, ca: trustme.CA | None = None, **options: Any) -> None:
        """Issue a certificate and put it into the folder."""
        issued = (ca or self.ca).issue_cert(*(names or (HOST,)), **options)
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        self.put(chain, issued.private_key_pem.bytes())

    def put(self, certificate: bytes, key: bytes) -> None:
        """Replace both files at once, as the kubelet does: with a new folder and a renamed link."""
        self._generation += 1
        generation = self.folder / f"..{self._generation}"
        generation.mkdir()
        (generation / "tls.crt").write_bytes(certificate)
        (generation / "tls.key").write_bytes(key)
        link = self.folder / "..new"
        link.symlink_to(generation.name)
        link.rename(self.folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")

    def client_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts this CA."""
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        context.check_hostname = False
        return context


class RunningWebhook(Running):
    """A webhook with settings written as `path=value`; without a kubeconfig it runs on an in-memory cluster."""

    def __init__(self, authority: Authority, kubeconfig: Path | None, *settings: str, port: int = 0) -> None:
        self.authority = authority
        self.port, ops_port = port or free_port(), free_port()
        all_settings = (
            f"cluster.kubeconfig={kubeconfig or ''}",
            f"webhook.address={HOST}",
            f"webhook.port={self.port}",
            f"webhook.opsPort={ops_port}",
            f"webhook.certificates={authority.folder}",
            f"webhook.serverName={HOST}",
            "webhook.drainS=0.5",
            *settings,
        )
        standalone = ["tests.webhook.standalone", *all_settings]
        super().__init__(
            ["console.main", *flags(*all_settings), "webhook"] if kubeconfig else standalone,
            ops_port,
            authority.folder.parent / f"webhook-{self.port}.log",
        )

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Send a request over TLS."""
        request = urllib.request.Request(f"https://{HOST}:{self.port}{path}", data=body, method="POST")
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=10, context=self.authority.client_context()
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@contextmanager
def run_controller(real: RealCluster, folder: Path, *settings: str) -> Iterator[RunningController]:
    """Run a controller that leads. Creates the system namespace, and leaves it."""
    real.kubectl("create", "namespace", Configuration().system_namespace, check=False)
    with RunningController(real.kubeconfig, folder, *settings) as controller:
        eventually(controller.is_leading, "the controller to lead", 40)
        yield controller


def register(real: RealCluster, configuration: Configuration, port: int, authority: Authority) -> None:
    """Register a webhook that listens on this port of the machine, and wait until the API server calls it."""
    target = f"https://{real.expose(port)}"
    for each in registration(admission_config_of(configuration), target, authority.ca.cert_pem.bytes()):
        real.kubectl("apply", "-f-", stdin=json.dumps(each))
    eventually(lambda: is_called(real, configuration.domain), "the webhook to be called")


def unregister(real: RealCluster) -> None:
    """Delete what `register` created."""
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        real.kubectl("delete", kind, "quotient", "--ignore-not-found")
    for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
        real.kubectl("delete", kind, "quotient-quota-guard", "--ignore-not-found")
