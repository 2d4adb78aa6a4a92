"""Clients that create pods as fast as they are answered: `python -m bench.creating KUBECONFIG NAMESPACES COUNT`.

Plain HTTP/1.1 over TLS with requests written beforehand, so that the clients cost little of the machine they share
with what is measured. Prints one line of JSON.
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

CLIENTS = 50
END = b"\r\n\r\n"


def pod(domain: str, scheduler: str) -> dict[str, Any]:
    """Write a small pod with a part of a GPU."""
    limits = {f"{domain}/vcuda-core": "1", f"{domain}/vcuda-memory": "1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "p-", "annotations": {f"{domain}/use-gputype": "A100"}},
        "spec": {
            "schedulerName": scheduler,
            "containers": [{"name": "c", "image": "registry.example.org/i", "resources": {"limits": limits}}],
        },
    }


class Clients:
    """Several connections to an API server."""

    def __init__(self, kubeconfig: Path, namespaces: list[str], body: bytes) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        where = urlsplit(cluster["server"])
        self._host, self._port = str(where.hostname), int(where.port or 443)
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        token = config["users"][0]["user"]["token"]
        heads = [
            f"POST /api/v1/namespaces/{namespace}/pods HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            for namespace in namespaces
        ]
        self._requests = [head.encode() + body for head in heads]
        self.answers: Counter[int] = Counter()
        self.told: Counter[str] = Counter()
        self.latencies: list[float] = []

    async def run(self, count: int, clients: int) -> float:
        """Create so many pods, and give the seconds it took."""
        self._left = count
        streams = [await asyncio.open_connection(self._host, self._port, ssl=self._context) for _ in range(clients)]
        began = time.perf_counter()
        await asyncio.gather(*(self._create(*stream) for stream in streams))
        took = time.perf_counter() - began
        for _, writer in streams:
            writer.close()
        return took

    async def _create(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._left > 0:
            self._left -= 1
            began = time.perf_counter()
            writer.write(self._requests[self._left % len(self._requests)])
            head = (await reader.readuntil(END)).lower()
            if b"transfer-encoding: chunked" in head:
                body = await chunked(reader)
            else:
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line)
                body = await reader.readexactly(length)
            self.latencies.append(time.perf_counter() - began)
            status = int(head.split(b" ", 2)[1])
            self.answers[status] += 1
            if status >= 300:  # noqa: PLR2004
                self.told[json.loads(body).get("message", "")[:300]] += 1


async def chunked(reader: asyncio.StreamReader) -> bytes:
    """Read a body that comes in pieces."""
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


def main() -> None:
    """Create pods, and print how fast that was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("namespaces", help="separated by commas; pods are spread over them")
    parser.add_argument("count", type=int)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--domain", default="inspur.com")
    parser.add_argument("--scheduler", default="quotient-scheduler")
    options = parser.parse_args()
    body = json.dumps(pod(options.domain, options.scheduler)).encode()
    clients = Clients(options.kubeconfig, options.namespaces.split(","), body)
    try:
        import uvloop  # noqa: PLC0415

        took = uvloop.run(clients.run(options.count, options.clients))
    except ImportError:
        took = asyncio.run(clients.run(options.count, options.clients))
    slow = sorted(clients.latencies)
    print(  # noqa: T201
        json.dumps(
            {
                "per_s": clients.answers[201] / took,
                "p50_ms": slow[len(slow) // 2] * 1e3,
                "p99_ms": slow[len(slow) * 99 // 100] * 1e3,
                "answers": dict(clients.answers),
                "told": dict(clients.told.most_common(3)),
            }
        )
    )


if __name__ == "__main__":
    main()
