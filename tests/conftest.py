"""Fixtures that all rooms share: a real Kubernetes, and what to do where there can be none."""

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

# Deadlines measure the machine, not the code. One thorough profile for the full-size runs.
settings.register_profile("quotient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("quotient"), max_examples=5_000)
settings.load_profile("quotient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write outcome and duration of each test here, with commit and seed")


@pytest.fixture(scope="session")
def real_cluster_possible() -> None:
    """Skip, visibly, where there can be no real cluster; in CI that is a failure, or nobody would notice."""
    if why := why_no_cluster():
        do_without(why, in_ci=os.environ.get("CI") == "true")


def do_without(why: str, *, in_ci: bool) -> NoReturn:
    """Skip or fail a test that cannot have its cluster."""
    if in_ci:
        pytest.fail(f"in CI a real Kubernetes must run, but it {why}", pytrace=False)
    pytest.skip(f"a real Kubernetes {why}")


class SharedClusters:
    """The clusters that tests share: started when first asked for, or asked for again after an end."""

    def __init__(self) -> None:
        self._running: dict[bool, RealCluster] = {}

    def get(self, *, node: bool) -> RealCluster:
        """Give the cluster with or without a node."""
        if node not in self._running:
            self._running[node] = RealCluster.start(node=node)
        return self._running[node]

    def stop(self) -> None:
        """End those that run."""
        while self._running:
            self._running.popitem()[1].stop()


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[SharedClusters]:
    """Keeps the shared clusters until the end of the test run."""
    clusters = SharedClusters()
    yield clusters
    clusters.stop()


@pytest.fixture
def control_plane(real_cluster_possible: None, shared_clusters: SharedClusters) -> RealCluster:
    """A real API server with its controllers and scheduler, and no node."""
    return shared_clusters.get(node=False)


@pytest.fixture
def node_cluster(real_cluster_possible: None, shared_clusters: SharedClusters) -> RealCluster:
    """A real cluster that runs pods: with containerd and a kubelet."""
    return shared_clusters.get(node=True)


class Results:
    """Collects outcomes for `--results`."""

    def __init__(self, target: Path, config: pytest.Config) -> None:
        self._target, self._config, self._began = target, config, time.time()
        self._tests: dict[str, dict[str, object]] = {}
        # Results of an earlier run are not a change of what is tested.
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
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._began)),
            "tests": dict(sorted(self._tests.items())),
        }
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.write_text(json.dumps(summary, indent=1) + "\n")


def git(*arguments: str) -> str:
    """Ask git about this checkout; nothing where there is none."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


# Files that take longest: where several run side by side, these begin, so that none of them is left for the end.
SLOW = (
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


class ByRoom(LoadFileScheduling):
    """Keeps a file's tests together, and all that share the node with GPUs: one worker has it, the others need none."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/node" if nodeid.startswith("tests/node/") else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByRoom:
    return ByRoom(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("--results"):
        config.pluginmanager.register(Results(target, config))
