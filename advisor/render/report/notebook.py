"""What a notebook shows of a Report: a few lines, styled inline, escaped.

Colours come from the notebook's own theme where they can; nothing is loaded and nothing runs.
"""

from __future__ import annotations

from advisor.advise import facts, views
from advisor.core import text as t
from advisor.core.report import Report
from advisor.render.html import fill
from advisor.render.renderer import DEFAULT, Options, Renderer

MAX_FINDINGS = 5


class Notebook(Renderer[Report]):
    """A fragment of HTML."""

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """Verdict, the step as a bar, the findings worth most and how to fix them."""
        ranked = facts.ranked(subject)
        found = ranked[:MAX_FINDINGS]
        more = len(ranked) - len(found)
        missing = len(facts.abstentions(subject))
        return fill(
            "render/notebook_report.html",
            report=subject,
            shown=views.step_bar(subject),
            rows=[
                [
                    finding.rank,
                    finding.title,
                    t.format_gain(finding),
                    " · ".join(t.location_names(finding.where[0])[:1]) if finding.where else "",
                ]
                for finding in found
            ],
            found=found,
            more=t.count_noun(more, "more finding") if more else "",
            missing=t.count_noun(missing, "thing") if missing else "",
        )
