"""A load generator: `python -m bench.creating KUBECONFIG NAMESPACES COUNT` creates pods at full speed.

Each client sends its next request as soon as the previous one is answered. It speaks plain HTTP/1.1 over TLS and sends
requests that were serialized beforehand, because it shares the machine's cores with the servers that are measured.
Prints one line of JSON.
"""

import argparse
import asyncio
import json
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vcuda.names import DEFAULT_DOMAIN, SCHEDULER, Names

CLIENTS = 50
END_OF_HEADERS = b"\r\n\r\n"


def pod_manifest(names: Names, scheduler: str) -> dict[str, Any]:
    """Return a pod with the smallest possible fraction of a GPU."""
    limits = {names.core: "1", names.memory: "1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "p-", "annotations": {names.use_models: "A100"}},
        "spec": {
            "schedulerName": scheduler,
            "containers": [{"name": "c", "image": "registry.example.org/i", "resources": {"limits": limits}}],
        },
    }


class Clients:
    """Connections to an API server that create the same pod again and again, in all namespaces in turn."""

    def __init__(self, kubeconfig: Path, namespaces: list[str], body: bytes) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        server = urlsplit(cluster["server"])
        self._host, self._port = str(server.hostname), int(server.port or 443)
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        token = config["users"][0]["user"]["token"]
        heads = [
            f"POST /api/v1/namespaces/{namespace}/pods HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            for namespace in namespaces
        ]
        self._requests = [head.encode() + body for head in heads]
        self.statuses: Counter[int] = Counter()
        self.error_messages: Counter[str] = Counter()
        self.latencies_s: list[float] = []

    async def run(self, count: int, clients: int) -> float:
        """Create `count` pods, and return the seconds that it took, without the time to connect."""
        self._left = count
        streams = [await asyncio.open_connection(self._host, self._port, ssl=self._context) for _ in range(clients)]
        began = time.perf_counter()
        await asyncio.gather(*(self._create(*stream) for stream in streams))
        took_s = time.perf_counter() - began
        for _, writer in streams:
            writer.close()
        return took_s

    async def _create(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._left > 0:
            self._left -= 1
            began = time.perf_counter()
            writer.write(self._requests[self._left % len(self._requests)])
            head = (await reader.readuntil(END_OF_HEADERS)).lower()
            if b"transfer-encoding: chunked" in head:
                body = await read_chunked(reader)
            else:
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line)
                body = await reader.readexactly(length)
            self.latencies_s.append(time.perf_counter() - began)
            status = int(head.split(b" ", 2)[1])
            self.statuses[status] += 1
            if status >= 300:  # noqa: PLR2004
                self.error_messages[json.loads(body).get("message", "")[:300]] += 1


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    """Read a body with chunked transfer encoding, which the API server uses for large responses."""
    chunks = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("namespaces", help="separated by commas; pods are spread over them")
    parser.add_argument("count", type=int, help="number of pods")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="number of connections")
    parser.add_argument("--domain", default=DEFAULT_DOMAIN, help="domain of the GPU resources")
    parser.add_argument("--scheduler", default=SCHEDULER, help="schedulerName of the pods")
    options = parser.parse_args()
    body = json.dumps(pod_manifest(Names(options.domain), options.scheduler)).encode()
    clients = Clients(options.kubeconfig, options.namespaces.split(","), body)
    # uvloop costs the shared machine less; the benchmark also runs without it.
    try:
        import uvloop  # noqa: PLC0415

        took_s = uvloop.run(clients.run(options.count, options.clients))
    except ImportError:
        took_s = asyncio.run(clients.run(options.count, options.clients))
    latencies_s = sorted(clients.latencies_s)
    print(  # noqa: T201
        json.dumps(
            {
                "per_s": clients.statuses[201] / took_s,
                "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
                "p99_ms": latencies_s[len(latencies_s) * 99 // 100] * 1e3,
                "statuses": dict(clients.statuses),
                "errors": dict(clients.error_messages.most_common(3)),
            }
        )
    )


if __name__ == "__main__":
    main()
