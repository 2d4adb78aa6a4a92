"""The webhook compared with a plain Go handler, each on one core: `python -m bench.webhook [--seconds N]`.

Ratios within one run apply to other machines, absolute figures do not. The servers are measured in turns, several
times, and the median of the ratios is reported, because other processes on the machine disturb single rounds.
"""

import argparse
import asyncio
import base64
import json
import os
import platform
import re
import shutil
import ssl
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonpatch

from bench.reporting import current_commit, print_progress
from bench.reviews import creation_review, large_pod, small_pod
from deploy import debian
from deploy.toolchain import cache_dir, go_program, locked
from ledger.in_memory_ledgers import InMemoryLedgers
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
# Server and client on different cores, so that neither takes time from the other.
SERVER_CORE, CLIENT_CORE = "0", "1"
ROUNDS = 5
CONNECTIONS = 8
# Requests per second of the measurement at a steady rate, and its duration.
RATE, RATE_S = 200, 10
DECISIONS = 3000
TARGETS = {"times Go": 1.2, "p99 ms at 200/s": 5.0, "decision us": 100.0, "memory MiB": 100.0}

Figures = dict[str, Any]


def build_reference() -> Path:
    """Build the Go handler if its source has changed, and return the program."""
    target = cache_dir() / "bench" / "reference"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / ".lock"):
        newest = max(file.stat().st_mtime for file in (HERE / "reference").iterdir())
        if not target.exists() or target.stat().st_mtime < newest:
            print_progress("building the Go handler")
            command = [str(go_program()), "build", "-trimpath", "-ldflags=-s -w", "-o", str(target), "."]
            subprocess.run(command, cwd=HERE / "reference", env=os.environ | {"CGO_ENABLED": "0"}, check=True)  # noqa: S603
    return target


