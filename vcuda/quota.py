"""Quotas: what a namespace may use, by GPU model. Parsed from the two forms in which people write them.

In the namespace itself, the key `quota.yaml` of a labelled ConfigMap:

    types:
      A100: {cores: 400, memory: 160Gi}
      "*":  {cores: 500, pods: 20}       # over all types together
    unlisted: deny                       # models no line names: deny | allow; with "*" alone: allow
    pools: [training]                    # node pools this namespace may use; none listed: all
    untyped: float                       # float | deny: pods that could run on several models
    coreLimit: {default: request, max: 100}
    mode: enforce                        # enforce | audit (allow, warn, count)
    placement: fragmentation             # fragmentation | binpack | spread | topology; default: the cluster's policy
    privileged: deny                     # deny | allow: privileged containers in GPU pods; default: the cluster's
    minIsolation: preload                # what has to enforce shares, at least; or memory=preload,compute=mps

For all namespaces together, the older JSON `{namespace: {"quota": {model: cards}, "pool": [..]}}`.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vcuda.decision import MAX_VALUE_SHOWN, printable
from vcuda.decoding import convert
from vcuda.dimensions import CORES, DIMENSIONS, MEMORY, PODS
from vcuda.gpu_model import GpuModel, is_model, matches, never_matches, similar_names
from vcuda.isolation import Isolation, parse_minimum
from vcuda.memory_units import DEFAULT_UNIT_MIB, MIB, is_in_bytes, requested_mib
from vcuda.namespace_policy import CoreLimitPolicy, Mode, NamespacePolicy, PrivilegedPolicy
from vcuda.placement_strategies import SETTABLE_STRATEGIES, PlacementStrategy
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.vocabulary import CORES_PER_CARD

ALL_TYPES = "*"
DENY: Literal["deny"] = "deny"
ALLOW: Literal["allow"] = "allow"
FIELDS = ("types", "unlisted", "pools", "untyped", "coreLimit", "mode", "placement", "privileged", "minIsolation")
# Every ledger of the namespace carries its quotas, and every charge is matched against all lines.
MAX_LINES = 256
# Of `quota.yaml`: twice as long as MAX_LINES lines with all their limits, and parsed in 50 ms.
MAX_LENGTH = 32 * 1024
# A refusal shows no more; as many entries of a list are too many to be meant.
MAX_MISTAKES = 20
# A namespace, a model, and the fields between them.
MAX_PATH = 200
# Nodes have their pool as a label.
MAX_POOLS, MAX_POOL_NAME = 64, 63
# Beyond any cluster: ten million GPUs, with 100 GiB each. Sums of them still fit into 64 bits.
MAX_COUNT, MAX_MEMORY_MIB = 10**9, 10**12


class QuotaMistake(Struct, frozen=True):
    """One mistake in a quota: the quota, the path in it, the value there, and what to write instead."""

    quota: str
    path: str
    value: str
    remedy: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.quota, self.path, self.value, self.remedy)))


class QuotaError(ValueError):
    """An invalid quota, with all its mistakes."""

    def __init__(self, *mistakes: QuotaMistake) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = mistakes


class Quota(Struct, frozen=True):
    """One quota. `types` has the limits of each line by dimension; `name` is where the quota is written."""

    name: str
    types: dict[str, dict[str, int]]
    unlisted: Literal["deny", "allow"] = DENY
    untyped: Literal["float", "deny"] = "float"
    policy: NamespacePolicy = NamespacePolicy()

    def lines(self, model: GpuModel) -> tuple[str, ...]:
        """Return the lines that a model is charged to: its product, its family, and "*"."""
        similar = similar_names(tuple(self.types), model.name)
        return tuple(line for line in self.types if line == ALL_TYPES or (line in similar and matches(line, model)))

    def grants(self, model: GpuModel) -> bool:
        """Whether the namespace may use a model at all; "*" limits models, and does not grant them."""
        return self.unlisted == ALLOW or any(line != ALL_TYPES for line in self.lines(model))


class QuotaParser:
    """Checks the values of a quota. Mistakes are collected, so that all of them are reported at once.

    A method that reports a mistake returns a value of the right type, with which parsing goes on.
    """

    def __init__(self, quota: str, unit_mib: int) -> None:
        self.quota, self.unit_mib = quota, unit_mib
        self.mistakes: list[QuotaMistake] = []

    def report(self, path: str, value: Any, remedy: str) -> None:  # noqa: ANN401 - any JSON or YAML value
        self.mistakes.append(QuotaMistake(self.quota, printable(path, MAX_PATH), printable(as_written(value)), remedy))
        if len(self.mistakes) >= MAX_MISTAKES:
            raise QuotaError(*self.mistakes)

    def mapping(self, path: str, value: Any, remedy: str) -> dict[str, Any]:  # noqa: ANN401
        if isinstance(value, dict):
            return value
        self.report(path, value, remedy)
        return {}

    def choice(self, path: str, value: Any, choices: Sequence[str]) -> str:  # noqa: ANN401
        if value in choices and isinstance(value, str):
            return value
        self.report(path, value, f"write one of {', '.join(choices)}")
        return choices[0]

    def count(self, path: str, value: Any, remedy: str) -> int:  # noqa: ANN401
        # A bool is an int in Python, and `cores: true` is a mistake.
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return self.bounded(path, value, MAX_COUNT)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            self.report(path, "", f'"{printable(value)}" is text; remove the quotes')
        else:
            self.report(path, value, remedy)
        return 0

    def bounded(self, path: str, value: int, maximum: int) -> int:
        if value > maximum:
            self.report(path, value, f"too large; write at most {maximum}, or leave it out for no limit")
        return min(value, maximum)

    def known_fields(self, prefix: str, fields: Iterable[str], known: Sequence[str]) -> None:
        # A misspelled field that was ignored would leave the namespace without a limit.
        for field in fields:
            if field not in known:
                close = difflib.get_close_matches(field, known, n=1)
                remedy = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
                self.report(f"{prefix}{field}", "", f"unknown field; {remedy}")

    def pools(self, path: str, value: Any) -> tuple[str, ...] | None:  # noqa: ANN401
        """Return the names of node pools without repetitions; None, which means all pools, if there are none."""
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(pool, str) and 0 < len(pool) <= MAX_POOL_NAME for pool in value):
            if len(value) <= MAX_POOLS:
                return tuple(dict.fromkeys(value)) or None
            self.report(path, len(value), f"too many pools; write at most {MAX_POOLS}, or none to allow all")
        else:
            self.report(path, value, "write a list of node pools, such as [training]")
        return None

    def model(self, path: str, line: str) -> None:
        if never_matches(line) or not is_model(line):
            self.report(path, line, "not a GPU model; write a model or a family such as A100, T4 or RTX-3090")

    def memory_mib(self, path: str, value: Any) -> int:  # noqa: ANN401
        """Return memory written in bytes or in units; bytes beyond a whole MiB are not granted."""
        try:
            amount = parse_quantity(value)
            # Requests are rounded up to whole MiB, so limits are rounded down.
            rounded_up = requested_mib(amount, self.unit_mib)
            memory_mib = amount.whole // MIB if is_in_bytes(amount, self.unit_mib) else rounded_up
            if memory_mib <= MAX_MEMORY_MIB:
                return memory_mib
            problem = f"more than {MAX_MEMORY_MIB} MiB"
        except QuantityError as error:
            problem = str(error)
        except TypeError:  # a list or a mapping
            problem = "not a quantity"
        self.report(path, value, f"{problem}; write memory such as 160Gi, or a number of {self.unit_mib} MiB units")
        return 0


def as_written(value: Any) -> str:  # noqa: ANN401 - any JSON or YAML value
    """Return the beginning of a value as JSON; of text, all of it."""
    if isinstance(value, str):
        return value
    # One by one: with aliases, a short text has very many values.
    return "".join(islice(json.JSONEncoder(default=str).iterencode(value), MAX_VALUE_SHOWN))


def parse_quota(text: str, name: str, unit_mib: int = DEFAULT_UNIT_MIB) -> Quota:
    """Parse a `quota.yaml`; raises a QuotaError with all mistakes."""
    if len(text) > MAX_LENGTH:
        remedy = f"quota.yaml has {len(text)} characters; write at most {MAX_LENGTH}"
        raise QuotaError(QuotaMistake(name, "", "", remedy))
    try:
        documents = parse_documents(text, plain_numbers=True)
    except DocumentError as error:
        raise QuotaError(QuotaMistake(name, "", "", str(error))) from None
    if not documents:
        remedy = "quota.yaml is empty; write lines such as types: {A100: {cores: 400}}"
        raise QuotaError(QuotaMistake(name, "", "", remedy))
    if len(documents) != 1:
        raise QuotaError(QuotaMistake(name, "", "", f"contains {len(documents)} YAML documents; write exactly one"))
    parser = QuotaParser(name, unit_mib)
    body = parser.mapping("quota", documents[0], f"write a mapping with the fields {', '.join(FIELDS)}")
    quota = read_quota(body, name, parser)
    if parser.mistakes:
        raise QuotaError(*parser.mistakes)
    return quota


def read_quota(body: dict[str, Any], name: str, parser: QuotaParser) -> Quota:
    parser.known_fields("", body, FIELDS)
    types = {
        str(line): read_line(f"types.{line}", line, limits, parser) for line, limits in read_lines(body, parser).items()
    }
    # A quota that lists no models limits all of them together; denying the unlisted ones would deny every model.
    unlisted = ALLOW if set(types) <= {ALL_TYPES} else DENY
    if "unlisted" in body:
        unlisted = ALLOW if parser.choice("unlisted", body["unlisted"], (DENY, ALLOW)) == ALLOW else DENY
    untyped = parser.choice("untyped", body.get("untyped", "float"), ("float", DENY))
    mode = Mode(parser.choice("mode", body["mode"], [*Mode])) if "mode" in body else None
    return Quota(
        name=name,
        types=types,
        unlisted=unlisted,
        untyped="float" if untyped == "float" else DENY,
        policy=NamespacePolicy(
            parser.pools("pools", body.get("pools")),
            read_core_limit_policy(body.get("coreLimit"), parser),
            mode,
            read_placement(body, parser),
            read_privileged(body, parser),
            read_min_isolation(body, parser),
        ),
    )


def read_lines(body: Mapping[str, Any], parser: QuotaParser) -> dict[str, Any]:
    """Return the lines under `types`. An empty mapping is a mistake: it reads like a limit, and would be none."""
    if "types" not in body:
        return {}
    lines = parser.mapping("types", body["types"], "write lines such as A100: {cores: 400}")
    if lines == body["types"] == {}:
        parser.report("types", {}, "write lines such as A100: {cores: 400}, or leave types out")
    if len(lines) > MAX_LINES:
        remedy = f"too many lines; write at most {MAX_LINES}, for families instead of products"
        parser.report("types", len(lines), remedy)
        return {}
    return lines


def read_placement(body: Mapping[str, Any], parser: QuotaParser) -> PlacementStrategy | UnsetType:
    if "placement" not in body:
        return UNSET
    return PlacementStrategy(parser.choice("placement", body["placement"], SETTABLE_STRATEGIES))


def read_privileged(body: Mapping[str, Any], parser: QuotaParser) -> PrivilegedPolicy | UnsetType:
    if "privileged" not in body:
        return UNSET
    # The first choice is what a mistake counts as.
    return PrivilegedPolicy(parser.choice("privileged", body["privileged"], (DENY, ALLOW)))


def read_min_isolation(body: Mapping[str, Any], parser: QuotaParser) -> Isolation | UnsetType:
    if "minIsolation" not in body:
        return UNSET
    value = body["minIsolation"]
    if not isinstance(value, str):
        parser.report("minIsolation", value, "write text such as preload, or memory=preload,compute=mps")
        return UNSET
    minimum, mistakes = parse_minimum(value)
    for each in mistakes:
        parser.report("minIsolation", each.value, each.message)
    return minimum


def read_line(path: str, line: str, limits: Any, parser: QuotaParser) -> dict[str, int]:  # noqa: ANN401
    """Return the limits of one line by dimension; a dimension that is not written is not limited."""
    if line != ALL_TYPES:
        parser.model(path, line)
    read: dict[str, Callable[[str, Any], int]] = {
        CORES: lambda at, value: parser.count(at, value, "write a whole number of cores, 0 or more; 100 is one GPU"),
        MEMORY: parser.memory_mib,
        PODS: lambda at, value: parser.count(at, value, "write a whole number of pods, 0 or more"),
    }
    remedy = "write its limits, such as {cores: 400, memory: 160Gi, pods: 20}"
    written = parser.mapping(path, limits, remedy)
    if written == limits == {}:
        parser.report(path, limits, remedy)
    parser.known_fields(f"{path}.", written, DIMENSIONS)
    return {key: read[key](f"{path}.{key}", written[key]) for key in DIMENSIONS if key in written}


def read_core_limit_policy(value: Any, parser: QuotaParser) -> CoreLimitPolicy:  # noqa: ANN401
    if value is None:
        return CoreLimitPolicy()
    if isinstance(value, dict):
        known = CoreLimitPolicy.__struct_fields__
        parser.known_fields("coreLimit.", value, known)
        value = {field: value[field] for field in value if field in known}
    try:
        return convert(value, CoreLimitPolicy)
    except msgspec.ValidationError:
        parser.report(
            "coreLimit",
            value,
            f"write {{default: request, max: {CORES_PER_CARD}}}; default is request or 1 to {CORES_PER_CARD}, "
            f"max is 1 to {CORES_PER_CARD}",
        )
        return CoreLimitPolicy()


class DuplicateKey(ValueError):  # noqa: N818 - named for the mistake
    """A key is written twice in a JSON object. The usual parser would silently take the last."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raises DuplicateKey."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DuplicateKey(f"duplicate key {printable(key)!r}; write it once")
        seen[key] = value
    return seen


