"""`quotient controller`: reconciles ledgers and quota status, and manages certificates."""

import click

from console.running import run_until_signalled
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
    run_until_signalled(service)
