"""Checks that pods fit their quotas at every moment, from the API server's data alone, without Quotient's own code.

Every change of a pod is a new state of its namespace, and in each of them the pods that exist must fit the quota. The
states that a broken watch misses are checked afterwards: the API server can list pods as of any recent version.
"""

import json
import threading
from typing import Any

from cluster.api import ApiCluster
from cluster.errors import ApiError, Expired
from vcuda.decision import Unavailable

CORE, MEMORY, MODELS = "inspur.com/vcuda-core", "inspur.com/vcuda-memory", "inspur.com/use-gputype"
MIB_PER_UNIT = 256
MAX_CHECKED_LATE = 2000

Pod = dict[str, Any]
# By line of the quota: cores, memory in MiB, pods; None is unlimited.
Hard = dict[str, tuple[int | None, int | None, int | None]]


class Checker:
    """Watches the pods of some namespaces, and records every state in which they exceed the quota."""

    def __init__(self, cluster: ApiCluster, quotas: dict[str, Hard]) -> None:
        self._cluster, self._quotas = cluster, quotas
        self.violations: list[str] = []
        # States checked in all, from a list after the watch broke, and not at all; and how often the watch broke.
        self.states = self.checked_late = self.unchecked = self.breaks = 0
        self._pods: dict[str, dict[str, Pod]] = {namespace: {} for namespace in quotas}
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), name=f"checker-{name}", daemon=True) for name in quotas
        ]

    def start(self) -> "Checker":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self, namespace: str) -> None:
        version = 0
        while not self._stopping.is_set():
            try:
                version = self._catch_up(namespace, version)
                version = self._watch(namespace, version)
            except (ApiError, Unavailable):
                self.breaks += 1
                self._stopping.wait(0.2)

    def _list(self, namespace: str, version: int = 0) -> tuple[list[Pod], int]:
        query = {"resourceVersion": str(version), "resourceVersionMatch": "Exact"} if version else {}
        listing = json.loads(self._cluster.with_timeout(5)._call("GET", f"/api/v1/namespaces/{namespace}/pods", query))
        return listing["items"], int(listing["metadata"]["resourceVersion"])

    def _catch_up(self, namespace: str, since: int) -> int:
        """Check the current state, and all states between it and the last one that was checked."""
        pods, version = self._list(namespace)
        between = range(since + 1, version) if since else range(0)
        if len(between) > MAX_CHECKED_LATE:
            self.unchecked += len(between)
        else:
            for missed in between:
                try:
                    self._check(namespace, self._list(namespace, missed)[0], missed)
                    self.checked_late += 1
                except Expired:
                    self.unchecked += 1
        self._pods[namespace] = {pod["metadata"]["uid"]: pod for pod in pods}
        self._check(namespace, pods, version)
        return version

    def _watch(self, namespace: str, version: int) -> int:
        query = {"watch": "1", "resourceVersion": str(version), "timeoutSeconds": "300", "allowWatchBookmarks": "true"}
        path = f"/api/v1/namespaces/{namespace}/pods"
        answer = self._cluster._open("GET", path, query, timeout=None)
        buffer = b""
        try:
            for part in answer.stream(65536, decode_content=True):
                buffer += part
                *lines, buffer = buffer.split(b"\n")
                for line in filter(None, lines):
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        return version
                    version = int(change["object"]["metadata"]["resourceVersion"])
                    self._apply(namespace, change, version)
                if self._stopping.is_set():
                    break
        except Exception:
            self.breaks += 1
        finally:
            answer.close()
        return version

    def _apply(self, namespace: str, change: dict[str, Any], version: int) -> None:
        pods, pod = self._pods[namespace], change["object"]
        if change["type"] == "BOOKMARK":
            return
        if change["type"] == "DELETED":
            pods.pop(pod["metadata"]["uid"], None)
        else:
            pods[pod["metadata"]["uid"]] = pod
        self._check(namespace, list(pods.values()), version)

    def _check(self, namespace: str, pods: list[Pod], version: int) -> None:
        self.states += 1
        alive = [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        if not fits(alive, self._quotas[namespace]):
            self.violations.append(f"{namespace} at {version}: {[summary(pod) for pod in alive]}")


def summary(pod: Pod) -> tuple[str, int, int, tuple[str, ...]]:
    """Return a pod's name, cores, memory in MiB, and the models it may run on."""
    limits = [container["resources"].get("limits", {}) for container in pod["spec"]["containers"]]
    models = pod["metadata"].get("annotations", {}).get(MODELS, "")
    return (
        pod["metadata"]["name"],
        sum(int(each.get(CORE, 0)) for each in limits),
        sum(int(each.get(MEMORY, 0)) for each in limits) * MIB_PER_UNIT,
        tuple(filter(None, models.split(","))),
    )


def fits(pods: list[Pod], hard: Hard) -> bool:
    """Whether some assignment of pods to models keeps all limits."""
    lines = [line for line in hard if line != "*"]
    # Pods with the least choice and the most cores first: that cuts the search.
    requests = sorted(map(summary, pods), key=lambda each: (len(each[3]) or 99, -each[1]))
    limits = {line: [10**9 if limit is None else limit for limit in hard[line]] for line in hard}
    if "*" in limits:
        total = [sum(each[1] for each in requests), sum(each[2] for each in requests), len(requests)]
        if any(taken > limit for taken, limit in zip(total, limits["*"], strict=True)):
            return False
    return place(requests, {line: tuple(limits[line]) for line in lines}, set()) if lines else True


def place(
    pods: list[tuple[str, int, int, tuple[str, ...]]],
    free: dict[str, tuple[int, ...]],
    seen: set[tuple[object, ...]],
) -> bool:
    """Assign pods to models one after another, trying every state once."""
    if not pods:
        return True
    state = (len(pods), *free.values())
    if state in seen:
        return False
    seen.add(state)
    (_, cores, memory, models), *rest = pods
    for model in models or free:
        left = tuple(
            limit - taken for limit, taken in zip(free.get(model, (-1, -1, -1)), (cores, memory, 1), strict=True)
        )
        if min(left) >= 0 and place(rest, {**free, model: left}, seen):
            return True
    return False
