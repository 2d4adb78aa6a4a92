"""`quotient certs`: the certificates in use and their expiry; `rotate` requests new ones; `make` writes files."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from certs.authority import issue, new_authority
from certs.certificate_secrets import CertificateSecrets, RotationTarget
from certs.key_pairs import CertificateError, KeyPair, certificates_in, format_time, names_of
from certs.renewal import due_for_renewal, is_signed_by, needs_renewal
from certs.rotation import CertificateState
from console.connecting import connect_cluster
from console.errors import CommandError
from console.printing import wide_console
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import CA_SECRET, TLS_CERTIFICATE, TLS_KEY

Row = dict[str, Any]


@click.group(invoke_without_command=True, short_help="Show, rotate or make certificates.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def certs(context: click.Context, output: str) -> None:
    """Show the certificates in use, when they expire, and which webhooks trust them.

    Exit code: 0 no problems, 1 problems, 2 wrong usage or no cluster.
    """
    if context.invoked_subcommand is not None:
        return
    loaded: Loaded = context.obj
    rows, problems = certificate_report(loaded.configuration)
    if output == "json":
        report = {"certificates": rows, "wrong": problems}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        table = Table("certificate", "for", "until", "trusted by", "state", box=None)
        for row in rows:
            table.add_row(*(escape(str(row[key])) for key in ("certificate", "for", "until", "trustedBy", "state")))
        wide_console().print(table)
        for problem in problems:
            wide_console().print(f"[red]problem[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    context.exit(1 if problems else 0)


def certificate_report(configuration: Configuration) -> tuple[list[Row], list[str]]:
    """Return a row for each certificate of the cluster, and the problems found."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only loaded where a cluster is used
    from controller.webhook_configurations import WebhookConfigurations  # noqa: PLC0415

    cluster, namespace, now = connect_cluster(configuration), configuration.system_namespace, datetime.now(UTC)
    try:
        hooks = WebhookConfigurations(cluster, namespace)
        bundles = [bundle for bundle in hooks.bundles() if bundle]
        without = len(hooks.bundles()) - len(bundles)
        kept = CertificateSecrets(cluster, namespace).read(now).state
    except (ApiError, Unavailable) as error:
        raise CommandError(str(error)) from None
    rows = [row_of(name, pair, bundles) for name, pair in pairs_of(kept)]
    problems = []
    if without:
        writer = "the controller" if configuration.certificates.manage else "your certificate manager"
        problems.append(f"{without} webhooks have no caBundle: {writer} has to write it")
    if not configuration.certificates.manage:
        return rows, problems
    if kept.current is None:
        return rows, [*problems, f"secret {namespace}/{CA_SECRET} has no usable CA: check that the controller runs"]
    names, leaf = configuration.served_names(), kept.leaf
    renewing, why = needs_renewal(leaf.certificate, leaf.key, now=now, names=names, authority=kept.current.certificate)
    rows.append(leaf_row(kept, bundles, why))
    if renewing:
        problems.append(f"serving certificate: {why}; the controller issues a new one")
    elif distrusting := sum(not is_signed_by(certificates_in(leaf.certificate, "")[0], bundle) for bundle in bundles):
        problems.append(
            f"{distrusting} of {len(bundles)} webhooks do not trust the serving certificate: GPU pods are rejected"
        )
    return rows, problems


def pairs_of(kept: CertificateState) -> list[tuple[str, KeyPair]]:
    named = (("CA", kept.current), ("next CA", kept.next))
    return [(name, pair) for name, pair in named if pair is not None]


def row_of(name: str, pair: KeyPair, bundles: list[bytes]) -> Row:
    certificate = certificates_in(pair.certificate, name)[0]
    trusting = sum(pair.certificate in bundle for bundle in bundles)
    return {
        "certificate": name,
        "for": certificate.subject.rfc4514_string(),
        "until": format_time(pair.not_after),
        "trustedBy": f"{trusting} of {len(bundles)} webhooks",
        "state": due_for_renewal(certificate, datetime.now(UTC))[1],
    }


def leaf_row(kept: CertificateState, bundles: list[bytes], state: str) -> Row:
    try:
        leaf = certificates_in(kept.leaf.certificate, "it")[0]
    except CertificateError as error:
        return {"certificate": "serving", "for": "", "until": "", "trustedBy": "", "state": str(error)}
    trusting = sum(is_signed_by(leaf, bundle) for bundle in bundles)
    return {
        "certificate": "serving",
        "for": ", ".join(names_of(leaf)),
        "until": format_time(leaf.not_valid_after_utc),
        "trustedBy": f"{trusting} of {len(bundles)} webhooks",
        "state": state,
    }


@certs.command()
@click.option("--leaf", is_flag=True, help="Only a new serving certificate, signed by the same CA.")
@click.pass_obj
def rotate(loaded: Loaded, *, leaf: bool) -> None:
    """Request a new CA, and with it a new serving certificate.

    The controller replaces them without an interruption, which takes some minutes; `quotient certs` shows progress.
    """
    from cluster.errors import ApiError, NotFound  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        CertificateSecrets(connect_cluster(configuration), configuration.system_namespace).request_rotation(
            RotationTarget.LEAF if leaf else RotationTarget.AUTHORITY
        )
    except NotFound:
        where = f"{configuration.system_namespace}/{CA_SECRET}"
        raise CommandError(
            f"secret {where} does not exist: check that the controller runs and manages certificates"
        ) from None
    except (ApiError, Unavailable) as error:
        raise CommandError(str(error)) from None
    click.echo("requested; to see progress: quotient certs", err=True)


@certs.command(short_help="Write certificates for a webhook outside a cluster.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--name", "names", multiple=True, required=True, metavar="NAME", help="A DNS name or IP address; repeatable."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
def make(folder: Path, names: tuple[str, ...], *, force: bool) -> None:
    """Write a CA and a serving certificate into FOLDER, to run the webhook outside a cluster.

    Callers have to trust ca.crt; the webhook serves tls.crt and tls.key. The CA's private key is discarded.
    """
    now = datetime.now(UTC)
    authority = new_authority(now)
    try:
        pair = issue(authority, names, now)
    except ValueError as error:
        raise click.UsageError(f"--name: {error}; write a DNS name or an IP address") from None
    files = {"ca.crt": authority.certificate, TLS_CERTIFICATE: pair.certificate, TLS_KEY: pair.key}
    existing = [name for name in files if (folder / name).exists()]
    if existing and not force:
        raise click.UsageError(f"{folder}: {', '.join(existing)} exist; name another folder, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}") from None
    click.echo(f"{folder}: for {', '.join(names)}, until {format_time(pair.not_after)}", err=True)
