"""``advisor rules``: list of the rules, and what each checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.core.errors import AdvisorError, suggest

if TYPE_CHECKING:
    from advisor.core.rule import Rule

app = typer.Typer(help="List the rules, and what each checks.", rich_markup_mode=None)

LIST_HINT = "see 'advisor rules list'"


@app.callback(invoke_without_command=True)
def _rules(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_rules(None)


@app.command("list")
def list_rules(rules: o.Rules = None) -> None:
    """List all rules by category, with the level of validation of each."""
    from advisor.advise.rule_loading import read_config
    from advisor.render.documents.rule import build_list

    all_rules = _load_all_rules(rules)
    disabled = {name for name, options in read_config().items() if options.get("enabled") is False}
    out.show_document(build_list(all_rules, disabled=disabled))


def _complete_id(incomplete: str) -> list[str]:
    return [rule.id for rule in _load_all_rules(None) if rule.id.startswith(incomplete)]


@app.command("show")
def show(
    rule_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="As listed by 'advisor rules list'.", autocompletion=_complete_id
        ),
    ],
    rules: o.Rules = None,
) -> None:
    """Show what a rule checks, its cost and its thresholds."""
    from advisor.render.documents.rule import build

    rules_by_id = {rule.id: rule for rule in _load_all_rules(rules)}
    if rule_id not in rules_by_id:
        raise AdvisorError(f"no rule {rule_id!r}; {suggest(rule_id, rules_by_id, LIST_HINT)}")
    out.show_document(build(rules_by_id[rule_id]))


def _load_all_rules(folder: Path | None) -> list[Rule]:
    """Load every rule with its built-in thresholds, including the rules that are switched off."""
    from advisor.advise.rule_loading import load_rules

    return load_rules(folder, config={})
