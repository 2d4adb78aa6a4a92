"""`quotient nodeplugin`: the plugin of one node."""

import signal

import click

from settings.loading import Loaded
from vcuda.decision import Unavailable


@click.command()
@click.pass_obj
def nodeplugin(loaded: Loaded) -> None:
    """Run the plugin of this node.

    It finds the node's GPUs, offers them to the kubelet, and gives containers those that they were placed on. It serves
    /metrics, /usage, /livez and /readyz on port 5678. Containers keep what they have while it is away.
    """
    from cluster.api import connect  # noqa: PLC0415 - only what runs is loaded
    from nodeplugin.service import CannotServe, Service  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        service = Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.ending.set())
        service.run()
    except (CannotServe, Unavailable, OSError) as wrong:
        raise click.ClickException(str(wrong)) from None
