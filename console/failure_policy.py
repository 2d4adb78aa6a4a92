"""`quotient disarm` and `quotient arm`: whether pods with GPUs are rejected while the webhook does not answer."""

import time
from contextlib import suppress

import click

from console.check_results import shorten_list
from console.connecting import connect_cluster
from console.errors import CommandError
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import (
    APP,
    APP_LABEL,
    ARM_ANNOTATION,
    ARM_AUTO,
    ARM_NEVER,
    COMPONENT_LABEL,
    NODE_PLUGIN,
    WEBHOOK_CONFIGURATION,
)

# API servers follow webhook configurations by watch; until then they use the old one.
PROPAGATION_S = 2.0
# A node may be down. The job that runs this at an uninstallation has two minutes.
NODE_PLUGIN_END_S, POLL_S = 60.0, 0.5


@click.command(short_help="Admit GPU pods while the webhook is down.")
@click.option(
    "--for-good", is_flag=True, help="Before Quotient is removed: stop validating pods, and delete the node plugin."
)
@click.pass_obj
def disarm(loaded: Loaded, *, for_good: bool) -> None:
    """Set failurePolicy Ignore: pods with GPUs are admitted unchecked while the webhook does not answer.

    The webhook is still called, and its decisions hold. This stays in effect until `quotient arm`.
    """
    annotate(loaded.configuration, ARM_NEVER, for_good=for_good)
    if for_good:
        remove_node_plugin(loaded.configuration)
        click.echo("pods are no longer validated; Quotient can be removed", err=True)
        return
    click.echo("pods with GPUs no longer wait for the webhook; to undo: quotient arm", err=True)


@click.command(short_help="Reject GPU pods while the webhook is down.")
@click.pass_obj
def arm(loaded: Loaded) -> None:
    """Let the controller set failurePolicy Fail again, as soon as the webhook answers."""
    annotate(loaded.configuration, ARM_AUTO)
    click.echo("the controller sets failurePolicy Fail when the webhook answers; check: quotient doctor", err=True)


def remove_node_plugin(configuration: Configuration) -> None:
    """Delete the node plugin, and wait until its pods have ended: they remove what they have written to their Nodes.

    Later they could not: their permissions are deleted together with them.
    """
    from cluster.errors import ApiError, NotFound  # noqa: PLC0415
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import DAEMON_SETS, PODS  # noqa: PLC0415

    cluster, namespace = connect_cluster(configuration), configuration.system_namespace
    selector = Selector(labels=f"{APP_LABEL}={APP},{COMPONENT_LABEL}=nodeplugin")
    deadline = time.monotonic() + NODE_PLUGIN_END_S
    stay = "annotations and labels of Quotient may stay on nodes"
    try:
        with suppress(NotFound):
            cluster.delete(DAEMON_SETS, NODE_PLUGIN, namespace)
        while (pods := cluster.list(PODS, namespace, selector).items) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except (ApiError, Unavailable) as error:
        # No reason to stop an uninstallation: docs/installing.md says how to remove them by hand.
        click.echo(f"the node plugin was not deleted ({error}): {stay}", err=True)
        return
    if pods:
        nodes = shorten_list([str(pod.spec.node_name) for pod in pods])
        click.echo(f"the node plugin has not ended on {nodes}: {stay}", err=True)


def annotate(configuration: Configuration, value: str, *, for_good: bool = False) -> None:
    """Set the annotation that the controller obeys, and apply its effect without waiting for the controller."""
    from cluster.errors import ApiError, NotFound  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.objects import VALIDATING_WEBHOOKS  # noqa: PLC0415
    from controller.webhook_configurations import WEBHOOK_KINDS, WebhookConfigurations  # noqa: PLC0415

    cluster = connect_cluster(configuration)
    annotated = 0
    try:
        for kind in WEBHOOK_KINDS:
            # API servers learn of the two configurations one after the other, and a pod that is no longer rewritten
            # but still validated would be refused. So validation is removed, not only disarmed.
            removed: dict[str, list[str]] = {"webhooks": []} if for_good and kind is VALIDATING_WEBHOOKS else {}
            annotations = {ARM_ANNOTATION: value}
            try:
                cluster.patch(kind, WEBHOOK_CONFIGURATION, "", {"metadata": {"annotations": annotations}, **removed})
                annotated += 1
            except NotFound:
                continue
        if WebhookConfigurations(cluster, configuration.system_namespace).set_failure_policy(None) or for_good:
            time.sleep(PROPAGATION_S)
    except (ApiError, Unavailable) as error:
        raise CommandError(str(error)) from None
    if not annotated:
        raise CommandError(f"no webhook configuration {WEBHOOK_CONFIGURATION} exists: nothing waits for the webhook")
