"""`quotient scheduler`: the extender of Quotient's kube-scheduler."""

import click

from console.printing import as_yaml
from console.running import run_until_signalled
from settings.loading import Loaded
from vcuda.decision import Unavailable


@click.command(short_help="Run the scheduler extender.")
@click.option(
    "--print-configuration",
    is_flag=True,
    help="Print the configuration of the kube-scheduler that calls the extender, instead of running it.",
)
@click.pass_obj
def scheduler(loaded: Loaded, *, print_configuration: bool) -> None:
    """Run the scheduler extender.

    A kube-scheduler in the same pod calls it on loopback: it decides which nodes fit a GPU pod, ranks them, and binds
    the pod to particular GPUs. Several replicas may run; the one whose kube-scheduler holds the Lease answers.
    """
    configuration = loaded.configuration
    if print_configuration:
        from scheduler.kube_scheduler import kube_scheduler_configuration  # noqa: PLC0415

        click.echo(as_yaml([kube_scheduler_configuration(configuration)]), nl=False)
        return
    from cluster.api import connect  # noqa: PLC0415 - each component's process loads only its own code
    from scheduler.service import Service  # noqa: PLC0415

    try:
        service = Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))
    except (Unavailable, OSError) as error:
        raise click.ClickException(str(error)) from None
    run_until_signalled(service)
