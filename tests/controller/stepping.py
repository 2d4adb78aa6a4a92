"""Runs real code one cluster call at a time: the test decides which actor takes the next step, and which one dies."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from cluster.in_memory import InMemoryCluster
from cluster.interface import EVERYTHING, Listing, Selector, Watch
from cluster.objects import Kind, Object

T = TypeVar("T", bound=Object)

WAIT_S = 30


class Killed(BaseException):
    """Ends an actor as SIGKILL would: no handler for Exception sees it."""


class Actor:
    """Code on a thread of its own that pauses before and after every call to the cluster, until the next `step`."""

    def __init__(self, name: str, work: Callable[["Actor"], None]) -> None:
        self.name = name
        self._resume, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._kill = False
        self.is_over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[["Actor"], None]) -> None:
        try:
            self.pause()
            work(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._paused.release()

    def pause(self) -> None:
        """Block until the next step; called on the actor's own thread."""
        self._paused.release()
        assert self._resume.acquire(timeout=WAIT_S)
        if self._kill:
            raise Killed

    def step(self) -> None:
        """Let the actor run until its next pause, or its end."""
        assert self._paused.acquire(timeout=WAIT_S), f"{self.name} does not pause"
        if self.is_over:
            self._paused.release()
            return
        self._resume.release()
        assert self._paused.acquire(timeout=WAIT_S), f"{self.name} does not pause"
        self._paused.release()
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        """End the actor at the pause where it is."""
        self._kill = True
        while not self.is_over:
            self.step()


class SteppingCluster:
    """A cluster each of whose calls is two steps of the calling actor: before it takes effect, and after."""

    def __init__(self, cluster: InMemoryCluster) -> None:
        self._cluster = cluster
        self._actors = threading.local()

    def act_as(self, actor: Actor) -> None:
        """Make the calls of this thread steps of an actor; those of other threads run through."""
        self._actors.current = actor

    def _in_steps(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        actor: Actor | None = getattr(self._actors, "current", None)
        if actor is None:
            return call(*arguments, **options)
        actor.pause()
        result = call(*arguments, **options)
        actor.pause()
        return result

    def with_timeout(self, timeout_s: float) -> "SteppingCluster":  # noqa: ARG002
        return self

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        obj: T = self._in_steps(self._cluster.get, kind, name, namespace)
        return obj

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        listing: Listing[T] = self._in_steps(self._cluster.list, kind, namespace, selector)
        return listing

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        yield self.list(kind, namespace, selector)

    def watch(self, kind: Kind[T], since: str, *arguments: Any, **options: Any) -> Watch[T]:
        return self._cluster.watch(kind, since, *arguments, **options)

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        created: T = self._in_steps(self._cluster.create, kind, obj, dry_run=dry_run)
        return created

    def update(self, kind: Kind[T], obj: T) -> T:
        updated: T = self._in_steps(self._cluster.update, kind, obj)
        return updated

    def version(self) -> str:
        return self._cluster.version()

    def patch(self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], **options: Any) -> T:
        patched: T = self._in_steps(self._cluster.patch, kind, name, namespace, changes, **options)
        return patched

    def apply(self, kind: Kind[T], current: T, fields: Mapping[str, Any], **options: Any) -> T:
        applied: T = self._in_steps(self._cluster.apply, kind, current, fields, **options)
        return applied

    def delete(self, kind: Kind[T], name: str, namespace: str = "", **options: Any) -> None:
        self._in_steps(self._cluster.delete, kind, name, namespace, **options)

    def evict(self, pod: str, namespace: str, **options: Any) -> None:
        self._in_steps(self._cluster.evict, pod, namespace, **options)

    def bind(self, pod: str, namespace: str, node: str, **options: Any) -> None:
        self._in_steps(self._cluster.bind, pod, namespace, node, **options)
