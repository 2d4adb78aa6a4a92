"""The workload kinds whose pod templates are checked, and where each kind keeps its template."""

from msgspec import Struct

TEMPLATE = ("spec", "template")
# A CronJob holds a Job, which holds the pod template.
CRON_JOB_TEMPLATE = ("spec", "jobTemplate", "spec", "template")


class WorkloadKind(Struct, frozen=True):
    """A kind that creates pods, as the API serves it."""

    group: str
    kind: str
    plural: str
    template: tuple[str, ...] = TEMPLATE
    # apps/v1 requires a selector; older API versions took it from the labels of the template.
    needs_selector: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1".lstrip("/")

    @property
    def template_pointer(self) -> str:
        """The path of the template as a JSON pointer."""
        return "/" + "/".join(self.template)


WORKLOAD_KINDS = (
    WorkloadKind("apps", "Deployment", "deployments", needs_selector=True),
    WorkloadKind("apps", "StatefulSet", "statefulsets", needs_selector=True),
    WorkloadKind("apps", "DaemonSet", "daemonsets", needs_selector=True),
    WorkloadKind("apps", "ReplicaSet", "replicasets", needs_selector=True),
    WorkloadKind("", "ReplicationController", "replicationcontrollers"),
    WorkloadKind("batch", "Job", "jobs"),
    WorkloadKind("batch", "CronJob", "cronjobs", CRON_JOB_TEMPLATE),
)

BY_KIND = {each.kind: each for each in WORKLOAD_KINDS}
BY_GROUP_KIND = {(each.group, each.kind): each for each in WORKLOAD_KINDS}
