"""When the typical tasks are determined again from what has arrived.

The result takes effect some arrivals later: a scheduler prepares it beside its requests, and a simulation has to place
pods as the scheduler does.
"""

from vcuda.compiled_workload import CompiledWorkload
from vcuda.placement_costs import WorkloadEstimate
from vcuda.workload import TaskShape, TypicalTask, WorkloadHistory

# Determined first after so many arrivals, then each time they have grown by this factor.
FIRST, GROWTH = 20, 1.5
# But at least after so many: old tasks are forgotten, see `vcuda.workload`.
MAX_INTERVAL = 5000
# How many arrivals later it takes effect.
DELAY = 16


class WorkloadLearner:
    """Follows what arrives, and says when its estimate is to be replaced. Not thread-safe.

    `is_fixed` means that the history is that of the whole workload, known beforehand.
    """

    def __init__(
        self, history: WorkloadHistory | None = None, *, is_fixed: bool = False, with_largest: bool = True
    ) -> None:
        self._is_fixed, self._with_largest = is_fixed, with_largest
        self.history = history or WorkloadHistory()
        self.estimate = WorkloadEstimate(CompiledWorkload(self.typical()))
        self._next, self._effective_at = self._first_due(), 0

    def _first_due(self) -> int:
        return max(FIRST, round(self.history.arrivals * GROWTH))

    def typical(self) -> tuple[TypicalTask, ...]:
        return self.history.typical(with_largest=self._with_largest)

    def restart(self, history: WorkloadHistory) -> None:
        """Continue with a stored history; its typical tasks are due at once."""
        self.history = history
        self._next, self._effective_at = history.arrivals, 0

    def note_arrival(self, shape: TaskShape, host_mib: int) -> None:
        history, estimate = self.history, self.estimate
        if self._is_fixed:
            history.note_arrival()
        else:
            history.add(shape, host_mib)
        estimate.arrivals, estimate.turnover = history.arrivals, history.turnover

    def note_departure(self) -> None:
        self.history.note_departure()

    @property
    def is_due(self) -> bool:
        """Whether the typical tasks are to be determined again; not before those that were begun have taken effect."""
        return not self._is_fixed and self.history.arrivals >= self._next and self.is_effective

    def begin(self) -> tuple[TypicalTask, ...]:
        """Return the typical tasks as of now; they are not due again for a while."""
        arrivals = self.history.arrivals
        self._next = min(max(self._first_due(), arrivals + 1), arrivals + MAX_INTERVAL)
        # What was stored takes effect at once.
        self._effective_at = arrivals + DELAY if arrivals == self.estimate.arrivals else 0
        return self.typical()

    @property
    def is_effective(self) -> bool:
        """Whether what was begun last may take effect."""
        return self.history.arrivals >= self._effective_at

    def replace_workload(self, workload: CompiledWorkload) -> None:
        self.estimate.workload = workload
        self.estimate.version += 1
