"""`quotient webhook`: runs the admission webhook, or prints the objects that register it."""

from typing import Any

import click

from console.printing import as_yaml
from settings.loading import Loaded


@click.command(short_help="Run the admission webhook.")
@click.option(
    "--print-registration",
    metavar="URL|SERVICE",
    help="Print the objects that make an API server call the webhook, at a URL or a Service "
    "(NAMESPACE/NAME), instead of running it.",
)
@click.option("--ca-file", type=click.File("rb"), help="CA of the serving certificate, for --print-registration.")
@click.pass_obj
def webhook(loaded: Loaded, print_registration: str | None, ca_file: Any) -> None:  # noqa: ANN401 - a click file
    """Run the admission webhook.

    It serves /mutate and /validate over HTTPS, and /livez, /readyz and /metrics on a separate port. Certificates
    are read from the folder webhook.certificates and reloaded when they change. SIGTERM drains it.
    """
    configuration = loaded.configuration
    if print_registration is not None:
        from webhook.registration import registration  # noqa: PLC0415 - each component's process loads only its own code
        from webhook.service import admission_config_of  # noqa: PLC0415

        objects = registration(
            admission_config_of(configuration), print_registration, ca_file.read() if ca_file else b""
        )
        click.echo(as_yaml(objects), nl=False)
        return
    from cluster.api import connect  # noqa: PLC0415
    from webhook.gunicorn_server import GunicornApplication  # noqa: PLC0415
    from webhook.service import Service  # noqa: PLC0415

    def build() -> Service:
        return Service(configuration, connect(configuration.cluster.kubeconfig, configuration.cluster.context))

    GunicornApplication(configuration.webhook, build).run()
