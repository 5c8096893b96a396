"""Harm of a knob is seen (losses, memory, errors), and the program's files are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.tune.knob import KnobSetting, TrialResult, find_knob
from advisor.tune.measured_gain import check_losses
from advisor.tune.trials import build_trial_error, explain_refusal

from .conftest import TRAPS

pytest.importorskip("torch")

pytestmark = pytest.mark.timed
Run = Callable[..., TrialResult]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the program runs, with files of earlier runs."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.pt").write_text("of last week")
    (folder / "log.txt").write_text("of last week\n")
    return folder


@pytest.fixture(scope="module")
def result_without_knobs(run_once: Run, program_folder: Path) -> TrialResult:
    return run_once(TRAPS, here=program_folder)


def test_unchanged_program_is_timed_without_changing_files(
    result_without_knobs: TrialResult, program_folder: Path
) -> None:
    assert result_without_knobs.problem == "" and result_without_knobs.ended
    assert len(result_without_knobs.steps_ns) == 45 and len(result_without_knobs.losses) >= 49
    assert result_without_knobs.moved >= 3
    assert (program_folder / "checkpoints" / "best.pt").read_text() == "of last week"
    assert (program_folder / "log.txt").read_text() == "of last week\n"
    assert names(program_folder) == ["checkpoints", "log.txt", "program.py"]
    assert names(program_folder / "checkpoints") == ["best.pt"]


@pytest.mark.parametrize(
    ("name", "safety", "why"),
    [
        ("set-to-none", "exact", "on, and must not"),
        ("channels-last", "reordered", "apart in the first losses"),
        ("autocast", "precision", "gradient norms ×"),
    ],
)
def test_a_knob_that_changes_the_losses_is_refused(
    name: str,
    safety: str,
    why: str,
    run_once: Run,
    program_folder: Path,
    result_without_knobs: TrialResult,
) -> None:
    one = find_knob(name)
    assert one.safety == safety
    result = run_once(TRAPS, KnobSetting(name), here=program_folder, steps=8)
    assert result.problem == "" and result.idle == []
    losses = check_losses(one.safety, one.changes_random_numbers, [result_without_knobs], [result])
    assert not losses.passed
    assert why in losses.text


def test_knob_exceeding_memory_is_reported_out_of_memory(
    run_once: Run, program_folder: Path
) -> None:
    result = run_once(TRAPS, KnobSetting("gc-freeze"), here=program_folder)
    assert result.kind == "memory" and not result.ended


def test_exact_knob_without_effect_is_reported(
    run_once: Run, program_folder: Path, result_without_knobs: TrialResult
) -> None:
    result = run_once(TRAPS, KnobSetting("loader-persistent"), here=program_folder, steps=8)
    assert result.idle == ["loader-persistent"]
    assert check_losses("exact", False, [result_without_knobs], [result]).text == "equal"


NATIVE = """
import ctypes, os, sys
import torch
target = os.path.abspath("native.bin")
libc = ctypes.CDLL(None, use_errno=True)
number = libc.open(target.encode(), os.O_WRONLY | os.O_CREAT, 0o600)
print("native", number)
try:
    os.remove("precious.txt")
except PermissionError:
    print("kept")
raise RuntimeError("end")
"""


@pytest.mark.skipif(
    "not __import__('advisor.tune.trial_process', fromlist=['x']).landlock_version()"
)
def test_writes_of_native_code_and_deletions_are_refused(run_once: Run, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = run_once(NATIVE, here=tmp_path)
    assert names(tmp_path) == ["precious.txt", "program.py"]
    assert any(line.startswith("remove: ") for line in result.refused)
    assert result.kind == "error"


WRITERS = """
import json, os, sqlite3
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
os.makedirs("out", exist_ok=True)
log = sqlite3.connect("out/log.sqlite")
log.execute("create table if not exists steps (n integer)")
before = log.execute("select count(*) from steps").fetchone()[0]
assert before == int(open("before.txt").read()), before
for step in range(100):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    log.execute("insert into steps values (?)", (step,))
    log.commit()
    if step % 5 == 0:
        from safetensors.torch import load_file, save_file
        save_file(net.state_dict(), "out/model.safetensors")
        assert torch.equal(load_file("out/model.safetensors")["weight"], net.weight)
        from tokenizers import Tokenizer, models
        Tokenizer(models.WordLevel({"a": 0}, "a")).save("out/tokenizer.json")
        assert json.load(open("out/tokenizer.json"))
        torch.jit.save(torch.jit.trace(net, torch.ones(1, 4)), "out/traced.pt")
"""


def test_native_writers_get_a_folder_of_their_own(run_once: Run, tmp_path: Path) -> None:
    """safetensors, sqlite, tokenizers, TorchScript: what a Trainer saves."""
    import sqlite3

    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    (tmp_path / "out").mkdir()
    with sqlite3.connect(tmp_path / "out" / "log.sqlite") as log:
        log.execute("create table steps (n integer)")
        log.execute("insert into steps values (7)")
    (tmp_path / "before.txt").write_text("1")
    result = run_once(WRITERS, here=tmp_path, steps=20)
    assert result.problem == "" and result.ended, result
    assert names(tmp_path / "out") == ["log.sqlite"]
    with sqlite3.connect(tmp_path / "out" / "log.sqlite") as log:
        assert log.execute("select * from steps").fetchall() == [(7,)]


DENIED = """
import torch
from torch.utils.data import DataLoader
import sys, ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.open(os.path.abspath("native.bin").encode(), os.O_WRONLY | os.O_CREAT, 0o600) < 0:
    print("epoch 1 of 3")
    raise RuntimeError("native writer: Permission denied (os error 13)")
"""


@pytest.mark.skipif(
    "not __import__('advisor.tune.trial_process', fromlist=['x']).landlock_version()"
)
def test_writer_refusal_names_the_option_to_allow_it(run_once: Run, tmp_path: Path) -> None:
    result = run_once(DENIED, here=tmp_path)
    error = build_trial_error(explain_refusal(result), result)
    assert "--allow-write DIR" in str(error)
    assert "epoch 1 of 3" in "".join(error.__notes__)


def test_a_folder_that_the_user_allows_is_written_to(tmp_path: Path) -> None:
    import sys

    from advisor.tune.trial_process import TrialProgram

    (tmp_path / "program.py").write_text(
        "import torch, os\nos.makedirs('open', exist_ok=True)\n"
        f"open({str(tmp_path / 'open' / 'a.txt')!r}, 'w').write('kept')\n"
        f"open({str(tmp_path / 'b.txt')!r}, 'w').write('not')\n"
    )
    (tmp_path / "open").mkdir()
    (tmp_path / "root").mkdir()
    words = [sys.executable, str(tmp_path / "program.py")]
    program = TrialProgram(words, tmp_path / "root", allowed=[str(tmp_path / "open")])
    program.run((), warmup=1, steps=1, seconds=60, timeout=120)
    assert (tmp_path / "open" / "a.txt").read_text() == "kept"
    assert not (tmp_path / "b.txt").exists()
