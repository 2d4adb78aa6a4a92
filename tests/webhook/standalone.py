"""The webhook as a process on an in-memory cluster, for tests of serving and for benchmarks.

The arguments are settings, written as `path=value`. The namespace `default` has the pods `gpu` and `plain`, for tests
of Bindings.
"""

import os
import sys

from cluster.in_memory import InMemoryCluster
from cluster.objects import PODS
from ledger.in_memory_ledgers import InMemoryLedgers
from settings.loading import load
from settings.logs import configure_logs
from webhook.gunicorn_server import GunicornApplication
from webhook.service import Service


def main() -> None:
    configuration = load(None, os.environ, sys.argv[1:]).configuration
    configure_logs(configuration.log.level, configuration.log.format)

    def build() -> Service:
        cluster = InMemoryCluster()
        for name, limits in (("gpu", {f"{configuration.domain}/vcuda-core": "100"}), ("plain", {"cpu": "1"})):
            container = {"name": "c", "image": "i", "resources": {"limits": limits}}
            metadata = {"name": name, "namespace": "default"}
            cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [container]}})
        return Service(configuration, cluster, InMemoryLedgers())

    GunicornApplication(configuration.webhook, build).run()


if __name__ == "__main__":
    main()
