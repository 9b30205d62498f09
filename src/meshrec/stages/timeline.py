"""Record when every stage computed in a batch, and draw it as an SVG."""

import html
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "tables", "copy"]


class Event(NamedTuple):
    """A time interval in which a stage ran a pass or copied a value.

    Attributes:
        stage: stage number. For a copy between devices, the sending stage.
        kind: "forward", "backward", "tables" (table lookup or update) or "copy".
        split: index of the split (microbatch); -1 for the whole batch.
        start: seconds since the batch started.
        end: seconds since the batch started.
    """

    stage: int
    kind: Kind
    split: int
    start: float
    end: float


class Timeline:
    """Events of a batch, recorded by all stages.

    Attributes:
        events: recorded events, in the order in which they ended.
        start: ``time.perf_counter()`` at the start of the batch.
    """

    def __init__(self) -> None:
        # Threads append to it; a list append is atomic in CPython.
        self.events: list[Event] = []
        self.start = time.perf_counter()

    def add(self, stage: int, kind: Kind, split: int, start: float) -> None:
        """Record an event which ends now.

        Args:
            stage: stage number.
            kind: event kind.
            split: split index; -1 for the whole batch.
            start: ``time.perf_counter()`` at the start of the event.
        """
        now = time.perf_counter()
        self.events.append(Event(stage, kind, split, start - self.start, now - self.start))

    def busy(self) -> list[float]:
        """Return for every stage the fraction (0 to 1) of the batch time in which it computes.

        Copies do not count.
        """
        if not self.events:
            return []
        first, last = min(e.start for e in self.events), max(e.end for e in self.events)
        stages = range(max(e.stage for e in self.events) + 1)
        sums = [
            sum(e.end - e.start for e in self.events if e.stage == s and e.kind != "copy") for s in stages
        ]
        return [seconds / (last - first) for seconds in sums]

    def svg(self, names: Sequence[str] = ()) -> str:
        """Return an SVG image with a row per stage. Time runs to the right, and waiting is grey.

        Args:
            names: names for the stages; by default their numbers.
        """
        return draw_svg(self.events, names)


_COLORS = {"forward": "#3b82c4", "backward": "#2f9e6e", "tables": "#c98a1b", "copy": "#8f6fc0"}
# Image width, row height, and width of the column with stage names, in SVG units.
_WIDTH, _ROW, _LEFT = 960, 34, 150


def draw_svg(events: Sequence[Event], names: Sequence[str] = ()) -> str:
    """Return an SVG image of the events, with a row per stage."""
    # An empty image, because the scale below needs at least one event.
    if not events:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>'
    first, last = min(e.start for e in events), max(e.end for e in events)
    scale = (_WIDTH - _LEFT - 10) / max(last - first, 1e-9)
    num_stages = max(e.stage for e in events) + 1
    height = num_stages * (_ROW + 8) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>What each stage computed when; grey is waiting</title>",
    ]
    for stage in range(num_stages):
        y = 6 + stage * (_ROW + 8)
        name = names[stage] if stage < len(names) else f"stage {stage}"
        # The start and the end of a long name identify the first and the last unit.
        label = name if len(name) <= 22 else f"{name[:10]}…{name[-11:]}"
        shown = html.escape(label, quote=False)
        parts += [
            f'<text x="4" y="{y + _ROW / 2 + 4}" fill="currentColor">{shown}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 10}" height="{_ROW}" fill="#8884"/>',
        ]
        for event in (e for e in events if e.stage == stage):
            x, width = _LEFT + (event.start - first) * scale, max((event.end - event.start) * scale, 0.5)
            # Copies overlap with computation, so they are drawn as a thin line below it.
            thin = event.kind == "copy"
            tip = f"{event.kind}, split {event.split}" if event.split >= 0 else event.kind
            parts.append(
                f'<rect x="{x:.1f}" y="{y + (_ROW - 6 if thin else 0)}" width="{width:.1f}" '
                f'height="{6 if thin else _ROW}" fill="{_COLORS[event.kind]}" stroke="#fff8" '
                f'stroke-width="0.5"><title>{tip}: {(event.end - event.start) * 1e3:.2f} ms</title></rect>'
            )
            if not thin and width > 16 and event.split >= 0:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4}" fill="#fff" '
                    f'text-anchor="middle">{event.split}</text>'
                )
    y = height - 14
    parts += [
        f'<text x="{_LEFT}" y="{y}" fill="currentColor">0</text>',
        f'<text x="{_WIDTH - 10}" y="{y}" fill="currentColor" text-anchor="end">'
        f"{(last - first) * 1e3:.1f} ms</text>",
    ]
    for index, (kind, color) in enumerate(_COLORS.items()):
        x = _LEFT + 60 + index * 110
        parts += [
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>',
            f'<text x="{x + 18}" y="{y}" fill="currentColor">{kind}</text>',
        ]
    return "".join([*parts, "</svg>"])
