"""The dimensions of a quota: what a line such as `A100: {cores: 400, memory: 160Gi, pods: 20}` can limit.

A new dimension is added in these places; tests/vcuda/test_dimensions.py fails while one of the first four is missing:

1. here: `DIMENSIONS`, `UNITS`, `EXPLAINED_UNITS` and `STATUS_KEYS`;
2. `PodRequest.demand` (vcuda/request.py): how much of it a pod takes. A limit on a dimension that the demand does not
   contain is never exceeded;
3. `Charge` and `Holder` with their `amounts` (vcuda/quota_usage.py): how much of it is recorded;
4. `read_line` (vcuda/quota.py): how its limit is written;
5. every place that builds a `Charge` or a `Holder`: vcuda/charging.py, controller/pod_usage.py,
   controller/accounting.py and console/quota_files.py.

Ledgers, status, metrics and refusals follow from these.
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
