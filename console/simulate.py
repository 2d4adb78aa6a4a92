"""`quotient simulate`: what placement policies, quotas or more nodes would make of a workload."""

import csv
import io
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import Manager
from pathlib import Path
from queue import Empty
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from console.admit import quotas_from
from console.errors import CommandError
from console.offline_admission import OfflineQuotas
from console.printing import count_of, show_warnings, wide_console
from console.simulate_options import Added, FiniteRange, parse_added, parse_plot, parse_policies, parse_seeds
from settings.loading import Loaded
from simulator.arrivals import TooManyArrivalsError
from simulator.experiment import EXPONENTIAL, FROM_TRACE, Outcome, Scenario, relative_lifetimes, run_scenario
from simulator.plotting import comparison_svg
from simulator.replay import GPU_MEMORY_MIB, table_of
from simulator.synthetic import synthetic_nodes, synthetic_tasks
from simulator.trace_files import Task, TraceError, TraceNode, read_nodes, read_tasks
from vcuda.decision import printable
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota_usage import QuotaUsage

CPU_MILLI_PER_GPU, MIB_PER_GPU = 8000, 32_000
# How often a run reports its progress, in arrivals.
PROGRESS_STEP = 100
# Namespaces that a warning lists.
MAX_NAMES = 5
MEMORY_ASSUMED = (
    "tasks request GPU memory, but not all nodes have the column gpu_memory_mib: their GPUs count as "
    f"{GPU_MEMORY_MIB:,} MiB each; add the column"
)


