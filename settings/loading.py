"""Reads the configuration from file, environment and flags, and says exactly what is wrong with it."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from settings.configuration import API_VERSION, KIND, Configuration
from vcuda.decoding import convert
from vcuda.strict_yaml import DocumentError, parse_documents

PREFIX = "QUOTIENT_"
WHERE = re.compile(r"^(?P<message>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ConfigurationError(Exception):
    """The start fails: the message names source, path, value and remedy."""


class Loaded(Struct, frozen=True):
    """A configuration, and where each value that was set came from."""

    configuration: Configuration
    sources: dict[str, str]


def load(file: Path | None, environment: Mapping[str, str], flags: Iterable[str] = ()) -> Loaded:
    """Put file, environment and flags together, the later over the earlier, and check the whole."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        values = read_file(file)
        sources |= dict.fromkeys(leaves_of(values), str(file))
    known = types(Configuration)
    for path in known:
        variable = variable_of(path)
        if variable in environment:
            put(values, path, scalar(environment[variable], known[path]))
            sources[path] = variable
    for flag in flags:
        path, separator, text = flag.partition("=")
        if not separator or path not in known:
            raise ConfigurationError(f"--set {flag}: write PATH=VALUE with one of {', '.join(known)}")
        put(values, path, scalar(text, known[path]))
        sources[path] = f"--set {path}"
    return Loaded(decode(values, sources, file), sources)


def read_file(file: Path) -> dict[str, Any]:
    """Read the file as one document of our kind."""
    try:
        documents = parse_documents(file.read_text())
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigurationError(f"{file}: cannot be read: {wrong}") from None
    except DocumentError as wrong:
        raise ConfigurationError(f"{file}: {wrong}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigurationError(
            f"{file}: holds {len(documents)} documents; one mapping with apiVersion {API_VERSION} is needed"
        )
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if documents[0].get(field) != expected:
            raise ConfigurationError(
                f"{file}: {field}: {documents[0].get(field)!r} is not known here; write {field}: {expected}"
            )
    document: dict[str, Any] = documents[0]
    return document


def decode(values: dict[str, Any], sources: Mapping[str, str], file: Path | None) -> Configuration:
    """Check values against the struct, strictly; the first mistake is named with its source, path and value."""

    def error(path: str, message: str) -> ConfigurationError:
        source = sources.get(path) or (str(file) if file else "configuration")
        shown = lookup(values, path)
        value = f"{shown!r}: " if path and not isinstance(shown, dict) else ""
        return ConfigurationError(f"{source}: {path or 'configuration'}: {value}{message}")

    try:
        configuration = convert(values, Configuration)
    except msgspec.ValidationError as wrong:
        raise error(*explain(str(wrong))) from None
    if mistake := configuration.mistake():
        raise error(*mistake)
    return configuration


def explain(text: str) -> tuple[str, str]:
    """Turn the decoder's words into a path and what is wrong there."""
    found = WHERE.match(text)
    message, path = (found["message"], (found["path"] or "").lstrip(".")) if found else (text, "")
    if unknown := UNKNOWN.search(message):
        path = f"{path}.{unknown['field']}" if path else unknown["field"]
        return path, f"there is no such field{suggestion(path)}"
    if choices := choices_of(path):
        return path, f"write one of {', '.join(choices)}"
    return path, message


def choices_of(path: str) -> list[str]:
    """List the words that a value can be, if it is one of a few."""
    kind = types(Configuration).get(path)
    return sorted(get_args(kind)) if get_origin(kind) is Literal else []


def is_struct(kind: Any) -> bool:  # noqa: ANN401
    """Tell a section from a value."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def suggestion(path: str) -> str:
    """Guess what was meant."""
    close = difflib.get_close_matches(path, leaves(Configuration), n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(leaves(Configuration))}"


def types(struct: type[Struct], prefix: str = "") -> dict[str, Any]:
    """Give the paths of all values that can be set, with their types."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        path = f"{prefix}{field.encode_name}"
        if is_struct(field.type):
            found |= types(field.type, path + ".")
        elif path not in ("apiVersion", "kind"):
            found[path] = field.type
    return found


def leaves(struct: type[Struct]) -> list[str]:
    """List the paths of all values that can be set."""
    return list(types(struct))


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the paths that a document sets."""
    paths: list[str] = []
    for key, value in values.items():
        paths += leaves_of(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return paths


def variable_of(path: str) -> str:
    """Name the environment variable that overrides a value."""
    return PREFIX + WORDS.sub("_", path.replace("MiB", "Mib")).replace(".", "_").upper()


def scalar(text: str, kind: Any) -> Any:  # noqa: ANN401 - whatever YAML makes of it
    """Read a value from the environment or a flag as it would be read in the file; where text is wanted, as it is."""
    if kind is str:
        return text
    try:
        documents = parse_documents(text)
    except DocumentError:
        return text
    return documents[0] if len(documents) == 1 else text


def put(values: dict[str, Any], path: str, value: Any) -> None:  # noqa: ANN401
    """Set a value deep in a document; what stands in the way is replaced, and checked with the rest."""
    *outer, last = path.split(".")
    for step in outer:
        inner = values.get(step)
        values[step] = values = dict(inner) if isinstance(inner, dict) else {}
    values[last] = value


def lookup(values: Any, path: str) -> Any:  # noqa: ANN401
    """Find a value by its path; the mapping it should be in, if it is not there."""
    for step in filter(None, path.split(".")):
        if not isinstance(values, dict) or step not in values:
            return values
        values = values[step]
    return values
