"""Figures as inline SVG that takes its colours and fonts from the page.

Matplotlib draws in placeholder colours; :func:`inline` turns them into the page's CSS variables, so that the same
figure serves the light page, the dark page and print. All figures are as wide as a phone and stand side by side on
larger screens: no text is ever scaled down.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from fairtrial.report import words
from fairtrial.report.forest import log_ticks, tick_labels, ticks
from fairtrial.report.read import Document, Metric, Part, Recorded, Role, Summary

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 340  # px: what a phone has
TEXT = 11  # px
FONT = FontProperties(family="DejaVu Sans", size=TEXT)  # wider than most readers' system fonts
ROW = 36  # px: a candidate's row among the cells
WIDE = 12.0  # a positive axis is logarithmic where the largest value is this many times the smallest
SQUASHED = 3.0  # a control is left off the scale where it would make the axis this many times as long
MOST_ROWS = 24  # candidates among the cells
MOST_LINES = 24  # cells joined by lines, and curves of one candidate
MOST_DOTS = 80  # cells of one candidate drawn one by one
MOST_POINTS = 60  # of one curve

# Placeholder colours and the CSS variables that replace them.
INK, MUTED, RULE, PAPER, METHOD = "#010101", "#020202", "#030303", "#040404", "#050505"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper", METHOD: "--accent"}

# Roles differ by shape and by filling; colour only helps.
MARKERS: dict[Role, dict[str, Any]] = {
    "method": {"marker": "D", "color": METHOD, "markersize": 7},
    "baseline": {"marker": "o", "color": INK, "markersize": 7},
    "control": {"marker": "X", "color": MUTED, "markersize": 8},
    "reference": {"marker": "^", "color": INK, "markersize": 8, "markerfacecolor": PAPER, "markeredgewidth": 1.3},
}
BEYOND: dict[str, Any] = {"linestyle": "none", "color": MUTED, "markersize": 6}  # a mark off the scale
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))

STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.2,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Key:
    """A line of a figure's legend: the candidate and the stroke that stands for it."""

    label: str
    color: str
    dash: str


