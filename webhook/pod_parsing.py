"""What a pod under review asks for: amounts and wishes, in whatever vocabulary, with every mistake."""

from msgspec import Struct

from vcuda.decision import Reason
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


class ParsedPod(Struct, frozen=True):
    """A pod as read, and the annotations that say so. Where there are reasons, it is only what could be read.

    `written` are the limits as an annotation, `core_limit` the one on which all fractions agree, if they do.
    """

    request: PodRequest
    options: PodOptions
    limits: PodLimits
    written: str
    core_limit: int | None
    reasons: tuple[Reason, ...]

    @property
    def is_gpu(self) -> bool:
        """Whether the pod asks for GPUs, rightly or wrongly."""
        return self.request.is_gpu or bool(self.reasons)


NO_GPUS = ParsedPod(PodRequest(), PodOptions(), PodLimits(v=VERSION, models=(), containers={}), "", None, ())


def parse_pod(pod: Pod, config: AdmissionConfig, policy: NamespacePolicy) -> ParsedPod:
    """Read a pod, and compute what its containers may use."""
    names, scheme = config.names, config.scheme
    annotations = pod.metadata.noted
    reading = parse_request(pod.spec, annotations, scheme)
    request = reading.request
    if not request.is_gpu and not reading.reasons:
        return NO_GPUS  # Its annotations may be anything: they are nobody's business here.
    options, wrong = read_pod_options(annotations, scheme, largest_fraction(request))
    present = annotations.get(names.limits)
    if options.core_limit is None or present is None:
        limits = limits_of(request, options, policy.core_limit, scheme.unit_mib)
        written = encode_limits(limits)
    else:
        # The limit may be one that we injected ourselves in an earlier call: then nobody wished for it.
        unasked = PodOptions(None, options.models, options.avoided_models)
        limits = limits_of(request, unasked, policy.core_limit, scheme.unit_mib)
        written = encode_limits(limits)
        is_default = present == written and common_core_limit(limits) == options.core_limit
        if is_default or is_injected(present, annotations.get(names.core_limit)):
            options = unasked
        else:
            limits = limits_of(request, options, policy.core_limit, scheme.unit_mib)
            written = encode_limits(limits)
    reasons = [*reading.reasons, *wrong, *check_burst(request, options, policy, config, annotations)]
    return ParsedPod(request, options, limits, written, common_core_limit(limits), tuple(reasons))


def largest_fraction(request: PodRequest) -> int:
    """Give the least that a core limit can be."""
    return max([each.share.cores for each in request.containers if not each.share.whole_cards], default=1)


def is_injected(present: str, core_limit: str | None) -> bool:
    """Tell whether a core limit came with these limits, for a pod that has changed since."""
    before = decode_limits(present)
    return before is not None and core_limit is not None and is_injected_core_limit(before, core_limit)


def check_burst(
    request: PodRequest,
    options: PodOptions,
    policy: NamespacePolicy,
    config: AdmissionConfig,
    annotations: dict[str, str],
) -> list[Reason]:
    """Hold a wished core limit to what the containers ask for, and to what the namespace allows."""
    if options.core_limit is None:
        return []
    least = largest_fraction(request)
    if all(each.share.whole_cards for each in request.containers):
        return []
    most = max(policy.core_limit.max, least)
    if least <= options.core_limit <= most:
        return []
    key = next(names.core_limit for names in config.scheme.all_names if names.core_limit in annotations)
    if most < CORES_PER_CARD and options.core_limit > most:
        reason = core_limit_invalid(key, annotations[key], least)
        return [
            Reason(
                code=reason.code,
                field=annotation_field(key),
                value=reason.value,
                message=f"this namespace's quota lets containers burst to {most} cores at the most",
                remedy=f'write "{least}" to "{most}", or leave the annotation out',
            )
        ]
    return [core_limit_invalid(key, annotations[key], least)]
