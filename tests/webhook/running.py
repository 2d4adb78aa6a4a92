"""The webhook as a process of its own, with certificates, as it runs in a cluster."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import trustme

from settings.configuration import Configuration
from tests.cluster.keeper import ROOT
from tests.cluster.quotient import is_called
from tests.cluster.real import RealCluster
from tests.waiting import eventually
from webhook.registration import registration
from webhook.service import rules_of

HOST = "127.0.0.1"
START_S = 30.0


def free_port() -> int:
    """Find a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Authority:
    """A CA, and a folder of certificates as a mounted secret has it: swapped by moving a link."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._generation = 0
        self.issue()

    def issue(self, *names: str, ca: trustme.CA | None = None, **options: Any) -> None:
        """Make a new certificate and swap it in."""
        made = (ca or self.ca).issue_cert(*(names or (HOST,)), **options)
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        self.put(chain, made.private_key_pem.bytes())

    def put(self, certificate: bytes, key: bytes) -> None:
        """Swap files in, all at once, as the kubelet does."""
        self._generation += 1
        fresh = self.folder / f"..{self._generation}"
        fresh.mkdir()
        (fresh / "tls.crt").write_bytes(certificate)
        (fresh / "tls.key").write_bytes(key)
        link = self.folder / "..new"
        link.symlink_to(fresh.name)
        link.rename(self.folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")

    def client_context(self) -> ssl.SSLContext:
        """Trust this CA."""
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        context.check_hostname = False
        return context


class RunningWebhook:
    """One process. Further settings are given as `path=value`; `prefix` stands before its command line."""

    prefix: tuple[str, ...] = ()

    def __init__(self, authority: Authority, kubeconfig: Path | None, *settings: str, port: int = 0) -> None:
        """Without a kubeconfig it runs on an in-memory cluster."""
        self.authority = authority
        self.port, self.ops_port = port or free_port(), free_port()
        self._alone = kubeconfig is None
        self._settings = (
            f"cluster.kubeconfig={kubeconfig or ''}",
            f"webhook.address={HOST}",
            f"webhook.port={self.port}",
            f"webhook.opsPort={self.ops_port}",
            f"webhook.certificates={authority.folder}",
            f"webhook.serverName={HOST}",
            "webhook.drainS=0.5",
            *settings,
        )
        self.log = authority.folder.parent / f"webhook-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> Self:
        """Start it, and wait until it is ready."""
        flags = [part for each in self._settings for part in ("--set", each)]
        module = ["tests.webhook.standalone", *self._settings] if self._alone else ["console.main", *flags, "webhook"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", *module],
                cwd=ROOT,
                stderr=log,
                stdout=log,
                env=os.environ | {"QUOTIENT_LOG_FORMAT": "json"},
            )
        if ready:
            eventually(self.is_ready, f"the webhook to be ready, see {self.log.read_text()[-2000:]}", START_S)
        return self

    def is_ready(self) -> bool:
        """Ask the probe."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return self.ops("/readyz")[0] == 200

    def ops(self, path: str) -> tuple[int, str]:
        """Ask the port of probes and metrics."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.ops_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError as away:
            return 0, str(away)

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
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    def memory_mib(self) -> float:
        """Measure what it takes of the machine's memory, all its processes together, shared pages counted once."""
        assert self.process is not None
        return sum(proportional_kib(pid) for pid in (self.process.pid, *self.children())) / 1024

    def children(self) -> list[int]:
        """Name the processes that it started."""
        assert self.process is not None
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and give its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            for pid in (self.process.pid, *self.children()) if number == signal.SIGKILL else (self.process.pid,):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        code = self.process.wait(30)
        self.process = None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)


def proportional_kib(pid: int) -> int:
    """Give a process's memory, with its part of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def register(real: RealCluster, configuration: Configuration, port: int, authority: Authority) -> None:
    """Make the API server call a webhook on this port of the machine, and wait until it does."""
    target = f"https://{real.expose(port)}"
    for each in registration(rules_of(configuration), target, authority.ca.cert_pem.bytes()):
        real.kubectl("apply", "-f-", stdin=json.dumps(each))
    eventually(lambda: is_called(real, configuration.domain), "the webhook to be called")


def unregister(real: RealCluster) -> None:
    """Make the API server forget the webhook."""
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        real.kubectl("delete", kind, "quotient", "--ignore-not-found")
    for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
        real.kubectl("delete", kind, "quotient-quota-guard", "--ignore-not-found")
