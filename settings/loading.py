"""Loads the configuration from file, environment and flags.

A mistake is reported with its source (the file, the variable or the flag), the path, the value and a remedy.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from settings.configuration import API_VERSION, KIND, Configuration
from settings.reading import describe_read_error
from vcuda.decision import printable
from vcuda.decode_errors import DECODE_ERRORS, UNKNOWN_FIELD, describe_decode_error
from vcuda.decoding import convert
from vcuda.strict_yaml import DocumentError, parse_documents

PREFIX = "QUOTIENT_"
FLAG = "--set "
WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ConfigurationError(Exception):
    """The configuration is invalid; the message names source, path, value and remedy."""


class Loaded(Struct, frozen=True):
    """A configuration, and the source of each value that differs from a default."""

    configuration: Configuration
    sources: dict[str, str]


def load(file: Path | None, environment: Mapping[str, str], flags: Iterable[str] = ()) -> Loaded:
    """Merge file, environment and flags (`PATH=VALUE`), later ones taking precedence, and check the result."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        values = read_file(file)
        sources |= dict.fromkeys(paths_in(values), str(file))
    known = value_types(Configuration)
    # Known variables only: a Service named quotient-webhook puts QUOTIENT_WEBHOOK_SERVICE_HOST and more into every pod.
    for path in known:
        variable = environment_variable(path)
        if variable in environment:
            set_value(values, path, parse_scalar(environment[variable], known[path]))
            sources[path] = variable
    for flag in flags:
        path, separator, text = flag.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {flag}: write PATH=VALUE, such as --set log.level=debug")
        if path not in known:
            raise ConfigurationError(f"--set {flag}: {path} {describe_unknown(path)}")
        set_value(values, path, parse_scalar(text, known[path]))
        sources[path] = f"{FLAG}{path}"
    return Loaded(decode(values, sources, file), sources)


def read_file(file: Path) -> dict[str, Any]:
    """Read a file that has to be one YAML document of our apiVersion and kind."""
    try:
        documents = parse_documents(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: {describe_read_error(error)}") from None
    except DocumentError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    head = f"apiVersion: {API_VERSION} and kind: {KIND}"
    if len(documents) != 1:
        raise ConfigurationError(f"{file}: has {len(documents)} YAML documents; write one, with {head}")
    document = documents[0]
    if not isinstance(document, dict):
        raise ConfigurationError(f"{file}: must be a mapping with {head}")
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            raise ConfigurationError(f"{file}: {field}: is required, but missing; write {field}: {expected}")
        if document[field] != expected:
            value = format_value(document[field])
            raise ConfigurationError(f"{file}: {field}: {value}is not supported; write {field}: {expected}")
    return document


def decode(values: dict[str, Any], sources: Mapping[str, str], file: Path | None) -> Configuration:
    """Convert and check the merged values; ConfigurationError describes the first mistake."""

    def error_at(path: str, message: str) -> ConfigurationError:
        # An entry of a list has the source of the whole list.
        source = sources.get(path.partition("[")[0]) or (str(file) if file else "configuration")
        value = format_value(lookup(values, path)) if path else ""
        if source.startswith(FLAG):  # names the path already
            return ConfigurationError(f"{FLAG}{path}: {value}{message}")
        return ConfigurationError(f"{source}: {path or 'configuration'}: {value}{message}")

    try:
        configuration = convert(values, Configuration)
    except DECODE_ERRORS as error:
        problem = describe_decode_error(error)
        raise error_at(problem.path, with_remedy(problem.path, problem.message)) from None
    if mistake := configuration.problem():
        raise error_at(*mistake)
    return configuration


def with_remedy(path: str, message: str) -> str:
    """Complete a decoder's message with what could be written instead."""
    if message == UNKNOWN_FIELD:
        return f"{message}{suggestion(path)}"
    # The decoder does not know the choices, only that this is none of them.
    if choices := choices_of(path):
        return f"must be one of {', '.join(choices)}"
    return message


def choices_of(path: str) -> list[str]:
    """Return the words that a value can be; empty if it is not one of a few words."""
    kind = value_types(Configuration).get(path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return sorted(str(member.value) for member in kind)
    return sorted(get_args(kind)) if get_origin(kind) is Literal else []


def describe_unknown(path: str) -> str:
    """Return why a path cannot be set: it is a section, or unknown."""
    fields = [known.removeprefix(f"{path}.") for known in value_paths(Configuration) if known.startswith(f"{path}.")]
    if fields:
        return f"is a section with {', '.join(dict.fromkeys(field.partition('.')[0] for field in fields))}"
    return f"{UNKNOWN_FIELD}{suggestion(path)}"


def suggestion(path: str) -> str:
    """Return the known path that is closest to a misspelled one, or where to find all of them if none is close."""
    close = difflib.get_close_matches(path, value_paths(Configuration), n=1)
    return f"; did you mean {close[0]}?" if close else "; see quotient config"


def is_section(kind: Any) -> bool:  # noqa: ANN401 - a type annotation, which need not be a class
    return isinstance(kind, type) and issubclass(kind, Struct)


def value_types(struct: type[Struct], prefix: str = "") -> dict[str, Any]:
    """Return the types of all values that can be set, by their paths."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        path = f"{prefix}{field.encode_name}"
        if is_section(field.type):
            found |= value_types(field.type, path + ".")
        # apiVersion and kind identify the file; they are not settings.
        elif path not in ("apiVersion", "kind"):
            found[path] = field.type
    return found


def value_paths(struct: type[Struct]) -> list[str]:
    return list(value_types(struct))


def paths_in(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the paths of the values that a document sets."""
    paths: list[str] = []
    for key, value in values.items():
        paths += paths_in(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return paths


def environment_variable(path: str) -> str:
    """Return the name of the variable that overrides a value: `log.level` is QUOTIENT_LOG_LEVEL."""
    # Otherwise "MiB" would become MI_B.
    return PREFIX + WORD_BOUNDARY.sub("_", path.replace("MiB", "Mib")).replace(".", "_").upper()


def parse_scalar(text: str, kind: Any) -> Any:  # noqa: ANN401 - any value that YAML can express
    """Parse the text of a variable or flag as YAML, unless the value is text anyway: a context may be called 123."""
    if kind is str:
        return text
    try:
        documents = parse_documents(text)
    except DocumentError:
        return text
    return documents[0] if len(documents) == 1 else text


def set_value(values: dict[str, Any], path: str, value: Any) -> None:  # noqa: ANN401
    """Set a value by its path, copying the mappings on the way: with YAML aliases one may be in two places."""
    *outer, last = path.split(".")
    for step in outer:
        inner = values.get(step)
        # A value where a section belongs is an error that `decode` would report; the override takes its place.
        values[step] = values = dict(inner) if isinstance(inner, dict) else {}
    values[last] = value


def lookup(values: Any, path: str) -> Any:  # noqa: ANN401
    """Return a value by its path; the innermost mapping on the way if there is no such value."""
    for step in filter(None, path.split(".")):
        if not isinstance(values, dict) or step not in values:
            return values
        values = values[step]
    return values


def format_value(value: Any) -> str:  # noqa: ANN401
    """Return a value and a colon as the beginning of a message; empty for mappings and lists, which can be long."""
    if isinstance(value, dict | list):
        return ""
    if value is None or isinstance(value, bool):
        return f"{msgspec.json.encode(value).decode()}: "
    try:
        return f"{printable(repr(value) if isinstance(value, str) else str(value))}: "
    except ValueError:  # a hexadecimal integer can have more digits than Python converts to decimal
        return ""
