"""`quotient admit`: what the webhook would decide on manifests, and how it would change them, without a cluster."""

import click
import msgspec
from rich.markup import escape

from console.errors import CommandError
from console.manifests import NO_KIND, parse_objects, read_text
from console.offline_admission import DEFAULT_USER, AdmissionResult, OfflineQuotas, admit_offline, read_quotas
from console.printing import as_yaml, wide_console
from console.yaml_locations import source_texts
from settings.loading import Loaded
from vcuda.quota import QuotaError
from vcuda.strict_yaml import DocumentError
from webhook.service import admission_config_of


def quotas_from(file: str | None, unit_mib: int) -> OfflineQuotas:
    """Read the file of `--quota`; no file means no quotas."""
    if file is None:
        return OfflineQuotas()
    try:
        return read_quotas(read_text(file), file, unit_mib)
    except QuotaError as error:
        raise CommandError(str(error)) from None


@click.command(short_help="Show the admission decision on manifests.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@click.option("--quota", "quota_file", metavar="FILE", help="Charge the documents to these quotas, one after another.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For documents that name none.")
@click.option("--as", "user", default=DEFAULT_USER, show_default=True, help="The user who applies them.")
@click.pass_context
def admit(
    context: click.Context, files: tuple[str, ...], *, output: str, quota_file: str | None, namespace: str, user: str
) -> None:
    """Show the admission decision on manifests: allowed, or refused and why, and what would be changed.

    FILE is a manifest of pods, workloads or quotas, or - for standard input; other kinds are not checked. -o json
    writes one object per document and line; -o yaml the documents as they would be stored. Exit code: 0 none refused,
    1 some refused, 2 wrong usage or an invalid file.
    """
    loaded: Loaded = context.obj
    config = admission_config_of(loaded.configuration)
    quotas = quotas_from(quota_file, config.scheme.unit_mib)
    results: list[AdmissionResult] = []
    for file in files:
        try:
            text = read_text(file)
            documents = parse_objects(text)
            sources = source_texts(documents, text)
        except DocumentError as error:
            raise CommandError(f"{file}: {error}") from None
        if not all(document.get("kind") for document in documents):
            raise CommandError(f"{file}: {NO_KIND}")
        results += [
            admit_offline(document, config, quotas, namespace, user, sources=written)
            for document, written in zip(documents, sources, strict=True)
        ]
    if not results:
        raise CommandError(f"{', '.join(files)}: no document in it")
    if output == "yaml":
        click.echo(as_yaml(result.object for result in results if result.allowed), nl=False)
    for result in results:
        if output == "json":
            click.echo(msgspec.json.encode(as_json(result), enc_hook=str))
        elif output == "text":
            show_result(result)
    context.exit(0 if all(result.allowed for result in results) else 1)


def as_json(result: AdmissionResult) -> dict[str, object]:
    return {
        "allowed": result.allowed,
        "reasons": [
            {
                "code": reason.code,
                "field": reason.field,
                "value": reason.value,
                "message": reason.message,
                "remedy": reason.remedy,
                **({"numbers": reason.numbers} if reason.numbers else {}),
            }
            for reason in result.reasons
        ],
        "warnings": list(result.warnings),
        "patch": result.patch,
        "object": result.object,
    }


def show_result(result: AdmissionResult) -> None:
    console = wide_console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    metadata = result.object.get("metadata")
    name = (metadata.get("name") or metadata.get("generateName") or "") if isinstance(metadata, dict) else ""
    title = escape(f"{result.object.get('kind', 'document')} {name}".strip())
    if not result.checked:
        line(f"{title}: not checked (Quotient checks Pods, workloads and quotas)")
        return
    line(f"{title}: " + ("[green]allowed[/green]" if result.allowed else "[bold red]refused[/bold red]"))
    for reason in result.reasons:
        value = f" {escape(repr(reason.value))}:" if reason.value else ""
        line(f"  [red]{escape(reason.field)}[/red]:{value} {escape(reason.message)}")
        line(f"    [bold]{escape(reason.remedy)}[/bold]")
    for warning in result.warnings:
        line(f"  [yellow]warning[/yellow] {escape(warning)}")
    for operation in result.patch:
        value = f" = {msgspec.json.encode(operation['value']).decode()}" if "value" in operation else ""
        line(f"  [dim]{operation['op']} {escape(operation['path'])}{escape(value)}[/dim]")
