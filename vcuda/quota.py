"""Quotas: what a namespace may use, by GPU model, as people write them and as they are held to.

Two forms are read. In the namespace itself, the key `quota.yaml` of a labelled ConfigMap:

    types:
      A100: {cores: 400, memory: 160Gi}
      "*":  {cores: 500, pods: 20}       # over all types together
    unlisted: deny                       # models no line names: deny | allow; with "*" alone: allow
    pools: [training]                    # node pools this namespace may use; none listed: all
    untyped: float                       # float | deny: pods that could run on several models
    coreLimit: {default: request, max: 100}
    mode: enforce                        # enforce | audit (allow, warn, count)

For all namespaces together, the older JSON `{namespace: {"quota": {model: cards}, "pool": [..]}}`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from vcuda.decision import printable
from vcuda.decoding import convert
from vcuda.dimensions import CORES, DIMENSIONS, MEMORY, PODS
from vcuda.gpu_model import GpuModel, matches, never_matches, parse_model
from vcuda.memory_units import DEFAULT_UNIT_MIB, MIB, is_in_bytes, requested_mib
from vcuda.namespace_policy import CoreLimitPolicy, Mode, NamespacePolicy
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.vocabulary import CORES_PER_CARD

ALL_TYPES = "*"
DENY: Literal["deny"] = "deny"
ALLOW: Literal["allow"] = "allow"
FIELDS = ("types", "unlisted", "pools", "untyped", "coreLimit", "mode")
MAX_LINES = 256


class QuotaMistake(Struct, frozen=True):
    """Something in a quota that cannot be meant: in which quota, where there, what stands there, what to write."""

    quota: str
    path: str
    value: str
    remedy: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.quota, self.path, self.value, self.remedy)))


class QuotaError(ValueError):
    """A quota that cannot be meant, with everything that is wrong with it."""

    def __init__(self, *mistakes: QuotaMistake) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = mistakes


class Quota(Struct, frozen=True):
    """One quota: ceilings per line, and the policy that stands with them. `name` says where it is written."""

    name: str
    types: dict[str, dict[str, int]]
    unlisted: Literal["deny", "allow"] = DENY
    untyped: Literal["float", "deny"] = "float"
    policy: NamespacePolicy = NamespacePolicy()

    def lines(self, model: GpuModel) -> tuple[str, ...]:
        """Name the lines that a model is charged to: the product's, the family's, and the one over all types."""
        return tuple(line for line in self.types if line == ALL_TYPES or matches(line, model))

    def grants(self, model: GpuModel) -> bool:
        """Tell whether this quota lets the namespace use a model at all."""
        return self.unlisted == ALLOW or any(line != ALL_TYPES for line in self.lines(model))


class QuotaParser:
    """Collects what is wrong while a quota is read."""

    def __init__(self, where: str, unit_mib: int) -> None:
        self.where, self.unit_mib = where, unit_mib
        self.mistakes: list[QuotaMistake] = []

    def wrong(self, path: str, value: Any, message: str) -> None:  # noqa: ANN401 - whatever was written
        """Note a mistake."""
        self.mistakes.append(QuotaMistake(self.where, path, printable(json_like(value)), message))

    def mapping(self, path: str, value: Any, remedy: str) -> dict[str, Any]:  # noqa: ANN401
        """Expect a mapping."""
        if isinstance(value, dict):
            return value
        self.wrong(path, value, remedy)
        return {}

    def choice(self, path: str, value: Any, choices: Sequence[str]) -> str:  # noqa: ANN401
        """Expect one of a few words; the first is taken while the mistake is told."""
        if value in choices and isinstance(value, str):
            return value
        self.wrong(path, value, f"write one of {', '.join(choices)}")
        return choices[0]

    def whole(self, path: str, value: Any, remedy: str) -> int:  # noqa: ANN401
        """Expect a whole number that is not negative."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.wrong(path, value, remedy)
        return 0

    def unknown(self, path: str, fields: Iterable[str], known: Sequence[str]) -> None:
        """Refuse fields that mean nothing: a slip of the pen must not be an unlimited quota."""
        for field in fields:
            if field not in known:
                self.wrong(f"{path}{field}", field, f"there is no such field; there are {', '.join(known)}")

    def pools(self, path: str, value: Any) -> tuple[str, ...] | None:  # noqa: ANN401
        """Expect a list of names of pools; an empty one means all."""
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(pool, str) and pool for pool in value):
            return tuple(dict.fromkeys(value)) or None
        self.wrong(path, value, "write a list of node pools, as in [training]")
        return None

    def model(self, path: str, line: str) -> None:
        """Expect the name of a model or a family."""
        if never_matches(line):
            self.wrong(path, line, "no card is called so: write a model or a family such as A100, T4 or RTX-3090")
            return
        try:
            parse_model(line)
        except ValueError as wrong:
            self.wrong(path, line, str(wrong).partition(": ")[2])

    def memory_mib(self, path: str, value: Any) -> int:  # noqa: ANN401
        """Expect memory, in bytes or in units; what is not a whole MiB is not granted."""
        try:
            amount = parse_quantity(value)
            rounded_up = requested_mib(amount, self.unit_mib)
            return amount.whole // MIB if is_in_bytes(amount, self.unit_mib) else rounded_up
        except (QuantityError, TypeError) as wrong:
            self.wrong(path, value, f"{wrong}; write memory as in 160Gi, or a number of {self.unit_mib} MiB units")
            return 0


