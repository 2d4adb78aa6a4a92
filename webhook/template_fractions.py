"""Parts of a card in workloads' templates: made whole numbers, and made again whenever the author changes them.

The API server would refuse `0.3` in a template, so the template gets canonical amounts, and an annotation that records
which containers were so rewritten. What the author changes later is merged over that: a new part of a card, whole
cards, another vocabulary, none at all, another name. Then what was put in before is a leftover, and is taken out again.
"""

import re
from collections.abc import Collection

from msgspec import Struct

from vcuda.pod import Container, ResourceList, Resources
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.request import TOKEN_MEMORY_UNITS, Role, read_container
from vcuda.vocabulary import Share
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of, is_count
from webhook.objects import AdmittedContainer, Metadata, Template
from webhook.patching import PatchBuilder, escape_pointer

RECORD = re.compile(r"(?P<name>[^=,]+)=(?P<cores>[1-9][0-9]?)", re.ASCII)


class ContainerAmounts(Struct):
    """What a container asks for under our keys, in the making."""

    limits: ResourceList
    requests: ResourceList | None

    @property
    def parts(self) -> list[ResourceList]:
        """Limits, and requests where there are any."""
        return [self.limits] if self.requests is None else [self.limits, self.requests]

    def drop(self, keys: Collection[str]) -> None:
        """Take keys out."""
        for part in self.parts:
            for key in keys:
                part.pop(key, None)


def rewrite_fractions(
    template: Template, before: Template | None, manifest: Template | None, config: AdmissionConfig
) -> PatchBuilder:
    """Draft canonical amounts for parts of a card. `manifest` is what was applied, if that is known."""
    draft = PatchBuilder()
    # The template's own record is newer where this call has rewritten it before; a replaced template may have none.
    recorded = record_of(before.metadata if before else None, config) | record_of(template.metadata, config)
    now: dict[str, int] = {}
    following: list[str] = []
    for place, container in containers_of(template.spec):
        amounts = ours_of(container, config)
        old = recorded.get(container.name)
        if old is not None and is_leftover(amounts, old, config):
            if speaks_otherwise(amounts, config) or is_dropped(container.name, manifest, config):
                amounts.drop((config.names.core, config.names.memory))
            else:
                now[container.name] = old
        share = part_of_card(amounts, container.name, config)
        if share is not None:
            now[container.name] = share.cores
            amounts.drop((config.names.cards,))
            for part in amounts.parts:
                part |= {config.names.core: str(share.cores), config.names.memory: str(share.memory_count)}
        elif may_follow(amounts, config):
            following.append(container.name)
        write(place, container, amounts, config, draft)
    annotate(template.metadata, recorded, now, following, config=config, draft=draft)
    return draft.finish(template.metadata)


def record_of(metadata: Metadata | None, config: AdmissionConfig) -> dict[str, int]:
    """Read which containers were rewritten before, and to how many cores."""
    text = (metadata.noted if metadata else {}).get(config.names.cards_rewritten, "")
    return {found["name"]: int(found["cores"]) for found in RECORD.finditer(text)}


def ours_of(container: AdmittedContainer, config: AdmissionConfig) -> ContainerAmounts:
    """Give what a container asks for under our keys."""
    resources = container.resources or Resources()
    by_key = config.scheme.by_key
    limits = {key: value for key, value in (resources.limits or {}).items() if key in by_key}
    if resources.requests is None:
        return ContainerAmounts(limits, None)
    return ContainerAmounts(limits, {key: value for key, value in resources.requests.items() if key in by_key})


def is_leftover(amounts: ContainerAmounts, cores: int, config: AdmissionConfig) -> bool:
    """Tell whether canonical amounts are those that were put in."""
    wanted = {config.names.core: str(cores), config.names.memory: str(TOKEN_MEMORY_UNITS)}
    return all(key in amounts.limits and is_count(amounts.limits[key], value) for key, value in wanted.items())


def speaks_otherwise(amounts: ContainerAmounts, config: AdmissionConfig) -> bool:
    """Tell whether there is anything but canonical amounts."""
    own = (config.names.core, config.names.memory)
    return any(key not in own and not is_zero(part[key]) for part in amounts.parts for key in part)


def is_zero(amount: str | float) -> bool:
    """Tell whether an amount counts as absent."""
    try:
        return parse_quantity(amount).nanos == 0
    except QuantityError:
        return False


def is_dropped(name: str, manifest: Template | None, config: AdmissionConfig) -> bool:
    """Tell whether what was applied has this container without any GPU."""
    if manifest is None:
        return False
    found = [container for _, container in containers_of(manifest.spec) if container.name == name]
    return bool(found) and not any(part for container in found for part in ours_of(container, config).parts)


def part_of_card(amounts: ContainerAmounts, name: str, config: AdmissionConfig) -> Share | None:
    """Read a part of a card; None if there is none, if it cannot be read, or if another vocabulary stands beside it."""
    key = config.names.cards
    parts = [part[key] for part in amounts.parts if key in part]
    if not any(map(is_fraction, parts)) or any(set(part) - {key} for part in amounts.parts):
        return None
    alone = Container(name, Resources(amounts.limits, amounts.requests))
    found, _ = read_container(alone, "", Role.APP, config.scheme, memory_follows_cores=False)
    return found.share if found else None


def is_fraction(amount: str | float) -> bool:
    """Tell whether an amount is no whole number, which Kubernetes allows for no resource of this sort."""
    try:
        return not parse_quantity(amount).is_whole
    except QuantityError:
        return False


def may_follow(amounts: ContainerAmounts, config: AdmissionConfig) -> bool:
    """Tell whether memory can follow the cores here: there are some, and no memory but perhaps a token."""
    memory = amounts.limits.get(config.names.memory)
    return config.names.core in amounts.limits and (memory is None or is_count(memory, str(TOKEN_MEMORY_UNITS)))


def write(
    place: str, container: AdmittedContainer, amounts: ContainerAmounts, config: AdmissionConfig, draft: PatchBuilder
) -> None:
    """Draft what makes a container ask for these amounts under our keys, and for all else as before."""
    resources = container.resources or Resources()
    by_key = config.scheme.by_key
    for part, written, wanted in (
        ("limits", resources.limits, amounts.limits),
        ("requests", resources.requests, amounts.requests),
    ):
        if wanted is None or (written is None and not wanted):
            continue
        inside = f"{place}/resources/{part}"
        if written is None:
            draft.add(inside, wanted)
            continue
        for key in written:
            if key in by_key and key not in wanted:
                draft.remove(f"{inside}/{escape_pointer(key)}")
        for key, value in wanted.items():
            if written.get(key) != value:
                draft.add(f"{inside}/{escape_pointer(key)}", value)


def annotate(
    metadata: Metadata | None,
    recorded: dict[str, int],
    now: dict[str, int],
    following: list[str],
    *,
    config: AdmissionConfig,
    draft: PatchBuilder,
) -> None:
    """Record what was rewritten, and let memory follow there and no longer where it was."""
    if not recorded and not now:
        return
    listed = (metadata.noted if metadata else {}).get(config.names.memory_follows_core, "")
    present = [name.strip() for name in listed.split(",") if name.strip()]
    gone = set(recorded) - set(now) - set(following)
    names = [*(name for name in present if name not in gone), *(name for name in now if name not in present)]
    draft.annotate(config.names.memory_follows_core, ",".join(names) or None)
    draft.annotate(config.names.cards_rewritten, ",".join(f"{name}={cores}" for name, cores in now.items()) or None)
