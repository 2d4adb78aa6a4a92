"""YAML text to plain values, strictly: duplicate keys and keys that are not strings are errors, with their line.

The usual loader silently keeps the last of two equal keys, which turns a typing error in a quota or a configuration
into a different quota. Quotas are written by users, so no text may crash the process or need much memory.
"""

import re
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, ClassVar

import yaml

from vcuda.decision import printable

# The C loader recurses for every level of nesting and would overflow the stack of the process. A text of this length
# cannot nest deeply enough; a longer one is checked before it is loaded.
MAX_UNCHECKED_LENGTH = 1000
MAX_DEPTH, MAX_VALUES = 100, 200_000
# The loader in Python needs 8 ms for 1 kB, so it explains a rejected quota only if that is short.
MAX_EXPLAINED_LENGTH = 8000
# How many mappings one mapping may merge, and how many fields a text has after merging: they multiply as aliases do.
MAX_MERGES, MAX_MERGED = 64, 20_000
# Python refuses to convert integers of more than 4300 decimal digits, both from and to text. A number of this length,
# in any notation of YAML, stays below that.
MAX_NUMBER_LENGTH = 1000
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
# Numbers to Kubernetes that PyYAML reads as text: 1e3, 08, 0o14.
KUBERNETES_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
KUBERNETES_OCTAL = re.compile(r"[-+]?0o[0-7_]+", re.ASCII)
OCTAL = re.compile(r"([-+]?)0+([0-9]+)", re.ASCII)
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
# What PyYAML's constructors raise for a value that does not match its tag, such as `!!int x` or 2026-99-99.
VALUE_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
LOADER_ERRORS = (yaml.YAMLError, RecursionError, *VALUE_ERRORS)
TAG_PREFIX = "tag:yaml.org,2002:"
# PyYAML's words for the end of the text, and ours.
END_OF_TEXT = {"'<stream end>'": "the end of the file", "end of stream": "end of the file"}
MERGE, VALUE, INT = f"{TAG_PREFIX}merge", f"{TAG_PREFIX}value", f"{TAG_PREFIX}int"
FLOAT, TIMESTAMP, BOOL = f"{TAG_PREFIX}float", f"{TAG_PREFIX}timestamp", f"{TAG_PREFIX}bool"


class DocumentError(ValueError):
    """The text is not a valid document; the message begins with the line where it is known."""


def error_at(node: yaml.Node, message: str) -> DocumentError:
    return DocumentError(f"line {node.start_mark.line + 1}: {message}")


