"""Torch is noticed however a program comes by it, once, and the program sees no difference."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from advisor.recorder.folder import with_injected
from advisor.recorder.injection import NOTES

TORCH = """
import os, pathlib
if os.environ.pop("FAILS", None):
    import json
    raise ImportError("half-way")
class Tensor: pass
"""
"""A stand-in: how it is found and run is what counts here."""

FINDER = """
import sys, importlib.machinery, importlib.util, importlib.abc
class Wrapping(importlib.abc.Loader):
    def __init__(self, inner): self.inner = inner
    def create_module(self, spec): return self.inner.create_module(spec)
    def exec_module(self, module): self.inner.exec_module(module)
class Finder:
    busy = False
    def __init__(self, ask): self.ask = ask
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.busy: return None
        self.busy = True
        spec = self.ask(name)
        self.busy = False
        spec.loader = Wrapping(spec.loader)
        return spec
"""

EDITABLE = """
import sys, importlib.util
file = sys.path[0] + '/torch/__init__.py'
class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == 'torch': return importlib.util.spec_from_file_location(name, file)
"""

WAYS = {
    "a plain import": "import torch",
    "from it": "from torch import Tensor",
    "looked for before, often": (
        "import importlib.util\n"
        "for _ in range(3): assert importlib.util.find_spec('torch').loader.get_source('torch')\n"
        "import torch"
    ),
    "looked for by pkgutil": (
        "import pkgutil\nassert 'torch' in {m.name for m in pkgutil.iter_modules()}\n"
        "pkgutil.resolve_name('torch')"
    ),
    "looked for by PathFinder": (
        "from importlib.machinery import PathFinder\nPathFinder.find_spec('torch')\nimport torch"
    ),
    "by name": "import importlib; importlib.import_module('torch')",
    "loaded lazily": (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('torch')\n"
        "spec.loader = importlib.util.LazyLoader(spec.loader)\n"
        "sys.modules['torch'] = torch = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(torch)\nimport json\nprint(seen())\ntorch.Tensor"
    ),
    "failed half-way, then again": (
        "import os\nos.environ['FAILS'] = '1'\n"
        "try: import torch\nexcept ImportError: print(seen())\nimport torch"
    ),
    "in a thread": (
        "import threading\nt = threading.Thread(target=__import__, args=('torch',))\n"
        "t.start(); t.join()"
    ),
    "through a finder put in front that asks PathFinder": (
        FINDER + "sys.meta_path.insert(0, Finder(importlib.machinery.PathFinder.find_spec))\n"
        "import torch"
    ),
    "through a finder put in front that asks all": (
        FINDER + "sys.meta_path.insert(0, Finder(importlib.util.find_spec))\nimport torch"
    ),
    "past a finder put behind": FINDER + "sys.meta_path.append(Finder(None))\nimport torch",
    "with meta_path replaced": (
        "import sys, importlib.machinery as m\n"
        "sys.meta_path = [m.BuiltinImporter, m.FrozenImporter, m.PathFinder]\nimport torch"
    ),
    "with meta_path saved and put back": (
        "import sys\nsaved = sys.meta_path[:]\nsys.meta_path.clear()\n"
        "sys.meta_path[:] = saved\nimport torch"
    ),
    "by a finder of its own, as of an editable install": (
        EDITABLE + "sys.path[:] = [p for p in sys.path[1:] if 'site-packages' not in p]\n"
        "sys.meta_path.append(Editable)\nimport torch"
    ),
    "by a finder of its own, put in front": (
        EDITABLE + "sys.meta_path.insert(0, Editable)\nimport torch\nimport wave"
    ),
    "from a zip file": (
        "import sys\nsys.path[0] += '/torch.zip'\nimport torch\nassert '.zip' in torch.__file__"
    ),
    "and imported anew": "import importlib, torch\nfor _ in range(2): importlib.reload(torch)",
    "run by hand": (
        "import sys, importlib.util as u\n"
        "spec = u.spec_from_file_location('torch', sys.path[0] + '/torch/__init__.py')\n"
        "sys.modules['torch'] = torch = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(torch)\nimport wave"
    ),
}
NEVER = {
    "a stand-in": "import sys\nsys.modules['torch'] = object()\nimport json",
    "an empty module": "import sys\nsys.modules['torch'] = type(sys)('torch')\nimport json",
    "only looked for": "import importlib.util\nimportlib.util.find_spec('torch')\nimport json",
    "never there": "import sys\nsys.path.clear()\ntry: import torch\nexcept ImportError: pass",
}
SEEN = f"""
def seen():
    import os
    try: lines = open(f"{{os.environ['{NOTES}']}}/{{os.getpid()}}").read().splitlines()
    except (KeyError, OSError): return 0
    return lines.count("torch")
