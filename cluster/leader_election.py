"""One active among several replicas, by a Lease.

Time is measured on this process's monotonic clock: a lease is taken over when *we* have seen it unchanged for
its duration, so clocks of other machines and jumps of our own do not matter. A leader that cannot renew steps
down before others may take over. Being leader is a hint that saves work: every write is still
compare-and-swap, because a paused leader does not know that time has passed.
"""

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from msgspec import Struct
from msgspec.structs import replace

from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import LEASES, Lease, LeaseSpec, Metadata, Owners
from vcuda.decision import Unavailable


class ElectionTimings(Struct, frozen=True):
    """client-go's defaults: others wait 15 s, the leader gives up after 10 s without renewal, tries each 2 s."""

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > self.retry_s > 0:
            raise ValueError(
                f"election needs lease > renew > retry > 0, not {self.lease_s}, {self.renew_s}, {self.retry_s}"
            )


class LeaderElector:
    """Strives for a lease on a thread of its own, and tells when it is held and when no more.

    The callbacks run on that thread and must return soon. `leading` may be asked at any time; it turns false
    by the clock alone, even if the thread hangs in a call.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        namespace: str,
        identity: str,
        *,
        terms: ElectionTimings | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        owners: Owners = list,
    ) -> None:
        self._terms, self._owners = terms or ElectionTimings(), owners
        # A call that hangs must not outlast the lease.
        self._cluster = cluster.bounded(self._terms.renew_s / 2)
        self._name, self._namespace, self.identity = name, namespace, identity
        self._on_start, self._on_stop, self._clock = on_start, on_stop, clock
        self._seen: Lease | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self._announced = False
        self._stopping = threading.Event()
        self._log = structlog.get_logger().bind(lease=name, identity=identity)
        self._thread = threading.Thread(target=self._run, name=f"elector-{name}", daemon=True)

    @property
    def leading(self) -> bool:
        """Whether the lease is ours, by our own clock."""
        renewed = self._renewed_at
        return renewed is not None and self._clock() - renewed < self._terms.renew_s

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> "LeaderElector":
        """Begin to strive for the lease."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Step down, release the lease so that another need not wait, and end. From its return on we do not lead."""
        self._stopping.set()
        self._renewed_at = None
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._stopping.wait(self._terms.retry_s * random.uniform(0.8, 1.0))
        self._release()

    def step(self) -> None:
        """Try once to get or keep the lease."""
        began = self._clock()
        try:
            held = self._acquire_or_renew()
        except (ApiError, Unavailable) as broken:
            held = False
            self._log.warning("lease_call_failed", cause=str(broken))
        except Exception:  # the outermost frame of the thread: it has to go on
            held = False
            self._log.exception("lease_call_crashed")
        if held and not self._stopping.is_set():
            if self._announced and not self.leading:
                # Our time had run out before we got it again: another may have led meanwhile.
                self._renewed_at = None
                self._announce()
            # Counted from before the call: others count from when they see it, which is later.
            self._renewed_at = began
        self._announce()

    def _announce(self) -> None:
        if self.leading and not self._announced:
            self._announced = True
            self._log.info("leading")
            self._call(self._on_start)
        elif not self.leading and self._announced:
            self._announced = False
            self._renewed_at = None
            self._log.warning("leading_no_more")
            self._call(self._on_stop)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # its fault must not cost us the lease, or others the election
            self._log.exception("callback_failed")

    def _acquire_or_renew(self) -> bool:
        try:
            lease = self._cluster.get(LEASES, self._name, self._namespace)
        except NotFound:
            # Somebody deleted it. Its holder does not know yet, and leads until it should have renewed.
            free = self._seen is None or self._is_ours(self._seen) or self._is_free(self._seen)
            return self._create() if free else False
        self._observe(lease)
        if self._is_ours(lease):
            return self._write(lease, lease.spec)
        if self._is_free(lease):
            taken = replace(
                lease.spec, acquire_time=micro_time(), lease_transitions=(lease.spec.lease_transitions or 0) + 1
            )
            return self._write(lease, taken)
        self._renewed_at = None
        return False

    def _create(self) -> bool:
        spec = self._ours(LeaseSpec(acquire_time=micro_time(), lease_transitions=0))
        try:
            metadata = Metadata(name=self._name, namespace=self._namespace, owner_references=self._owners())
            self._observe(self._cluster.create(LEASES, Lease(metadata=metadata, spec=spec)))
        except AlreadyExists:
            return False
        return True

    def _write(self, lease: Lease, spec: LeaseSpec) -> bool:
        try:
            self._observe(self._cluster.update(LEASES, replace(lease, spec=self._ours(spec))))
        except Conflict:
            return False
        return True

    def _ours(self, spec: LeaseSpec) -> LeaseSpec:
        return replace(
            spec,
            holder_identity=self.identity,
            lease_duration_seconds=max(1, round(self._terms.lease_s)),
            renew_time=micro_time(),
        )

    def _observe(self, lease: Lease) -> None:
        """Remember when we first saw the lease in its present state."""
        if self._seen is None or self._seen.metadata.resource_version != lease.metadata.resource_version:
            self._seen, self._seen_at = lease, self._clock()

    def _is_ours(self, lease: Lease) -> bool:
        return lease.spec.holder_identity == self.identity

    def _is_free(self, lease: Lease) -> bool:
        if not lease.spec.holder_identity:
            return True
        lasts_s = max(self._terms.lease_s, float(lease.spec.lease_duration_seconds or 0))
        return self._clock() - self._seen_at > lasts_s

    def _release(self) -> None:
        self._renewed_at = None
        self._announce()
        if self._seen is None or not self._is_ours(self._seen):
            return
        free = replace(self._seen.spec, holder_identity="", lease_duration_seconds=1, renew_time=micro_time())
        try:
            self._cluster.update(LEASES, replace(self._seen, spec=free))
        except (ApiError, Unavailable) as broken:
            self._log.warning("lease_not_released", cause=str(broken))


def micro_time() -> str:
    """Write the time as Leases carry it; for people only, nobody measures with it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
