"""The webhook beside a plain Go handler, each on one core: `make bench`, or `python -m bench.webhook [--seconds N]`.

Ratios within one run carry over to other machines, absolute figures do not. Servers take turns, several times, and
medians are compared, because the machine is shared.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonpatch

from bench.reviews import large, review, small
from deploy import debian
from deploy.toolchain import cache_dir, go_program, locked
from ledger.committing import InMemoryLedgers
from tests.running import HOST, free_port
from tests.webhook.load import request
from tests.webhook.running import Authority, RunningWebhook
from vcuda.scheme import build_scheme
from webhook.admission import Admission
from webhook.admission_config import AdmissionConfig
from webhook.metrics import Metrics
from webhook.quota_sources import FixedQuotaSource
from webhook.responding import Responder

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "webhook.json"
SERVER_CORE, CLIENT_CORE = "0", "1"
ROUNDS = 5
CONNECTIONS = 8
RATE = 200
RATE_S = 10
DECISIONS = 3000
TARGETS = {"times Go": 1.2, "p99 ms at 200/s": 5.0, "decision us": 100.0, "memory MiB": 100.0}

Figures = dict[str, Any]


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def reference() -> Path:
    """Build the Go handler, once per version of it."""
    target = cache_dir() / "bench" / "reference"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / ".lock"):
        newest = max(file.stat().st_mtime for file in (HERE / "reference").iterdir())
        if not target.exists() or target.stat().st_mtime < newest:
            say("building the Go handler")
            command = [str(go_program()), "build", "-trimpath", "-ldflags=-s -w", "-o", str(target), "."]
            subprocess.run(command, cwd=HERE / "reference", env=os.environ | {"CGO_ENABLED": "0"}, check=True)  # noqa: S603
    return target


def wrk(url: str, body: Path, seconds: float) -> Figures:
    """Call a server as fast as it answers, over kept connections."""
    folder = debian.unpack_packages(("wrk", "libluajit-5.1-2", "libluajit-5.1-common"), "-bench")
    libraries = ":".join(map(str, folder.glob("usr/lib/*-linux-gnu*")))
    script = body.with_suffix(".lua")
    script.write_text(
        f'local f = io.open("{body}"); wrk.body = f:read("*a"); f:close()\n'
        'wrk.method = "POST"; wrk.headers["Content-Type"] = "application/json"\n'
    )
    options = ("-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--latency", "-s", str(script))
    done = subprocess.run(  # noqa: S603
        [*pinned(CLIENT_CORE), f"{folder}/usr/bin/wrk", *options, url],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "Non-2xx" in done or "Socket errors" in done:
        raise RuntimeError(done)
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", done)
    slow = re.search(r"99%\s+([0-9.]+)(us|ms|s)\b", done)
    if rate is None or slow is None:
        raise RuntimeError(done)
    return {"per_s": float(rate[1]), "p99_ms": float(slow[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[slow[2]]}


def pinned(core: str) -> tuple[str, ...]:
    """Give the words before a command that keep it on one core."""
    return str(shutil.which("taskset")), "-c", core


def responder() -> Responder:
    """Put the decision together without a server."""
    admission = Admission(AdmissionConfig(scheme=build_scheme()), FixedQuotaSource())
    return Responder(admission, lambda *_: None, InMemoryLedgers(), Metrics(), 8.0)


def bodies() -> dict[str, dict[str, bytes]]:
    """Write the reviews: for validation the pod is as mutation leaves it."""
    found: dict[str, dict[str, bytes]] = {"mutate": {}, "validate": {}}
    for name, pod in (("3 kB", small()), ("30 kB", large())):
        asked = review(pod)
        answer = json.loads(responder().reply("mutate", "application/json", "", asked).body)["response"]
        patch = jsonpatch.JsonPatch.from_string(decoded(answer["patch"]))
        found["mutate"][name], found["validate"][name] = asked, review(patch.apply(pod))
    return found


def decoded(patch: str) -> str:
    """Decode a patch."""
    import base64  # noqa: PLC0415

    return base64.b64decode(patch).decode()


def decision_us(route: str, body: bytes) -> float:
    """Measure one decision, from bytes to bytes."""
    decide: Callable[..., Any] = responder().reply
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(DECISIONS):
            decide(route, "application/json", "timeout=10s", body)
        taken.append((time.perf_counter() - began) / DECISIONS * 1e6)
    return statistics.median(taken)


async def paced(port: int, context: ssl.SSLContext, body: bytes) -> list[float]:
    """Call at a steady rate, whether or not earlier calls have been answered; give the latencies."""
    sent = request(body)
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection(HOST, port, ssl=context))
    taken: list[float] = []

    async def call(due: float) -> None:
        reader, writer = await idle.get()
        writer.write(sent)
        opening = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in opening.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        taken.append(asyncio.get_running_loop().time() - due)
        idle.put_nowait((reader, writer))

    begin = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as calls:
        for number in range(RATE * RATE_S):
            due = begin + number / RATE
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            calls.create_task(call(due))
    while not idle.empty():
        idle.get_nowait()[1].close()
    return taken


def measure(seconds: float) -> Figures:
    """Measure everything, with progress."""
    with tempfile.TemporaryDirectory(prefix="quotient-bench-") as scratch:
        folder = Path(scratch)
        authority = Authority(folder / "tls")
        webhook = RunningWebhook(authority, None, "log.level=warning")
        webhook.prefix = pinned(SERVER_CORE)
        port = free_port()
        certificate, key = authority.folder / "tls.crt", authority.folder / "tls.key"
        command = [str(reference()), f"-address={HOST}:{port}", f"-certificate={certificate}", f"-key={key}"]
        go = subprocess.Popen(  # noqa: S603
            [*pinned(SERVER_CORE), *command], env=os.environ | {"GOMAXPROCS": "1"}, stderr=subprocess.DEVNULL
        )
        try:
            with webhook:
                return compare(webhook, port, folder, seconds)
        finally:
            go.terminate()
            go.wait()


def compare(webhook: RunningWebhook, go_port: int, folder: Path, seconds: float) -> Figures:
    """Let both servers take turns."""
    figures: Figures = {"throughput": [], "decision_us": {}}
    for route, sizes in bodies().items():
        for size, body in sizes.items():
            file = folder / f"{route}-{size.replace(' ', '')}.json"
            file.write_bytes(body)
            rounds: dict[str, list[Figures]] = {"go": [], "quotient": []}
            for number in range(ROUNDS):
                for name, at in (("go", go_port), ("quotient", webhook.port)):
                    rounds[name].append(wrk(f"https://{HOST}:{at}/{route}?timeout=10s", file, seconds))
                    say(f"{route} {size} round {number + 1} of {ROUNDS}: {name} {rounds[name][-1]['per_s']:,.0f}/s")
            figures["throughput"].append(summary(route, size, len(body), rounds))
        figures["decision_us"][route] = round(decision_us(route, sizes["3 kB"]), 1)
        say(f"{route}: a decision takes {figures['decision_us'][route]} us")
    say(f"{RATE} calls a second for {RATE_S} s")
    taken = sorted(asyncio.run(paced(webhook.port, webhook.authority.client_context(), bodies()["mutate"]["3 kB"])))
    figures["paced_ms"] = {
        "p50": milliseconds(taken, 0.5),
        "p99": milliseconds(taken, 0.99),
        "max": milliseconds(taken, 1),
    }
    figures["memory_mib"] = round(webhook.memory_mib(), 1)
    return figures


def milliseconds(taken: list[float], part: float) -> float:
    """Give a quantile of latencies."""
    return round(taken[min(len(taken) - 1, int(len(taken) * part))] * 1e3, 2)


def summary(route: str, size: str, length: int, rounds: dict[str, list[Figures]]) -> Figures:
    """Compare two servers: in each round with each other, since the machine's speed drifts, and then by the median."""
    ratios = [ours["per_s"] / go["per_s"] for ours, go in zip(rounds["quotient"], rounds["go"], strict=True)]
    rates = {name: statistics.median(each["per_s"] for each in found) for name, found in rounds.items()}
    slow = {name: statistics.median(each["p99_ms"] for each in found) for name, found in rounds.items()}
    return {
        "route": route,
        "review": size,
        "bytes": length,
        "per_s": {name: round(rate) for name, rate in rates.items()},
        "p99_ms": {name: round(value, 2) for name, value in slow.items()},
        "times_go": round(statistics.median(ratios), 2),
        "times_go_of_each_round": [round(ratio, 2) for ratio in ratios],
    }


def show(figures: Figures) -> None:
    """Print what was measured."""
    for each in figures["throughput"]:
        told = "   ".join(
            f"{name} {each['per_s'][name]:6,}/s p99 {each['p99_ms'][name]:5} ms" for name in each["per_s"]
        )
        say(f"{each['route']:9} {each['review']:6} {told}   {each['times_go']} times Go")
    say(f"decision: mutate {figures['decision_us']['mutate']} us, validate {figures['decision_us']['validate']} us")
    say(f"at {RATE}/s: p50 {figures['paced_ms']['p50']} ms, p99 {figures['paced_ms']['p99']} ms")
    say(f"memory: {figures['memory_mib']} MiB, all processes")


def main() -> None:
    """Measure, show and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one round of one server")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = measure(options.seconds)
    show(figures)
    git = [str(shutil.which("git")), "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    about = {
        "commit": commit,
        "seed": 0,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "targets": TARGETS,
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(about | figures, indent=1) + "\n")
    say(f"written to {options.results}")


if __name__ == "__main__":
    main()
