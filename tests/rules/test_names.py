"""The names of rules and readers: files, classes and identifiers fit each other."""

from __future__ import annotations

import ast
from pathlib import Path

from advisor.advise.rule_loading import load_rules
from advisor.read.registry import bundled_readers

ROOT = Path(__file__).parents[2]
RULES = load_rules(config={})


def test_a_file_with_one_rule_is_named_by_its_id() -> None:
    ids: dict[str, list[str]] = {}
    for rule in RULES:
        ids.setdefault(type(rule).__module__.rpartition(".")[2], []).append(rule.id)
    single = {file: of[0].replace("-", "_") for file, of in ids.items() if len(of) == 1}
    assert len(single) > 50
    assert {file: name for file, name in single.items() if file != name} == {}


def test_rule_and_reader_classes_have_conventional_names() -> None:
    """A rule's as its id: of one, the other is guessed. A reader's by its last word."""
    names = {rule.id: type(rule).__name__ for rule in RULES}
    assert {i: name for i, name in names.items() if name.lower() != i.replace("-", "")} == {}
    readers = [type(reader).__name__ for reader in bundled_readers()]
    assert [name for name in readers if not name.endswith("Reader")] == []


def test_no_rule_is_named_outside_itself() -> None:
    """Neither what runs rules nor another rule names one. Hints and workloads say which rule
    confirms them."""
    ids = {rule.id for rule in RULES} - {"recompilation"}  # a word of texts too
    folders = [ROOT / "rules", ROOT / "dashboard"]
    parts = ("advise", "cli", "compare", "core", "export", "measure", "mcp", "render", "replay")
    folders += [ROOT / "advisor" / part for part in parts]
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in ids:
                line = file.read_text(encoding="utf-8").splitlines()[node.lineno - 1].strip()
                assert line == f'id = "{node.value}"', f"{file}: {line}"
