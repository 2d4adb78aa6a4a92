"""`quotient lint`: manifests checked in a pipeline, with file and line, and repaired where the repair is certain."""

from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from msgspec import Struct

from console.admit import quotas_from
from console.manifests import STDIN, parse_objects, read_text
from console.offline_admission import AdmissionResult, OfflineQuotas, admit_offline
from console.schema_checks import UNREPAIRABLE, SchemaProblem, mapping_within, repaired_document, schema_problems
from console.yaml_locations import LocatedObject, child, deepest_node, line_of, locate_objects, unquoted_values
from settings.loading import Loaded
from vcuda.decision import Code, Reason
from vcuda.names import LEGACY_KEY, QUOTA_KEY
from vcuda.strict_yaml import DocumentError
from webhook.admission_config import AdmissionConfig
from webhook.service import admission_config_of

LINE_IN_ERROR = "line "

# A part of a text to be replaced: start, end, replacement.
Edit = tuple[int, int, str]


class LintFinding(Struct, frozen=True, omit_defaults=True):
    """One error or warning about a file."""

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
        value = f"{self.value!r}: " if self.value else ""
        named = f"{self.field}: {value}" if self.field else ""
        return f"{self.file}:{self.line}: {named}{self.message}; {self.remedy} [{self.code}]"


@click.command(short_help="Check manifests, and repair what is certain.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--fix", is_flag=True, help="Repair what is certain: missing quotes, removed API versions.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--quota", "quota_file", metavar="FILE", help="Charge the documents to these quotas, one after another.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For documents that name none.")
@click.pass_context
def lint(
    context: click.Context, files: tuple[str, ...], *, fix: bool, output: str, quota_file: str | None, namespace: str
) -> None:
    """Check manifests as the webhook would, and for what the API server rejects before any webhook.

    FILE is a manifest, a folder of them, or - for standard input. Exit code: 0 no errors (warnings do not count),
    1 errors, 2 wrong usage.
    """
    loaded: Loaded = context.obj
    config = admission_config_of(loaded.configuration)
    quotas = quotas_from(quota_file, config.scheme.unit_mib)
    findings: list[LintFinding] = []
    for file in expand_folders(files):
        text = read_text(file)
        if fix and file != STDIN and (repaired := repair_text(text)) != text:
            Path(file).write_text(repaired)
            click.echo(f"{file}: repaired", err=True)
            text = repaired
        findings += check_file(file, text, config, quotas, namespace)
    for finding in findings:
        click.echo(msgspec.json.encode(finding) if output == "json" else str(finding))
    context.exit(1 if any(finding.level == "error" for finding in findings) else 0)


def expand_folders(files: tuple[str, ...]) -> list[str]:
    expanded: list[str] = []
    for file in files:
        if Path(file).is_dir():
            manifests = (each for each in Path(file).rglob("*") if each.suffix in (".yaml", ".yml", ".json"))
            expanded += sorted(map(str, manifests))
        else:
            expanded.append(file)
    return expanded


def check_file(
    file: str, text: str, config: AdmissionConfig, quotas: OfflineQuotas, namespace: str
) -> list[LintFinding]:
    try:
        documents, locations = parse_objects(text), locate_objects(text)
    except DocumentError as error:
        line, text = split_line_number(str(error))
        message, _, remedy = text.partition("; ")
        return [LintFinding(file, line, "error", Code.OBJECT_INVALID, "", "", message, remedy or "correct the file")]
    findings: list[LintFinding] = []
    for document, location in zip(documents, locations, strict=True):
        sources = unquoted_values(document, location.node, text)
        result = admit_offline(document, config, quotas, namespace, sources=sources)
        findings += findings_of(file, location, result)
    return findings


def split_line_number(error: str) -> tuple[int, str]:
    """Split `line 3, column 5: not YAML: ...` into the line and the rest; line 1 if none is named."""
    if error.startswith(LINE_IN_ERROR):
        position, _, message = error.removeprefix(LINE_IN_ERROR).partition(": ")
        line = position.partition(",")[0]
        return (int(line), message) if line.isdecimal() else (1, error)
    return 1, error


def findings_of(file: str, location: LocatedObject, result: AdmissionResult) -> list[LintFinding]:
    errors = [
        LintFinding(
            file,
            reason_line(location.node, reason),
            "error",
            reason.code,
            reason.field,
            reason.value,
            reason.message,
            reason.remedy,
        )
        for reason in result.reasons
    ]
    warnings = [
        LintFinding(file, line_of(location.node, first_word(warning)), "warning", "", "", "", warning, "")
        for warning in result.warnings
    ]
    return sorted(errors + warnings, key=lambda finding: finding.line)


def reason_line(node: yaml.Node, reason: Reason) -> int:
    """Return the line of a refusal; for an invalid quota that of the key in `data` that holds it."""
    if reason.code is not Code.QUOTA_INVALID:
        return line_of(node, reason.field)
    data = child(node, "data")
    quota = data and (child(data, QUOTA_KEY) or child(data, LEGACY_KEY))
    return int((quota or data or node).start_mark.line) + 1


def first_word(warning: str) -> str:
    """Return the field that a warning begins with; a word that is no field leads to the object's first line."""
    return warning.split(" ", 1)[0].rstrip(":")


def repair_text(text: str) -> str:
    """Repair what is certain and change nothing else: comments and order stay.

    The result is parsed again and has to be exactly the repaired documents; otherwise the text is returned unchanged.
    """
    try:
        documents, locations = parse_objects(text), locate_objects(text)
        wanted = [
            repaired_document(document, unquoted_values(document, location.node, text))
            for document, location in zip(documents, locations, strict=True)
        ]
        edits = {
            edit
            for document, location, repaired in zip(documents, locations, wanted, strict=True)
            for problem in schema_problems(document)
            for edit in edits_for(problem, repaired, location.node, text)
        }
        edited = text
        # From the end, so that positions before an edit stay valid.
        for start, end, replacement in sorted(edits, reverse=True):
            edited = edited[:start] + replacement + edited[end:]
        return edited if parse_objects(edited) == wanted else text
    except DocumentError:
        return text


def edits_for(problem: SchemaProblem, repaired: dict[str, Any], node: yaml.Node, text: str) -> list[Edit]:
    """Return the edits that repair a problem; none where the place in the text is not certain."""
    if problem.reason.code in UNREPAIRABLE:
        return []
    place = deepest_node(node, problem.steps)
    start, end = place.start_mark.index, place.end_mark.index
    if problem.reason.code is Code.TEXT_EXPECTED:
        return [(start, end, f'"{text[start:end]}"')] if isinstance(place, yaml.ScalarNode) else []
    if problem.steps == ("apiVersion",):
        quote = text[start] if text[start] in "\"'" else ""
        return [(start, end, f"{quote}{repaired['apiVersion']}{quote}")]
    labels = mapping_within(repaired, ("spec", "selector", "matchLabels"))
    spec = child(node, "spec")
    if not labels or not isinstance(spec, yaml.MappingNode):
        return []
    selector = f'{{"matchLabels": {msgspec.json.encode(labels).decode()}}}'
    if spec.flow_style:
        return [(spec.start_mark.index + 1, spec.start_mark.index + 1, f'"selector": {selector}, ')]
    return [(spec.start_mark.index, spec.start_mark.index, f"selector: {selector}\n{' ' * spec.start_mark.column}")]
