"""The content of ConfigMap `gpu-quota-status`, which shows everyone in a namespace how its quotas are used.

```yaml
v: 1
mode: enforce
quotas:
- name: team/gpu-quota
  types:
    A100:
      cores: {hard: 400, used: 350, reserved: 25, free: 25}
      memoryMiB: {hard: 163840, used: 81920, reserved: 0, free: 81920}
holders:                 # the workloads that use most
- {name: Job/train, model: A100, cores: 300, pods: 3, memoryMiB: 122880}
waiting:                 # pods that were created without a charge, and wait for free quota
- {name: late, reason: "..."}
notes: []                # problems: an invalid quota, a quota lowered below its usage, a lost ledger
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from vcuda.dimensions import STATUS_KEYS, UNITS
from vcuda.ledger import Ledger, LedgerState
from vcuda.namespace_policy import Mode
from vcuda.quota_usage import QuotaUsage

VERSION = 1
# A ConfigMap holds 1 MiB, and a status that is too large cannot be written at all.
MAX_WAITING, MAX_LINES, MAX_NOTES = 20, 1000, 50
# Four times as fast where the C library is installed, with the same output.
DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def status_of(
    ledger: Ledger,
    cluster_mode: Mode,
    waiting: Mapping[str, str],
    mistakes: Mapping[str, Sequence[str]],
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the status of a namespace.

    `waiting` has the reason for each waiting pod by name, `mistakes` those in each invalid quota by its name, and
    `problems` are those of the ledger.
    """
    lines = [(quota.name, line, limits) for quota in ledger.quotas for line, limits in quota.types.items()]
    quotas: dict[str, dict[str, Any]] = {quota.name: {} for quota in ledger.quotas}
    for name, line, limits in lines[:MAX_LINES]:
        quotas[name][line] = line_usage(ledger.usage, name, line, limits)
    notes = [*problems, *status_notes(ledger, cluster_mode, mistakes)]
    if len(lines) > MAX_LINES:
        notes.append(f"{len(lines) - MAX_LINES} more lines of quotas are not shown here; all of them apply")
    return {
        "v": VERSION,
        "mode": str(ledger.policy.effective_mode(cluster_mode)),
        "quotas": [{"name": name, "types": types} for name, types in quotas.items()],
        "holders": [msgspec.to_builtins(holder) for holder in ledger.holders],
        "waiting": [{"name": name, "reason": reason} for name, reason in sorted(waiting.items())[:MAX_WAITING]],
        "notes": limit_notes(notes),
    }


def limit_notes(notes: Sequence[str]) -> list[str]:
    """Return the first notes, and how many more there are."""
    more = len(notes) - MAX_NOTES
    return [*notes[:MAX_NOTES], f"and {more} more"] if more > 0 else list(notes)


def line_usage(usage: QuotaUsage, quota: str, line: str, limits: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the numbers of one line of a quota, by dimension."""
    # After a rollback the ledger may hold a dimension that only the newer version knows: it keeps its own name.
    return {
        STATUS_KEYS.get(dimension, dimension): {
            "hard": hard,
            "used": usage.used[quota, line, dimension],
            "reserved": usage.reserved[quota, line, dimension],
            "free": usage.hard.free(usage.taken, (quota, line, dimension)),
        }
        for dimension, hard in limits.items()
    }


def status_notes(ledger: Ledger, cluster_mode: Mode, mistakes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what a user or administrator has to know: exceeded limits, invalid quotas, a ledger being rebuilt."""
    notes = exceeded_limits(ledger, cluster_mode)
    in_force = {quota.name for quota in ledger.quotas}
    for name, mistakes_in_quota in mistakes.items():
        is_in_force = name in in_force
        consequence = (
            "the last valid version stays in force" if is_in_force else "it is not in force and limits nothing"
        )
        notes += [f"{mistake}; {consequence}" for mistake in mistakes_in_quota]
    if ledger.state is LedgerState.REBUILDING:
        is_audit = ledger.policy.effective_mode(cluster_mode) is Mode.AUDIT
        consequence = "GPU pods are not charged" if is_audit else "GPU pods are refused, whatever is free,"
        notes.append(f"the ledger was lost and is being rebuilt; {consequence} for up to a minute")
    return notes


def exceeded_limits(ledger: Ledger, cluster_mode: Mode) -> list[str]:
    """Return a note for each limit that was lowered below the usage, or exceeded in audit mode."""
    usage = ledger.usage
    is_audit = ledger.policy.effective_mode(cluster_mode) is Mode.AUDIT
    consequence = (
        "mode is audit, so no pod is refused"
        if is_audit
        else "new pods are refused until usage drops below it; running pods are not evicted"
    )
    return [
        f"{quota}: types.{line}.{dimension}: {usage.taken[quota, line, dimension]} {UNITS[dimension]} in use exceed "
        f"the limit of {hard}; {consequence}"
        for (quota, line, dimension), hard in usage.hard.items()
        if usage.taken[quota, line, dimension] > hard
    ]


def encode_status(status: Mapping[str, Any]) -> str:
    return yaml.dump(dict(status), Dumper=DUMPER, sort_keys=False, default_flow_style=None, width=1000)
