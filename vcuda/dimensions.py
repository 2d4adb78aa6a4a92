"""The dimensions of a quota: what a line such as `A100: {cores: 400, memory: 160Gi, pods: 20}` can limit.

A new dimension is added here, in `Charge.amounts` and `Holder.amounts` (vcuda/quota_usage.py: how much of it a pod
takes) and in `read_line` (vcuda/quota.py: how its limit is written). Ledgers, status, metrics and refusals follow
from these.
"""

CORES = "cores"
MEMORY = "memory"
PODS = "pods"

DIMENSIONS = (CORES, MEMORY, PODS)

# As refusals write an amount: "asked 50 cores (100 = one GPU) of A100".
UNITS = {CORES: "cores", MEMORY: "MiB of memory", PODS: "pod(s)"}
EXPLAINED_UNITS = UNITS | {CORES: "cores (100 = one GPU)"}

# Keys of the dimensions in `gpu-quota-status`, where amounts of memory are in MiB.
STATUS_KEYS = {CORES: "cores", MEMORY: "memoryMiB", PODS: "pods"}
