"""``advisor rules``: list of the rules, and what each looks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.core.errors import AdvisorError, suggest

if TYPE_CHECKING:
    from advisor.core.rule import Rule

app = typer.Typer(help="List the rules, and what each looks for.", rich_markup_mode=None)

SEE = "see 'advisor rules list'"


@app.callback(invoke_without_command=True)
def _rules(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_rules(None)


@app.command("list")
def list_rules(rules: o.Rules = None) -> None:
    """List all rules by category, with how far each was validated."""
    from advisor.advise.rule_loading import read_config
    from advisor.render.documents.rule import build_list

    known = _load(rules)
    off = {name for name, options in read_config().items() if options.get("enabled") is False}
    out.show_document(build_list(known, disabled=off))


@app.command("show")
def show(
    rule_id: Annotated[str, typer.Argument(metavar="ID", help="As 'advisor rules list' has it.")],
    rules: o.Rules = None,
) -> None:
    """Show what a rule looks for, its cost and its thresholds."""
    from advisor.render.documents.rule import build

    known = {rule.id: rule for rule in _load(rules)}
    if rule_id not in known:
        raise AdvisorError(f"no rule {rule_id!r}; {suggest(rule_id, known, SEE)}")
    out.show_document(build(known[rule_id]))


def _load(folder: Path | None) -> list[Rule]:
    """Load every rule with its built-in thresholds, including the rules that are switched off."""
    from advisor.advise.rule_loading import load_rules

    return load_rules(folder, config={})