def parse_legacy_quotas(text: str, name: str) -> dict[str, Quota]:
    """Parse the older JSON for all namespaces, by namespace; raises a QuotaError with all mistakes."""
    try:
        body = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        raise QuotaError(QuotaMistake(name, "", "", str(error))) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise QuotaError(QuotaMistake(name, "", "", f"{where}: invalid JSON: {error.msg}")) from None
    except (ValueError, RecursionError):
        # A number with more than 4300 digits, or hundreds of nested brackets.
        raise QuotaError(
            QuotaMistake(name, "", "", "invalid JSON: nested too deeply, or a number with too many digits")
        ) from None
    parser = QuotaParser(name, DEFAULT_UNIT_MIB)
    quotas: dict[str, Quota] = {}
    for namespace, entry in parser.mapping("gpu_quota", body, "write a mapping of namespaces to quotas").items():
        fields = parser.mapping(namespace, entry, 'write {"quota": {"A100": 4}, "pool": ["training"]}')
        parser.known_fields(f"{namespace}.", fields, ("quota", "pool"))
        counts = parser.mapping(
            f"{namespace}.quota", fields.get("quota", {}), 'write GPUs by model, such as {"A100": 4}'
        )
        for model in counts:
            parser.model(f"{namespace}.quota.{model}", model)
        quotas[namespace] = Quota(
            name=name,
            types={
                model: {
                    CORES: CORES_PER_CARD
                    * parser.bounded(
                        f"{namespace}.quota.{model}",
                        parser.count(f"{namespace}.quota.{model}", cards, "write a whole number of GPUs, 0 or more"),
                        MAX_COUNT // CORES_PER_CARD,
                    )
                }
                for model, cards in counts.items()
            },
            # As in gpu-admission: an entry with pools alone restricts where pods run, and not how many.
            unlisted=DENY if "quota" in fields else ALLOW,
            policy=NamespacePolicy(parser.pools(f"{namespace}.pool", fields.get("pool"))),
        )
    if parser.mistakes:
        raise QuotaError(*parser.mistakes)
    return quotas
