"""`quotient lint`: manifests checked in a pipeline, with file and line, and repaired where that is certain."""

from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from msgspec import Struct

from console.admit import STDIN, quotas_from, read_text
from console.offline_admission import AdmissionResult, OfflineQuotas, admit_offline, is_judged, objects_of
from console.schema_checks import SchemaProblem, Steps, repaired_document, schema_problems, within
from console.yaml_locations import Located, child, deepest, line_of, locate
from settings.loading import Loaded
from vcuda.decision import Code
from vcuda.strict_yaml import DocumentError
from webhook.admission_config import AdmissionConfig
from webhook.service import admission_config_of

LINE_IN_ERROR = "line "


class LintFinding(Struct, frozen=True, omit_defaults=True):
    """One thing to say about a file."""

    file: str
    line: int
    level: str
    code: str
    field: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        if self.level == "warning":
            return f"{self.file}:{self.line}: warning: {self.message}"
        named = f"{self.field}: {self.value!r}: " if self.field else ""
        return f"{self.file}:{self.line}: {named}{self.message}; {self.remedy} [{self.code}]"


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--fix", is_flag=True, help="Repair what is certain: quotes around texts, API versions that are gone.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--quota", "quota_file", metavar="FILE", help="Hold the documents to these quotas, one after another.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For documents that name none.")
@click.pass_context
def lint(
    context: click.Context, files: tuple[str, ...], *, fix: bool, output: str, quota_file: str | None, namespace: str
) -> None:
    """Check manifests as the webhook would, and for what dies before any webhook sees it.

    FILE is a manifest, a folder of them, or - for standard input. Exit code: 0 nothing wrong (warnings do not count),
    1 something is, 2 bad usage.
    """
    loaded: Loaded = context.obj
    rules = admission_config_of(loaded.configuration)
    quotas = quotas_from(quota_file, rules.scheme.unit_mib)
    findings: list[LintFinding] = []
    for file in expanded(files):
        text = read_text(file)
        if fix and file != STDIN and (repaired_document := repaired(text)) != text:
            Path(file).write_text(repaired_document)
            click.echo(f"{file}: repaired", err=True)
            text = repaired_document
        findings += check(file, text, rules, quotas, namespace)
    for finding in findings:
        click.echo(msgspec.json.encode(finding) if output == "json" else str(finding))
    context.exit(1 if any(finding.level == "error" for finding in findings) else 0)


def expanded(files: tuple[str, ...]) -> list[str]:
    """Take folders for the manifests in them."""
    found: list[str] = []
    for file in files:
        if Path(file).is_dir():
            found += sorted(str(each) for each in Path(file).rglob("*") if each.suffix in (".yaml", ".yml", ".json"))
        else:
            found.append(file)
    return found


def check(file: str, text: str, rules: AdmissionConfig, quotas: OfflineQuotas, namespace: str) -> list[LintFinding]:
    """Find what is wrong in one file."""
    try:
        documents, places = objects_of(text), locate(text)
    except DocumentError as wrong:
        number, message = line_and_message(str(wrong))
        return [LintFinding(file, number, "error", Code.OBJECT_INVALID, "", "", message, "correct the file")]
    findings: list[LintFinding] = []
    for document, place in zip(documents, places, strict=True):
        if is_judged(document):
            findings += about(file, place, admit_offline(document, rules, quotas, namespace, "somebody"))
    return findings


def line_and_message(told: str) -> tuple[int, str]:
    """Take the line out of a complaint about YAML."""
    if told.startswith(LINE_IN_ERROR):
        number, _, message = told.removeprefix(LINE_IN_ERROR).partition(": ")
        digits = number.partition(",")[0]
        return (int(digits), message) if digits.isdecimal() else (1, told)
    return 1, told


def about(file: str, place: Located, verdict: AdmissionResult) -> list[LintFinding]:
    """Put lines to what was judged."""
    errors = [
        LintFinding(
            file,
            line_of(place.node, reason.field),
            "error",
            reason.code,
            reason.field,
            reason.value,
            reason.message,
            reason.remedy,
        )
        for reason in verdict.reasons
    ]
    warnings = [
        LintFinding(file, line_of(place.node, field_in(warning)), "warning", "", "", "", warning, "")
        for warning in verdict.warnings
    ]
    return sorted(errors + warnings, key=lambda finding: finding.line)


def field_in(warning: str) -> str:
    """Find the field that a warning begins with, if it does."""
    return warning.split(" ", 1)[0].rstrip(":")


def repaired(text: str) -> str:
    """Repair what is certain, and touch nothing else: comments and order stay.

    What comes out is read again and has to be exactly what was meant; if it is not, the text is left as it was.
    """
    try:
        documents, places = objects_of(text), locate(text)
        meant = [
            repaired_document(document, sources_of(document, place.node, text))
            for document, place in zip(documents, places, strict=True)
        ]
        edits = {
            edit
            for document, place, wanted in zip(documents, places, meant, strict=True)
            for found in schema_problems(document)
            for edit in edits_for(found, wanted, place.node, text)
        }
        made = text
        for start, end, replacement in sorted(edits, reverse=True):
            made = made[:start] + replacement + made[end:]
        return made if objects_of(made) == meant else text
    except DocumentError:
        return text


def sources_of(document: dict[str, Any], node: yaml.Node, text: str) -> dict[Steps, str]:
    """Give the values that need quotes as they stand in the file."""
    found: dict[Steps, str] = {}
    for each in schema_problems(document):
        place = deepest(node, each.steps)
        if each.reason.code is Code.TEXT_EXPECTED and isinstance(place, yaml.ScalarNode):
            found[each.steps] = text[place.start_mark.index : place.end_mark.index]
    return found


def edits_for(found: SchemaProblem, wanted: dict[str, Any], node: yaml.Node, text: str) -> list[tuple[int, int, str]]:
    """Say which part of the text becomes what; nothing where it is not plain."""
    place = deepest(node, found.steps)
    start, end = place.start_mark.index, place.end_mark.index
    if found.reason.code is Code.TEXT_EXPECTED:
        return [(start, end, f'"{text[start:end]}"')] if isinstance(place, yaml.ScalarNode) else []
    if found.steps == ("apiVersion",):
        quote = text[start] if text[start] in "\"'" else ""
        return [(start, end, f"{quote}{wanted['apiVersion']}{quote}")]
    labels = within(wanted, ("spec", "selector", "matchLabels"))
    spec = child(node, "spec")
    if not labels or not isinstance(spec, yaml.MappingNode):
        return []
    selector = f'{{"matchLabels": {msgspec.json.encode(labels).decode()}}}'
    if spec.flow_style:
        return [(spec.start_mark.index + 1, spec.start_mark.index + 1, f'"selector": {selector}, ')]
    return [(spec.start_mark.index, spec.start_mark.index, f"selector: {selector}\n{' ' * spec.start_mark.column}")]
