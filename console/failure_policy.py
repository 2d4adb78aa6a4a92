"""`quotient disarm` and `quotient arm`: whether pods with GPUs are rejected while the webhook does not answer."""

import time

import click

from console.connecting import connect_cluster
from console.errors import CommandError
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import ARM_ANNOTATION, ARM_AUTO, ARM_NEVER, WEBHOOK_CONFIGURATION

# API servers follow webhook configurations by watch; until then they use the old one.
PROPAGATION_S = 2.0


@click.command(short_help="Admit GPU pods while the webhook is down.")
@click.option("--for-good", is_flag=True, help="Before Quotient is removed: stop validating pods at once.")
@click.pass_obj
def disarm(loaded: Loaded, *, for_good: bool) -> None:
    """Set failurePolicy Ignore: pods with GPUs are admitted unchecked while the webhook does not answer.

    The webhook is still called, and its decisions hold. This stays in effect until `quotient arm`.
    """
    annotate(loaded.configuration, ARM_NEVER, for_good=for_good)
    if for_good:
        click.echo("pods are no longer validated; Quotient can be removed", err=True)
        return
    click.echo("pods with GPUs no longer wait for the webhook; to undo: quotient arm", err=True)


@click.command(short_help="Reject GPU pods while the webhook is down.")
@click.pass_obj
def arm(loaded: Loaded) -> None:
    """Let the controller set failurePolicy Fail again, as soon as the webhook answers."""
    annotate(loaded.configuration, ARM_AUTO)
    click.echo("the controller sets failurePolicy Fail when the webhook answers; check: quotient doctor", err=True)


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
