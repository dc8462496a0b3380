"""Numbers, quantities and verdicts as a reader wants them said.

>>> number(0.000123456), number(-1234.5), number(float("inf"))
('0.000123', '−1,234', '∞')
>>> estimate(0.11037, 0.0512, 0.1695)
('0.110', '0.051', '0.170')
>>> ratio(times(0.11037, higher_is_better=False)).replace(PERCENT, "%")
'−10.4%'
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairtrial.report.read import Claim, Metric, Part

MISSING = "–"
PERCENT = "\u202f%"  # a narrow space that does not break
TIMES = "\u202f×"
# What XML or UTF-8 cannot carry, and what turns the text around it.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
COUNTED = ("HOLDS", "FAILS", "UNDECIDED", "UNMEASURED")
OTHER_SIDE = {"above": "below", "below": "above"}


# ------------------------------------------------------------------------------------------------------------- numbers


def number(value: float | None, digits: int = 3) -> str:
    """Return a number to ``digits`` significant digits, with a real minus sign and no needless exponent."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and not 1e-4 <= size < 1e7:
        text = re.sub(r"e([+-])0*", r"e\1", f"{value:.{digits - 1}e}").replace("e+", "e")
    else:
        places = 0 if size >= 10 ** (digits - 1) else digits - 1 - math.floor(math.log10(size)) if size else 0
        text = f"{value:,.{places}f}"
        if "." in text:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def fixed(value: float, places: int) -> str:
    """Return a number with ``places`` decimals; -0 is 0."""
    if not math.isfinite(value) or places > 7 or abs(value) >= 1e7:
        return number(value)
    text = f"{value:,.{places}f}"
    return text.lstrip("-") if not float(text.replace(",", "")) else text.replace("-", "−")


def places(width: float) -> int:
    """Return how many decimals show two significant digits of ``width``."""
    return max(0, 1 - math.floor(math.log10(width))) if width > 0 and math.isfinite(width) else 0


def estimate(value: float, low: float, high: float) -> tuple[str, str, str]:
    """Return an estimate and its interval's ends with as many decimals as the interval deserves."""
    half = (high - low) / 2
    if not math.isfinite(half) or half <= 0:
        return number(value), number(low), number(high)
    shown = fixed(value, places(half))
    if value and shown.strip("0.") == "":  # not nothing, only small beside its interval
        shown = fixed(value, places(abs(value)) - 1)
    return shown, fixed(low, places(half)), fixed(high, places(half))


def estimated_ratio(value: float, low: float, high: float) -> tuple[str, str, str]:
    """Return an estimated ratio and its interval's ends to three digits, or as many as a narrow interval deserves."""
    narrow = (high - low) / 2 < 0.01 * value
    return estimate(value, low, high) if narrow else (number(value), number(low), number(high))


def ratio(value: float) -> str:
    """Return a ratio as a signed percentage near 1, as a factor far from it."""
    if not math.isfinite(value):
        return number(value)
    if not 0.5 <= value <= 2:
        return f"{number(value)}{TIMES}"
    percent = f"{value * 100 - 100:+.1f}"
    return "0" + PERCENT if percent in ("+0.0", "-0.0") else percent.replace("-", "−") + PERCENT


def times(log_difference: float, higher_is_better: bool) -> float:
    """Return the first's value over the second's, from a difference of logarithms that favours the first."""
    log = log_difference if higher_is_better else -log_difference
    return math.inf if log > 700 else math.exp(log)


