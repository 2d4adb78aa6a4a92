"""How the quotas in a ledger follow those of the cluster, by writers whose views of them may be behind."""

from collections.abc import Callable, Iterable, Mapping

from vcuda.ledger import Ledger
from vcuda.quota import Quota


def merge_newer_quotas(ledger: Ledger, quotas: Iterable[Quota], versions: Mapping[str, int]) -> None:
    """Replace quotas by newer versions and add new ones; remove none.

    For webhooks, whose caches may be behind in any of several watches. Only the controller removes a quota; a webhook
    that still has it must not add it again, so a quota the ledger does not have must be newer than `quotas_at`.
    """
    known = ledger.versions
    newer = {each.name: each for each in quotas if versions.get(each.name, 0) > known.get(each.name, ledger.quotas_at)}
    if not newer:
        return
    # A quota of the namespace replaces the configured default, which has no version.
    versioned = {quota.name: quota for quota in ledger.quotas if known.get(quota.name)}
    merged = versioned | newer
    current = {name: max(versions.get(name, 0), known.get(name, 0)) for name in merged}
    ledger.set_quotas([merged[name] for name in sorted(merged)], ledger.quotas_at, current)


def reconcile_quotas(
    ledger: Ledger, quotas: Iterable[Quota], versions: Mapping[str, int], at: int, is_gone: Callable[[str], bool]
) -> None:
    """Make the quotas of a ledger those of the cluster.

    Where the ledger has a newer version of a quota, that is kept. A quota that is missing in `quotas` is removed only
    if `is_gone` confirms it: the cache may not have seen it yet.
    """
    current = {quota.name: quota for quota in quotas}
    known = {name: versions.get(name, 0) for name in current}
    for quota in ledger.quotas:
        version = ledger.versions.get(quota.name, 0)
        if quota.name in current:
            if version > known[quota.name]:
                current[quota.name], known[quota.name] = quota, version
        elif version and not is_gone(quota.name):
            current[quota.name], known[quota.name] = quota, version
    ordered = tuple(current[name] for name in sorted(current))
    # Versions are compared too: a quota that was changed and changed back must not fall back to what was in between.
    if (ordered, known) != (ledger.quotas, ledger.versions):
        ledger.set_quotas(ordered, at, known)
