"""Real code, one call to the cluster at a time: whoever runs a test decides who goes on next, and who dies where."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from cluster.in_memory import InMemoryCluster
from cluster.interface import EVERYTHING, Listing, Selector, Watch
from cluster.objects import Kind, Object

T = TypeVar("T", bound=Object)

WAIT_S = 30


class Killed(BaseException):
    """An actor ends here, as by SIGKILL."""


class Actor:
    """Code on a thread of its own that stops before every call to the cluster, and after it, until told to go on."""

    def __init__(self, name: str, work: Callable[["Actor"], None]) -> None:
        self.name = name
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._kill = False
        self.is_over = False
        self.broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[["Actor"], None]) -> None:
        try:
            self.pause()
            work(self)
        except Killed:
            pass
        except BaseException as broken:
            self.broken = broken
        finally:
            self.is_over = True
            self._stopped.release()

    def pause(self) -> None:
        """Stop until told to go on; called on the actor's own thread."""
        self._stopped.release()
        assert self._go.acquire(timeout=WAIT_S)
        if self._kill:
            raise Killed

    def step(self) -> None:
        """Let it go on until its next stop."""
        assert self._stopped.acquire(timeout=WAIT_S), f"{self.name} does not stop"
        if self.is_over:
            self._stopped.release()
            return
        self._go.release()
        assert self._stopped.acquire(timeout=WAIT_S), f"{self.name} does not stop"
        self._stopped.release()
        if self.broken is not None:
            raise self.broken

    def kill(self) -> None:
        """End it where it stands."""
        self._kill = True
        while not self.is_over:
            self.step()


class Stepping:
    """A cluster whose every call is two steps of the actor that makes it: before it takes effect, and after."""

    def __init__(self, cluster: InMemoryCluster) -> None:
        self._cluster = cluster
        self._actors = threading.local()

    def played_by(self, actor: Actor) -> None:
        """Say who makes the calls of this thread."""
        self._actors.now = actor

    def _stepwise(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        actor: Actor | None = getattr(self._actors, "now", None)
        if actor is None:
            return call(*arguments, **options)
        actor.pause()
        done = call(*arguments, **options)
        actor.pause()
        return done

    def with_timeout(self, timeout_s: float) -> "Stepping":  # noqa: ARG002
        return self

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        found: T = self._stepwise(self._cluster.get, kind, name, namespace)
        return found

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        found: Listing[T] = self._stepwise(self._cluster.list, kind, namespace, selector)
        return found

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        yield self.list(kind, namespace, selector)

    def watch(self, kind: Kind[T], since: str, *arguments: Any, **options: Any) -> Watch[T]:
        return self._cluster.watch(kind, since, *arguments, **options)

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        made: T = self._stepwise(self._cluster.create, kind, obj, dry_run=dry_run)
        return made

    def update(self, kind: Kind[T], obj: T) -> T:
        made: T = self._stepwise(self._cluster.update, kind, obj)
        return made

    def version(self) -> str:
        return self._cluster.version()

    def patch(self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], **options: Any) -> T:
        made: T = self._stepwise(self._cluster.patch, kind, name, namespace, changes, **options)
        return made

    def apply(self, kind: Kind[T], current: T, fields: Mapping[str, Any], **options: Any) -> T:
        made: T = self._stepwise(self._cluster.apply, kind, current, fields, **options)
        return made

    def delete(self, kind: Kind[T], name: str, namespace: str = "", **options: Any) -> None:
        self._stepwise(self._cluster.delete, kind, name, namespace, **options)

    def bind(self, pod: str, namespace: str, node: str, **options: Any) -> None:
        self._stepwise(self._cluster.bind, pod, namespace, node, **options)
