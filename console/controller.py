"""`quotient controller`: keeps ledgers and quota status right."""

import signal

import click

from settings.loading import Loaded
from vcuda.decision import Unavailable


@click.command()
@click.pass_obj
def controller(loaded: Loaded) -> None:
    """Run the controller.

    It keeps the ledger of every namespace right: reservations become usage when their pods are seen, and room again
    when they end. Several replicas may run; one of them leads. It serves /livez, /readyz and /metrics.
    """
    from cluster.api import connect  # noqa: PLC0415 - only what runs is loaded
    from controller.service import Service  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        service = Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))
    except (Unavailable, OSError) as wrong:
        raise click.ClickException(str(wrong)) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.ending.set())
    service.run()
