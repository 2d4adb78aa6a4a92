"""The cost of the library that limits GPU memory: for each allocation, for each process, and for many at once.

    python -m bench.isolation [--rounds 1000000]

Allocations are measured on a driver whose calls cost next to nothing, with and without the library in turn, so that the
difference is the library's. Processes are started on the fake driver.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.reporting import current_commit
from nodeplugin import share_files
from nodeplugin.compiler import run_compiler
from nodeplugin.cuda_header import find_headers
from nodeplugin.fake import DEFAULT_VERSION
from nodeplugin.preload_build import build
from nodeplugin.share_files import CardLimits

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "isolation.json"
# Upper limits, goals of our own. HAMi-core took 297 ms for each process, one after another: 227 s for 300.
TARGETS = {"alloc_overhead_ns": 300, "start_overhead_ms": 3, "at_once_s": 2}
REPEATS, STARTS, AT_ONCE, OTHERS = 5, 40, 300, 50
UUID = "GPU-00000000-1111-2222-3333-444444444444"
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="allocations in each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        figures = bench.measure_calls(options.rounds) | bench.measure_starts()
    result = {
        "commit": current_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounds": options.rounds,
        "figures": figures,
        "targets": TARGETS,
        "missed": {key: figures[key] for key, target in TARGETS.items() if figures[key] > target},
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))  # noqa: T201 - the result


class Bench:
    """A container's files, the library, and a driver that does nothing."""

    def __init__(self, folder: Path) -> None:
        self.driver, self.library, self.program = folder / "driver", folder / "library", folder / "program"
        self.files = folder / "files"
        for each in (self.driver, self.files):
            each.mkdir()
        build(self.library, ["gcc"], ["-DFOLDER_FROM_ENVIRONMENT"])
        headers = ("-isystem", str(find_headers()), "-Wno-deprecated-declarations")
        real = self.driver / f"libcuda.so.{DEFAULT_VERSION}"
        run_compiler(
            "-O2",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            *headers,
            "-o",
            str(real),
            str(HERE / "isolation_driver.c"),
        )
        (self.driver / "libcuda.so.1").symlink_to(real.name)
        run_compiler("-O2", *headers, "-o", str(self.program), str(HERE / "isolation_overhead.c"), str(real))
        card = CardLimits(uuid=UUID, memory_bytes=1 << 40, context_bytes=MIB, cores=0, core_limit=0)
        share_files.write_limits(self.files, [card], DEFAULT_VERSION, str(self.driver))
        share_files.create_usage(self.files / share_files.USAGE_FOLDER / share_files.USAGE_FILE)

    def environment(self, *, is_limited: bool) -> Mapping[str, str]:
        found = os.environ | {"LD_LIBRARY_PATH": str(self.driver), "QUOTIENT_FOLDER": str(self.files)}
        return found | ({"LD_PRELOAD": str(self.library / "libcuda.so.1")} if is_limited else {})

    def run(self, rounds: int, *, is_limited: bool) -> list[float]:
        command = [str(self.program), str(rounds)]
        environment = self.environment(is_limited=is_limited)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
        return [float(each) for each in done.stdout.split()]

    def measure_calls(self, rounds: int) -> dict[str, Any]:
        """Measure both in turn; the best of each is what disturbs least."""
        plain, limited = [], []
        for _ in range(REPEATS):
            plain.append(self.run(rounds, is_limited=False))
            limited.append(self.run(rounds, is_limited=True))
        large, small, _ = (min(one) - min(other) for one, other in zip(zip(*limited), zip(*plain), strict=True))  # noqa: B905
        with_others = self.measure_beside_others(rounds)
        return {
            # An allocation and its free together.
            "alloc_overhead_ns": round(large, 1),
            "small_alloc_overhead_ns": round(small, 1),
            f"alloc_overhead_beside_{OTHERS}_processes_ns": round(with_others - min(plain)[0], 1),
        }

    def measure_beside_others(self, rounds: int) -> float:
        """Each allocation adds up what all processes have; the others hold memory and do nothing."""
        command = ["sh", "-c", f"{self.program} 10000000000 >/dev/null"]
        environment = self.environment(is_limited=True)
        others = [
            subprocess.Popen(["stdbuf", "-oL", *command], env=environment, start_new_session=True)  # noqa: S603, S607
            for _ in range(OTHERS)
        ]
        try:
            while len(usage_pids(self.files)) < OTHERS:
                time.sleep(0.01)
            for each in others:
                os.killpg(each.pid, 19)
            return min(self.run(rounds, is_limited=True)[0] for _ in range(REPEATS))
        finally:
            for each in others:
                os.killpg(each.pid, 9)
                each.wait()

    def start(self, count: int, *, is_limited: bool) -> float:
        """Start processes at once that allocate once; returns the seconds until the last has ended."""
        environment = self.environment(is_limited=is_limited)
        began = time.monotonic()
        running = [
            subprocess.Popen([self.program, "10"], env=environment, stdout=subprocess.DEVNULL)  # noqa: S603
            for _ in range(count)
        ]
        # Each has to be waited for.
        if sum(each.wait() for each in running):
            raise RuntimeError("a program on the driver that does nothing failed")
        return time.monotonic() - began

    def measure_starts(self) -> dict[str, Any]:
        plain, limited = [], []
        for _ in range(STARTS):
            plain.append(self.start(1, is_limited=False))
            limited.append(self.start(1, is_limited=True))
        return {
            "start_overhead_ms": round(1000 * (statistics.median(limited) - statistics.median(plain)), 2),
            "at_once": AT_ONCE,
            "at_once_s": round(self.start(AT_ONCE, is_limited=True), 2),
            "at_once_without_s": round(self.start(AT_ONCE, is_limited=False), 2),
        }


def usage_pids(files: Path) -> tuple[int, ...]:
    usage = share_files.read_usage(files / share_files.USAGE_FOLDER / share_files.USAGE_FILE, 1)
    return usage.pids if usage else ()


if __name__ == "__main__":
    main()
