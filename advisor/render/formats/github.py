"""Reports and gate decisions as workflow commands, which GitHub Actions shows next to the code.

See "Workflow commands for GitHub Actions": one command per line, data with %, CR and LF escaped,
properties also with colon and comma escaped."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from advisor.advise import finding_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.render.documents import memory
from advisor.render.renderer import DEFAULT, Renderer, RenderOptions

if TYPE_CHECKING:
    from advisor.compare.comparison import Comparison

COMMANDS: Final = {"critical": "error", "warning": "warning", "info": "notice"}
_MAX_MESSAGE: Final = 3000
"""Maximum length of a message, characters. GitHub cuts messages longer than about 4 KB."""
MAX_HOLDERS: Final = 5
"""Maximum number of rows in each table of memory."""


class Github(Renderer[Any]):
    """Renderer of workflow commands, one per line."""

    def render(self, subject: Any, options: RenderOptions = DEFAULT) -> str:
        """Write an annotation for the verdict or the decision, and one for each finding."""
        lines = (
            _annotate_report(subject)
            if isinstance(subject, Report)
            else _annotate_decision(subject)
        )
        return "".join(f"{line}\n" for line in lines)


def _annotate_report(report: Report) -> list[str]:
    """Annotate each finding and risk that is not a symptom of another, by gain, and each device's
    memory if a snapshot was read."""
    shown = [f for f in (*report.findings, *report.risks) if f.folded_under is None]
    level = "error" if report.crashes else "notice"
    lines = [_write_command(level, {"title": "advisor"}, report.verdict)]
    lines += [_annotate_finding(finding) for finding in shown]
    return lines + [
        _annotate_memory(device) for device in memory.describe_devices(report, MAX_HOLDERS)
    ]


def _annotate_decision(comparison: Comparison) -> list[str]:
    """Annotate a gate's decision, and warn of each new finding."""
    from advisor.compare import comparison_text

    decision = comparison.decision
    assert decision is not None
    level = "warning" if decision.answer == "not shown" else "notice"
    level = "error" if decision.failed else level
    text = labels.clean(
        f"{comparison_text.write_headline(comparison)}. {'; '.join(decision.reasons)}."
    )
    lines = [f"::{level} title=advisor gate::{escape_data(text)}"]
    for item in dict(comparison_text.gate_findings(comparison))["new"]:
        title = escape_property("advisor: new finding")
        place = f" ({item.place})" if item.place else ""
        lines.append(f"::warning title={title}::{escape_data(labels.clean(item.title + place))}")
    return lines


def _annotate_finding(finding: Finding) -> str:
    properties = {}
    place = code_place(finding)
    if place is not None and place.file is not None:
        path, inside = make_relative_path(place.file)
        if inside:  # GitHub does not show annotations of files outside the repository
            properties["file"] = path
            if place.line is not None and place.line > 0:
                properties["line"] = str(place.line)
    properties["title"] = (
        f"{labels.clean(finding.title)} ({finding_text.describe_gain(finding, alone=True)})"
    )
    lines = [finding.summary, f"Fix: {finding.fix}"]
    if "file" not in properties and finding.where:
        lines.append(f"Where: {' · '.join(t.location_names(finding.where[0]))}")
    text = "\n".join(labels.clean(line) for line in lines if line)
    return _write_command(COMMANDS[finding.severity], properties, text, lines=True)


def _annotate_memory(device: memory.DeviceMemory) -> str:
    """Annotate a device's memory with its figures, then its tables, one row per line."""
    title = {"title": f"{device.title} {device.aside}"}
    return _write_command("notice", title, "\n".join(memory.sentences(device)), lines=True)


def _write_command(name: str, properties: dict[str, str], text: str, *, lines: bool = False) -> str:
    property_list = ",".join(f"{key}={escape_property(value)}" for key, value in properties.items())
    message = labels.shorten(labels.clean(text, lines=lines), _MAX_MESSAGE)
    return f"::{name} {property_list}::{escape_data(message)}"


def escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    safe = escape_data(labels.shorten(labels.clean(text), 1000))
    return safe.replace(":", "%3A").replace(",", "%2C")


# -- places in code as other tools name them: files relative to the repository, lines from 1 ------

_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")


def code_place(finding: Finding) -> Location | None:
    """Return the worst place that is a line of code, or ``None`` if stacks were not recorded."""
    return next((place for place in finding.where if place.file), None)


def make_relative_path(file: str) -> tuple[str, bool]:
    """Return (path with forward slashes, whether it is relative to the repository).

    A path below the working folder becomes relative to it, as CI expects. A path recorded as
    relative (profilers cut off a common beginning) stays unchanged."""
    file = labels.clean(file)
    with suppress(ValueError, OSError):
        file = str(PurePath(file).relative_to(Path.cwd()))
    path = file.replace("\\", "/")
    absolute = path.startswith("/") or _DRIVE.match(file) is not None
    inside = not absolute and ".." not in path.split("/")
    return path, inside
