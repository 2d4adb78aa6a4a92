"""Which GPUs a pod's options allow, whatever is free of them."""

from vcuda.gpu_model import matches, parse_model
from vcuda.inventory import Gpu
from vcuda.pod_options import PodOptions


def may_use(options: PodOptions, gpu: Gpu) -> bool:
    if (options.uuids and gpu.uuid not in options.uuids) or gpu.uuid in options.avoided_uuids:
        return False
    return may_use_model(options, gpu.model)


def may_use_model(options: PodOptions, model: str) -> bool:
    parsed = parse_model(model)
    # A pod that names neither a slice nor a UUID wants cards, and may need all of one.
    if parsed.mig_profile and not options.models and not options.uuids:
        return False
    if options.models and not any(matches(wanted, parsed) for wanted in options.models):
        return False
    return not any(matches(avoided, parsed) for avoided in options.avoided_models)
