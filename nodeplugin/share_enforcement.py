"""Limits what containers use of cards they share, by what each card offers, and tells what of it does not work.

Containers get their limits at their start, from the injector. Here is what runs beside: the server that the runtime's
hook asks for the driver's limit, and the feedback for the preloaded library.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.context_sizes import ContextMeasurement, ContextSizes, measure_context
from nodeplugin.injection import Injector
from nodeplugin.isolation_ladder import CardLadder, LadderFacts, card_ladder
from nodeplugin.memory_feedback import MemoryFeedback
from nodeplugin.memory_limit_server import MemoryLimitServer
from nodeplugin.memory_limits import (
    LimitedContainer,
    MemoryLimiter,
    limited_containers,
    offers_memory_limits,
    read_facts,
)
from nodeplugin.nvml import Driver
from nodeplugin.pods import PodsByUid
from nodeplugin.sampling import ContainerSample, Sample
from vcuda.isolation import IsolationSetting, Rung

CUDA_LIBRARY = "libcuda.so.1"
Allocations = Mapping[str, PodAllocation]


class ShareEnforcement:
    """The parts that enforce shares on one node. `driver_version` is empty before a driver was found."""

    def __init__(
        self,
        setting: IsolationSetting,
        folder: Path,
        *,
        host: Path,
        driver: Driver,
        injector: Injector,
        node_cards: NodeCards,
        allocations: Callable[[], Allocations],
        sample: Callable[[], Sample],
        driver_version: Callable[[], str],
        find_library: Callable[[str], Path | None],
    ) -> None:
        self._driver, self._find_library = driver, find_library
        self._setting, self._host, self._injector, self._node_cards = setting, host, injector, node_cards
        self._allocations, self._driver_version = allocations, driver_version
        self._context_sizes = ContextSizes(folder)
        injector.context_mib = self._context_mib
        self.feedback = MemoryFeedback(
            # No call of the driver for nothing, on nodes without such containers.
            folder / "containers",
            injector.preload.account,
            lambda: sample() if self._has_preloaded() else Sample(),
            self._token_of,
            self._context_mib,
        )
        self._measurement = ContextMeasurement(
            self._context_sizes, node_cards.cards, driver_version, self._measure_context, self._is_free
        )
        self._limiter = MemoryLimiter(driver, host, self.limited_by_driver)
        self._server = MemoryLimitServer(injector.memory_limit_hook.socket, self._limiter.apply)

    def start(self) -> None:
        self._server.start()
        self.feedback.start()

    def stop(self) -> None:
        """Stop both; limits that are set stay."""
        self._server.stop()
        self.feedback.stop()

    def measure_contexts(self) -> None:
        """Measure what contexts take that containers are charged for, where that is not known; returns at once."""
        self._measurement.start()

    def _has_preloaded(self) -> bool:
        return any(
            given.isolation.memory is Rung.PRELOAD
            for pod in self._allocations().values()
            for given in pod.containers.values()
        )

    def _is_free(self, card: Card) -> bool:
        is_held = any(card.uuid in pod.usage for pod in self._allocations().values())
        is_usable = not card.is_mig and self._node_cards.condition(card.uuid).healthy
        return is_usable and not is_held and self.ladder_of(card).isolation.memory is Rung.PRELOAD

    def _measure_context(self, card: Card) -> int | None:
        library = self._find_library(CUDA_LIBRARY)
        return measure_context(library, card, self._memory_of) if library else None

    def _memory_of(self, card: Card, pid: int) -> int | None:
        processes = self._driver.usage(card).processes or ()
        return next((each.memory_mib for each in processes if each.pid == pid), None)

    def running_parts(self) -> dict[str, bool]:
        """Return by name whether each thread still runs."""
        return {"server of memory limits": self._server.alive, "memory feedback": self.feedback.alive}

    def problem(self) -> str:
        return self._server.problem()

    def verify(self, pods: PodsByUid) -> None:
        """Check the driver's limits of containers that run since before this start."""
        self._limiter.verify(pods)

    def release_ended(self) -> None:
        self._limiter.release_ended()

    def ladder_of(self, card: Card) -> CardLadder:
        """Return what enforces shares of a card on this node, and why not what is stronger."""
        facts = LadderFacts(
            setting=self._setting,
            injection=self._injector.mode,
            driver_problem=self._driver_problem(card),
            preload_problem=self._injector.preload.problem(),
        )
        return card_ladder(facts, is_mig=card.is_mig)

    def _driver_problem(self, card: Card) -> str:
        has_hook = self._injector.memory_limit_hook.is_usable()
        facts = read_facts(self._host, self._driver_version(), self._injector.mode, has_hook=has_hook)
        return offers_memory_limits(facts, card)

    def limited_by_driver(self) -> dict[str, LimitedContainer]:
        """Return the containers that were started with the driver's limit, by token."""

        def is_limited(pod: PodAllocation, container: str) -> bool:
            return pod.isolation_of(container).memory is Rung.DRIVER

        return limited_containers(self._allocations(), self._node_cards, is_limited)

    def _context_mib(self, uuid: str) -> int:
        card = self._node_cards.get(uuid)
        return self._context_sizes.get(card.product if card else "", self._driver_version())

    def _token_of(self, sample: ContainerSample) -> str:
        allocation = self._allocations().get(sample.pod.uid)
        given = allocation.containers.get(sample.container) if allocation else None
        return given.token if given else ""