@dataclass(frozen=True)
class Figure:
    """A figure with its caption; ``svg`` is trusted markup made here."""

    caption: str
    note: str
    svg: str
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Panel:
    """What one figure shows: a metric of a part at one setting."""

    part: Part
    metric: Metric
    where: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The metric and the setting in words."""
        return " · ".join(filter(None, [words.metric_name(self.metric), words.where(self.where)]))

    @property
    def direction(self) -> str:
        """Which way is better."""
        return "higher is better" if self.metric.higher_is_better else "lower is better"

    def summaries(self, document: Document) -> list[Summary]:
        """Return the candidates' means at this panel's setting."""
        return [
            s
            for s in document.summary
            if (s.part, s.metric) == (self.part.name, self.metric.name) and s.where == dict(self.where)
        ]


def panels(document: Document) -> list[Panel]:
    """Return what the claims are about, in their order; the first metric of a part that claims nothing."""
    settings: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}  # of each part and metric, by their text
    for entry in document.summary:
        settings.setdefault((entry.part, entry.metric), {})[_text(entry.where)] = entry.where
    wanted = {}  # (part, metric, restriction), each once, in order
    for claim in document.leaves():
        q = claim.quantity
        for metric, where in [(q.metric, q.where), *((term.metric, term.where) for term in q.terms)]:
            wanted[claim.part, metric, _text(where)] = where
    claimed = {part for part, metric, _ in wanted if (part, metric) in settings}
    for part in document.parts:
        if part.metrics and part.name not in claimed:
            wanted[part.name, part.metrics[0].name, ""] = {}
    found: dict[tuple[str, str, str], Panel] = {}
    for (name, metric, _), where in wanted.items():
        part = document.part(name)
        for text, setting in settings.get((name, metric), {}).items():
            if _admits(where, setting):
                found.setdefault((name, metric, text), Panel(part, part.metric(metric), setting))
    return list(found.values())


def _text(where: Mapping[str, Any]) -> str:
    return json.dumps(where, sort_keys=True, default=str)


def _admits(where: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    return all(
        name not in setting or setting[name] == wanted or (isinstance(wanted, list) and setting[name] in wanted)
        for name, wanted in where.items()
    )


# ---------------------------------------------------------------------------------------------------------------- cost


def cost_quality(document: Document, panel: Panel, slug: str) -> Figure | None:
    """Return a metric against what each candidate took, or None where fewer than two have both or all are level."""
    seconds = {cost.candidate: cost.seconds for cost in document.costs if cost.seconds > 0}
    entries = [s for s in panel.summaries(document) if s.candidate in seconds and math.isfinite(s.mean)]
    if len(entries) < 2 or _level([(s.role, [s.mean]) for s in entries]):
        return None
    entries.sort(key=lambda s: list(MARKERS).index(s.role))  # where names are crowded, the method's goes first
    with rc_context(STYLE):
        canvas, axes = _axes(WIDTH, 250, left=4, bottom=40, top=10)
        _scale(axes, "x", [seconds[s.candidate] for s in entries], pad=0.12)
        y = [(s.role, [v for v in (s.mean, s.low, s.high) if math.isfinite(v)]) for s in entries]
        low, high = _scale(axes, "y", _in_focus(y), pad=0.12)
        labels = []
        for entry in entries:
            at = seconds[entry.candidate]
            inside = min(max(entry.mean, low), high)
            if inside != entry.mean:
                axes.plot([at], [inside], marker="^" if entry.mean > high else "v", clip_on=False, **BEYOND)
                labels.append((at, inside, f"{_fit(entry.candidate, 100)} {words.number(entry.mean)}"))
                continue
            if math.isfinite(entry.low):
                axes.plot([at, at], [entry.low, entry.high], color=MUTED, linewidth=1)
            axes.plot([at], [entry.mean], linestyle="none", **MARKERS[entry.role])
            labels.append((at, entry.mean, _fit(entry.candidate, 140)))
        crowded = _label_points(axes, labels)
        timed = any(part.timed for part in document.parts)
        axes.set_xlabel("seconds outside timed parts" if timed else "seconds, all cells and stages")
        svg = inline(canvas, slug, f"{panel.title} against seconds")
    note = f"Mean with 95{words.PERCENT} interval; {panel.direction}, further left is cheaper."
    if crowded:
        note += f" {words.count(crowded, 'crowded mark')} without a name."
    return Figure(panel.title, note, svg)


def _label_points(axes: Axes, points: list[tuple[float, float, str]]) -> int:
    """Write each point's label where it meets no other label or point, with a line to it where it moved.

    Return how many points found no room for their label.
    """
    crowded = 0
    box = axes.get_window_extent()
    to_data = axes.transData.inverted().transform
    spots = axes.transData.transform([(x, y) for x, y, _ in points])
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    for (x, y), (_, _, label) in zip(spots, points, strict=True):
        width = _width(label)
        spot = _free_spot((x, y), width, taken, (box.x0, box.y0, WIDTH - 2, box.y1))
        if spot is None:
            crowded += 1
            continue
        left, middle = spot
        taken.append((left, middle - TEXT / 2 - 1, left + width, middle + TEXT / 2 + 1))
        if middle != y:
            near = min(max(x, left), left + width)
            line = to_data([(x, y), (near, middle - math.copysign(TEXT / 2, middle - y))])
            axes.plot(*line.T, color=RULE, linewidth=0.8, zorder=1)
        at = to_data((left, middle))
        axes.text(at[0], at[1], label, va="center_baseline", ha="left")
    return crowded


def _free_spot(
    point: Sequence[float], width: float, taken: Sequence[Sequence[float]], box: Sequence[float]
) -> tuple[float, float] | None:
    """Return (left, middle) in px of the nearest place inside ``box`` for a text that meets none of ``taken``."""
    x, y = point
    lefts = (x + 9, x - 9 - width, x - width / 2)
    spots = [(left, y + drop) for drop in range(-42, 43, 14) for left in lefts]

    def distance(spot: tuple[float, float]) -> float:
        return abs(spot[1] - y) + max(spot[0] - x - 9, x - 9 - width - spot[0], 0)

    for left, middle in sorted(spots, key=distance):
        low, high = middle - TEXT / 2 - 1, middle + TEXT / 2 + 1
        inside = left > box[0] and left + width <= box[2] and low >= box[1] and high <= box[3]
        if inside and not any(left < b[2] and b[0] < left + width and low < b[3] and b[1] < high for b in taken):
            return left, middle
    return None


# --------------------------------------------------------------------------------------------------------------- cells


def cell_dots(recorded: Recorded, panel: Panel, slug: str) -> Figure | None:
    """Return every cell of a metric as a dot, one row a candidate, equal cells joined; None where nothing varies."""
    frame = _cells_of(recorded, panel)
    if frame is None:
        return None
    frame = frame[frame[panel.metric.name].notna() | (frame["status"] == "failed")]  # None: does not apply
    cells = {c.label: frame[frame["candidate"] == c.label] for c in panel.part.candidates}
    rows = [c for c in panel.part.candidates if len(cells[c.label])]
    left_out = len(rows[MOST_ROWS:])
    rows = rows[:MOST_ROWS]
    values = {c.label: cells[c.label][panel.metric.name].to_numpy(float, na_value=np.nan) for c in rows}
    finite = {label: own[np.isfinite(own)] for label, own in values.items()}
    if _level([(c.role, finite[c.label].tolist()) for c in rows]):
        return None
    means = {s.candidate: s.mean for s in panel.summaries(recorded.document)}
    most = max(map(len, values.values()))
    joined = most <= MOST_LINES and len(rows) > 1
    with rc_context(STYLE):
        canvas, axes = _axes(WIDTH, ROW * len(rows) + 52, left=8, bottom=40, top=12)
        low, high = _scale(axes, "x", _in_focus([(c.role, finite[c.label].tolist()) for c in rows]), pad=0.05)
        axes.set_ylim(len(rows) - 0.35, -0.65)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        beyond = {label for label, own in finite.items() if len(own) and (own.min() > high or own.max() < low)}
        if joined:
            for path in _slopes(frame, panel, [None if c.label in beyond else c.label for c in rows]):
                axes.plot(path, range(len(rows)), color=RULE, linewidth=0.8)
        for y, candidate in enumerate(rows):
            own, mean = finite[candidate.label], means.get(candidate.label, math.nan)
            remarks = []
            if candidate.label in beyond:
                above = own.min() > high
                axes.plot([high if above else low], [y], marker=">" if above else "<", clip_on=False, **BEYOND)
                remarks.append(f"off the scale at {words.number(float(np.mean(own)))}")
            else:
                _distribution(axes, own, y, MARKERS[candidate.role]["color"])
                axes.plot([mean], [y], linestyle="none", zorder=5, **MARKERS[candidate.role])
            if diverged := int(np.isinf(values[candidate.label]).sum()):
                remarks.append(f"{diverged} diverged")
            if lost := int((cells[candidate.label]["status"] == "failed").sum()):
                remarks.append(f"{lost} lost")
            remark = "".join(f", {text}" for text in remarks)
            label = _fit(candidate.label, WIDTH - 20 - _width(remark)) + remark
            axes.text(0, y - 0.42, label, transform=axes.get_yaxis_transform(), va="center", ha="left")
        axes.set_xlabel(_fit(words.metric_name(panel.metric), WIDTH - 90) + _scale_name(axes.get_xscale()))
        svg = inline(canvas, slug, f"{panel.title}: every cell, by candidate")
    shown = "Small dots are cells" if most <= MOST_DOTS else "Bars hold the middle 50 and 90 per cent of cells"
    lines = ", lines join the same cell" if joined else ""
    note = f"{shown}{lines}; large marks are means. {panel.direction.capitalize()}."
    if left_out:
        note += f" {words.count(left_out, 'further candidate')} in the full table."
    return Figure(panel.title, note, svg)


def _cells_of(recorded: Recorded, panel: Panel) -> pd.DataFrame | None:
    """Return the cells of a panel, or None where the table does not hold them."""
    frame = recorded.cells
    if frame is None or panel.metric.name not in frame or not {"part", "candidate", "status"} <= set(frame.columns):
        return None
    keep = frame["part"] == panel.part.name
    for name, wanted in panel.where.items():
        if name in frame:
            same = frame[name].map(str) == str(wanted)  # 2 may be 2.0 there, or "2"; a list is text
            keep &= same if isinstance(wanted, list | tuple) else same | (frame[name] == wanted)
    return frame[keep]


def _slopes(frame: pd.DataFrame, panel: Panel, labels: list[str | None]) -> Iterator[np.ndarray]:
    """Yield for each cell its finite values over the candidates, NaN where a candidate has none or is None."""
    names = [f.name for f in panel.part.factors if f.name in frame]
    if not names:
        return
    wide = frame.pivot_table(index=names, columns="candidate", values=panel.metric.name, aggfunc="first")
    for row in wide.reindex(columns=labels).to_numpy(float):
        yield np.where(np.isfinite(row), row, np.nan)


def _distribution(axes: Axes, values: np.ndarray, y: float, color: str) -> None:
    """Draw values as dots, or as bars of the middle 50 and 90 per cent where they are many."""
    if len(values) <= MOST_DOTS:
        axes.plot(values, np.full(len(values), y), "o", color=color, markersize=4, alpha=0.45, markeredgewidth=0)
        return
    q05, q25, q75, q95 = np.quantile(values, [0.05, 0.25, 0.75, 0.95])
    axes.plot([q05, q95], [y, y], color=MUTED, linewidth=1)
    axes.plot([q25, q75], [y, y], color=MUTED, linewidth=5, solid_capstyle="butt")


# -------------------------------------------------------------------------------------------------------------- curves


def curves(recorded: Recorded, part: Part, metric: str, slug: str) -> Figure | None:
    """Return the curves of a metric, one line a cell, candidates told apart by dashes and the role's colour."""
    items = recorded.items
    assert items is not None, "asked for only where curve_metrics found some"
    mine = items[(items["part"] == part.name) & (items["metric"] == metric) & (items["kind"] == "curve")]
    finite = mine[np.isfinite(mine["x"]) & np.isfinite(mine["value"])]
    if finite.empty:
        return None
    keys = []
    with rc_context(STYLE):
        canvas, axes = _axes(WIDTH, 230, left=20, bottom=40, top=10)
        _scale(axes, "x", finite["x"].tolist(), pad=0.02, logs=False)
        _scale(axes, "y", finite["value"].tolist(), pad=0.05)
        seen: Counter[str] = Counter()
        for candidate in part.candidates:
            own = finite[finite["candidate"] == candidate.label]
            if own.empty:
                continue
            color = MARKERS[candidate.role]["color"]
            dash = DASHES[seen[color] % len(DASHES)]
            seen[color] += 1
            for _, cell in list(own.groupby("cell", sort=False))[:MOST_LINES]:
                kept = np.unique(np.linspace(0, len(cell) - 1, MOST_POINTS).astype(int))
                x, y = cell["x"].to_numpy()[kept], cell["value"].to_numpy()[kept]
                axes.plot(x, y, color=color, linestyle=dash, linewidth=0.9)
            pattern = "" if isinstance(dash, str) else " ".join(map(str, dash[1]))
            keys.append(Key(candidate.label, VARIABLES[color], pattern))
        axes.set_ylabel(_fit(metric, 100) + _scale_name(axes.get_yscale()))
        svg = inline(canvas, slug, f"curves of {metric}")
    return Figure(f"{words.metric_name(part.metric(metric))} along each run", "One line a cell.", svg, tuple(keys))