"""


@pytest.fixture(scope="module")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    with zipfile.ZipFile(folder / "torch.zip", "w") as packed:
        packed.writestr("torch.py", TORCH)
    return folder


def started(
    home: Path, source: str, *, recorded: bool, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script in a process that is recorded as ``advisor record`` would have it, or is not."""
    script = home / "train.py"
    script.write_text(SEEN + source)
    environment = env or {}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ADVISOR", "PYTHON"))}
    notes = home / "notes"
    notes.mkdir(exist_ok=True)
    if recorded:
        env |= {"PYTHONPATH": with_injected(""), "ADVISOR_RUN_DIR": str(home / "run")}
        env[NOTES] = str(notes)
    return subprocess.run(
        [sys.executable, str(script)],
        env={**env, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("way", WAYS)
def test_torch_is_noticed_once(program_folder: Path, way: str) -> None:
    # the stand-in cannot be recorded, which is reported: the test is that it was noticed
    result = started(program_folder, WAYS[way] + "\nprint(seen())", recorded=True)
    assert result.returncode == 0, result.stderr
    *before, after = result.stdout.split()
    assert after == "1"
    assert set(before) <= {"0"}


def test_recorder_is_silent_in_programs_without_torch(program_folder: Path) -> None:
    for way, source in NEVER.items():
        result = started(program_folder, source + "\nprint(seen())", recorded=True)
        assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", ""), way


CHAINING = """
import os, sys
print("chained")
here = os.path.dirname(__file__)
place = sys.path.index(here)
del sys.path[place]
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = ours
sys.path.insert(place, here)
"""
"""A start-up file of another tool: it runs the one that it hides."""


@pytest.mark.parametrize("first", [True, False])
def test_start_up_files_of_other_tools_run_once_each(program_folder: Path, first: bool) -> None:
    for name, text in (("tool", CHAINING), ("user", "print('mine')")):
        (program_folder / name).mkdir(exist_ok=True)
        (program_folder / name / "sitecustomize.py").write_text(text)
    search_path = with_injected("")
    order = (
        [program_folder / "tool", search_path] if first else [search_path, program_folder / "tool"]
    )
    path = os.pathsep.join(map(str, [*order, program_folder / "user"]))
    result = started(
        program_folder, "import torch\nprint(seen())", recorded=True, env={"PYTHONPATH": path}
    )
    assert result.stdout.splitlines() == ["chained", "mine", "1"]
    assert "sitecustomize" not in result.stderr


LOOK = """
import sys, importlib.util, traceback
from importlib.machinery import PathFinder
print(sys.path, sorted(sys.modules) if len(sys.argv) > 9 else "")
try:
    import broken
except ImportError:
    traceback.print_exc(file=sys.stdout)
import os
os.environ["FAILS"] = "1"
try:
    import torch
except ImportError:
    traceback.print_exc(file=sys.stdout)
spec = importlib.util.find_spec("torch")
print(type(spec.loader), spec.origin, spec.submodule_search_locations)
print("logging" in sys.modules, "dataclasses" in sys.modules, "advisor" in sys.modules)
import logging; logging.disable()
import torch
print(type(torch.__spec__.loader), vars(torch.__spec__.loader), torch.__loader__)
print(sys.meta_path, PathFinder.__dict__["find_spec"].__func__.__code__.co_filename)
"""


def test_a_program_sees_the_same_imports(program_folder: Path) -> None:
    """Paths, finders, loaders, loaded modules, and the tracebacks of imports that fail."""
    seen = []
    for recorded in (False, True):
        result = started(program_folder, LOOK, recorded=recorded)
        assert result.returncode == 0, result.stderr
        seen.append([line.partition(" at 0x")[0] for line in result.stdout.splitlines()])
    assert seen[0] == seen[1]
    assert sum("half-way" in line for line in seen[0]) == 2  # the line of code, and the error


def test_user_module_named_advisor_is_kept(program_folder: Path) -> None:
    (program_folder / "advisor.py").write_text("print('mine')")
    try:
        result = started(
            program_folder, "import torch\nimport advisor\nprint(advisor.__file__)", recorded=True
        )
    finally:
        (program_folder / "advisor.py").unlink()
    assert result.stdout == f"mine\n{program_folder / 'advisor.py'}\n"
    assert result.stderr == ""
