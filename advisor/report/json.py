"""The JSON renderer: the Report as it is, with nothing in it that a terminal could obey."""

from __future__ import annotations

import re

from advisor.report.data import Report

# JSON text may hold these raw inside strings; some terminals obey the second half (C1 controls),
# and the last ones reorder or break the line that shows them.
_RAW = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def render(report: Report) -> str:
    """The documented JSON (docs/report-schema.md), indented by two, ending in a line feed.

    Holds the whole report: nothing is shortened or left out. Reads back with
    ``Report.from_json``.
    """
    return harmless(report.to_json())


def harmless(text: bytes) -> str:
    """JSON text with escapes for what a terminal would obey."""
    return _RAW.sub(lambda found: f"\\u{ord(found[0]):04x}", text.decode())
