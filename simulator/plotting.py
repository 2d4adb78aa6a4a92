"""Draws a comparison of policies as an SVG file: allocation and fragmentation over the demand that has arrived."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from simulator.experiment import ClusterSample, Outcome

# Distinguishable without red and green.
COLOURS = ("#0b62a4", "#d9730d", "#5a9e2f", "#7a4fb5", "#b0306a", "#6b6b6b", "#00838f")
WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 460, 300, 60, 50, 80, 24
TICKS = 5

# Points of a curve.
Curve = list[tuple[float, float]]


def mean_samples(runs: Sequence[Outcome]) -> list[ClusterSample]:
    """Return the mean of the samples of several runs of one policy."""
    return [
        ClusterSample(
            each[0].arrived,
            sum(sample.allocated for sample in each) / len(each),
            sum(sample.fragmentation for sample in each) / len(each),
        )
        for each in zip(*(run.samples for run in runs), strict=False)
    ]


def comparison_svg(runs: Mapping[str, Sequence[Outcome]], title: str) -> str:
    """Return the text of an SVG file; `runs` are those of each policy."""
    curves = {policy: mean_samples(outcomes) for policy, outcomes in runs.items()}
    panels = (
        ("GPU allocated, % of capacity", {name: [(s.arrived, s.allocated) for s in of] for name, of in curves.items()}),
        (
            "free GPU that a typical task cannot use, % of capacity",
            {name: [(s.arrived, s.fragmentation) for s in of] for name, of in curves.items()},
        ),
    )
    width, height = LEFT + 2 * WIDTH + GAP + 30, TOP + HEIGHT + 60 + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        text(LEFT, 24, title, size=15),
    ]
    for number, (label, of_policies) in enumerate(panels):
        parts += panel(LEFT + number * (WIDTH + GAP), label, of_policies)
    parts += legend(list(curves), TOP + HEIGHT + 58)
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(left: float, label: str, curves: Mapping[str, Curve]) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    most_x, most_y = max((x for x, _ in points), default=1) or 1, round_up(max((y for _, y in points), default=1))
    parts = [text(left, TOP - 8, label), f'<g stroke="#dddddd">{"".join(grid(left))}</g>']
    for tick in range(TICKS + 1):
        parts.append(
            text(left + WIDTH * tick / TICKS, TOP + HEIGHT + 16, f"{most_x * tick / TICKS:.0f}", anchor="middle")
        )
        y = TOP + HEIGHT - HEIGHT * tick / TICKS
        parts.append(text(left - 6, y + 4, f"{most_y * tick / TICKS:g}", anchor="end"))
    parts.append(text(left + WIDTH / 2, TOP + HEIGHT + 34, "demand that has arrived, % of capacity", anchor="middle"))
    for number, curve in enumerate(curves.values()):
        path = " ".join(f"{left + WIDTH * x / most_x:.1f},{TOP + HEIGHT - HEIGHT * y / most_y:.1f}" for x, y in curve)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return parts


def grid(left: float) -> Iterable[str]:
    for tick in range(TICKS + 1):
        x, y = left + WIDTH * tick / TICKS, TOP + HEIGHT * tick / TICKS
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}"/>'
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}"/>'


def legend(policies: Sequence[str], top: float) -> list[str]:
    parts = []
    for number, policy in enumerate(policies):
        x, colour = LEFT + 130 * number, COLOURS[number % len(COLOURS)]
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x + 22}" y2="{top}" stroke="{colour}" stroke-width="3"/>')
        parts.append(text(x + 28, top + 4, policy))
    return parts


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(content)}</text>'


def round_up(value: float) -> float:
    """Return the next number that divides well into ticks."""
    return next(step for step in (1, 2, 5, 10, 15, 20, 25, 50, 100, 1e9) if step >= value)
