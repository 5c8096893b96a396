"""Imports point one way: against circles and short cuts that a file by itself does not show.

The graph has a node for each file of advisor/, rules/ and dashboard/, and an edge for each import,
those inside functions included. What only a type checker reads is no import. Names that a package
hands out when asked (``advisor.analyze``) are those of ``advisor/__init__.py``: nobody inside takes
them from there, and a test says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("advisor", "rules", "dashboard")

Graph = dict[str, set[str]]


def module_name(file: Path, root: Path) -> str:
    """``rules/host/debug_switches.py`` -> ``advisor.rules.host.debug_switches``."""
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "advisor" else ("advisor", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path) -> dict[str, Path]:
    """Module -> its file. ``advisor/rules`` and the like are links to what is listed by itself."""
    result = {}
    for tree in TREES:
        for file in sorted((root / tree).rglob("*.py")):
            if not any(part.is_symlink() for part in file.parents if root in part.parents):
                result[module_name(file, root)] = file
    return result


def import_graph(root: Path) -> Graph:
    """Module -> the modules of the tree that it imports, at once or later."""
    modules = sources(root)
    graph: Graph = {}
    for name, file in modules.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        requested = set(_imports(ast.parse(file.read_bytes()), package))
        result = {target for one in requested for target in _imported_modules(one, modules)}
        graph[name] = result - {name}
    return graph


def _imported_modules(requested: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules that an import of ``requested`` means: itself, the module that has the
    name, or for ``advisor.cli.*`` all below."""
    if requested.endswith("*"):
        return {name for name in modules if name.startswith(requested[:-1])}
    while requested and requested not in modules:
        requested = requested.rpartition(".")[0]
    return {requested} if requested else set()


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """Dotted names, also those that ``import_module`` is given."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from _imports(child, package)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")
            base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.JoinedStr | ast.Constant):
        # f"advisor.dashboard.pages.{module}": whatever is there may be imported by that name
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        first = parts[0].value if parts and isinstance(parts[0], ast.Constant) else None
        if isinstance(first, str) and re.fullmatch(r"advisor\.(\w+\.)+", first):
            yield first + "*"
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package)


def layers(text: str) -> list[set[str]]:
    """The rows of the table of layers, lowest first: what stands in backquotes in a second cell."""
    rows = re.findall(r"^\| *\d+ *\|([^|]*)\|", text, re.MULTILINE)
    return [set(re.findall(r"`([\w.]+)`", row)) for row in rows]


def layer_of(module: str, table: list[set[str]]) -> int | None:
    """Row of a module in the table: that of ``read`` for ``advisor.read.build``; of ``advisor``
    for all."""
    unit = module.split(".")[1] if "." in module else module
    return next((number for number, row in enumerate(table) if unit in row), None)


def forbidden_imports(graph: Graph, table: list[set[str]]) -> list[str]:
    """Imports that the table does not allow: of a higher row, or of another unit in the same."""
    result = []
    for name, targets in sorted(graph.items()):
        for target in sorted(targets):
            own_layer, other_layer = layer_of(name, table), layer_of(target, table)
            inside = name.split(".")[1:2] == target.split(".")[1:2]
            if (
                own_layer is None
                or other_layer is None
                or (own_layer <= other_layer and not inside)
            ):
                result.append(f"{name} imports {target}")
    return result


def import_cycle(graph: Graph) -> list[str]:
    """Modules that import each other round and round; empty: none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def product_graph() -> Graph:
    return import_graph(ROOT)


def documented_layers() -> list[set[str]]:
    return layers((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert import_cycle(product_graph()) == []


def test_every_import_points_down_the_table_of_layers() -> None:
    assert forbidden_imports(product_graph(), documented_layers()) == []


def is_rule(file: Path) -> bool:
    """Return whether a file defines a rule: a class with an id."""
    return any(
        isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "id"
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
    )


def test_only_the_rule_loader_names_rules() -> None:
    """Code that others need of a rule is in a file that rules share."""
    rules = {
        name
        for name, file in sources(ROOT).items()
        if name.startswith("advisor.rules.") and is_rule(file)
    }
    assert len(rules) > 50
    known = {name: targets & rules for name, targets in product_graph().items() if targets & rules}
    assert known.pop("advisor.advise.rule_loading") == rules
    assert known == {}


def test_layout_table_lists_every_folder_and_file() -> None:
    units = {name.split(".")[1] if "." in name else name for name in product_graph()} - {"__main__"}
    listed = [unit for row in documented_layers() for unit in row]
    assert sorted(listed) == sorted({*units, "__main__"})


def test_modules_do_not_import_the_public_names() -> None:
    taken = []
    known = sources(ROOT)
    for name, file in known.items():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module == "advisor" and not node.level:
                taken += [
                    f"{name}: {alias.name}"
                    for alias in node.names
                    if alias.name != "__version__" and f"advisor.{alias.name}" not in known
                ]
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "advisor"
                and node.attr != "__version__"
                and f"advisor.{node.attr}" not in known
            ):
                taken.append(f"{name}: {node.attr}")
    assert taken == []


TABLE = "| 1 | `low` `beside` | |\n| 2 | `high` | |\n"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ("", "from advisor.low.one import x", []),
        ("from advisor.high.one import x", "", ["advisor.low.one imports advisor.high.one"]),
        ("def f():\n    import advisor.high.one", "", ["advisor.low.one imports advisor.high.one"]),
        ("from advisor import beside", "", ["advisor.low.one imports advisor.beside"]),
        ("from ..high import one", "", ["advisor.low.one imports advisor.high.one"]),
        ("x = f'advisor.high.{f}'", "", ["advisor.low.one imports advisor.high.one"]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import advisor.high.one",
            "",
            [],
        ),
    ],
)
def test_an_import_upwards_is_seen_wherever_it_stands(
    tmp_path: Path, low: str, high: str, expected: list[str]
) -> None:
    for name, text in {"low/one": low, "high/one": high, "beside": ""}.items():
        file = tmp_path / "advisor" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert forbidden_imports(import_graph(tmp_path), layers(TABLE)) == expected


def test_a_circle_is_seen_by_way_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "advisor").mkdir()
    (tmp_path / "advisor/a.py").write_text("import advisor.b")
    (tmp_path / "advisor/b.py").write_text("def f():\n    from advisor.a import x")
    assert set(import_cycle(import_graph(tmp_path))) == {"advisor.a", "advisor.b"}
