"""`quotient controller`: reconciles ledgers and quota status, and manages certificates."""

import signal

import click

from settings.loading import Loaded
from vcuda.decision import Unavailable


@click.command(short_help="Run the controller.")
@click.pass_obj
def controller(loaded: Loaded) -> None:
    """Run the controller.

    It reconciles the ledger of every namespace: reservations become usage when their pods appear, and are released when
    the pods end. Several replicas may run; one of them leads. It serves /livez, /readyz and /metrics.
    """
    from cluster.api import connect  # noqa: PLC0415 - each component's process loads only its own code
    from controller.service import Service  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        service = Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))
    except (Unavailable, OSError) as error:
        raise click.ClickException(str(error)) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.ending.set())
    service.run()