def curve_metrics(recorded: Recorded) -> list[tuple[Part, str]]:
    """Return the parts and metrics that have curves."""
    items = recorded.items
    if items is None or not {"part", "candidate", "cell", "metric", "kind", "x", "value"} <= set(items.columns):
        return []
    found = items.loc[items["kind"] == "curve", ["part", "metric"]].drop_duplicates()
    return [(recorded.document.part(part), metric) for part, metric in found.itertuples(index=False)]


# ------------------------------------------------------------------------------------------------------------- drawing


def _axes(width: float, height: float, *, left: float, bottom: float, top: float) -> tuple[Canvas, Axes]:
    """Return a canvas of ``width`` x ``height`` px (72 to the inch, as SVG counts) and axes inside the margins."""
    canvas = Canvas(figsize=(width / 72, height / 72), dpi=72)
    box = (left / width, bottom / height, (width - left - 10) / width, (height - bottom - top) / height)
    return canvas, canvas.add_axes(box)


def _level(values: list[tuple[Role, list[float]]]) -> bool:
    """Return whether there is nothing to see: all values are the same, but for a reference beside several others."""
    compared = [own for role, own in values if role != "reference" and own]
    known = [v for own in (compared if len(compared) > 1 else [own for _, own in values]) for v in own]
    return not known or max(known) - min(known) <= 1e-9 * max(map(abs, known))


