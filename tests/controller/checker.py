"""Judges a cluster by what its API server shows of pods, and by nothing of Quotient's own code.

Every change of a pod is a new state of its namespace, and in each of them the pods that exist must fit the quota. What
a broken watch passes over is looked up afterwards: the API server can list pods as they were at any recent version.
"""

import json
import threading
from typing import Any

from cluster.api import ApiCluster
from cluster.errors import ApiError, Expired
from vcuda.decision import Unavailable

CORE, MEMORY, MODELS = "inspur.com/vcuda-core", "inspur.com/vcuda-memory", "inspur.com/use-gputype"
MIB_PER_UNIT = 256
MOST_LOOKED_UP = 2000

Pod = dict[str, Any]
# By line: cores, memory in MiB, pods; None is unlimited.
Hard = dict[str, tuple[int | None, int | None, int | None]]


class Checker:
    """Follows the pods of some namespaces, and notes every state in which they are too many."""

    def __init__(self, cluster: ApiCluster, quotas: dict[str, Hard]) -> None:
        self._cluster, self._quotas = cluster, quotas
        self.violations: list[str] = []
        self.states = self.looked_up = self.breaks = self.passed_over = 0
        self._pods: dict[str, dict[str, Pod]] = {namespace: {} for namespace in quotas}
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), name=f"checker-{name}", daemon=True) for name in quotas
        ]

    def start(self) -> "Checker":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self, namespace: str) -> None:
        version = 0
        while not self._ending.is_set():
            try:
                version = self._catch_up(namespace, version)
                version = self._follow(namespace, version)
            except (ApiError, Unavailable):
                self.breaks += 1
                self._ending.wait(0.2)

    def _list(self, namespace: str, version: int = 0) -> tuple[list[Pod], int]:
        query = {"resourceVersion": str(version), "resourceVersionMatch": "Exact"} if version else {}
        found = json.loads(self._cluster.with_timeout(5)._call("GET", f"/api/v1/namespaces/{namespace}/pods", query))
        return found["items"], int(found["metadata"]["resourceVersion"])

    def _catch_up(self, namespace: str, since: int) -> int:
        """Look at the present state, and at all those between it and the last one that was seen."""
        pods, version = self._list(namespace)
        between = range(since + 1, version) if since else range(0)
        if len(between) > MOST_LOOKED_UP:
            self.passed_over += len(between)
        else:
            for moment in between:
                try:
                    self._judge(namespace, self._list(namespace, moment)[0], moment)
                    self.looked_up += 1
                except Expired:
                    self.passed_over += 1
        self._pods[namespace] = {pod["metadata"]["uid"]: pod for pod in pods}
        self._judge(namespace, pods, version)
        return version

    def _follow(self, namespace: str, version: int) -> int:
        query = {"watch": "1", "resourceVersion": str(version), "timeoutSeconds": "300", "allowWatchBookmarks": "true"}
        where = f"/api/v1/namespaces/{namespace}/pods"
        answer = self._cluster._open("GET", where, query, timeout=None)
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
                    self._take(namespace, change, version)
                if self._ending.is_set():
                    break
        except Exception:
            self.breaks += 1
        finally:
            answer.close()
        return version

    def _take(self, namespace: str, change: dict[str, Any], version: int) -> None:
        pods, pod = self._pods[namespace], change["object"]
        if change["type"] == "BOOKMARK":
            return
        if change["type"] == "DELETED":
            pods.pop(pod["metadata"]["uid"], None)
        else:
            pods[pod["metadata"]["uid"]] = pod
        self._judge(namespace, list(pods.values()), version)

    def _judge(self, namespace: str, pods: list[Pod], version: int) -> None:
        self.states += 1
        alive = [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        if not fits(alive, self._quotas[namespace]):
            self.violations.append(f"{namespace} at {version}: {[described(pod) for pod in alive]}")


def described(pod: Pod) -> tuple[str, int, int, tuple[str, ...]]:
    """Say what a pod holds: cores, MiB, and the models it may run on."""
    limits = [container["resources"].get("limits", {}) for container in pod["spec"]["containers"]]
    models = pod["metadata"].get("annotations", {}).get(MODELS, "")
    return (
        pod["metadata"]["name"],
        sum(int(each.get(CORE, 0)) for each in limits),
        sum(int(each.get(MEMORY, 0)) for each in limits) * MIB_PER_UNIT,
        tuple(filter(None, models.split(","))),
    )


def fits(pods: list[Pod], hard: Hard) -> bool:
    """Tell whether some choice of models puts all pods below all ceilings."""
    lines = [line for line in hard if line != "*"]
    wanted = sorted(map(described, pods), key=lambda each: (len(each[3]) or 99, -each[1]))
    room = {line: [10**9 if most is None else most for most in hard[line]] for line in hard}
    if "*" in room:
        total = [sum(each[1] for each in wanted), sum(each[2] for each in wanted), len(wanted)]
        if any(taken > most for taken, most in zip(total, room["*"], strict=True)):
            return False
    return place(wanted, {line: tuple(room[line]) for line in lines}, set()) if lines else True


def place(
    pods: list[tuple[str, int, int, tuple[str, ...]]],
    room: dict[str, tuple[int, ...]],
    seen: set[tuple[object, ...]],
) -> bool:
    """Put pods on models, one after another, trying every choice once."""
    if not pods:
        return True
    state = (len(pods), *room.values())
    if state in seen:
        return False
    seen.add(state)
    (_, cores, memory, models), *rest = pods
    for model in models or room:
        left = tuple(
            most - taken for most, taken in zip(room.get(model, (-1, -1, -1)), (cores, memory, 1), strict=True)
        )
        if min(left) >= 0 and place(rest, {**room, model: left}, seen):
            return True
    return False