@click.command(short_help="Compare placement policies, quotas and nodes on a workload.")
@click.option("--nodes", "nodes_file", type=click.Path(path_type=Path), help="CSV of nodes; without it, our own.")
@click.option("--pods", "pods_file", type=click.Path(path_type=Path), help="CSV of tasks; without it, drawn by us.")
@click.option("--from-cluster", is_flag=True, help="Begin with the nodes and pods of the cluster of the kubeconfig.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["fragmentation"],
    callback=parse_policies,
    show_default=True,
    metavar="NAME,...",
    help=f"One or several of: {', '.join(PlacementStrategy)}.",
)
@click.option(
    "--demand",
    type=FiniteRange(0.01, 10),
    default=1.3,
    show_default=True,
    help="How much GPU demand arrives, as a multiple of the capacity.",
)
@click.option(
    "--seed",
    "--seeds",
    "seeds",
    default="42",
    callback=parse_seeds,
    show_default=True,
    metavar="N|N-M|N,M",
    help="Order and choice of arrivals; one run for each.",
)
@click.option(
    "--typical",
    type=click.Choice(["learned", "given"]),
    default="learned",
    show_default=True,
    help="Whether policies learn the workload from arrivals, or know it beforehand.",
)
@click.option(
    "--lifetimes",
    type=click.Choice([EXPONENTIAL, FROM_TRACE]),
    help="Have tasks leave again, after random times or those of the file.",
)
@click.option(
    "--load",
    type=FiniteRange(0.05, 3),
    default=0.95,
    show_default=True,
    help="With --lifetimes: the demand at any time, as a multiple of the capacity.",
)
@click.option("--quota", "quota_file", metavar="FILE", help="Hold the tasks' namespaces to these quotas.")
@click.option(
    "--add-nodes",
    "added",
    multiple=True,
    callback=parse_added,
    metavar="NODES:MODEL:GPUS",
    help="Add nodes, as in 10:T4:4.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=parse_plot,
    help="Write a comparison to this SVG file.",
)
@click.option(
    "--placements",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this CSV file where each task was placed.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(1),
    default=lambda: os.cpu_count() or 1,
    show_default="processors",
    help="Runs at the same time.",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def simulate(
    context: click.Context,
    *,
    nodes_file: Path | None,
    pods_file: Path | None,
    from_cluster: bool,
    policies: list[PlacementStrategy],
    demand: float,
    seeds: list[int],
    typical: str,
    lifetimes: str | None,
    load: float,
    quota_file: str | None,
    added: list[Added],
    plot: Path | None,
    placements: Path | None,
    jobs: int,
    output: str,
) -> None:
    """Replay a workload through the code that admits, charges and places pods, and show how much of the GPUs it uses.

    The tasks arrive in random order until they request --demand times the capacity; one that fits nowhere is dropped.
    CSV files are in the format of the Alibaba trace gpu-v2023 ("openb"): docs/placement.md lists the columns. -o json
    writes one object, or a list of them for several runs. Exit code: 0 simulated, 2 wrong usage or an invalid file.
    """
    loaded: Loaded = context.obj
    if from_cluster and (nodes_file or pods_file):
        raise click.UsageError("--from-cluster reads nodes and pods: leave out --nodes and --pods")
    if from_cluster and lifetimes:
        raise click.UsageError(
            "--lifetimes: how long running pods still run is not known; leave it out with --from-cluster"
        )
    is_ignored = "demand" if lifetimes else "load"
    if context.get_parameter_source(is_ignored) is ParameterSource.COMMANDLINE:
        show_warnings([f"--{is_ignored} has no effect {'with' if lifetimes else 'without'} --lifetimes"])
    unit_mib = loaded.configuration.memory_unit_mib
    quotas = quotas_from(quota_file, unit_mib)
    try:
        scenario = (
            read_cluster_scenario(loaded, added, quotas)
            if from_cluster
            else read_scenario(nodes_file, pods_file, added, quotas, has_times=lifetimes == FROM_TRACE)
        )
    except TraceError as error:
        raise CommandError(str(error)) from None
    scenario = msgspec.structs.replace(
        scenario,
        demand=demand,
        lifetimes=lifetimes or "",
        load=load,
        is_given=typical == "given",
        unit_mib=unit_mib,
        cluster_mode=loaded.configuration.mode,
    )
    check_scenario(scenario)
    show_warnings([*scenario_warnings(scenario), *quota_warnings(quotas, scenario)])
    outcomes = run_all(scenario, policies, seeds, jobs)
    if placements is not None:
        write_file(placements, placements_csv(outcomes))
    if plot is not None:
        write_file(plot, comparison_svg(by_policy(outcomes), plot_title(scenario, seeds)))
    show_outcomes(outcomes, output)


def read_scenario(
    nodes_file: Path | None, pods_file: Path | None, added: Iterable[Added], quotas: OfflineQuotas, *, has_times: bool
) -> Scenario:
    known = read_nodes(nodes_file) if nodes_file else synthetic_nodes()
    nodes = [*known, *added_nodes(added, known)]
    tasks = read_tasks(pods_file, has_times=has_times) if pods_file else synthetic_tasks(seed=0)
    if any(task.gpu_memory_mib for task in tasks) and not all(node.gpu_memory_mib for node in nodes):
        show_warnings([MEMORY_ASSUMED])
    namespaces = {task.namespace for task in tasks}
    usages = {name: QuotaUsage(quotas.of(name)) for name in sorted(namespaces) if quotas.of(name)}
    return Scenario(table_of(nodes), tasks, usages=usages)


def read_cluster_scenario(loaded: Loaded, added: Iterable[Added], quotas: OfflineQuotas) -> Scenario:
    from console.cluster_snapshot import read_snapshot  # noqa: PLC0415 - other simulations need no API client

    snapshot = read_snapshot(loaded.configuration)
    show_warnings(snapshot.quotas.warnings)
    return snapshot.scenario(lambda nodes: added_nodes(added, nodes), quotas.of)


def added_nodes(added: Iterable[Added], nodes: Sequence[TraceNode]) -> Iterator[TraceNode]:
    """Yield the nodes of `--add-nodes`, with CPU and memory of the first node of the same model, for each GPU."""
    known = {node.model: node for node in reversed(nodes)}
    for group, (count, model, gpus) in enumerate(added):
        like = known.get(model) or TraceNode("", CPU_MILLI_PER_GPU, MIB_PER_GPU, 1, model)
        for number in range(count):
            name = f"added-{group}-{number}"
            cpu_milli, mib = like.cpu_milli * gpus // like.gpus, like.memory_mib * gpus // like.gpus
            yield TraceNode(name, cpu_milli, mib, gpus, model, like.gpu_memory_mib, like.pool, like.isolation)


def quota_warnings(quotas: OfflineQuotas, scenario: Scenario) -> Iterator[str]:
    """Yield why quotas refuse nothing although they were given."""
    named = sorted(filter(None, quotas.namespaces))
    present = {task.namespace for task in (*scenario.tasks, *scenario.first)}
    if named and not any(quotas.of(namespace) for namespace in present):
        names = ", ".join(map(printable, named[:MAX_NAMES]))
        yield (
            f"no task is in a namespace with a quota ({names}): the quotas have no effect; write the namespaces in the "
            "column namespace of the tasks, or quotas without a namespace, which apply to all"
        )
    for quota in {quota.name: quota for usage in scenario.usages.values() for quota in usage.quotas}.values():
        if quota.policy.effective_mode(scenario.cluster_mode) is Mode.AUDIT:
            yield f"the quota {printable(quota.name)} is in audit mode: alone it refuses nothing"


def scenario_warnings(scenario: Scenario) -> Iterator[str]:
    if count := sum(task.is_rounded for task in scenario.tasks):
        rounded = f"gpu_milli of {count_of(count, 'task')} was rounded up to whole per cents of a GPU"
        yield f"{rounded}, the unit of vcuda-core"


def has_lifetimes(tasks: Sequence[Task]) -> bool:
    """Whether some task ends, and one with GPUs runs for any time."""
    runs = zip(tasks, relative_lifetimes(tasks, FROM_TRACE), strict=True)
    return any(task.lifetime_s for task in tasks) and any(task.demand * lifetime for task, lifetime in runs)


def check_scenario(scenario: Scenario) -> None:
    if not any(task.demand for task in scenario.tasks):
        raise CommandError("no task requests GPUs; use a list of tasks whose column num_gpu is above 0")
    if scenario.lifetimes == FROM_TRACE and not has_lifetimes(scenario.tasks):
        raise CommandError(
            "--lifetimes trace: no task has a lifetime; add the columns creation_time and deletion_time, or use "
            "--lifetimes exponential"
        )
    try:
        scenario.check_length()
    except TooManyArrivalsError as error:
        raise CommandError(str(error)) from None


def run_all(
    scenario: Scenario, policies: Sequence[PlacementStrategy], seeds: Sequence[int], jobs: int
) -> list[Outcome]:
    """Run every policy with every seed, and show the progress on standard error."""
    runs = [(policy, seed) for policy in policies for seed in seeds]
    with progress_of(len(runs)) as on_progress:
        if min(jobs, len(runs)) == 1:
            return [
                run_scenario(scenario, policy, seed, partial(on_progress, at)) for at, (policy, seed) in enumerate(runs)
            ]
        with Manager() as manager, ProcessPoolExecutor(min(jobs, len(runs))) as pool:
            reports = manager.Queue()
            futures = [
                pool.submit(run_reporting, scenario, policy, seed, at, reports)
                for at, (policy, seed) in enumerate(runs)
            ]
            follow(futures, reports, on_progress)
            return [future.result() for future in futures]


def run_reporting(scenario: Scenario, policy: PlacementStrategy, seed: int, at: int, reports: Any) -> Outcome:  # noqa: ANN401
    """Run in a process of a pool; reports (number of the run, arrivals, all arrivals)."""

    def report(done: int, total: int) -> None:
        if done % PROGRESS_STEP == 0 or done == total:
            reports.put((at, done, total))

    return run_scenario(scenario, policy, seed, report)


def follow(futures: Sequence[Future[Outcome]], reports: Any, on_progress: Callable[[int, int, int], None]) -> None:  # noqa: ANN401
    while not all(future.done() for future in futures):
        try:
            on_progress(*reports.get(timeout=0.2))
        except Empty:
            continue


@contextmanager
def progress_of(runs: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show one bar for all runs; nothing if standard error is not a terminal."""
    columns = (TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    done = [0.0] * runs
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=runs)

        def report(at: int, arrived: int, total: int) -> None:
            if arrived % PROGRESS_STEP == 0 or arrived == total:
                done[at] = arrived / total
                progress.update(bar, completed=sum(done))

        yield report


def by_policy(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.policy, []).append(outcome)
    return grouped


def plot_title(scenario: Scenario, seeds: Sequence[int]) -> str:
    table = scenario.table
    runs = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    load = f", departures at {100 * scenario.load:g} % load" if scenario.lifetimes else ""
    return f"{len(table)} nodes, {table.gpu_count()} GPUs, {len(scenario.tasks)} tasks{load}, {runs}"


def placements_csv(outcomes: Iterable[Outcome]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("policy", "seed", "task", "node", "gpus"))
    for outcome in outcomes:
        for row in outcome.rows:
            writer.writerow((outcome.policy, outcome.seed, row.task, row.node, "|".join(row.gpus)))
    return text.getvalue()


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def show_outcomes(outcomes: Sequence[Outcome], output: str) -> None:
    if output == "json":
        summaries = [outcome.summary() for outcome in outcomes]
        click.echo(msgspec.json.encode(summaries[0] if len(summaries) == 1 else summaries))
        return
    console, table = wide_console(), Table(box=None, pad_edge=False)
    points = list(outcomes[0].allocated_percent)
    has_departures = outcomes[0].accepted_percent is not None
    headings = [f"allocated at {point} %" if point.isdecimal() else f"allocated, {point}" for point in points]
    extra = ["accepted"] if has_departures else []
    for heading in ("POLICY", *headings, *extra, "placed", "refused", "seconds"):
        table.add_column(heading.upper(), justify="left" if heading == "POLICY" else "right")
    for policy, runs in by_policy(outcomes).items():
        cells = [mean_cell([run.allocated_percent[point] for run in runs]) for point in points]
        cells += [mean_cell([run.accepted_percent or 0.0 for run in runs])] if has_departures else []
        numbers = [mean_of(runs, name) for name in ("placed", "refused")]
        table.add_row(policy, *cells, *(f"{each:.0f}" for each in numbers), f"{mean_of(runs, 'seconds'):.1f}")
    console.print(table)


def mean_of(runs: Sequence[Outcome], name: str) -> float:
    return statistics.mean(float(getattr(run, name)) for run in runs)


def mean_cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f} %{spread}"