def _in_focus(values: list[tuple[Role, list[float]]]) -> list[float]:
    """Return what an axis must show: all values, but not the controls' where those would squash all others."""
    everything = [v for _, own in values for v in own]
    others = [v for role, own in values if role != "control" for v in own]
    if len(others) < 2 or max(everything) - min(everything) <= SQUASHED * (max(others) - min(others)):
        return everything
    return others


def _scale(axes: Axes, axis: str, values: list[float], *, pad: float, logs: bool = True) -> tuple[float, float]:
    """Set limits, kind and ticks of one axis from the values it must show; return the limits."""
    low, high = min(values), max(values)
    log = logs and low > 0 and high > WIDE * low
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or abs(high) * 0.2 or 1.0
    low, high = low - span * pad, high + span * pad
    positions = log_ticks(low, high) if log else ticks(low, high)
    labels = [words.number(v) for v in positions] if log else tick_labels(positions)
    widths = [_width(label) for label in labels]
    box = axes.get_window_extent()
    if axis == "x" and sum(widths) + 12 * len(widths) > box.width:
        positions, labels = positions[::2], labels[::2]
    if axis == "y":
        left = (box.x0 + max(widths, default=0.0) + 8) / WIDTH
        axes.set_position((left, axes.get_position().y0, axes.get_position().x1 - left, axes.get_position().height))
    if log:
        low, high = 10**low, 10**high
    axes.set(**{f"{axis}scale": "log" if log else "linear", f"{axis}lim": (low, high)})
    getattr(axes, f"set_{axis}ticks")(positions, labels)
    getattr(axes, f"set_{axis}ticks")([], minor=True)
    return low, high


