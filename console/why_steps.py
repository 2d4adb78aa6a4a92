"""The answer of `quotient why`: a chain of steps, and what to do next."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Struct

from cluster.object_details import EventDetails

# The largest unit of which an age has at least two is shown.
AGE_UNITS = ((2 * 86400, 86400, "d"), (2 * 3600, 3600, "h"), (120, 60, "min"))


class WhyStep(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One step: what happened, and for an event, which component reported it and how long ago."""

    step: str
    text: str
    source: str = ""
    age_s: int | None = None

    def __str__(self) -> str:
        ago = "" if self.age_s is None else f"{format_age(self.age_s)} ago"
        origin = ", ".join(filter(None, (ago, self.source)))
        return clean(self.text) + (f"   ({origin})" if origin else "")


class Explanation(Struct, frozen=True, rename="camel", kw_only=True):
    """The answer. `found` is whether the object exists."""

    object: str
    found: bool
    state: str
    summary: str
    steps: tuple[WhyStep, ...]
    next: str

    def lines(self) -> list[str]:
        width = max((len(each.step) for each in self.steps), default=0)
        chain = [f"{number}. {each.step:<{width}}  {each}" for number, each in enumerate(self.steps, 1)]
        return [clean(f"{self.object}: {self.summary}"), *chain, clean(f"next: {self.next}")]


def clean(text: str) -> str:
    """Return a text of other components or users without characters that would control a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def format_age(seconds: float) -> str:
    for at_least, unit_s, name in AGE_UNITS:
        if seconds >= at_least:
            return f"{int(seconds // unit_s)} {name}"
    return f"{max(0, int(seconds))} s"


def age_s(now: datetime, stamp: str | datetime | None) -> int | None:
    """Return the seconds since a time; None for no time. Clocks differ, so the future counts as now."""
    if not stamp:
        return None
    since = stamp if isinstance(stamp, datetime) else datetime.fromisoformat(stamp)
    return max(0, int((now - since) / timedelta(seconds=1)))


def event_step(step: str, event: EventDetails, now: datetime, text: str = "") -> WhyStep:
    return WhyStep(step, text or event.message, event.component, age_s(now, event.seen_at))


def latest(events: Iterable[EventDetails]) -> EventDetails | None:
    dated = [(each.seen_at, each) for each in events]
    return max(((at, each) for at, each in dated if at), key=lambda pair: pair[0], default=(None, None))[1]
