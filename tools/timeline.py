"""A picture of a server under load, from its log: which requests wait, are read and decode, when.

    specdec serve 2> serve.log
    python tools/timeline.py serve.log --seconds 60 --out timeline.svg

Above, how many requests are in each state; below, a row for each request, in the order of arrival.
Prompts much longer than the median have their number of tokens beside them.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

LINE = re.compile(
    r"^(?P<when>\S+ \S+) INFO specdec\.access: POST \S+ (?P<status>\d+) (?P<took>\d+) ms id=\S+ "
    r"queue=(?P<queue>\d+)ms (?:first=(?P<first>\d+)ms )?prompt=(?P<prompt>\d+) "
)
"""A request that reached the engine, in the access log."""
TIME_FORMAT = "%Y-%m-%d %H:%M:%S,%f"
STATES = ("waits for a slot", "its prompt is read", "decodes")
COLOURS = ("#c22f4f", "#e07a1f", "#3056d3")
DARK_COLOURS = ("#f27b93", "#f2a65a", "#7f9cf5")
WIDTH = 820
"""Of the picture, in its own units; a page scales it."""
LEFT = 44
"""Room for figures of the upper part."""
RIGHT = 90
"""Room for a long prompt's tokens."""
TOP = 34
"""Room for the legend."""
COUNTS_HEIGHT = 110
"""Of the upper part."""
BETWEEN = 16
"""Height between the two parts."""
BOTTOM = 40
"""Room for the axis."""
ROW = 7
"""Height of a request's row."""
TICK_SECONDS = 10
LONG = 4
"""How many times the median makes a prompt a long one."""


@dataclass(frozen=True)
class Request:
    """Times are in seconds since the beginning of the picture."""

    arrived: float
    seated: float
    first: float
    """Its first token; its end if it had none."""
    ended: float
    prompt: int
    """Tokens of its prompt."""

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """From when to when it is in each of STATES."""
        times = self.arrived, self.seated, self.first, self.ended
        return tuple(zip(times, times[1:], strict=False))


def requests_of(log: Iterable[str]) -> list[Request]:
    """In the order of arrival; times of day, in seconds."""
    return sorted(filter(None, map(_request, log)), key=lambda request: request.arrived)


def _request(line: str) -> Request | None:
    if (read := LINE.match(line)) is None:
        return None
    ended = datetime.strptime(read["when"], TIME_FORMAT).timestamp()
    arrived = ended - int(read["took"]) / 1000

    def at(part: str) -> float:
        return ended if read[part] is None else min(ended, arrived + int(read[part]) / 1000)

    return Request(arrived, at("queue"), at("first"), ended, int(read["prompt"]))


def last_seconds(requests: list[Request], seconds: float) -> list[Request]:
    """The requests of the log's last seconds, with times from their beginning."""
    begins = max(request.ended for request in requests) - seconds

    def shifted(request: Request) -> Request:
        arrived, seated, first, ended = (
            max(0.0, at - begins)
            for at in (request.arrived, request.seated, request.first, request.ended)
        )
        return Request(arrived, seated, first, ended, request.prompt)

    return [shifted(request) for request in requests if request.ended > begins]


