"""The GitHub renderer: findings as workflow commands, which Actions shows beside the code.

See "Workflow commands for GitHub Actions": a command a line, data with %, CR and LF escaped,
properties with colon and comma too.
"""

from __future__ import annotations

from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.render import memory
from advisor.render.places import code_place, relative
from advisor.render.renderer import DEFAULT, Options, Renderer

COMMANDS = {"critical": "error", "warning": "warning", "info": "notice"}
LONGEST = 3000
"""Characters of a message; GitHub cuts what is longer than 4 KB or so."""
MAX_HOLDERS = 5
"""Rows of each table of memory."""


class Github(Renderer[Report]):
    """Workflow commands, one a line."""

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """An annotation for the verdict and one for each finding and risk that is no symptom of
        another, in the order of worth; and one for each device's memory, where a snapshot was
        read."""
        found = [f for f in (*subject.findings, *subject.risks) if f.folded_under is None]
        level = "error" if subject.crashes else "notice"
        lines = [_command(level, {"title": "advisor"}, subject.verdict)]
        lines += [_annotation(finding) for finding in found]
        lines += [_held(device) for device in memory.devices(subject, MAX_HOLDERS)]
        return "".join(f"{line}\n" for line in lines)


def _annotation(finding: Finding) -> str:
    properties = {}
    place = code_place(finding)
    if place is not None and place.file is not None:
        path, inside = relative(place.file)
        if inside:  # an annotation of a file that is not in the repository is shown nowhere
            properties["file"] = path
            if place.line is not None and place.line > 0:
                properties["line"] = str(place.line)
    properties["title"] = f"{t.clean(finding.title)} ({t.format_gain(finding)})"
    lines = [finding.summary, f"Fix: {finding.fix}"]
    if "file" not in properties and finding.where:
        lines.append(f"Where: {' · '.join(t.location_names(finding.where[0]))}")
    text = "\n".join(t.clean(line) for line in lines if line)
    return _command(COMMANDS[finding.severity], properties, text, lines=True)


def _held(device: memory.Device) -> str:
    """What held a device's memory: its figures, then its tables, a row a line."""
    title = {"title": f"{device.title} {device.aside}"}
    return _command("notice", title, "\n".join(memory.sentences(device)), lines=True)


def _command(name: str, properties: dict[str, str], text: str, *, lines: bool = False) -> str:
    told = ",".join(f"{key}={escape_property(value)}" for key, value in properties.items())
    return f"::{name} {told}::{escape_data(t.shorten(t.clean(text, lines=lines), LONGEST))}"


def escape_data(text: str) -> str:
    """The message of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """The value of a property."""
    safe = escape_data(t.shorten(t.clean(text), 1000))
    return safe.replace(":", "%3A").replace(",", "%2C")
