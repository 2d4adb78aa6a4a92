"""The webhook as a process on an in-memory cluster, for tests of serving and for benchmarks.

The arguments are settings, written as `path=value`. The namespace `default` has the pods `gpu` and `plain`, for tests
of Bindings.
"""

import os
import sys

from settings.loading import load
from settings.logs import configure_logs
from webhook.gunicorn_server import GunicornApplication


def main() -> None:
    configuration = load(None, os.environ, sys.argv[1:]).configuration
    configure_logs(configuration.log.level, configuration.log.format)

    def build() -> object:
        from cluster.in_memory import InMemoryCluster  # noqa: PLC0415 - in the worker process only
        from cluster.objects import PODS  # noqa: PLC0415
        from ledger.in_memory_ledgers import InMemoryLedgers  # noqa: PLC0415
        from webhook.service import Service  # noqa: PLC0415

        cluster = InMemoryCluster()
        for name, limits in (("gpu", {f"{configuration.domain}/vcuda-core": "100"}), ("plain", {"cpu": "1"})):
            container = {"name": "c", "image": "i", "resources": {"limits": limits}}
            metadata = {"name": name, "namespace": "default"}
            cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [container]}})
        return Service(configuration, cluster, InMemoryLedgers())

    GunicornApplication(configuration.webhook, build).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
