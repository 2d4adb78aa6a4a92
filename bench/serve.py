"""The webhook on an in-memory cluster, for measuring: `python -m bench.serve PORT OPS_PORT CERTIFICATES SHORT`."""

import sys

from settings.configuration import Configuration, Webhook
from settings.logs import configure_logs
from webhook.serving import Application


def main() -> None:
    """Serve until told to end."""
    port, ops_port, certificates, short = sys.argv[1:]
    configuration = Configuration(
        webhook=Webhook(
            address="127.0.0.1",
            port=int(port),
            ops_port=int(ops_port),
            certificates=certificates,
            server_name="127.0.0.1",
            short_path=short == "short",
            drain_s=0,
        )
    )
    configure_logs("warning", "json")

    def build() -> object:
        from cluster.memory import MemoryCluster  # noqa: PLC0415 - in the process that serves
        from webhook.service import Service  # noqa: PLC0415

        return Service(configuration, MemoryCluster())

    Application(configuration.webhook, build).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
