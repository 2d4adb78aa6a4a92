"""`quotient disarm` and `quotient arm`: the emergency exit, and the way back."""

import time

import click

from console.quota import connected
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import ARM_ANNOTATION, ARM_AUTO, ARM_NEVER, WEBHOOK_CONFIGURATION

# How long API servers may take to hear of it.
HEARD_S = 2.0


@click.command()
@click.option("--for-good", is_flag=True, help="Before Quotient is removed: judge no pod any more.")
@click.pass_obj
def disarm(loaded: Loaded, *, for_good: bool) -> None:
    """Let pods with GPUs through unchecked while the webhook does not answer: the emergency exit.

    The webhook is asked all the same, and where it answers, its answer holds. It stays so until `quotient arm`.
    """
    write(loaded.configuration, ARM_NEVER, for_good=for_good)
    if for_good:
        click.echo("no pod is judged any more; what Quotient consists of can be removed", err=True)
        return
    click.echo("pods with GPUs no longer wait for the webhook; take it back with: quotient arm", err=True)


@click.command()
@click.pass_obj
def arm(loaded: Loaded) -> None:
    """Insist on the webhook's answer for pods with GPUs again, as soon as there is one."""
    write(loaded.configuration, ARM_AUTO)
    click.echo("the controller insists on an answer as soon as the webhook gives one: see quotient doctor", err=True)


def write(configuration: Configuration, how: str, *, for_good: bool = False) -> None:
    """Note it where the controller looks, and do at once what does not need it."""
    from cluster.errors import ApiError, NotFound  # noqa: PLC0415 - only what runs is loaded
    from cluster.objects import VALIDATING_WEBHOOKS  # noqa: PLC0415
    from controller.webhook_configurations import WEBHOOK_KINDS, WebhookConfigurations  # noqa: PLC0415

    cluster = connected(configuration)
    found = 0
    try:
        for kind in WEBHOOK_KINDS:
            try:
                # API servers hear of two configurations one after the other: a pod that is no longer rewritten and
                # still judged would be refused.
                gone: dict[str, list[str]] = {"webhooks": []} if for_good and kind is VALIDATING_WEBHOOKS else {}
                cluster.patch(
                    kind, WEBHOOK_CONFIGURATION, "", {"metadata": {"annotations": {ARM_ANNOTATION: how}}, **gone}
                )
                found += 1
            except NotFound:
                continue
        if WebhookConfigurations(cluster, configuration.system_namespace).set_failure_policy(None) or for_good:
            time.sleep(HEARD_S)
    except (ApiError, Unavailable) as refused:
        raise click.UsageError(str(refused)) from None
    if not found:
        raise click.UsageError("there is no webhook configuration quotient: nothing waits for the webhook")