def run_wrk(url: str, body: Path, seconds: float) -> Figures:
    """Measure the throughput of a server over persistent connections."""
    folder = debian.unpack_packages(("wrk", "libluajit-5.1-2", "libluajit-5.1-common"), "-bench")
    libraries = ":".join(map(str, folder.glob("usr/lib/*-linux-gnu*")))
    script = body.with_suffix(".lua")
    script.write_text(
        f'local f = io.open("{body}"); wrk.body = f:read("*a"); f:close()\n'
        'wrk.method = "POST"; wrk.headers["Content-Type"] = "application/json"\n'
    )
    options = ("-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--latency", "-s", str(script))
    done = subprocess.run(  # noqa: S603
        [*pin_to(CLIENT_CORE), f"{folder}/usr/bin/wrk", *options, url],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "Non-2xx" in done or "Socket errors" in done:
        raise RuntimeError(done)
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", done)
    p99 = re.search(r"99%\s+([0-9.]+)(us|ms|s)\b", done)
    if rate is None or p99 is None:
        raise RuntimeError(done)
    return {"per_s": float(rate[1]), "p99_ms": float(p99[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[p99[2]]}


def pin_to(core: str) -> tuple[str, ...]:
    """Return the prefix of a command line that runs it on one core."""
    return str(shutil.which("taskset")), "-c", core


def build_responder() -> Responder:
    """Build the admission code without a server."""
    admission = Admission(AdmissionConfig(scheme=build_scheme()), FixedQuotaSource())
    return Responder(admission, lambda *_: None, InMemoryLedgers(), Metrics(), 8.0)


def build_bodies() -> dict[str, dict[str, bytes]]:
    """Return the requests by route and size; those of validation have the pod as mutation leaves it."""
    bodies: dict[str, dict[str, bytes]] = {"mutate": {}, "validate": {}}
    for size, pod in (("3 kB", small_pod()), ("30 kB", large_pod())):
        review = creation_review(pod)
        response = json.loads(build_responder().reply("mutate", "application/json", "", review).body)["response"]
        patch = jsonpatch.JsonPatch.from_string(base64.b64decode(response["patch"]).decode())
        mutated = patch.apply(pod)
        mutated["metadata"]["uid"] = str(uuid.uuid4())  # which a pod has in validating calls only
        bodies["mutate"][size], bodies["validate"][size] = review, creation_review(mutated)
    return bodies


def measure_decision_us(route: str, body: bytes) -> float:
    """Measure one decision in this process, from the bytes of the request to those of the response."""
    reply: Callable[..., Any] = build_responder().reply
    rounds_us = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(DECISIONS):
            reply(route, "application/json", "timeout=10s", body)
        rounds_us.append((time.perf_counter() - began) / DECISIONS * 1e6)
    return statistics.median(rounds_us)


async def call_at_rate(port: int, context: ssl.SSLContext, body: bytes) -> list[float]:
    """Send requests at a steady rate, whether or not earlier ones are answered; returns the latencies in seconds.

    Latency counts from the time at which a request is due. Otherwise a slow server would delay the requests that would
    have shown that it is slow (coordinated omission).
    """
    message = request(body)
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection(HOST, port, ssl=context))
    latencies_s: list[float] = []

    async def call(due: float) -> None:
        reader, writer = await idle.get()
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        latencies_s.append(asyncio.get_running_loop().time() - due)
        idle.put_nowait((reader, writer))

    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as calls:
        for number in range(RATE * RATE_S):
            due = began + number / RATE
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            calls.create_task(call(due))
    while not idle.empty():
        idle.get_nowait()[1].close()
    return latencies_s


def measure(seconds: float) -> Figures:
    """Start both servers and measure everything."""
    with tempfile.TemporaryDirectory(prefix="quotient-bench-") as scratch:
        folder = Path(scratch)
        authority = Authority(folder / "tls")
        webhook = RunningWebhook(authority, None, "log.level=warning")
        webhook.prefix = pin_to(SERVER_CORE)
        port = free_port()
        certificate, key = authority.folder / "tls.crt", authority.folder / "tls.key"
        command = [str(build_reference()), f"-address={HOST}:{port}", f"-certificate={certificate}", f"-key={key}"]
        go = subprocess.Popen(  # noqa: S603
            [*pin_to(SERVER_CORE), *command], env=os.environ | {"GOMAXPROCS": "1"}, stderr=subprocess.DEVNULL
        )
        try:
            with webhook:
                return compare(webhook, port, folder, seconds)
        finally:
            go.terminate()
            go.wait()


def compare(webhook: RunningWebhook, go_port: int, folder: Path, seconds: float) -> Figures:
    """Measure both servers in turns."""
    figures: Figures = {"throughput": [], "decision_us": {}}
    bodies = build_bodies()
    for route, sizes in bodies.items():
        for size, body in sizes.items():
            file = folder / f"{route}-{size.replace(' ', '')}.json"
            file.write_bytes(body)
            rounds: dict[str, list[Figures]] = {"go": [], "quotient": []}
            for number in range(ROUNDS):
                for name, port in (("go", go_port), ("quotient", webhook.port)):
                    rounds[name].append(run_wrk(f"https://{HOST}:{port}/{route}?timeout=10s", file, seconds))
                    rate = f"{rounds[name][-1]['per_s']:,.0f}/s"
                    print_progress(f"{route} {size} round {number + 1} of {ROUNDS}: {name} {rate}")
            figures["throughput"].append(summarize(route, size, len(body), rounds))
        figures["decision_us"][route] = round(measure_decision_us(route, sizes["3 kB"]), 1)
        print_progress(f"{route}: a decision takes {figures['decision_us'][route]} us")
    print_progress(f"{RATE} requests per second for {RATE_S} s")
    context = webhook.authority.client_context()
    latencies_s = sorted(asyncio.run(call_at_rate(webhook.port, context, bodies["mutate"]["3 kB"])))
    figures["paced_ms"] = {
        "p50": quantile_ms(latencies_s, 0.5),
        "p99": quantile_ms(latencies_s, 0.99),
        "max": quantile_ms(latencies_s, 1),
    }
    figures["memory_mib"] = round(webhook.memory_mib(), 1)
    return figures


def quantile_ms(latencies_s: list[float], quantile: float) -> float:
    """Return a quantile of sorted latencies."""
    return round(latencies_s[min(len(latencies_s) - 1, int(len(latencies_s) * quantile))] * 1e3, 2)


def summarize(route: str, size: str, length: int, rounds: dict[str, list[Figures]]) -> Figures:
    """Compare the two servers by the median of the ratios of each round."""
    # Not the ratio of medians: the machine's speed drifts between rounds, and within a round it affects both.
    ratios = [ours["per_s"] / go["per_s"] for ours, go in zip(rounds["quotient"], rounds["go"], strict=True)]
    rates = {name: statistics.median(each["per_s"] for each in runs) for name, runs in rounds.items()}
    p99_ms = {name: statistics.median(each["p99_ms"] for each in runs) for name, runs in rounds.items()}
    return {
        "route": route,
        "review": size,
        "bytes": length,
        "per_s": {name: round(rate) for name, rate in rates.items()},
        "p99_ms": {name: round(value, 2) for name, value in p99_ms.items()},
        "times_go": round(statistics.median(ratios), 2),
        "times_go_of_each_round": [round(ratio, 2) for ratio in ratios],
    }


def print_summary(figures: Figures) -> None:
    for each in figures["throughput"]:
        rates = "   ".join(
            f"{name} {each['per_s'][name]:6,}/s p99 {each['p99_ms'][name]:5} ms" for name in each["per_s"]
        )
        print_progress(f"{each['route']:9} {each['review']:6} {rates}   {each['times_go']} times Go")
    decisions = figures["decision_us"]
    print_progress(f"decision: mutate {decisions['mutate']} us, validate {decisions['validate']} us")
    print_progress(f"at {RATE}/s: p50 {figures['paced_ms']['p50']} ms, p99 {figures['paced_ms']['p99']} ms")
    print_progress(f"memory: {figures['memory_mib']} MiB, all processes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of one round of one server")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    figures = measure(options.seconds)
    print_summary(figures)
    about = {
        "commit": current_commit(),
        "seed": 0,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "targets": TARGETS,
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(about | figures, indent=1) + "\n")
    print_progress(f"results written to {options.results}")


if __name__ == "__main__":
    main()
