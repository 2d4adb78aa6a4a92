"""A container with a share of the fake driver's GPUs, and programs in it that make the calls a test tells them to."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from nodeplugin import fake, share_files
from nodeplugin.share_files import CardLimits

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE, NO_DEVICE = 2, 1, 100
UUIDS = [f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(4)]
CARD_MIB, CONTEXT_MIB, LIMIT_MIB = 8192, 64, 1024
FD, FABRIC = 1, 8


def mib(value: float) -> int:
    return int(value * MIB)


@dataclass
class Container:
    """The two files of a container, and the driver that its programs find."""

    folder: Path
    build: Path
    shell: Path
    limits_mib: Sequence[float] = (LIMIT_MIB,)
    gpus: int = 0
    version: str = fake.DEFAULT_VERSION
    description: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files, self.driver = self.folder / "quotient", self.folder / "driver"
        self.files.mkdir(parents=True)
        cards = [
            {"uuid": uuid, "product": "Fake", "memoryMiB": CARD_MIB, "contextMiB": CONTEXT_MIB}
            for uuid in UUIDS[: self.gpus or len(self.limits_mib)]
        ]
        fake.install_cuda(self.driver, {"driver": self.version, "cuda": 12040, "cards": cards, **self.description})
        self.limit(*self.limits_mib)
        share_files.create_usage(self.usage)

    @property
    def usage(self) -> Path:
        """The file in which its processes keep account."""
        return self.files / share_files.USAGE_FOLDER / share_files.USAGE_FILE

    def limit(self, *limits_mib: float, residual_mib: float = 0) -> None:
        cards = [
            CardLimits(
                uuid=uuid,
                memory_bytes=mib(limit),
                context_bytes=mib(CONTEXT_MIB),
                cores=0,
                core_limit=0,
                residual_bytes=mib(residual_mib),
            )
            for uuid, limit in zip(UUIDS, limits_mib, strict=False)
        ]
        share_files.write_limits(self.files, cards, self.version, str(self.driver))

    def environment(self, *, is_limited: bool = True, **more: str) -> dict[str, str]:
        found = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.driver),
            "QUOTIENT_FOLDER": str(self.files),
            "QUOTIENT_FAKE_STATE": str(self.driver / "fake-devices.state"),
        }
        if is_limited:
            found["LD_PRELOAD"] = f"{self.build / 'libcuda.so.1'}:{self.build / 'libnvidia-ml.so.1'}"
        return found | more

    def start(self, *, is_limited: bool = True, context: bool = True, **more: str) -> "Program":
        """Start a program, by default with a context on the first GPU."""
        program = Program(self, self.environment(is_limited=is_limited, **more))
        if context:
            program.ok("init")
            program.ok("primary 0")
        return program

    def accounted(self, card: int = 0) -> int:
        """Return what the node plugin reads of the container's usage."""
        usage = share_files.read_usage(self.usage, card + 1)
        assert usage is not None
        return usage.card_bytes[card]

    def observe(self, card: int = 0) -> "Observer":
        return Observer(self, card)


class Program:
    """A running program; its block ends with its end."""

    def __init__(self, container: Container, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [container.shell],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def input(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def send(self, *calls: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{each}\n" for each in calls))
        self._process.stdin.flush()

    def hear(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def call(self, line: str) -> list[str]:
        """Make a call and return its answer: the result's number, and what else it returned."""
        self.send(line)
        answer = self.hear()
        assert answer, f"the program ended at: {line}"
        assert answer[0] != "-2", f"unknown: {line}"
        return answer

    def result(self, line: str) -> int:
        return int(self.call(line)[0])

    def ok(self, line: str) -> list[str]:
        answer = self.call(line)
        assert answer[0] == "0", f"{line}: {answer[0]}"
        return answer[1:]

    def refused(self, line: str) -> None:
        assert self.result(line) == OUT_OF_MEMORY, line

    def free_and_total(self) -> tuple[int, int]:
        available, total = self.ok("info")
        return int(available), int(total)

    def kill(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            self._process.kill()
            self._process.wait()
            self.close()

    def close(self) -> None:
        for each in (self._process.stdin, self._process.stdout, self._process.stderr):
            if each:
                each.close()

    def end(self) -> str:
        """End the program's input, and return what it has written to stderr."""
        _, errors = self._process.communicate(timeout=30)
        return str(errors)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class Observer:
    """Says what is really allocated on a card: asks the driver in a process that nothing limits."""

    def __init__(self, container: Container, card: int = 0) -> None:
        self._program = container.start(is_limited=False, context=False)
        self._program.ok("init")
        self._program.ok(f"primary {card}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.kill()

    def real(self) -> int:
        available, total = self._program.free_and_total()
        return total - available - mib(CONTEXT_MIB)