def duration(seconds: float) -> str:
    """Return a time in the two units that matter: ``'2 h 05 min'``."""
    if seconds < 1:
        return f"{number(seconds * 1000, 2)} ms"
    if seconds < 60:
        return f"{number(seconds)} s"
    whole = round(seconds)
    for size, large, small, parts in ((86400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            return f"{whole // size:,} {large} {whole % size // parts:02d} {small}"
    raise AssertionError(seconds)


def memory(size: float | None) -> str:
    """Return bytes as MiB or GiB."""
    if not size:
        return MISSING
    return f"{number(size / 2**30)} GiB" if size >= 2**30 else f"{number(size / 2**20)} MiB"


def count(amount: int, noun: str) -> str:
    """Return ``'1 cell'``, ``'1,200 cells'``."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


# --------------------------------------------------------------------------------------------------------------- lists


def clip(text: str, most: int) -> str:
    """Return ``text`` in one line of at most ``most`` characters, a longer one cut with an ellipsis."""
    text = CONTROL.sub("", " ".join(text.split()))
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def join(words: Sequence[str]) -> str:
    """Return ``'a, b and c'``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def values(items: Sequence[Any], most: int = 12) -> str:
    """Return a list of values, runs of whole numbers as ``'0 to 9'``."""
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in items)
    if whole and len(items) > 2 and list(items) == list(range(items[0], items[0] + len(items))):
        return f"{items[0]} to {items[-1]}"
    shown = [value(v) for v in items[:most]]
    return ", ".join(shown) + (f" and {len(items) - most:,} more" if len(items) > most else "")


def value(thing: Any) -> str:
    """Return a factor's or parameter's value."""
    if isinstance(thing, bool):
        return "yes" if thing else "no"
    if isinstance(thing, float):
        return number(thing, 6)
    return MISSING if thing is None else clip(str(thing), 160)


def where(conditions: Mapping[str, Any]) -> str:
    """Return a restriction of factors: ``'sparsity 0.5, task a or b'``."""
    return ", ".join(
        f"{name} {' or '.join(map(value, wanted)) if isinstance(wanted, list) else value(wanted)}"
        for name, wanted in conditions.items()
    )


# -------------------------------------------------------------------------------------------------------------- claims


def state(name: str) -> str:
    """Return a verdict's word: ``'HOLDS'``, ``'not measured'``."""
    return "not measured" if name == "UNMEASURED" else name


def headline(states: Iterable[str]) -> str:
    """Return the outcome in one sentence.

    >>> headline(["HOLDS", "FAILS", "HOLDS", "UNDECIDED", "UNMEASURED", "REPORTED"])
    '2 of 5 claims hold; 1 fails and 1 is undecided; 1 is not measured here.'
    """
    counts = Counter(states)
    total = sum(counts[state] for state in COUNTED)
    if not total:
        reported = counts["REPORTED"]
        return f"Nothing is claimed; {reported} {'quantity is' if reported == 1 else 'quantities are'} reported."
    holds, fails, undecided, unmeasured = (counts[state] for state in COUNTED)
    if total == 1:
        verb = "holds" if holds else "fails" if fails else "is undecided" if undecided else "is not measured here"
        return f"The one claim {verb}."
    everything = ((holds, "hold"), (fails, "fail"), (undecided, "are undecided"), (unmeasured, "are not measured here"))
    for amount, verb in everything:
        if amount == total:
            return f"{'Both' if total == 2 else f'All {total}'} claims {verb}."
    first = f"{holds or 'None'} of {total} claims hold{'s' if holds == 1 else ''}"
    rest = [
        *([f"{fails} fail{'s' if fails == 1 else ''}"] if fails else []),
        *([f"{undecided} {'is' if undecided == 1 else 'are'} undecided"] if undecided else []),
    ]
    apart = [f"{unmeasured} {'is' if unmeasured == 1 else 'are'} not measured here"] if unmeasured else []
    return f"{'; '.join(filter(None, [first, join(rest), *apart]))}."


def spoken(name: str) -> str:
    """Return a metric's name as words."""
    return clip(name.replace("_", " "), 60)


def metric_name(metric: Metric) -> str:
    """Return a metric's name in words, with its unit."""
    name = spoken(metric.name)
    return f"{name} ({clip(metric.unit, 40)})" if metric.unit and metric.unit != metric.name else name


def sentence(claim: Claim, parent: Claim | None) -> tuple[str, str]:
    """Return a claim's id and text; of one made at each value of a setting only that: ``("", "sparsity 0.5")``."""
    if parent is None or claim.text != parent.text:
        return clip(claim.id, 60), claim.text
    return "", clip(claim.id.removeprefix(parent.id).strip("[]").replace("=", " ", 1), 100)


def quantity(claim: Claim) -> str:
    """Return what a claim's number is, in a few words."""
    q = claim.quantity
    a, b, metric = clip(q.a, 60), clip(q.b, 60), spoken(q.metric)
    if q.kind == "difference":
        text = f"{a} against {b}: {metric}" + (", ratio" if q.scale == "log" else "")
    elif q.kind == "level":
        text = f"{a}: mean {metric}"
    elif q.kind == "contrast":
        text = " ".join(
            f"{'−' if t.weight < 0 else '+'} {'' if abs(t.weight) == 1 else number(abs(t.weight)) + ' × '}"
            f"{clip(t.candidate, 60)} {spoken(t.metric)}{f' ({where(t.where)})' if t.where else ''}"
            for t in q.terms
        ).removeprefix("+ ")
    elif q.kind == "statistic":
        text = "a statistic of all cells" if q.name in ("", "<lambda>") else q.name.replace("_", " ").strip()
    else:
        text = {"exact": "exact, without an interval", "all_of": "all of the following"}.get(q.kind, q.kind)
        if q.kind == "for_each":
            text = f"at each {q.factor}"
    return f"{text} · {where(q.where)}" if q.where else text


def is_ratio(claim: Claim) -> bool:
    """Return whether a claim's number is a difference of logarithms, better said as a ratio."""
    return claim.quantity.kind == "difference" and claim.quantity.scale == "log"


def as_ratio(claim: Claim, part: Part) -> Claim:
    """Return a claim of a difference of logarithms with the ratios that it means, the first's value over the second's.

    Any other claim is returned as it is.
    """
    if not is_ratio(claim):
        return claim
    higher = part.metric(claim.quantity.metric).higher_is_better
    low, high = (claim.low, claim.high) if higher else (claim.high, claim.low)
    numbers = {"difference": times(claim.difference, higher), "low": times(low, higher), "high": times(high, higher)}
    bound = {side if higher else OTHER_SIDE[side]: times(limit, higher) for side, limit in claim.bound.items()}
    return claim.model_copy(update={**numbers, "bound": bound})


def bound(claim: Claim, part: Part) -> str:
    """Return what a claim asks of its number: ``'above 0.02'``, of a difference of logarithms ``'at most 3 ×'``."""
    if not is_ratio(claim):
        return " and ".join(f"{side} {number(limit)}" for side, limit in claim.bound.items())
    inclusive = {"above": "at least", "below": "at most"}
    limits = as_ratio(claim, part).bound.items()
    return " and ".join(f"{side if v == 1 else inclusive[side]} {number(v)}{TIMES}" for side, v in limits)


def outcome(claim: Claim, part: Part) -> str:
    """Return what was found, in a sentence."""
    q = claim.quantity
    if math.isnan(claim.difference):
        return ""
    seen = as_ratio(claim, part)
    found, low, high = (estimated_ratio if is_ratio(claim) else estimate)(seen.difference, seen.low, seen.high)
    metric = part.metric(q.metric)
    a, b = clip(q.a, 60), clip(q.b, 60)
    if is_ratio(claim):
        factor = seen.difference
        shown = (factor, seen.low, seen.high, *seen.bound.values())
        if all(0.5 <= v <= 2 for v in shown if not math.isnan(v)):
            than = f"{number(abs(factor - 1) * 100)}{PERCENT} {'higher' if factor > 1 else 'lower'} than {b}’s"
            low, high = ratio(seen.low), ratio(seen.high)
        else:
            than = f"{found}{TIMES} {b}’s"
            high += TIMES
        said = f"{a}’s {spoken(q.metric)} is {than}"
    elif q.kind == "difference" and claim.difference:
        side = "better" if claim.difference > 0 else "worse"
        said = f"{a} is {side} than {b} by {found.lstrip('−')} in {metric_name(metric)}"
    elif q.kind == "difference":
        said = f"{a} and {b} are level in {metric_name(metric)}"
    else:
        said = f"Measured: {found}"
    if math.isnan(claim.low):
        return f"{said}; no interval."
    return f"{said}; {number(claim.level * 100)}{PERCENT} interval {low} to {high}."