class StrictConstructor(yaml.constructor.SafeConstructor):
    """PyYAML's safe constructor without duplicate keys, keys that are not strings, and overlong integers."""

    # Booleans to Kubernetes, beside those that PyYAML knows.
    bool_values: ClassVar = {**yaml.constructor.SafeConstructor.bool_values, "y": True, "n": False}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key_node, _ in node.value:
            # `<<` may be repeated, and is replaced by the mapping it refers to.
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise error_at(key_node, key_not_a_string(key_node))
            if key in seen:
                raise error_at(key_node, f"duplicate key {printable(key)!r}; remove one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    # The fields of all mappings that merge others.
    merged_fields = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by the fields of the mappings that it refers to."""
        merges = [value for key, value in node.value if key.tag == MERGE]
        if any(isinstance(value, yaml.SequenceNode) and len(value.value) > MAX_MERGES for value in merges):
            raise error_at(node, f"merges more than {MAX_MERGES} mappings; use fewer")
        super().flatten_mapping(node)
        if merges:
            self.merged_fields += len(node.value)
        if self.merged_fields > MAX_MERGED:
            raise error_at(node, f"more than {MAX_MERGED} fields, merged ones included; merge fewer")

    def construct_int(self, node: yaml.ScalarNode) -> int:
        length = len(self.construct_scalar(node))
        if length > MAX_NUMBER_LENGTH:
            raise error_at(node, f"the number has {length} characters; the maximum is {MAX_NUMBER_LENGTH}")
        return int(self.construct_yaml_int(node))

    def construct_number(self, node: yaml.ScalarNode) -> Any:  # noqa: ANN401
        """Read a number; one in base 60, such as 1:30, is text to Kubernetes."""
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        return self.construct_int(node) if node.tag == INT else self.construct_yaml_float(node)

    def reject_tag(self, node: yaml.Node) -> None:
        tag = node.tag
        short = f"!!{tag.removeprefix(TAG_PREFIX)}" if tag.startswith(TAG_PREFIX) else tag
        raise error_at(node, f"the tag {printable(short)!r} is not supported; remove it")


# By name, so that subclasses can override the method: PyYAML calls the registered function, not a method.
StrictConstructor.add_constructor(INT, lambda loader, node: loader.construct_number(node))  # type: ignore[union-attr]
StrictConstructor.add_constructor(FLOAT, lambda loader, node: loader.construct_number(node))  # type: ignore[union-attr]
# Dates are text to Kubernetes, and JSON has none.
StrictConstructor.add_constructor(TIMESTAMP, StrictConstructor.construct_scalar)  # type: ignore[type-var]
# As keys they are something else; as values, `<<` and `=` are text to Kubernetes.
for tag in (MERGE, VALUE):
    StrictConstructor.add_constructor(tag, StrictConstructor.construct_scalar)  # type: ignore[type-var]
# PyYAML calls the constructor of None for a tag without a constructor. JSON has no value for those of the other tags.
for unsupported in (None, *(f"{TAG_PREFIX}{name}" for name in ("set", "binary", "omap", "pairs"))):
    StrictConstructor.add_constructor(unsupported, StrictConstructor.reject_tag)  # type: ignore[type-var]


class DecimalConstructor(StrictConstructor):
    """Accepts decimal integers only: YAML reads 0400 as octal and 1:30 as base 60, which no quota intends."""

    def construct_number(self, node: yaml.ScalarNode) -> Any:  # noqa: ANN401
        if node.tag == INT:
            return self.construct_int(node)
        text = str(self.construct_scalar(node))
        # 1e3 and 08 are no decimal numbers; the reader of the document says what to write instead.
        return text if "e" in text.lower() or "." not in text else self.construct_yaml_float(node)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if not DECIMAL.fullmatch(text):
            octal = OCTAL.fullmatch(text)
            remedy = f"{octal[1]}{octal[2]} (a leading zero means octal in YAML)" if octal else "it in plain digits"
            raise error_at(node, f"{printable(text)!r} is not a decimal number; write {printable(remedy)}")
        return super().construct_int(node)


class StrictLoader(StrictConstructor, yaml.SafeLoader):
    """The loader in Python. It is slow, but its errors are precise: it explains what the C loader rejected."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
        try:
            return super().construct_object(node, deep=deep)
        except (DocumentError, yaml.YAMLError):
            raise
        except VALUE_ERRORS:
            value = f"{printable(node.value)!r}" if isinstance(node, yaml.ScalarNode) else "the value"
            raise error_at(node, f"{value} is not a valid {node.tag.removeprefix(TAG_PREFIX)}") from None


class FastLoader(StrictConstructor, yaml.CSafeLoader):
    """The loader in C, many times faster: it decides what is valid."""


for each in (StrictLoader, FastLoader):
    each.add_implicit_resolver(BOOL, re.compile("^[yYnN]$"), list("yYnN"))
    # After those of PyYAML, which read 012 as an integer.
    each.add_implicit_resolver(INT, re.compile(f"^{KUBERNETES_OCTAL.pattern}$"), list("-+0"))
    each.add_implicit_resolver(FLOAT, re.compile(f"^{KUBERNETES_FLOAT.pattern}$"), list("-+.0123456789"))


class DecimalStrictLoader(DecimalConstructor, StrictLoader):
    pass


class DecimalFastLoader(DecimalConstructor, FastLoader):
    pass


Loader = type[StrictLoader | FastLoader]


def parse_documents(text: str, *, plain_numbers: bool = False) -> list[Any]:
    """Parse all documents of a text except empty ones; DocumentError if it is invalid.

    With `plain_numbers`, integers must be decimal.
    """
    fast, slow = (DecimalFastLoader, DecimalStrictLoader) if plain_numbers else (FastLoader, StrictLoader)
    if len(text) > MAX_UNCHECKED_LENGTH:
        check_depth(text)
    try:
        documents = load_documents(text, fast)
        check_size(documents)
    except DocumentError:
        raise
    except LOADER_ERRORS as error:
        precise = precise_error(text, slow) if not plain_numbers or len(text) <= MAX_EXPLAINED_LENGTH else None
        raise explain_error(text, precise or error) from None
    return documents


def load_documents(text: str, loader: Loader) -> list[Any]:
    return [document for document in yaml.load_all(text, Loader=loader) if document is not None]


def check_depth(text: str) -> None:
    """Reject a text that is nested too deeply, from its events alone."""
    depth = 0
    with suppress(yaml.YAMLError):  # loading the text raises it again
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise DocumentError(TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1


def check_size(documents: list[Any]) -> None:
    """Reject documents with too many levels or values, aliases expanded.

    An alias costs nothing here, but whatever walks the values visits it every time: a few aliases of aliases are
    billions of values, and an alias of itself has no end.
    """
    pending = [(document, 1) for document in documents]
    count = 0
    while pending:
        value, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise DocumentError(TOO_DEEP)
        if count > MAX_VALUES:
            raise DocumentError(f"more than {MAX_VALUES} values, aliases expanded; use fewer")
        if isinstance(value, dict):
            pending += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            pending += [(each, depth + 1) for each in value]


def precise_error(text: str, loader: Loader) -> BaseException | None:
    """Return the error of the Python loader for a text that the C loader rejected, if it fails too."""
    try:
        load_documents(text, loader)
    except LOADER_ERRORS as error:
        return error
    return None


def explain_error(text: str, error: BaseException) -> DocumentError:
    """Return the error to show for what a loader raised."""
    match error:
        case DocumentError():
            return error
        case RecursionError():
            return DocumentError(TOO_DEEP)
        case yaml.reader.ReaderError():
            line = text.count("\n", 0, error.position) + 1
            return DocumentError(f"line {line}: invalid YAML: the character U+{error.character:04X} is not allowed")
        case yaml.MarkedYAMLError():
            mark = error.problem_mark
            where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            problem = str(error.problem)
            for words, plain in END_OF_TEXT.items():
                problem = problem.replace(words, plain)
            return DocumentError(f"{where}invalid YAML: {problem}")
    return DocumentError("invalid YAML")


def key_not_a_string(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"the key {printable(node.value) or '(empty)'} is not a string; write it in quotes"
    kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
    return f"a key must be a string, not a {kind}"
