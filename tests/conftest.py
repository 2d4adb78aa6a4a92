"""What all tests share: real Kubernetes clusters, the `--results` option, and the order of the test files."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.cluster.real import RealCluster, why_no_cluster
from tests.cluster.supervisor import ROOT

# No deadlines: they measure the machine, not the code. The second profile is for full-size runs.
settings.register_profile("quotient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("quotient"), max_examples=5_000)
settings.load_profile("quotient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", type=Path, help="folder with the lists of the trace gpu-v2023, see docs/placement.md")
    parser.addoption("--results", type=Path, help="write outcome and duration of each test here, with commit and seed")


@pytest.fixture(scope="session")
def real_cluster_possible() -> None:
    """Skips tests on machines that cannot run a cluster; in CI they fail, as a skipped test would go unnoticed."""
    if why := why_no_cluster():
        skip_or_fail(why, in_ci=os.environ.get("CI") == "true")


def skip_or_fail(why: str, *, in_ci: bool) -> NoReturn:
    if in_ci:
        pytest.fail(f"in CI a real Kubernetes must run, but it {why}", pytrace=False)
    pytest.skip(f"a real Kubernetes {why}")


class SharedClusters:
    """The clusters that tests share, started on first use and again after `stop`."""

    def __init__(self) -> None:
        self._running: dict[bool, RealCluster] = {}

    def get(self, *, node: bool) -> RealCluster:
        if node not in self._running:
            self._running[node] = RealCluster.start(node=node)
        return self._running[node]

    def stop(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[SharedClusters]:
    clusters = SharedClusters()
    yield clusters
    clusters.stop()


@pytest.fixture
def control_plane(real_cluster_possible: None, shared_clusters: SharedClusters) -> RealCluster:
    """A real API server with controllers and scheduler, without a node."""
    return shared_clusters.get(node=False)


@pytest.fixture
def node_cluster(real_cluster_possible: None, shared_clusters: SharedClusters) -> RealCluster:
    """A real cluster with containerd and a kubelet, which runs pods."""
    return shared_clusters.get(node=True)


class Results:
    """Collects the outcomes of tests for `--results`."""

    def __init__(self, target: Path, config: pytest.Config) -> None:
        self._target, self._config, self._started = target, config, time.time()
        self._tests: dict[str, dict[str, object]] = {}
        # Results of an earlier run do not change what is tested.
        changed = git("status", "--porcelain", "--", ".", ":!tests/results")
        self._commit = git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            figures = {key: value for key, value in report.user_properties if isinstance(value, (int, float, str))}
            self._tests[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 2), **figures}

    def pytest_sessionfinish(self) -> None:
        summary = {
            "commit": self._commit,
            "seed": self._config.getoption("randomly_seed", None),
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._started)),
            "tests": dict(sorted(self._tests.items())),
        }
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.write_text(json.dumps(summary, indent=1) + "\n")


def git(*arguments: str) -> str:
    """Return git's output for this checkout; empty if it is not a git repository."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


# The slowest files first: with several workers, none of them should be left for the end.
SLOWEST_FILES = (
    "test_install",
    "test_restarts",
    "test_shapes",
    "test_faults",
    "test_swaps",
    "test_cdi",
    "test_quotas_for_real",
    "test_real_cluster",
    "test_real_api",
    "test_serving",
)


class NodeOnOneWorker(LoadFileScheduling):
    """Runs each file's tests on one worker, and all of tests/node on the same one: only it starts a node with GPUs."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/node" if nodeid.startswith("tests/node/") else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> NodeOnOneWorker:
    return NodeOnOneWorker(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("--results"):
        config.pluginmanager.register(Results(target, config))
