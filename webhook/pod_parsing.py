"""Parses a pod under review: its GPU request in any vocabulary, its options, and the limits that follow from both.

`parse_pod` runs for every review of a pod, so it must stay cheap. It collects all mistakes instead of stopping at one.
"""

from msgspec import Struct
from msgspec.structs import replace

from vcuda.decision import Code, Reason
from vcuda.limits import (
    VERSION,
    PodLimits,
    common_core_limit,
    decode_limits,
    encode_limits,
    is_injected_core_limit,
    limits_of,
)
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod_options import PodOptions, annotation_field, core_limit_invalid, read_pod_options
from vcuda.request import PodRequest, parse_request
from vcuda.vocabulary import CORES_PER_CARD
from webhook.admission_config import AdmissionConfig
from webhook.objects import Pod
from webhook.size_limits import size_mistakes


class ParsedPod(Struct, frozen=True):
    """What a pod requests. With `reasons`, the other fields hold only what could be parsed.

    `limits_annotation` is `limits` encoded; `core_limit` is the one that all fractional containers have in common.
    """

    request: PodRequest
    options: PodOptions
    limits: PodLimits
    limits_annotation: str
    core_limit: int | None
    reasons: tuple[Reason, ...]

    @property
    def is_gpu(self) -> bool:
        """Whether the pod requests GPUs, even if the request is invalid."""
        return self.request.is_gpu or bool(self.reasons)

    @property
    def is_too_large(self) -> bool:
        """Whether the pod was not parsed, because of its size."""
        return any(reason.code is Code.TOO_LARGE for reason in self.reasons)


NO_GPUS = ParsedPod(PodRequest(), PodOptions(), PodLimits(v=VERSION, models=(), containers={}), "", None, ())


def parse_pod(pod: Pod, config: AdmissionConfig, policy: NamespacePolicy) -> ParsedPod:
    names, scheme = config.names, config.scheme
    if mistakes := size_mistakes(pod, config):
        return replace(NO_GPUS, reasons=tuple(mistakes))
    annotations = pod.metadata.annotations_or_empty
    parsed = parse_request(pod.spec, annotations, scheme)
    request = parsed.request
    if not request.is_gpu and not parsed.reasons:
        return NO_GPUS  # the annotations of other pods are not checked
    options, mistakes = read_pod_options(annotations, scheme, largest_fraction(request))
    if options.core_limit is None and any(each.share.bursts for each in request.containers):
        # Written to the pod as if by its author: its rewritten resources no longer tell.
        options = replace(options, core_limit=max(policy.core_limit.max, largest_fraction(request)))
    present = annotations.get(names.limits)
    if options.core_limit is None or present is None:
        limits = limits_of(request, options, policy, scheme.unit_mib)
        encoded = encode_limits(limits)
    else:
        # The API server may call again after another webhook changed the pod. Then the core limit can be the one that
        # the first call injected; taken for the user's, it would stay when the containers have changed.
        without_limit = replace(options, core_limit=None)
        limits = limits_of(request, without_limit, policy, scheme.unit_mib)
        encoded = encode_limits(limits)
        is_default = present == encoded and common_core_limit(limits) == options.core_limit
        if is_default or is_injected(present, annotations.get(names.core_limit)):
            options = without_limit
        else:
            limits = limits_of(request, options, policy, scheme.unit_mib)
            encoded = encode_limits(limits)
    reasons = [*parsed.reasons, *mistakes, *check_core_limit(request, options, policy, config, annotations)]
    return ParsedPod(request, options, limits, encoded, common_core_limit(limits), tuple(reasons))


def largest_fraction(request: PodRequest) -> int:
    """Return the cores of the largest fractional container, which is the lowest valid core limit; 1 without one."""
    return max([each.share.cores for each in request.containers if not each.share.whole_cards], default=1)


def is_injected(limits_annotation: str, core_limit: str | None) -> bool:
    """Whether an earlier call injected this core limit together with these limits."""
    before = decode_limits(limits_annotation)
    return before is not None and core_limit is not None and is_injected_core_limit(before, core_limit)


def check_core_limit(
    request: PodRequest,
    options: PodOptions,
    policy: NamespacePolicy,
    config: AdmissionConfig,
    annotations: dict[str, str],
) -> list[Reason]:
    """Check the user's core limit against the containers' requests and the namespace's maximum."""
    if options.core_limit is None:
        return []
    lowest = largest_fraction(request)
    if all(each.share.whole_cards for each in request.containers):
        return []  # whole cards ignore it: a warning, not a mistake
    # A container may always use the cores that it requests, even if the namespace's maximum is lower.
    highest = max(policy.core_limit.max, lowest)
    if lowest <= options.core_limit <= highest:
        return []
    # Several domains may have the annotation; the first in this order is the one that was read.
    key = next(names.core_limit for names in config.scheme.all_names if names.core_limit in annotations)
    reason = core_limit_invalid(key, annotations[key], lowest)
    if highest < CORES_PER_CARD and options.core_limit > highest:
        return [
            Reason(
                code=reason.code,
                field=annotation_field(key),
                value=reason.value,
                message=f"exceeds {highest}, the maximum core limit in this namespace's quota",
                remedy=f'write "{lowest}" to "{highest}", or remove the annotation',
            )
        ]
    return [reason]
