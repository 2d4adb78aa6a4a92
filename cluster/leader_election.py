"""Leader election: one active process among several replicas, by means of a Lease.

Time is measured on this process's monotonic clock only: a lease may be taken over when *we* have seen it unchanged for
its duration. So neither the clocks of other machines nor jumps of our own matter. A leader that cannot renew its lease
steps down before others may take it over. Leadership saves work, but nothing relies on it for correctness: a process
that was paused does not notice that its lease has run out, so every write is a compare-and-swap as well.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from msgspec import Struct
from msgspec.structs import replace

from cluster.backoff import Backoff
from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import LEASES, Lease, LeaseSpec, Metadata, Owners
from vcuda.decision import Unavailable

# Candidates that started together should not write the Lease at the same moment for ever.
RETRY_JITTER = (0.8, 1.0)


class ElectionTimings(Struct, frozen=True):
    """With client-go's defaults."""

    # How long others wait for a renewal before they take over, and how long the leader itself relies on one.
    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > self.retry_s > 0:
            raise ValueError(
                f"election needs lease > renew > retry > 0, not {self.lease_s}, {self.renew_s}, {self.retry_s}"
            )


class LeaderElector:
    """Acquires and renews a lease on its own thread.

    The callbacks run on that thread and must return soon, or the lease runs out. `leading` may be read on any thread;
    it becomes false by the clock alone, even while the thread hangs in a call.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        namespace: str,
        identity: str,
        *,
        timings: ElectionTimings | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        owners: Owners = list,
    ) -> None:
        self._timings, self._owners = timings or ElectionTimings(), owners
        # Half of the time to renew: after a call that hangs there is time for another one.
        self._cluster = cluster.with_timeout(self._timings.renew_s / 2)
        self._retry = Backoff(self._timings.retry_s, self._timings.retry_s, RETRY_JITTER)
        self._name, self._namespace, self.identity = name, namespace, identity
        self._on_start, self._on_stop, self._clock = on_start, on_stop, clock
        # The lease as last seen, and since when it has been seen in this state.
        self._seen: Lease | None = None
        self._seen_at = 0.0
        # None: not leading. Written by `stop` as well, which only ever sets it to None.
        self._renewed_at: float | None = None
        self._announced = False
        self._stopping = threading.Event()
        self._log = structlog.get_logger().bind(lease=name, identity=identity)
        self._thread = threading.Thread(target=self._run, name=f"elector-{name}", daemon=True)

    @property
    def leading(self) -> bool:
        """Whether we hold the lease, by our own clock."""
        renewed_at = self._renewed_at
        return renewed_at is not None and self._clock() - renewed_at < self._timings.renew_s

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> "LeaderElector":
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Step down, and release the lease so that another replica need not wait; `leading` is false on return."""
        self._stopping.set()
        self._renewed_at = None
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._stopping.wait(self._retry.delay_s(failures=0))
        self._release()

    def step(self) -> None:
        """Try once to acquire or renew the lease, and call the callbacks."""
        started = self._clock()
        try:
            is_held = self._acquire_or_renew()
        except (ApiError, Unavailable) as error:
            is_held = False
            self._log.warning("lease_request_failed", error=str(error))
        except Exception:  # the outermost frame of the thread: it has to continue
            is_held = False
            self._log.exception("election_failed")
        if is_held and not self._stopping.is_set():
            if self._announced and not self.leading:
                # Our term had run out before this renewal, and another replica may have led in between: this is a new
                # term, and the callbacks have to say so.
                self._renewed_at = None
                self._announce()
            # Counted from before the call: others count from when they see the renewal, which is later.
            self._renewed_at = started
        self._announce()

    def _announce(self) -> None:
        """Call the callback if leadership changed since the last call."""
        if self.leading and not self._announced:
            self._announced = True
            self._log.info("started_leading")
            self._call(self._on_start)
        elif not self.leading and self._announced:
            self._announced = False
            self._renewed_at = None
            self._log.warning("stopped_leading")
            self._call(self._on_stop)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # a bug in a callback must not end the election
            self._log.exception("callback_failed")

    def _acquire_or_renew(self) -> bool:
        """Return whether we hold the lease."""
        try:
            lease = self._cluster.get(LEASES, self._name, self._namespace)
        except NotFound:
            # If it was deleted, its holder does not know yet, and leads until its next renewal is due.
            is_free = self._seen is None or self._is_ours(self._seen) or self._is_free(self._seen)
            return self._create() if is_free else False
        self._observe(lease)
        if self._is_ours(lease):
            return self._write(lease, lease.spec)
        if self._is_free(lease):
            transitions = (lease.spec.lease_transitions or 0) + 1
            return self._write(lease, replace(lease.spec, acquire_time=micro_time(), lease_transitions=transitions))
        self._renewed_at = None
        return False

    def _create(self) -> bool:
        spec = self._with_holder(LeaseSpec(acquire_time=micro_time(), lease_transitions=0))
        try:
            metadata = Metadata(name=self._name, namespace=self._namespace, owner_references=self._owners())
            self._observe(self._cluster.create(LEASES, Lease(metadata=metadata, spec=spec)))
        except AlreadyExists:
            return False
        return True

    def _write(self, lease: Lease, spec: LeaseSpec) -> bool:
        try:
            self._observe(self._cluster.update(LEASES, replace(lease, spec=self._with_holder(spec))))
        except Conflict:
            return False
        return True

    def _with_holder(self, spec: LeaseSpec) -> LeaseSpec:
        """Return a spec that names us as the holder, renewed now."""
        return replace(
            spec,
            holder_identity=self.identity,
            lease_duration_seconds=max(1, round(self._timings.lease_s)),
            renew_time=micro_time(),
        )

    def _observe(self, lease: Lease) -> None:
        """Remember the lease and, if it changed, the time of this observation."""
        if self._seen is None or self._seen.metadata.resource_version != lease.metadata.resource_version:
            self._seen, self._seen_at = lease, self._clock()

    def _is_ours(self, lease: Lease) -> bool:
        return lease.spec.holder_identity == self.identity

    def _is_free(self, lease: Lease) -> bool:
        """Return whether the lease has no holder, or was not renewed for its duration."""
        if not lease.spec.holder_identity:
            return True
        # The longer of both: the holder may be configured with a longer duration than we are.
        duration_s = max(self._timings.lease_s, float(lease.spec.lease_duration_seconds or 0))
        return self._clock() - self._seen_at > duration_s

    def _release(self) -> None:
        self._renewed_at = None
        self._announce()
        if self._seen is None or not self._is_ours(self._seen):
            return
        free = replace(self._seen.spec, holder_identity="", lease_duration_seconds=1, renew_time=micro_time())
        try:
            self._cluster.update(LEASES, replace(self._seen, spec=free))
        except (ApiError, Unavailable) as error:
            self._log.warning("lease_not_released", error=str(error))


def micro_time() -> str:
    """Return the time as Leases write it. For people to read: no decision depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
