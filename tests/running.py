"""Components of Quotient as processes, as they run in a cluster."""

import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.cluster.supervisor import ROOT
from tests.waiting import eventually

HOST = "127.0.0.1"
START_S = 30.0
# Below the range that the kernel takes ports of outgoing connections from: such a connection of another test took a
# port between its choice and its use. Each worker of pytest-xdist has a part of its own.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.cycle(range(12_000 + 2_000 * WORKER % 20_000, 14_000 + 2_000 * WORKER % 20_000))


def free_port() -> int:
    """Return a port that is free, and that no other test of this run is given."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise AssertionError("unreachable: the ports repeat")


class Running:
    """A component's process: `module` is Python's `-m` argument with all others, `prefix` a wrapper of its command."""

    prefix: tuple[str, ...] = ()

    def __init__(self, module: list[str], ops_port: int, log: Path) -> None:
        self._module, self.ops_port, self.log = module, ops_port, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> Self:
        """Start the process and, if `ready`, wait until its readiness probe succeeds."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", *self._module],
                cwd=ROOT,
                stderr=log,
                stdout=log,
                env=os.environ | {"QUOTIENT_LOG_FORMAT": "json"},
            )
        if ready:
            eventually(self.is_ready, f"{self.log.name} to be ready", START_S, self._log_end)
        return self

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log_end()
        return self.ops("/readyz")[0] == 200

    def _log_end(self) -> str:
        return self.log.read_text()[-3000:]

    def ops(self, path: str) -> tuple[int, str]:
        """Get a path of the probes' port: status and body; status 0 and the error if there is no response."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.ops_port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:  # it may die in the middle of a response
            return 0, str(error)

    def memory_mib(self) -> float:
        """Return the memory of all its processes together, with shared pages counted once."""
        return sum(proportional_kib(pid) for pid in self.pids()) / 1024

    def pids(self) -> list[int]:
        """Return the main process and its children."""
        assert self.process is not None
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the process and return its exit code; SIGKILL is sent to its children as well."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            if number == signal.SIGKILL:
                self.send(number)
            else:
                self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)


def proportional_kib(pid: int) -> int:
    """Return a process's proportional set size: its own pages, and its part of shared ones."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def flags(*settings: str) -> list[str]:
    return [part for each in settings for part in ("--set", each)]


class RunningController(Running):
    def __init__(self, kubeconfig: Path, folder: Path, *settings: str) -> None:
        port = free_port()
        given = (
            f"cluster.kubeconfig={kubeconfig}",
            f"controller.address={HOST}",
            f"controller.opsPort={port}",
            f"controller.identity=controller-{port}",
            *settings,
        )
        super().__init__(["console.main", *flags(*given), "controller"], port, folder / f"controller-{port}.log")

    def is_leading(self) -> bool:
        return "quotient_controller_leading 1.0" in self.ops("/metrics")[1]

    def __exit__(self, *_: object) -> None:
        """Stop it with SIGTERM, so that it releases its lease and the next controller need not wait."""
        self.stop()
