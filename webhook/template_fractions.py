"""Rewrites fractions of a card (`inspur.com/gpu: 0.3`) in the pod templates of workloads.

The API server rejects a template with a fraction of an extended resource, so here the webhook writes canonical amounts
into the template, and records the containers in an annotation of the template. When the user changes the manifest,
`kubectl apply` merges the change over those amounts: another fraction, whole cards, another vocabulary, no GPU, or a
renamed container. The record tells which amounts the webhook has written, so that they can be removed again. That the
user no longer requests a GPU does not show in the template: the caller says for which containers.
"""

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from vcuda.pod import Container, ResourceList, Resources
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.request import TOKEN_MEMORY_UNITS, Role, read_container
from vcuda.vocabulary import Share
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of, is_same_amount, patch_amounts, split_names
from webhook.objects import AdmittedContainer, AdmittedMetadata, Template
from webhook.patching import PatchBuilder

# The cores in an entry of the annotation. Users can edit it: other entries are ignored.
CORES = re.compile(r"[1-9][0-9]?", re.ASCII)


class GpuAmounts(Struct):
    """The GPU resources of a container, in any vocabulary. Mutable: a rewrite edits them, then patches the template."""

    limits: ResourceList
    requests: ResourceList | None

    @property
    def lists(self) -> list[ResourceList]:
        """The limits, and the requests if there are any."""
        return [self.limits] if self.requests is None else [self.limits, self.requests]

    def drop(self, keys: Collection[str]) -> None:
        for amounts in self.lists:
            for key in keys:
                amounts.pop(key, None)


def rewrite_fractions(
    template: Template, recorded: Mapping[str, int], withdrawn: Collection[str], config: AdmissionConfig
) -> PatchBuilder:
    """Return the patch of a template.

    `recorded` are the containers that were rewritten before, `withdrawn` those of them that no user requests GPUs for
    any more.
    """
    names, patch = config.names, PatchBuilder()
    rewritten: dict[str, int] = {}
    following: list[str] = []
    for pointer, container in containers_of(template.spec):
        amounts = gpu_amounts(container, config)
        cores = recorded.get(container.name)
        if cores is not None and is_written_by_webhook(amounts, cores, config):
            if has_other_amounts(amounts, config) or container.name in withdrawn:
                amounts.drop((names.core, names.memory))
            else:
                rewritten[container.name] = cores
        share = read_fraction(amounts, container.name, config)
        if share is not None:
            rewritten[container.name] = share.cores
            amounts.drop((names.cards,))
            for each in amounts.lists:
                # In place: these are the dicts of `amounts`.
                each |= {names.core: str(share.cores), names.memory: str(share.memory_count)}
        elif may_follow_core(amounts, config):
            following.append(container.name)
        patch_amounts(pointer, container, amounts.limits, amounts.requests, config=config, patch=patch)
    record_rewrites(template.metadata, recorded, rewritten, following, config=config, patch=patch)
    return patch.finish(template.metadata)


def recorded_rewrites(template: Template, before: Template | None, config: AdmissionConfig) -> dict[str, int]:
    """Return the containers that were rewritten before, with the cores that were written."""
    # The record of the new template wins: it is newer if an earlier call for this request has rewritten it. A template
    # that was replaced has none, so the old one's counts too.
    return read_record(before.metadata if before else None, config) | read_record(template.metadata, config)


def read_record(metadata: AdmittedMetadata | None, config: AdmissionConfig) -> dict[str, int]:
    text = (metadata.annotations_or_empty if metadata else {}).get(config.names.cards_rewritten, "")
    # Split and not searched for: a pattern that may begin at every character takes quadratic time.
    entries = (entry.partition("=") for entry in text.split(","))
    return {name: int(cores) for name, _, cores in entries if name and CORES.fullmatch(cores)}


def gpu_amounts(container: AdmittedContainer, config: AdmissionConfig) -> GpuAmounts:
    resources = container.resources or Resources()
    by_key = config.scheme.by_key
    limits = {key: value for key, value in (resources.limits or {}).items() if key in by_key}
    if resources.requests is None:
        return GpuAmounts(limits, None)
    return GpuAmounts(limits, {key: value for key, value in resources.requests.items() if key in by_key})


def is_written_by_webhook(amounts: GpuAmounts, cores: int, config: AdmissionConfig) -> bool:
    """Whether the canonical amounts are still those of an earlier rewrite to this many cores."""
    # Limits are enough: Kubernetes requires requests of extended resources to be equal.
    written = {config.names.core: str(cores), config.names.memory: str(TOKEN_MEMORY_UNITS)}
    return all(key in amounts.limits and is_same_amount(amounts.limits[key], value) for key, value in written.items())


def has_other_amounts(amounts: GpuAmounts, config: AdmissionConfig) -> bool:
    """Whether the container has amounts in another vocabulary than the canonical one, such as a 0 for no GPU."""
    return any(each.keys() - {config.names.core, config.names.memory} for each in amounts.lists)


def read_fraction(amounts: GpuAmounts, name: str, config: AdmissionConfig) -> Share | None:
    """Return the share of a container that requests a fraction of a card.

    None if it requests none, if the amount is invalid, or if there are amounts of another vocabulary beside it.
    """
    key = config.names.cards
    values = [each[key] for each in amounts.lists if key in each]
    if not any(map(is_fraction, values)) or any(set(each) - {key} for each in amounts.lists):
        return None
    cards_only = Container(name, Resources(amounts.limits, amounts.requests))
    request, _ = read_container(cards_only, "", Role.APP, config.scheme, memory_follows_cores=False)
    return request.share if request else None


def is_fraction(amount: str | float) -> bool:
    """Whether an amount is valid and not a whole number, which Kubernetes requires of extended resources."""
    try:
        return not parse_quantity(amount).is_whole
    except QuantityError:
        return False


def may_follow_core(amounts: GpuAmounts, config: AdmissionConfig) -> bool:
    """Whether memory can follow the cores: there are cores, and no memory but perhaps the token of one unit."""
    memory = amounts.limits.get(config.names.memory)
    return config.names.core in amounts.limits and (memory is None or is_same_amount(memory, str(TOKEN_MEMORY_UNITS)))


def record_rewrites(
    metadata: AdmittedMetadata | None,
    recorded: Mapping[str, int],
    rewritten: dict[str, int],
    following: list[str],
    *,
    config: AdmissionConfig,
    patch: PatchBuilder,
) -> None:
    """Write the record, and keep the list of containers whose memory follows their cores in step with it.

    The user may have listed containers too. A container leaves the list only if the webhook had added it, it is no
    longer rewritten, and its amounts would be invalid in the list.
    """
    if not recorded and not rewritten:
        return
    listed = (metadata.annotations_or_empty if metadata else {}).get(config.names.memory_follows_core, "")
    present = split_names(listed)
    dropped = set(recorded) - set(rewritten) - set(following)
    kept = [name for name in present if name not in dropped]
    added = rewritten.keys() - present
    names = [*kept, *(name for name in rewritten if name in added)]
    patch.annotate(config.names.memory_follows_core, ",".join(names) or None)
    patch.annotate(
        config.names.cards_rewritten, ",".join(f"{name}={cores}" for name, cores in rewritten.items()) or None
    )