def json_like(value: Any) -> str:  # noqa: ANN401 - whatever was written
    """Show a value as it would stand in a document."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def parse_quota(text: str, name: str, unit_mib: int = DEFAULT_UNIT_MIB) -> Quota:
    """Read a `quota.yaml`; a QuotaError tells everything that is wrong with it."""
    try:
        documents = parse_documents(text, plain_numbers=True)
    except DocumentError as wrong:
        raise QuotaError(QuotaMistake(name, "", "", str(wrong))) from None
    if len(documents) != 1:
        raise QuotaError(QuotaMistake(name, "", "", f"holds {len(documents)} documents; write one"))
    parser = QuotaParser(name, unit_mib)
    body = parser.mapping("quota", documents[0], f"write a mapping with {', '.join(FIELDS)}")
    quota = read_quota(body, name, parser)
    if parser.mistakes:
        raise QuotaError(*parser.mistakes)
    return quota


def read_quota(body: dict[str, Any], name: str, parser: QuotaParser) -> Quota:
    """Read the fields of a quota."""
    parser.unknown("", body, FIELDS)
    if isinstance(body.get("types"), dict) and len(body["types"]) > MAX_LINES:
        parser.wrong("types", len(body["types"]), f"too many lines; write at most {MAX_LINES}, by family")
    types = {
        str(line): read_line(f"types.{line}", line, limits, parser)
        for line, limits in parser.mapping(
            "types", body.get("types", {}), "write lines such as A100: {cores: 400}"
        ).items()
    }
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
            parser.pools("pools", body.get("pools")), read_core_limit_policy(body.get("coreLimit"), parser), mode
        ),
    )


def read_line(path: str, line: str, limits: Any, parser: QuotaParser) -> dict[str, int]:  # noqa: ANN401
    """Read the ceilings of one line."""
    if line != ALL_TYPES:
        parser.model(path, line)
    read: dict[str, Callable[[str, Any], int]] = {
        CORES: lambda at, value: parser.whole(at, value, "write cores as a whole number; 100 is one GPU"),
        MEMORY: parser.memory_mib,
        PODS: lambda at, value: parser.whole(at, value, "write a whole number of pods"),
    }
    found = parser.mapping(path, limits, "write its ceilings, as in {cores: 400, memory: 160Gi, pods: 20}")
    parser.unknown(f"{path}.", found, DIMENSIONS)
    return {key: read[key](f"{path}.{key}", found[key]) for key in DIMENSIONS if key in found}


def read_core_limit_policy(value: Any, parser: QuotaParser) -> CoreLimitPolicy:  # noqa: ANN401
    """Read how far fractions may burst."""
    if value is None:
        return CoreLimitPolicy()
    try:
        return convert(value, CoreLimitPolicy)
    except msgspec.ValidationError:
        parser.wrong(
            "coreLimit", value, f"write {{default: request, max: {CORES_PER_CARD}}}; both may be 1 to {CORES_PER_CARD}"
        )
        return CoreLimitPolicy()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Read a JSON object in which nothing is said twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"{printable(twice)!r} stands twice in it; write it once")
    return found


def parse_legacy_quotas(text: str, name: str) -> dict[str, Quota]:
    """Read the older JSON for all namespaces; a namespace that it does not name has no quota here."""
    try:
        body = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as wrong:
        raise QuotaError(QuotaMistake(name, "", "", f"not JSON as it should be: {wrong}")) from None
    parser = QuotaParser(name, DEFAULT_UNIT_MIB)
    quotas: dict[str, Quota] = {}
    for namespace, entry in parser.mapping("gpu_quota", body, "write namespaces and their quotas").items():
        fields = parser.mapping(namespace, entry, 'write {"quota": {"A100": 4}, "pool": ["training"]}')
        parser.unknown(f"{namespace}.", fields, ("quota", "pool"))
        counts = parser.mapping(f"{namespace}.quota", fields.get("quota", {}), "write models and whole GPUs")
        for model in counts:
            parser.model(f"{namespace}.quota.{model}", model)
        quotas[namespace] = Quota(
            name=name,
            types={
                model: {CORES: CORES_PER_CARD * parser.whole(f"{namespace}.quota.{model}", cards, "write whole GPUs")}
                for model, cards in counts.items()
            },
            unlisted=DENY if "quota" in fields else ALLOW,
            policy=NamespacePolicy(parser.pools(f"{namespace}.pool", fields.get("pool"))),
        )
    if parser.mistakes:
        raise QuotaError(*parser.mistakes)
    return quotas