def _scale_name(scale: str) -> str:
    return ", log scale" if scale == "log" else ""


def _width(text: str) -> float:
    """Return the width of a text in px, generously: characters beyond the font's count as wide as they get."""
    known = "".join(c for c in text if ord(c) < 0x1100)
    with _unknown_glyphs_allowed():
        return float(text_to_path.get_text_width_height_descent(known, FONT, ismath=False)[0]) + 1.4 * TEXT * (
            len(text) - len(known)
        )


def _fit(text: str, most: float) -> str:
    """Return a text cut so that it is at most ``most`` px wide."""
    text = shown = words.clip(text, 80)
    length = len(text)
    while (width := _width(shown)) > most and length > 1:
        length = max(1, min(length - 1, int(length * most / width)))
        shown = words.clip(text, length)
    return shown


@contextlib.contextmanager
def _unknown_glyphs_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw them, not these
        yield


def inline(canvas: Canvas, slug: str, title: str) -> str:
    """Return a canvas as SVG for a page: the page's colours and font, no dates, ids unique to ``slug``."""
    buffer = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _unknown_glyphs_allowed(), rc_context({"svg.hashsalt": slug}):
        canvas.savefig(buffer, format="svg", metadata=no_metadata)
    used = re.findall(r'(?:url\(|href=")#([^")]+)', buffer.getvalue().decode())
    ids = {name: f"{slug}-{i}" for i, name in enumerate(dict.fromkeys(used))}
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # HTML knows SVG's elements without their namespace
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            if name != "id":
                element.set(name, _restyled(value, ids))
            elif value in ids:
                element.set("id", ids[value])
        if element.tag != "text":
            element.text = None  # blanks between elements, and a style sheet that page.css holds for all figures
        element.tail = None
    caption = ElementTree.Element("title")
    caption.text = title
    root.insert(0, caption)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode").replace('<defs><style type="text/css" /></defs>', "")


def _restyled(value: str, ids: Mapping[str, str]) -> str:
    """Return an attribute with the page's variables, short numbers and the figure's own ids."""
    for placeholder, variable in VARIABLES.items():
        value = value.replace(placeholder, f"var({variable})")
    value = re.sub(r"#([^)\s]+)", lambda m: f"#{ids.get(m[1], m[1])}", value)
    value = re.sub(r"-?\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value)
    value = re.sub(r"font: [^;]+", f"font-size: {TEXT}px", value)
    value = re.sub(r"font-family: [^;]+;?", "", value)
    return re.sub(r"\s*([;:])\s+", r"\1", value).strip()
