"""Pods and events with the fields that commands show to people, beyond those in `cluster.objects`.

They are kinds of their own because components decode every pod of a cluster, and need none of these fields.
"""

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from cluster.objects import Event, Kind, Object, PodCondition
from vcuda.pod import PodSpec


class WaitingState(Struct, frozen=True, rename="camel", omit_defaults=True):
    reason: str = ""
    message: str = ""


class RunningState(Struct, frozen=True, rename="camel", omit_defaults=True):
    started_at: str | None = None


class TerminatedState(Struct, frozen=True, rename="camel", omit_defaults=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class ContainerState(Struct, frozen=True, omit_defaults=True):
    """At most one of these is set."""

    waiting: WaitingState | None = None
    running: RunningState | None = None
    terminated: TerminatedState | None = None


class ContainerStatusDetails(Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatusDetails(Struct, frozen=True, rename="camel", omit_defaults=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    conditions: Sequence[PodCondition] = ()
    init_container_statuses: Sequence[ContainerStatusDetails] = ()
    container_statuses: Sequence[ContainerStatusDetails] = ()

    @property
    def has_ended(self) -> bool:
        return self.phase in {"Succeeded", "Failed"}

    @property
    def all_containers(self) -> list[ContainerStatusDetails]:
        return [*self.init_container_statuses, *self.container_statuses]


class SchedulingGate(Struct, frozen=True):
    name: str = ""


class PodSpecDetails(PodSpec, frozen=True, rename="camel"):
    scheduling_gates: Sequence[SchedulingGate] = ()


class PodDetails(Object, frozen=True, kw_only=True):
    """A pod; partial."""

    spec: PodSpecDetails = PodSpecDetails()
    status: PodStatusDetails = PodStatusDetails()


class EventSeries(Struct, frozen=True, rename="camel", omit_defaults=True):
    last_observed_time: str | None = None


class EventDetails(Event, frozen=True, kw_only=True):
    """An event as any component writes it: kube-scheduler uses the newer API, with other fields for component and time.

    Partial.
    """

    event_time: str | None = None
    series: EventSeries | None = None

    @property
    def component(self) -> str:
        return self.source.component or self.reporting_component

    @property
    def seen_at(self) -> datetime | None:
        """When it happened last."""
        times = (
            self.series.last_observed_time if self.series else None,
            self.last_timestamp,
            self.event_time,
            self.metadata.creation_timestamp,
        )
        return next((datetime.fromisoformat(each) for each in times if each), None)


POD_DETAILS = Kind("v1", "Pod", "pods", PodDetails, partial=True, subresources=("status", "binding"))
EVENT_DETAILS = Kind("v1", "Event", "events", EventDetails, partial=True)