def picture(requests: list[Request], seconds: float) -> str:
    """The SVG."""
    scale = (WIDTH - LEFT - RIGHT) / seconds

    def x(at: float) -> float:
        return LEFT + at * scale

    rows_top = TOP + COUNTS_HEIGHT + BETWEEN
    bottom = rows_top + ROW * len(requests)
    marks = [
        *_legend(),
        *_axis(seconds, x, bottom),
        *_counts(requests, x),
        *_rows(requests, x, rows_top),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" '
        f'role="img"><title>{len(requests)} requests in {seconds:g} seconds</title>\n'
        f'<style>{_style()}</style>\n<rect class="back" width="100%" height="100%"/>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


def _style() -> str:
    def colours(of: tuple[str, ...]) -> str:
        return " ".join(f".s{i} {{ fill: {colour}; }}" for i, colour in enumerate(of))

    return (
        "text { font: 12px system-ui, sans-serif; fill: #1d2129; } .end { text-anchor: end; } "
        ".mid { text-anchor: middle; } .back { fill: #fff; } .grid { stroke: #d0d5dd; } "
        f"{colours(COLOURS)} @media (prefers-color-scheme: dark) {{ text {{ fill: #e6e8ec; }} "
        f".back {{ fill: #14161a; }} .grid {{ stroke: #30343d; }} {colours(DARK_COLOURS)} }}"
    )


def _legend() -> Iterator[str]:
    x = LEFT
    for state, name in enumerate(STATES):
        yield f'<rect class="s{state}" x="{x}" y="8" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17}" y="18">{name}</text>'
        x += 40 + 7 * len(name)


def _axis(seconds: float, x: Callable[[float], float], bottom: float) -> Iterator[str]:
    for at in range(0, int(seconds) + 1, TICK_SECONDS):
        yield f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="mid" x="{x(at):.1f}" y="{bottom + 16}">{at}</text>'
    yield f'<text class="mid" x="{x(seconds / 2):.1f}" y="{bottom + 32}">seconds</text>'


def _counts(requests: list[Request], x: Callable[[float], float]) -> Iterator[str]:
    """How many requests are in each state, as areas on top of each other, decoding lowest."""
    times = sorted({at for request in requests for span in request.spans for at in span})
    counts = [_states(requests, at) for at in times]
    most = max(map(sum, counts))
    base, height = TOP + COUNTS_HEIGHT, COUNTS_HEIGHT / most
    for state in range(len(STATES)):
        uppers = [base - height * sum(count[state:]) for count in counts]
        lowers = [base - height * sum(count[state + 1 :]) for count in counts]
        path = [*_steps(times, uppers, x), *reversed(_steps(times, lowers, x))]
        points = " ".join(f"{at:.1f},{y:.1f}" for at, y in path)
        yield f'<polygon class="s{state}" points="{points}"/>'
    for count in (0, most):
        yield f'<text class="end" x="{LEFT - 6}" y="{base - height * count + 4:.1f}">{count}</text>'


def _steps(
    times: list[float], heights: list[float], x: Callable[[float], float]
) -> list[tuple[float, float]]:
    """A line that keeps each height until the next time."""
    parts = zip(times, times[1:], heights, strict=False)
    return [(x(at), y) for begins, ends, y in parts for at in (begins, ends)]


def _states(requests: list[Request], at: float) -> list[int]:
    """How many requests are in each state just after a time."""
    spans = zip(*(request.spans for request in requests), strict=True)
    return [sum(begins <= at < ends for begins, ends in state) for state in spans]


def _rows(requests: list[Request], x: Callable[[float], float], top: float) -> Iterator[str]:
    median = statistics.median_low(request.prompt for request in requests)
    for row, request in enumerate(requests):
        y = top + ROW * row
        for state, (begins, ends) in enumerate(request.spans):
            if ends > begins:
                yield _bar(state, x(begins), x(ends), y + 1, ROW - 2)
        if request.prompt > LONG * median:
            place = f'x="{x(request.ended) + 4:.1f}" y="{y + ROW}"'
            yield f"<text {place}>{request.prompt:,} tokens</text>"


def _bar(state: int, left: float, right: float, y: float, height: float) -> str:
    return (
        f'<rect class="s{state}" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" '
        f'height="{height:.1f}"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="what `specdec serve` wrote to stderr")
    parser.add_argument("--seconds", type=float, default=60.0, help="the log's last ones")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"))
    asked = parser.parse_args()
    requests = requests_of(asked.log.read_text().splitlines())
    if not requests:
        parser.error(f"{asked.log} has no request that reached the engine")
    asked.out.write_text(picture(last_seconds(requests, asked.seconds), asked.seconds))


if __name__ == "__main__":
    main()
