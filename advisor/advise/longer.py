"""What makes one step longer than another, as data and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core import labels
from advisor.core import text as t
from advisor.core.report import LongerPart, Uneven

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.steps.uneven import StepDifference

ANOTHER_COUNT = 0.25
"""Relative difference of how often work runs from which a longer step is said to run more of it."""


def steps_apart(a: Analysis) -> Uneven | None:
    """For the report; ``None``: steps are alike, or too few."""
    found = None if a.record_only else a.uneven
    if found is None:
        return None
    return Uneven(found.short_ns, found.long_ns, _parts(found.classes), _parts(found.work))


def longer_steps(a: Analysis) -> str:
    """A sentence or two for steps that differ."""
    found, own = a.uneven, a.trace.meta.framework
    if found is None:
        return "What makes one longer than another is not told by so few steps."
    said = f"The longer half takes {t.format_duration(found.difference_ns)} more a step"
    if not found.classes:
        return f"{said}, spread over many causes."
    parts = (f"{_class(part.name, own)} {t.format_duration(part.ns)}" for part in found.classes)
    said += f": {', '.join(parts)}."
    if not found.work:
        return said
    said += f" Most of it in {', '.join(_work(part) for part in found.work)}."
    if any(_more_calls(part) for part in found.work):
        said += (
            " The longer steps run more of it: their work is larger, or the device runs what an "
            "earlier step has launched."
        )
    return said


def _parts(parts: tuple[StepDifference, ...]) -> list[LongerPart]:
    return [LongerPart(p.name, p.ns, p.short_count, p.long_count) for p in parts]


def _class(name: str, framework: str | None) -> str:
    if name.startswith("host: "):
        return t.host_label(name.removeprefix("host: "), framework)
    cause = name.removeprefix("idle: ")
    if cause != name:
        told = t.cause_label(cause, framework) if cause in t.CAUSE_LABELS else "no known cause"
        return f"idle ({told})"
    return t.CLASS_LABELS.get(name, name)


def _work(part: StepDifference) -> str:
    calls = (
        f" ({part.short_count:.3g} to {part.long_count:.3g} a step)" if _more_calls(part) else ""
    )
    return f"{labels.kernel_label(part.name, 40)} {t.format_duration(part.ns)}{calls}"


def _more_calls(part: StepDifference) -> bool:
    few, many = part.short_count or 0.0, part.long_count or 0.0
    return many - few >= ANOTHER_COUNT * max(many, 1e-9)
