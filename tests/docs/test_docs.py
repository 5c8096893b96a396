"""The generated pages are current, and what the docs name exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from benchmarks import bench_thresholds

ROOT = Path(__file__).resolve().parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_current() -> None:
    wanted = generator().pages()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    unwanted = [str(p) for p in (ROOT / "docs" / "rules").glob("*.md") if p not in wanted]
    assert (stale, unwanted) == ([], []), "run 'make docs'"


def test_examples_of_other_packages_import_public_names_alone() -> None:
    """The rule of the page on extending, and the format and the reader that tests install."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    texts = [page.partition("```python\n")[2].partition("```")[0]]
    for file in ("render/test_renderers.py", "read/test_readers.py"):
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        texts += [ast.literal_eval(n.value) for n in tree.body if ast.unparse(n)[:6] == "TOY = "]
    public = generator().FOR_PACKAGES
    used = {
        (node.module or "", alias.name)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("advisor")
        for alias in node.names
    }
    assert len(texts) == 3
    assert {(where, name) for where, name in used if name not in public[where].split()} == set()


def test_the_page_of_thresholds_has_each_with_its_value() -> None:
    """A measured threshold goes stale with its rule: measure that rule again."""
    rows = bench_thresholds.rows(bench_thresholds.PAGE.read_text(encoding="utf-8"))
    documented = {key: value for key, (value, *_) in rows.items()}
    wanted = {(rule, name): f"{value:g}" for rule, name, value in bench_thresholds.thresholds()}
    rules = {
        rule
        for rule, name in {*documented, *wanted}
        if documented.get((rule, name)) != wanted.get((rule, name))
    }
    assert not rules, "run benchmarks/bench_thresholds.py " + " ".join(f"--rule {r}" for r in rules)


def test_every_field_of_the_report_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", generator().schema_text(), re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, meaning in rows if not meaning.strip()] == []


def test_troubleshooting_messages_exist_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^> (.+)$", page, re.MULTILINE)
    assert len(messages) > 10
    text = "\n".join(
        node.value
        for path in (ROOT / "advisor").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    text = re.sub(r"%[drs]", "…", text)
    assert [
        message
        for message in messages
        if not all(part.strip() in text for part in re.split(r" ?… ?", message))
    ] == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if not page.is_symlink()]  # those are at the top already
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    broken = [f"{p.relative_to(ROOT)}: {to}" for p, to in links if not (p.parent / to).exists()]
    assert broken == []


def test_names_on_the_page_on_extending_exist() -> None:
    """Files (with one of each kind for ``<placeholder>``), attributes, functions and constants."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    quoted = [q for q in re.findall(r"`([^`]+)`", prose) if not q.startswith(("advisor ", "make "))]
    folders = ("advisor", "rules", "dashboard", "sample_workloads", "tests", "benchmarks")
    code = {
        file: file.read_text(encoding="utf-8")
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
    }
    defined = r"(?m)(?:\b(?:def|class|import)\b.* {0}\b|^ *(?:self\.)?{0}(?:: | = )|[(,] ?{0}:)"

    def is_defined(name: str, owner: str = "") -> bool:
        of = [t for file, t in code.items() if owner in ("", file.stem) or f"class {owner}" in t]
        return any(re.search(defined.format(name), text) for text in of)

    files = {q.split()[0] for q in quoted if re.search(r"\.(?:py|md|css)(?: |$)|^[\w/]+/$", q)}
    above = (ROOT, ROOT / "advisor", ROOT / "advisor" / "read" / "formats", ROOT / "dashboard")
    missing = []
    for name in files - {"my_rules/progress_bar.py"}:
        pattern = re.sub("<[^>]+>", "*", name).rstrip("/")
        places = (*above, *(ROOT / "tests").iterdir(), ROOT / "advisor" / "render" / "documents")
        if not any(next(place.glob(pattern), None) for place in places if place.is_dir()):
            missing.append(name)
    owned = {
        pair
        for q in quoted
        if q not in files
        for pair in re.findall(r"(?<![\w./])([A-Za-z]\w{2,})\.([A-Za-z]\w+)", q)
        if pair[0] not in {"self", "advisor", "NAME", "pyproject"}
    }
    missing += [f"{owner}.{name}" for owner, name in owned if not is_defined(name, owner)]
    names = {n for q in quoted for n in re.findall(r"^(\w+)$|(?<![\w.])(\w+)\(", q) for n in n if n}
    missing += [n for n in names if re.search(r"\w_\w|[A-Z]", n) and not is_defined(n)]
    assert len(files) > 60 and len(owned) > 4 and len(names) > 50
    assert missing == []


def test_files_that_the_code_names_by_their_path_exist() -> None:
    """The files named in comments and docstrings count too: a rename takes its mentions with it."""
    places = r"advisor|rules|dashboard|sample_workloads|tests|benchmarks|docs|tools"
    path = re.compile(rf"(?<![\w/.-])(?:{places})/[\w/]+\.(?:py|md|js|css)\b")
    missing, seen = [], 0
    for folder in ("advisor", "rules", "dashboard", "sample_workloads"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in {".py", ".js", ".css"}:
                named = path.findall(file.read_text(encoding="utf-8"))
                lost = [
                    n for n in named if not any((ROOT / at / n).exists() for at in ("", "advisor"))
                ]
                missing += [(str(file.relative_to(ROOT)), name) for name in lost]
                seen += len(named)
    assert seen > 30
    assert missing == []


def test_every_page_is_linked_from_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    linked = {(docs / to).resolve() for to in re.findall(r"\]\(([^)#\s]+)", index)}
    pages = [page.resolve() for page in docs.glob("*.md") if page.name != "index.md"]
    assert [page.name for page in pages if page not in linked] == []


def test_every_script_of_ci_is_called_by_a_workflow() -> None:
    called = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    scripts = [f"run: .ci/{script.name}\n" for script in (ROOT / ".ci").iterdir()]
    assert scripts and [script for script in scripts if script not in called] == []


def test_readme_counts_unproven_rules() -> None:
    listed = (ROOT / "docs" / "rules" / "README.md").read_text(encoding="utf-8")
    every, public, samples = map(int, re.findall(r"\d+", listed.partition(" more on")[0]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{every - public - samples} of {every} rules are not yet confirmed" in readme


def test_readme_and_scoreboard_agree_on_new_programs() -> None:
    page = (ROOT / "docs" / "scoreboard.md").read_text(encoding="utf-8")
    first = re.search(r"On (\d+ programs that were new to the rules), (.+ \d+)\.\*\*", page)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert first and f"On [{first[1]}](docs/scoreboard.md), {first[2]}." in readme


def test_all_pages_install_advisor_in_the_way_that_works() -> None:
    """There is one way, kept in ``core/errors.py``: no page and no message has another."""
    from advisor.core.errors import install_command

    package = re.escape(".")  # pages are read beside the source
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for folder in ("advisor", "rules", "dashboard", "sample_workloads"):
        files += (ROOT / folder).rglob("*.py")
    lines = [
        (str(file.relative_to(ROOT)), line.strip())
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(
            r"pip install\b.*(gpu-advisor|\[(record|dashboard|all|cluster)\]|install \.)", line
        )
    ]
    assert lines and install_command("record").startswith("pip install ")
    good = re.compile(rf'pip install (?:"{package}\[\w+\]"|{package}(?:\s|$|`))')
    wrong = [(file, line) for file, line in lines if not good.search(line)]
    assert [entry for entry in wrong if entry[0] != "advisor/core/errors.py"] == []
