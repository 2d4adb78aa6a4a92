"""Three webhook replicas that write one ledger: pods created in one namespace, beside the same load on one replica.

    python -m bench.contention [--rounds 3] [--pods 2000] [--clients 48]

The API server calls the replicas through one address that passes each connection to another one, as kube-proxy does. A
controller runs too, a further writer. Everything shares one machine, so only ratios within a round mean something.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.quota import create_pods, gpu_quota, ledger_counters
from bench.reporting import current_commit, print_progress
from settings.configuration import Configuration
from tests.cluster.real import RealCluster
from tests.waiting import eventually
from tests.webhook.running import Authority, RunningWebhook, register, run_controller, unregister
from tests.webhook.service import Service

RESULTS = Path(__file__).parent / "results" / "contention.json"
REPLICAS = 3
TARGETS = {"failed": 0, "conflicts_per_write": 0.1}

Figures = dict[str, Any]


def measure(real: RealCluster, folder: Path, replicas: int, namespace: str, options: argparse.Namespace) -> Figures:
    """Create pods in a new namespace, with this many replicas of the webhook."""
    folder.mkdir()
    authority = Authority(folder / "tls")
    with ExitStack() as stack:
        stack.enter_context(run_controller(real, folder))
        running = [stack.enter_context(RunningWebhook(authority, real.kubeconfig)) for _ in range(replicas)]
        service = stack.enter_context(Service(*running))
        eventually(lambda: len(service.ready) == replicas, "the replicas")
        register(real, Configuration(), service.port, authority)
        real.kubectl("create", "namespace", namespace)
        real.kubectl("apply", "-f-", stdin=json.dumps(gpu_quota(namespace)))
        figures = create_pods(real, [namespace], options.pods, options.clients)
        counters = [ledger_counters(each.ops("/metrics")[1]) for each in running]
        unregister(real)
    writes, conflicts = (sum(each[name] for each in counters) for name in ("ledger_writes", "ledger_conflicts"))
    figures |= {"writes": writes, "conflicts": conflicts, "conflicts_per_write": round(conflicts / writes, 3)}
    print_progress(
        f"{namespace}: {figures['per_s']:.0f}/s, p99 {figures['p99_ms']:.0f} ms, "
        f"{conflicts:.0f} conflicts for {writes:.0f} writes, {figures['statuses']}"
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pods", type=int, default=2000, help="pods per round and number of replicas")
    parser.add_argument("--clients", type=int, default=48, help="connections that create pods")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    real = RealCluster.start(node=False)
    runs: dict[int, list[Figures]] = {1: [], REPLICAS: []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(options.rounds):
                for replicas, measured in runs.items():
                    name = f"replicas-{replicas}-{number}"
                    measured.append(measure(real, Path(folder) / name, replicas, name, options))
    finally:
        real.stop()
    three = runs[REPLICAS]
    figures = {
        "commit": current_commit(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "targets": TARGETS,
        "pods": options.pods,
        "clients": options.clients,
        "failed": sum(options.pods - each["statuses"].get("201", 0) for each in three),
        "conflicts_per_write": statistics.median(each["conflicts_per_write"] for each in three),
        "times_one_replica": round(
            statistics.median(many["per_s"] / one["per_s"] for one, many in zip(runs[1], three, strict=True)), 2
        ),
        "p99_ms": {
            str(replicas): round(statistics.median(each["p99_ms"] for each in measured))
            for replicas, measured in runs.items()
        },
        "of_each_round": {str(replicas): measured for replicas, measured in runs.items()},
    }
    options.results.write_text(json.dumps(figures, indent=1) + "\n")
    print_progress(f"results written to {options.results}")


if __name__ == "__main__":
    main()
