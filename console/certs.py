"""`quotient certs`: which certificates are in use and until when; `rotate` asks for others; `make` writes files."""

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
from console.printing import wide_console
from console.quota import connected
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import CA_SECRET, TLS_CERTIFICATE, TLS_KEY

Row = dict[str, Any]


@click.group(invoke_without_command=True)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def certs(context: click.Context, output: str) -> None:
    """Show which certificates are in use and until when, and who trusts them.

    Exit code: 0 all is well, 1 something is not, 2 bad usage or no cluster.
    """
    if context.invoked_subcommand is not None:
        return
    loaded: Loaded = context.obj
    rows, wrong = standing(loaded.configuration)
    if output == "json":
        found = {"certificates": rows, "wrong": wrong}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        table = Table("certificate", "for", "until", "trusted by", "state", box=None)
        for row in rows:
            table.add_row(*(escape(str(row[key])) for key in ("certificate", "for", "until", "trustedBy", "state")))
        wide_console().print(table)
        for each in wrong:
            wide_console().print(f"[red]wrong[/red] {escape(each)}", highlight=False, soft_wrap=True)
    context.exit(1 if wrong else 0)


def standing(configuration: Configuration) -> tuple[list[Row], list[str]]:
    """Say how certificates stand in a cluster, and what is wrong with them."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only what runs is loaded
    from controller.webhook_configurations import WebhookConfigurations  # noqa: PLC0415

    cluster, namespace, now = connected(configuration), configuration.system_namespace, datetime.now(UTC)
    try:
        hooks = WebhookConfigurations(cluster, namespace)
        bundles = [bundle for bundle in hooks.bundles() if bundle]
        without = len(hooks.bundles()) - len(bundles)
        kept = CertificateSecrets(cluster, namespace).read(now).state
    except (ApiError, Unavailable) as refused:
        raise click.UsageError(str(refused)) from None
    rows = [row_of(name, pair, bundles) for name, pair in pairs_of(kept)]
    wrong = [f"{without} webhooks trust no CA: whoever keeps certificates puts that right"] if without else []
    if not configuration.certificates.manage:
        return rows, wrong
    if kept.current is None:
        return rows, [*wrong, f"secret {namespace}/{CA_SECRET} has no CA that can sign: does the controller run?"]
    names, leaf = configuration.served_names(), kept.leaf
    renewing, why = needs_renewal(leaf.certificate, leaf.key, now=now, names=names, authority=kept.current.certificate)
    rows.append(leaf_row(kept, bundles, why))
    if renewing:
        wrong.append(f"serving certificate: {why}; the controller makes another")
    elif distrusting := sum(not is_signed_by(certificates_in(leaf.certificate, "")[0], bundle) for bundle in bundles):
        wrong.append(f"{distrusting} of {len(bundles)} webhooks do not trust the serving certificate: pods are refused")
    return rows, wrong


def pairs_of(kept: CertificateState) -> list[tuple[str, KeyPair]]:
    """Name the CAs that are kept."""
    named = (("CA", kept.current), ("CA that follows", kept.next))
    return [(name, pair) for name, pair in named if pair is not None]


def row_of(name: str, pair: KeyPair, bundles: list[bytes]) -> Row:
    """Show a CA."""
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
    """Show the serving certificate."""
    try:
        leaf = certificates_in(kept.leaf.certificate, "it")[0]
    except CertificateError as wrong:
        return {"certificate": "serving", "for": "", "until": "", "trustedBy": "", "state": str(wrong)}
    trusting = sum(is_signed_by(leaf, bundle) for bundle in bundles)
    return {
        "certificate": "serving",
        "for": ", ".join(names_of(leaf)),
        "until": format_time(leaf.not_valid_after_utc),
        "trustedBy": f"{trusting} of {len(bundles)} webhooks",
        "state": state,
    }


@certs.command()
@click.option("--leaf", is_flag=True, help="Only another serving certificate, of the same CA.")
@click.pass_obj
def rotate(loaded: Loaded, *, leaf: bool) -> None:
    """Ask for another CA, and with it for another serving certificate.

    The controller does it in the safe order, which takes some minutes; `quotient certs` shows how far it is.
    """
    from cluster.errors import ApiError, NotFound  # noqa: PLC0415

    configuration = loaded.configuration
    try:
        CertificateSecrets(connected(configuration), configuration.system_namespace).request_rotation(
            RotationTarget.LEAF if leaf else RotationTarget.AUTHORITY
        )
    except NotFound:
        where = f"{configuration.system_namespace}/{CA_SECRET}"
        raise click.UsageError(f"there is no secret {where}: does a controller run that makes certificates?") from None
    except (ApiError, Unavailable) as refused:
        raise click.UsageError(str(refused)) from None
    click.echo("asked for; see how far it is with: quotient certs", err=True)


@certs.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--name", "names", multiple=True, required=True, metavar="NAME", help="A DNS name or address; repeatable."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
def make(folder: Path, names: tuple[str, ...], *, force: bool) -> None:
    """Write a CA and a serving certificate into FOLDER, for running the webhook without a cluster's.

    ca.crt is what callers have to trust; tls.crt and tls.key are what the webhook serves. The CA's key is not kept.
    """
    now = datetime.now(UTC)
    authority = new_authority(now)
    try:
        pair = issue(authority, names, now)
    except ValueError as wrong:
        raise click.UsageError(f"--name: {wrong}; write a DNS name or an address") from None
    files = {"ca.crt": authority.certificate, TLS_CERTIFICATE: pair.certificate, TLS_KEY: pair.key}
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise click.UsageError(f"{folder}: {', '.join(there)} exist already; name another folder, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
    except OSError as wrong:
        raise click.UsageError(f"{folder}: {wrong.strerror}") from None
    click.echo(f"{folder}: for {', '.join(names)}, until {format_time(pair.not_after)}", err=True)
