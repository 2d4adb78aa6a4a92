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

VERSION = 1
MAX_WAITING = 20
# Four times as fast where the C library is installed, with the same output.
DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def status_of(
    ledger: Ledger, cluster_mode: Mode, waiting: Mapping[str, str], mistakes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return the status of a namespace.

    `waiting` has the reason for each waiting pod by name, `mistakes` those in each invalid quota by its name.
    """
    return {
        "v": VERSION,
        "mode": str(ledger.policy.effective_mode(cluster_mode)),
        "quotas": [
            {"name": quota.name, "types": {line: line_usage(ledger, quota.name, line) for line in quota.types}}
            for quota in ledger.quotas
        ],
        "holders": [msgspec.to_builtins(holder) for holder in ledger.holders],
        "waiting": [{"name": name, "reason": reason} for name, reason in sorted(waiting.items())[:MAX_WAITING]],
        "notes": status_notes(ledger, cluster_mode, mistakes),
    }


def line_usage(ledger: Ledger, quota: str, line: str) -> dict[str, dict[str, int]]:
    """Return the numbers of one line of a quota, by dimension."""
    usage = ledger.usage
    # After a rollback the ledger may hold a dimension that only the newer version knows: it keeps its own name.
    return {
        STATUS_KEYS.get(dimension, dimension): {
            "hard": hard,
            "used": usage.used[key],
            "reserved": usage.reserved[key],
            "free": usage.hard.free(usage.taken, key),
        }
        for key, hard in usage.hard.items()
        if key[:2] == (quota, line)
        for dimension in (key[2],)
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
        notes.append("the ledger was lost and is being rebuilt; GPU pods are refused for up to a minute")
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
