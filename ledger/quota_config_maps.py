"""Reads quotas from ConfigMaps, in either of the two forms.

A ConfigMap with the quota label holds the quota of its own namespace under `quota.yaml`. The legacy ConfigMap
`kube-system/gpuquota` holds the quotas of all namespaces under `gpu_quota`.
"""

from collections.abc import Mapping

from vcuda.names import LEGACY_KEY, LEGACY_NAME, LEGACY_NAMESPACE, QUOTA_KEY
from vcuda.quota import Quota, QuotaError, QuotaMistake, parse_legacy_quotas, parse_quota
from vcuda.scheme import Scheme

LEGACY_QUOTA = f"{LEGACY_NAMESPACE}/{LEGACY_NAME}"


def is_quota_config_map(namespace: str, name: str, labels: Mapping[str, str], scheme: Scheme) -> bool:
    """Whether a ConfigMap is a quota: by its label under any known domain, or by the legacy name."""
    if is_legacy(namespace, name):
        return True
    return any(labels.get(names.quota_label) == "true" for names in scheme.all_names)


def is_legacy(namespace: str, name: str) -> bool:
    return (namespace, name) == (LEGACY_NAMESPACE, LEGACY_NAME)


def parse_quota_config_map(namespace: str, name: str, data: dict[str, str], unit_mib: int) -> dict[str, Quota]:
    """Return the quotas in a ConfigMap by namespace; raises QuotaError with every mistake in it."""
    source = f"{namespace}/{name}".lstrip("/")
    # The legacy ConfigMap may also be labelled and hold a quota of kube-system itself.
    if is_legacy(namespace, name) and (LEGACY_KEY in data or QUOTA_KEY not in data):
        if LEGACY_KEY not in data:
            raise QuotaError(QuotaMistake(source, "data", "", f"has no key {LEGACY_KEY}; write the quotas under it"))
        return parse_legacy_quotas(data[LEGACY_KEY], source)
    if QUOTA_KEY not in data:
        raise QuotaError(QuotaMistake(source, "data", "", f"has no key {QUOTA_KEY}; write the quota under it"))
    return {namespace: parse_quota(data[QUOTA_KEY], source, unit_mib)}
