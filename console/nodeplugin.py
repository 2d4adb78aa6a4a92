"""`quotient nodeplugin`: the device plugin of one node."""

import click

from console.running import run_until_signalled
from settings.loading import Loaded
from vcuda.decision import Unavailable


@click.command(short_help="Run the device plugin of this node.")
@click.pass_obj
def nodeplugin(loaded: Loaded) -> None:
    """Run the device plugin of this node.

    It discovers the node's GPUs, registers them with the kubelet, and allocates to containers the GPUs they were placed
    on. It serves /metrics, /usage, /livez and /readyz on port 5678. Containers keep their GPUs while it is down.
    """
    from cluster.api import connect  # noqa: PLC0415 - each component's process loads only its own code
    from nodeplugin.discovery import CannotServe  # noqa: PLC0415
    from nodeplugin.service import Service  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        service = Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))
        run_until_signalled(service)
    except (CannotServe, Unavailable, OSError) as error:
        raise click.ClickException(str(error)) from None
