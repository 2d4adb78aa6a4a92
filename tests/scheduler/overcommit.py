"""Checks that no GPU is given out beyond its size, from the API server's data alone, without Quotient's own code.

Every version of every pod is looked at: the pods that are bound and not over hold what their placement says.
"""

import json
import threading
from typing import Any

import urllib3

from cluster.api import ApiCluster
from cluster.errors import ApiError
from vcuda.decision import Unavailable

PLACEMENT, INVENTORY = "inspur.com/gpu-placement", "inspur.com/gpu-inventory"
ENDED = ("Succeeded", "Failed")

# Cores and MiB by GPU.
Held = dict[str, tuple[int, int]]


def placement_of(pod: dict[str, Any]) -> Held:
    """Return what a bound pod holds; its containers all run at the same time."""
    if not pod["spec"].get("nodeName") or pod.get("status", {}).get("phase") in ENDED:
        return {}
    held: Held = {}
    written = json.loads(pod["metadata"].get("annotations", {}).get(PLACEMENT, '{"containers":{}}'))
    for slices in written["containers"].values():
        for each in slices:
            cores, mib = held.get(each["uuid"], (0, 0))
            held[each["uuid"]] = cores + each["cores"], mib + each["memoryMiB"]
    return held


class OvercommitChecker:
    """Watches all pods, and records every state in which a GPU is given out beyond its size."""

    def __init__(self, cluster: ApiCluster, sizes: dict[str, int]) -> None:
        self._cluster, self._sizes = cluster, sizes
        self.violations: list[str] = []
        # GPUs that are over their size at present; each is a violation that may still be settled.
        self.current: set[str] = set()
        self.states = self.breaks = 0
        self._held: dict[str, Held] = {}
        self._total: Held = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overcommit", daemon=True)

    def start(self) -> "OvercommitChecker":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                listing = json.loads(self._cluster.with_timeout(10)._call("GET", "/api/v1/pods"))
                self._replace(listing["items"])
                self._watch(listing["metadata"]["resourceVersion"])
            except (ApiError, Unavailable, OSError, urllib3.exceptions.HTTPError):
                self.breaks += 1
                self._stopping.wait(0.2)

    def _replace(self, pods: list[dict[str, Any]]) -> None:
        self._held, self._total = {}, {}
        for pod in pods:
            self._set(pod["metadata"]["uid"], pod["metadata"]["name"], placement_of(pod))

    def _watch(self, version: str) -> None:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "5"}
        response = self._cluster._open("GET", "/api/v1/pods", query)
        rest = b""
        try:
            for chunk in response.stream(65536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        return
                    pod = change["object"]
                    held = {} if change["type"] == "DELETED" else placement_of(pod)
                    self._set(pod["metadata"]["uid"], pod["metadata"]["name"], held)
                if self._stopping.is_set():
                    return
        finally:
            response.close()

    def _set(self, uid: str, name: str, held: Held) -> None:
        for gpu, (cores, mib) in self._held.pop(uid, {}).items():
            before = self._total[gpu]
            self._total[gpu] = before[0] - cores, before[1] - mib
            if not self._is_over(gpu):
                self.current.discard(gpu)
        for gpu, (cores, mib) in held.items():
            before = self._total.get(gpu, (0, 0))
            self._total[gpu] = before[0] + cores, before[1] + mib
            if self._is_over(gpu) and gpu not in self.current:
                self.current.add(gpu)
                self.violations.append(f"{gpu}: {self._total[gpu]} after pod {name}")
        self._held[uid] = held
        self.states += 1

    def _is_over(self, gpu: str) -> bool:
        cores, mib = self._total[gpu]
        return cores > 100 or mib > self._sizes[gpu]

    def free_cores(self) -> int:
        return sum(100 - self._total.get(gpu, (0, 0))[0] for gpu in self._sizes)
