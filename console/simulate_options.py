"""The options of `quotient simulate`: their values are checked before anything is read or simulated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from simulator.trace_files import MAX_GPUS
from vcuda.decision import printable
from vcuda.gpu_model import is_model, never_matches, parse_model
from vcuda.placement_strategies import PlacementStrategy

MAX_SEEDS, MAX_ADDED = 1000, 10_000
# Python refuses to convert texts of thousands of digits, and no number here has more than this.
MAX_DIGITS = 18

# How many nodes, of which model, with how many GPUs each.
Added = tuple[int, str, int]


class FiniteRange(click.FloatRange):
    """A range of floats without NaN, which is neither below nor above any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number; write one from {self.min} to {self.max}", param, ctx)
        return number


def is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def parse_seeds(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    """Read `42`, `42-51` or `1,5,7`."""
    ranges: list[range] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_number(first) or (dash and not is_number(last)):
            raise click.BadParameter(f"{printable(part)!r} is neither a number nor a range such as 42-51")
        ranges.append(range(int(first), int(last or first) + 1))
    # Counted before they are listed: a range may be long.
    count = sum(map(len, ranges))
    if not 0 < count <= MAX_SEEDS:
        raise click.BadParameter(f"{printable(value)!r} are {count} seeds; write 1 to {MAX_SEEDS}")
    return [seed for each in ranges for seed in each]


def parse_policies(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[PlacementStrategy]:
    policies: dict[PlacementStrategy, None] = {}
    for name in ",".join(values).split(","):
        try:
            policies[PlacementStrategy(name.strip())] = None
        except ValueError:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PlacementStrategy)}") from None
    return list(policies)


def parse_added(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[Added]:
    """Read `10:T4:4`: so many nodes, of this model, with so many GPUs each."""
    return [added_of(value) for value in values]


def added_of(value: str) -> Added:
    parts, shown = value.split(":"), repr(printable(value))
    if len(parts) != 3 or not (is_number(parts[0]) and is_number(parts[2])) or not parts[1]:  # noqa: PLR2004
        raise click.BadParameter(f"{shown} is not of the form NODES:MODEL:GPUS, as in 10:T4:4")
    count, model, gpus = int(parts[0]), parts[1], int(parts[2])
    if never_matches(model) or not is_model(model):
        raise click.BadParameter(f"{shown}: {printable(model)!r} is not a GPU model; write one such as T4 or RTX-3090")
    if not 0 < gpus <= MAX_GPUS:
        raise click.BadParameter(f"{shown}: a node with {gpus} GPUs; write 1 to {MAX_GPUS}")
    if not 0 < count * gpus <= MAX_ADDED:
        raise click.BadParameter(f"{shown} adds {count * gpus} GPUs; write 1 to {MAX_ADDED}")
    return count, parse_model(model).name, gpus


def parse_plot(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() != ".svg":
        raise click.BadParameter(
            f"{str(path)!r}: the plot is written as SVG; write a name that ends in .svg, such as {path.stem}.svg"
        )
    return path
