"""The quality of placement: how much of a cluster's GPUs each policy allocates, on the traces of docs/placement.md.

    python -m bench.placement --traces FOLDER [--only PART ...]

The folder holds the lists of the trace gpu-v2023. Every run is that of `quotient simulate`: the tasks of a list in an
order of their own, until they request 130 % of the capacity. `fragmentation` learns the workload from what arrives,
`given` knows it; `fgd` knows it, too, as in the paper. In `departures`, tasks arrive and leave at 95 % load.
"""

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from bench.reporting import current_commit, print_progress
from simulator.experiment import EXPONENTIAL, Outcome, Scenario, run_scenario
from simulator.replay import table_of
from simulator.trace_files import read_nodes, read_tasks
from vcuda.placement_strategies import PlacementStrategy

RESULTS = Path(__file__).parent / "results" / "placement.json"
NODES = "openb_node_list_gpu_node.csv"
# Published with the paper's code, at 100 % of demand.
PUBLISHED = {
    "default": {"random": 86.30, "bestfit": 92.86, "fgd": 95.23},
    "gpushare40": {"random": 84.86, "bestfit": 91.44, "fgd": 93.96},
    "gpushare100": {"random": 78.90, "bestfit": 84.62, "fgd": 86.64},
    "gpuspec33": {"random": 83.87, "bestfit": 80.40, "fgd": 87.84},
    "multigpu50": {"random": 81.28, "bestfit": 95.62, "fgd": 97.09},
    "cpu250": {"random": 80.00, "bestfit": 91.21, "fgd": 93.20},
}
TARGETS = {"mean_gain": 1.2, "least_gain": 0.2, "gpuspec33": 94.5, "cpu250": 94.5, "seconds": 30}
# By part: the policy, whether it knows the workload, whether tasks leave again, and the seeds.
PARTS = {
    "fragmentation": ("fragmentation", False, False, range(42, 52)),
    "fgd": ("fgd", True, False, range(42, 52)),
    "bestfit": ("bestfit", False, False, range(42, 52)),
    "random": ("random", False, False, range(42, 52)),
    "given": ("fragmentation", True, False, range(42, 52)),
    "departures": ("fragmentation", False, True, range(42, 45)),
    "departures_fgd": ("fgd", True, True, range(42, 45)),
}

Figures = dict[str, Any]
# A part, a trace and a seed.
Case = tuple[str, str, int]


@cache
def scenario_of(folder: Path, trace: str) -> Scenario:
    return Scenario(table_of(read_nodes(folder / NODES)), read_tasks(folder / f"openb_pod_list_{trace}.csv"))


def run_case(folder: Path, case: Case) -> tuple[Case, Outcome]:
    part, trace, seed = case
    policy, is_given, leaves, _ = PARTS[part]
    known = scenario_of(folder, trace)
    scenario = Scenario(known.table, known.tasks, is_given=is_given, lifetimes=EXPONENTIAL if leaves else "")
    return case, run_scenario(scenario, PlacementStrategy(policy), seed)


def figures_of(runs: list[Outcome]) -> Figures:
    if runs[0].accepted_percent is not None:
        accepted = [run.accepted_percent or 0.0 for run in runs]
        return {"accepted_at_95_load": mean(accepted), "runs": accepted, "seeds": len(runs)}
    return {
        "allocated_100": mean([run.allocated_percent["100"] for run in runs]),
        "allocated_130": mean([run.allocated_percent["130"] for run in runs]),
        "seconds": mean([run.seconds for run in runs]),
        "seeds": len(runs),
    }


def add_gains(results: Figures) -> None:
    """Add the gain of the default policy, which learns, over what was published for FGD."""
    gains = {
        trace: round(of["fragmentation"]["allocated_100"] - PUBLISHED[trace]["fgd"], 2)
        for trace, of in results["traces"].items()
        if "fragmentation" in of
    }
    if gains:
        results["gain_over_published_fgd"] = gains
        results |= {"mean_gain": mean(list(gains.values())), "least_gain": min(gains.values())}


def mean(values: list[float]) -> float:
    return round(statistics.mean(values), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if not (options.traces / NODES).exists():
        parser.error(f"{options.traces / NODES} does not exist: --traces names the folder with the lists of the trace")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"traces": {trace: {} for trace in PUBLISHED}}
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    every: list[Case] = [(part, trace, seed) for part in options.only for trace in PUBLISHED for seed in PARTS[part][3]]
    with ProcessPoolExecutor(options.jobs) as pool:
        for number, (case, outcome) in enumerate(pool.map(run_case, [options.traces] * len(every), every)):
            part, trace, seed = case
            runs = outcomes.setdefault((part, trace), [])
            runs.append(outcome)
            figures = figures_of(runs)
            print_progress(f"{number + 1} of {len(every)}: {part}, {trace}, seed {seed}: {figures}")
            results["traces"][trace][part] = figures
            # Parts are measured one by one, so each has the commit it was measured at.
            results.setdefault("commits", {})[part] = current_commit()
            results |= {
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "targets": TARGETS,
                "published": PUBLISHED,
            }
            add_gains(results)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
