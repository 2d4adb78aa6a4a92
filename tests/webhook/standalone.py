"""The webhook as a process without a cluster, for tests of serving and for measuring: `--set` flags as its settings.

Pods named `gpu` and `plain` in every namespace `default` are there to be bound.
"""

import os
import sys

from settings.loading import load
from settings.logs import configure_logs
from webhook.gunicorn_server import GunicornApplication


def main() -> None:
    """Serve until told to end."""
    configuration = load(None, os.environ, sys.argv[1:]).configuration
    configure_logs(configuration.log.level, configuration.log.format)

    def build() -> object:
        from cluster.in_memory import InMemoryCluster  # noqa: PLC0415 - in the process that serves
        from cluster.objects import PODS  # noqa: PLC0415
        from ledger.in_memory_ledgers import InMemoryLedgers  # noqa: PLC0415
        from webhook.service import Service  # noqa: PLC0415

        cluster = InMemoryCluster()
        for name, limits in (("gpu", {f"{configuration.domain}/vcuda-core": "100"}), ("plain", {"cpu": "1"})):
            container = {"name": "c", "image": "i", "resources": {"limits": limits}}
            made = {"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": [container]}}
            cluster.create(PODS, made)
        return Service(configuration, cluster, InMemoryLedgers())

    GunicornApplication(configuration.webhook, build).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
