"""Charts as plain SVG text: lines or bars over named places, readable on a light and on a dark page.

The file has its own background and colours for both, because a page that embeds it as an image cannot set them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#1b7c83", "#cf222e")
DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#8b949e", "#d29922", "#39c5cf", "#ff7b72")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 330, 46, 14, 46, 72  # size of a panel, and its margins
LEGEND = 20  # height of a line of the legend


class Series(NamedTuple):
    """One colour: a value for each place or None; limits: for bars, the largest value that a bar could reach."""

    label: str
    values: Sequence[float | None]
    limits: Sequence[float | None] = ()
    dashed: bool = False  # only for lines


class Panel(NamedTuple):
    """One set of axes."""

    title: str
    places: Sequence[str]
    series: Sequence[Series]


class Places(NamedTuple):
    """The horizontal axis in pixels: `count` equal places."""

    left: float
    right: float
    count: int

    @property
    def wide(self) -> float:
        """Width of one place."""
        return (self.right - self.left) / self.count

    def __call__(self, place: int) -> float:
        return self.left + (place + 0.5) * self.wide


class Scale(NamedTuple):
    """The vertical axis in pixels: 0 at the bottom, `top` at the top."""

    top: float
    bottom: float = HEIGHT - BOTTOM

    def __call__(self, value: float) -> float:
        return self.bottom - (self.bottom - TOP) * value / self.top


Body = Callable[[Panel, Places, Scale], Iterator[str]]


def style() -> str:
    """CSS classes: c0, c1, ... set a colour, t is text, g the grid."""

    def rules(ink: str, paper: str, grid: str, colours: Sequence[str]) -> str:
        numbered = "".join(f".c{i}{{color:{colour}}}" for i, colour in enumerate(colours))
        return f".p{{fill:{paper}}}.t{{fill:{ink}}}.g{{stroke:{grid}}}.o{{stroke:{ink}}}{numbered}"

    light, dark = rules("#1f2328", "#ffffff", "#d8dee4", LIGHT), rules("#e6edf3", "#0d1117", "#30363d", DARK)
    return f"<style>text{{font:12px sans-serif}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def lines(panels: Sequence[Panel], unit: str, mark: float) -> str:
    """Panels side by side, a line for each series; `mark` is a value with its own horizontal line."""

    def body(panel: Panel, x: Places, y: Scale) -> Iterator[str]:
        yield f'<line class="o" x1="{x.left}" x2="{x.right}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        for colour, series in enumerate(panel.series):
            points = [(x(i), y(v)) for i, v in enumerate(series.values) if v is not None]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            yield f'<g class="c{colour}" stroke="currentColor" fill="currentColor">'
            dashes = ' stroke-dasharray="6 4"' if series.dashed else ""
            yield f'<polyline fill="none" stroke-width="2"{dashes} points="{path}"/>'
            yield from (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>' for px, py in points)
            yield "</g>"

    return chart(panels, unit, body, WIDTH)


def bars(panel: Panel, unit: str) -> str:
    """One wide panel, a group of bars at each place; the limit of a bar is its outline."""

    def body(panel: Panel, x: Places, y: Scale) -> Iterator[str]:
        wide = 0.8 * x.wide / len(panel.series)
        for colour, series in enumerate(panel.series):
            yield f'<g class="c{colour}" stroke="currentColor" fill="currentColor">'
            for i, value in enumerate(series.values):
                left = x(i) + (colour - len(panel.series) / 2) * wide
                limit = series.limits[i] if series.limits else None
                for top, look in ((value, 'stroke="none"'), (limit, 'fill="none" stroke-width="0.7"')):
                    if top is not None:
                        size = (
                            f'x="{left:.1f}" y="{y(top):.1f}" width="{wide - 1:.1f}" height="{y.bottom - y(top):.1f}"'
                        )
                        yield f"<rect {size} {look}/>"
            yield "</g>"

    return chart([panel], unit, body, 2 * WIDTH)


def chart(panels: Sequence[Panel], unit: str, body: Body, width: int) -> str:
    """The whole file: frame, grid, scales and legend; `body(panel, x, y)` draws the data."""
    values = [v for panel in panels for s in panel.series for v in (*s.values, *s.limits) if v is not None]
    step = nice(max(values, default=1) / 6)
    top = step * -(-max(values, default=1) // step)
    total = width * len(panels)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" height="{HEIGHT}">',
        style(),
        f'<rect class="p" width="{total}" height="{HEIGHT}"/>',
    ]
    for index, panel in enumerate(panels):
        left, right = width * index + LEFT, width * (index + 1) - RIGHT
        x, y = Places(left, right, len(panel.places)), Scale(top)
        out.append(text(left, 20, panel.title, "start", ' font-weight="bold"'))
        out.append(text(left, TOP - 10, unit, "start"))
        for tick in range(round(top / step) + 1):
            height = y(tick * step)
            out.append(f'<line class="g" x1="{left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
            out.append(text(left - 6, height + 4, f"{tick * step:g}", "end"))
        for i, place in enumerate(panel.places):  # in one line or two
            out += [
                text(x(i), HEIGHT - BOTTOM + 14 + 12 * j, part, "middle") for j, part in enumerate(place.split("\n"))
            ]
        out += body(panel, x, y)
        out += legend(panel, left, right)
    return "\n".join([*out, "</svg>", ""])


def legend(panel: Panel, left: float, right: float) -> Iterator[str]:
    """Labels with their colours, in two lines below the axis."""
    per_line = -(-len(panel.series) // 2)
    for i, series in enumerate(panel.series):
        left_edge = left + (right - left) / per_line * (i % per_line)
        down = HEIGHT - BOTTOM + 38 + LEGEND * (i // per_line)
        yield f'<rect class="c{i}" fill="currentColor" x="{left_edge:.1f}" y="{down - 9}" width="10" height="10"/>'
        yield text(left_edge + 15, down, series.label, "start")


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Words at a place."""
    return f'<text class="t" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def nice(step: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10.0 ** (len(f"{step:.0f}") - 1) if step >= 1 else 0.1
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)
