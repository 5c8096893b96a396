"""The wheel is whole, claims no name but ``advisor``, and works in an empty environment.

It is built from the sdist, so both are checked, and out of a copy, so the checkout stays clean.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("advisor", "rules", "dashboard", "sample_workloads")
SUFFIXES = (
    ".py",
    ".pyi",
    ".json",
    ".jsonl",
    ".typed",
    ".css",
    ".js",
    ".svg",
    ".html",
    ".json.gz",
    "SKILL.md",
    "LICENSE",
)

# Importing these takes an extra (torch, dash, mcp); all others must import in a base installation.
NEEDS_EXTRA = ("advisor.recorder", "advisor.dashboard", "advisor.mcp")

pytestmark = pytest.mark.slow


class Wheel(NamedTuple):
    name: str
    """Name of the file."""
    content: set[str]
    """Names of the files in the wheel."""
    source: set[str]
    """Files of the copy it was built from, as they should be named in it."""
    bin: Path
    """Folder of the commands of an environment that holds the wheel and its dependencies only."""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed; no Python of ours leaks into its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    result = subprocess.run(
        [str(part) for part in command],
        check=False,
        cwd=cwd,
        env=environment,
        text=True,
        encoding="utf-8",
        capture_output=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importable(files: set[str]) -> set[str]:
    """Names of the modules that must import in a base installation."""
    modules = {module_name(file) for file in files if file.endswith(".py")}
    return {
        name
        for name in modules
        if not name.endswith(".__main__")
        and not f"{name}.".startswith(tuple(f"{p}." for p in NEEDS_EXTRA))
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Build and install once for all workers: the first to hold the lock does it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "wheel"
    with (root / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            build_and_install(folder)
            (folder / "done").touch()
    (path,) = (folder / "built").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        content = set(archive.namelist())
    source = {
        (Path(parent) / file).relative_to(folder / "source").as_posix()
        for parent, _, files in os.walk(folder / "source" / "advisor", followlinks=True)
        for file in files
        if file.endswith(SUFFIXES)
    }
    return Wheel(path.name, content, source, folder / "venv" / "bin")


def build_and_install(folder: Path) -> None:
    """Make ``source`` (a copy of what is packaged), ``built`` and ``venv`` in the folder."""
    source = folder / "source"
    leftovers = shutil.ignore_patterns("__pycache__", ".*", "*.so", "*.pyd")
    for name in PACKAGED:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leftovers)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = folder / "built"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source, cwd=folder)
    (path,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python", "install")
    options = ("--quiet", "--no-compile", "--disable-pip-version-check")
    run(*pip, *options, "-c", ROOT / "constraints.txt", path, cwd=folder)


def test_the_wheel_claims_no_top_level_name_but_advisor(wheel: Wheel) -> None:
    tops = {name.split("/")[0] for name in wheel.content}
    (metadata,) = tops - {"advisor"}
    assert "advisor" in tops
    assert metadata.startswith("gpu_advisor-")
    assert metadata.endswith(".dist-info")


def test_the_wheel_holds_every_file_of_the_tree_and_no_other(wheel: Wheel) -> None:
    assert any(name.startswith("advisor/sample_workloads/") for name in wheel.source)
    packaged = {name for name in wheel.content if name.startswith("advisor/")}
    assert sorted(wheel.source - packaged) == []
    assert sorted(packaged - wheel.source) == []
    assert not [n for n in wheel.content if {"simulation", "benchmarks"} & set(n.split("/"))]


def test_one_wheel_serves_every_platform(wheel: Wheel) -> None:
    """Nothing in it is compiled: no compiler is needed, and none of it can crash a training."""
    assert wheel.name.endswith("-py3-none-any.whl")


def test_every_module_imports_without_the_extras(wheel: Wheel) -> None:
    code = (
        "import importlib, json, sys, traceback\n"
        "broken = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception:\n"
        "        broken[name] = traceback.format_exc(limit=-1)\n"
        "print(json.dumps(broken))"
    )
    names = json.dumps(sorted(importable(wheel.source)))
    broken = json.loads(run(wheel.bin / "python", "-I", "-c", code, names, cwd=wheel.bin))
    # programs for training need PyTorch, and may say so at their top; nothing else may
    programs = {name for name in broken if name.startswith("advisor.sample_workloads.")}
    assert {broken.pop(name).splitlines()[-1] for name in programs} == {
        "ModuleNotFoundError: No module named 'torch'"
    }
    assert broken == {}


def test_walking_the_package_finds_every_module(wheel: Wheel) -> None:
    """The rules are found like this; a folder without ``__init__.py`` would be missed."""
    code = (
        "import json, pkgutil, advisor\n"
        "walk = pkgutil.walk_packages(advisor.__path__, 'advisor.', onerror=lambda name: None)\n"
        "print(json.dumps([module.name for module in walk]))"
    )
    items = set(json.loads(run(wheel.bin / "python", "-I", "-c", code, cwd=wheel.bin)))
    assert sorted(importable(wheel.source) - {"advisor"} - items) == []


def test_the_command_shows_its_help(wheel: Wheel) -> None:
    assert "analyze" in run(wheel.bin / "advisor", "--help", cwd=wheel.bin)


def test_the_command_analyzes_a_trace(wheel: Wheel, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": three_steps()}))
    report = json.loads(
        run(wheel.bin / "advisor", "analyze", trace, "--format", "json", cwd=tmp_path)
    )
    assert report
    assert run(wheel.bin / "advisor", "analyze", trace, cwd=tmp_path).strip()


def three_steps() -> list[dict[str, object]]:
    """Three steps of 1 ms, each an op that launches one kernel of 0.5 ms."""
    events: list[dict[str, object]] = []

    def add_event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur}
        events.append({**event, "args": args})

    for step in range(3):
        start = 1000.0 * (step + 1)  # µs
        link = {"External id": step + 1, "correlation": step + 1}
        shape = {"grid": [64, 1, 1], "block": [256, 1, 1]}
        add_event("user_annotation", f"ProfilerStep#{step}", start, 1000)
        add_event("cpu_op", "aten::mm", start + 100, 50, **{"External id": step + 1})
        add_event("cuda_runtime", "cudaLaunchKernel", start + 120, 10, **link)
        add_event("kernel", "sgemm", start + 150, 500, tid=7, device=0, stream=7, **link, **shape)
    return events
