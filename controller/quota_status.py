"""`gpu-quota-status`: what everybody in a namespace can see of its quotas.

```yaml
v: 1
mode: enforce
quotas:
- name: team/gpu-quota
  types:
    A100:
      cores: {hard: 400, used: 350, reserved: 25, free: 25}
      memoryMiB: {hard: 163840, used: 81920, reserved: 0, free: 81920}
holders:                 # who holds most
- {name: Job/train, model: A100, cores: 300, pods: 3, memoryMiB: 122880}
waiting:                 # pods that got in without a charge, and wait for one
- {name: late, reason: "..."}
notes: []                # what is amiss: a quota that cannot be read, or that was lowered below what is in use
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from vcuda.dimensions import STATUS_KEYS
from vcuda.ledger import Ledger, LedgerState
from vcuda.namespace_policy import Mode

VERSION = 1
MAX_WAITING = 20
# Four times as fast where the C library is there, and to the letter the same.
DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def status_of(
    ledger: Ledger, cluster_mode: Mode, waiting: Mapping[str, str], mistakes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Say how a namespace stands with its quotas.

    `waiting` are pods by name, with the reason; `mistakes` are quotas that cannot be read, with what is wrong.
    """
    return {
        "v": VERSION,
        "mode": str(ledger.policy.effective_mode(cluster_mode)),
        "quotas": [
            {"name": quota.name, "types": {line: dimensions(ledger, quota.name, line) for line in quota.types}}
            for quota in ledger.quotas
        ],
        "holders": [msgspec.to_builtins(holder) for holder in ledger.holders],
        "waiting": [{"name": name, "reason": why} for name, why in sorted(waiting.items())[:MAX_WAITING]],
        "notes": notes(ledger, cluster_mode, mistakes),
    }


def dimensions(ledger: Ledger, quota: str, line: str) -> dict[str, dict[str, int]]:
    """Give the numbers of one line."""
    usage = ledger.usage
    return {
        STATUS_KEYS[dimension]: {
            "hard": hard,
            "used": usage.used[key],
            "reserved": usage.reserved[key],
            "free": usage.hard.free(usage.taken, key),
        }
        for key, hard in usage.hard.items()
        if key[:2] == (quota, line)
        for dimension in (key[2],)
    }


def notes(ledger: Ledger, cluster_mode: Mode, mistakes: Mapping[str, Sequence[str]]) -> list[str]:
    """Say what is amiss."""
    usage = ledger.usage
    audit = ledger.policy.effective_mode(cluster_mode) is Mode.AUDIT
    follows = (
        "only watched, nothing is refused"
        if audit
        else "nothing more is admitted until it is less; nothing that runs is ended"
    )
    told = [
        f"{quota}: types.{line}.{dimension}: {usage.taken[quota, line, dimension]} are in use and {hard} allowed: "
        f"{follows}"
        for (quota, line, dimension), hard in usage.hard.items()
        if usage.taken[quota, line, dimension] > hard
    ]
    good = {quota.name for quota in ledger.quotas}
    for name, wrong in mistakes.items():
        kept = "the last good one stays in force" if name in good else "it is NOT in force, and limits nothing"
        told += [f"{mistake}; {kept}" for mistake in wrong]
    if ledger.state is LedgerState.REBUILDING:
        told.append("the ledger was lost and is being rebuilt; no pod with GPUs is admitted for up to a minute")
    return told


def encode_status(status: Mapping[str, Any]) -> str:
    """Write a status for people and programs."""
    return yaml.dump(dict(status), Dumper=DUMPER, sort_keys=False, default_flow_style=None, width=1000)
