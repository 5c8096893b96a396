"""Static hints: what is found, what is left alone, and code to take over."""

from __future__ import annotations

import ast
import json
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import advisor.lint
from advisor import cli
from advisor.advise.rule_loading import load_rules
from advisor.core.errors import AdvisorError
from advisor.lint import lint_paths, lint_text

HEAD = "import torch\nfrom torch import cuda, nn\nfrom torch.utils.data import DataLoader\n"


def loop(body: str, *, over: str = "for x, y in loader:", before: str = "") -> str:
    text = dedent(body).strip()
    return f"{HEAD}{dedent(before)}\n{over}\n{indent(text, '    ')}\n"


def ids(text: str) -> list[str]:
    return [hint.id for hint in lint_text(text)]


def code(text: str, identifier: str) -> str:
    """The code that one hint suggests."""
    (hint,) = [hint for hint in lint_text(text, "train.py") if hint.id == identifier]
    assert hint.code is not None
    return hint.code


BACKWARD = "loss = net(x).sum()\nloss.backward()\n"

FILLED = """
class Titles:
    def __getitem__(self, row):
        ids = torch.zeros(32, dtype=torch.long)
        for k, t in enumerate(self.titles[row].split()[:32]):
            ids[k] = VOCAB[t]
        return ids
"""

FIRES = {
    "element-writes": HEAD + FILLED,
    "dataloader-arguments": HEAD + "loader = DataLoader(data, batch_size=8)\n",
    "sync-in-loop": loop(BACKWARD + "total = loss.item()"),
    "loss-keeps-graph": loop(BACKWARD + "total += loss"),
    "empty-cache-in-loop": loop(BACKWARD + "torch.cuda.empty_cache()"),
    "synchronize-in-loop": loop(BACKWARD + "torch.cuda.synchronize()"),
    "collect-in-loop": "import gc\n" + loop(BACKWARD + "gc.collect()"),
    "data-parallel": HEAD + "model = nn.DataParallel(model)\n",
    "blocking-copy": loop(
        "x = x.to(device)\n" + BACKWARD,
        before="loader = DataLoader(d, num_workers=2, persistent_workers=True, pin_memory=True)",
    ),
    "eval-with-grad": HEAD + "def evaluate(loader):\n    for x in loader:\n        model(x)\n",
    "accumulation-without-no-sync": loop(
        BACKWARD + "if i % 4 == 0:\n    optimizer.step()",
        before="from torch.nn.parallel import DistributedDataParallel\n"
        "net = DistributedDataParallel(net)",
    ),
    "anomaly-mode": HEAD + "torch.autograd.set_detect_anomaly(True)\n",
    "backward-retain-graph": loop("loss = f(x)\nloss.backward(retain_graph=True)"),
    "zero-grad-set-to-none": loop(BACKWARD + "optimizer.zero_grad(set_to_none=False)"),
    "compile-in-loop": loop("m = torch.compile(m)\n" + BACKWARD),
    "launch-blocking": "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'\nx = 1\n",
    "sampler-epoch": HEAD + "from torch.utils.data import DistributedSampler\n"
    "sampler = DistributedSampler(data)\n"
    "for epoch in range(3):\n    for x in loader:\n        net(x).backward()\n",
}

SILENT = {
    "a loader of a loop's own data": HEAD
    + "for fold in folds:\n    loader = DataLoader(fold, num_workers=4, pin_memory=True,\n"
    "        persistent_workers=True)\n",
    "a loader with everything": HEAD
    + "DataLoader(d, num_workers=4, pin_memory=True, persistent_workers=True)\n",
    "options that are not seen": HEAD + "DataLoader(d, **options)\n",
    "another library's DataLoader": "from mine import DataLoader\nDataLoader(d)\n",
    "every fifty steps": loop(BACKWARD + "if step % 50 == 0:\n    print(loss.item())"),
    "after the loop": loop(BACKWARD) + "print(loss.item())\n",
    "a loop that does not train": f"{HEAD}for x in loader:\n    total += x.item()\n",
    "a function defined in the loop": loop(BACKWARD + "def later():\n    return loss.item()\n"),
    "a sum of losses for one backward": loop("loss = f(x)\nloss += g(x)\nloss.backward()"),
    "a detached sum": loop(BACKWARD + "total += loss.detach()"),
    "a number": loop(BACKWARD + "steps += 1"),
    "print of words": loop(BACKWARD + "print('step')"),
    "numbers that are none of the device": loop(BACKWARD + "lr = float(rate)"),
    "under no_grad": HEAD + "def evaluate(loader):\n    with torch.no_grad():\n"
    "        for x in loader:\n            model(x)\n",
    "decorated": HEAD
    + "@torch.inference_mode()\ndef evaluate(loader):\n    for x in loader:\n        model(x)\n",
    "training is no evaluation": HEAD
    + "def train(val_loader):\n    for x in val_loader:\n        model(x).sum().backward()\n",
    "no_sync is there": loop(
        "with net.no_sync():\n    net(x).backward()\nif i % 4 == 0:\n    optimizer.step()",
        before="net = torch.nn.parallel.DistributedDataParallel(net)",
    ),
    "anomaly detection off": HEAD + "torch.autograd.set_detect_anomaly(False)\n",
    "a comment that says so": loop(BACKWARD + "total = loss.item()  # advisor: ignore"),
    "a dtype": loop(
        "x = x.to(torch.bfloat16)\n" + BACKWARD,
        before="loader = DataLoader(d, num_workers=2, persistent_workers=True, pin_memory=True)",
    ),
    "nothing": "",
}


VARY = [
    "def collate(rows):\n    longest = max(len(r) for r in rows)\n"
    "    return torch.stack([nn.functional.pad(r, (0, longest - len(r))) for r in rows])",
    "def pad(rows):\n    n = max(r.shape[0] for r in rows)\n    return torch.zeros(len(rows), n)",
    "lengths = [len(r) for r in rows]\nx = torch.full((len(rows), max(lengths)), 0)",
    "n = int(lengths.max())\nx = x[:, :n]",
    "x = x[:, : mask.sum(1).max()]",
    "import random\nfor _ in range(9):\n    n = random.randint(8, 64)\n    m(torch.randn(4, n, 8))",
    "n = 8 * torch.randint(1, 9, (1,)).item()\nm(torch.randn(4, n))",
    "from transformers import DataCollatorWithPadding\nc = DataCollatorWithPadding(tok)",
    "nn.utils.rnn.pad_sequence(rows, batch_first=True)",
    "x = torch.nested.nested_tensor(rows)",
]
FIXED = [
    "loader = make_loader(d, collate_fn=torch.stack)",
    "# was: pad_sequence(x)\nx = tok(x, padding='max_length', max_length=128)",
    "from transformers import DataCollatorWithPadding\n"
    "c = DataCollatorWithPadding(tok, padding='max_length', max_length=128)",
    "from transformers import DataCollatorForSeq2Seq\n"
    "c = DataCollatorForSeq2Seq(tok, pad_to_multiple_of=64)",
    "LENGTH = 128\nx = torch.zeros(8, LENGTH)\nx = x[:, :LENGTH]",
    "best = max(best, score)\nx = torch.randn(8, 16)",
    "buckets = DDP(net, bucket_cap_mb=25, static_graph=True)",
    "x = torch.randint(0, 100, (8, 128))",
]

OTHER_KINDS = [
    ("torch.set_num_threads(512)", "too-many-threads"),
    ("import os\nos.environ['OMP_NUM_THREADS'] = '512'", "too-many-threads"),
    ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '512')", "too-many-threads"),
    ("import os\nos.environ.setdefault('CUDA_LAUNCH_BLOCKING', '1')", "launch-blocking"),
    (
        "model.eval()\nfor x in batches_of_rows(rows):\n    out = model(x)",
        "eval-with-grad",
    ),
    (
        "model.eval()\ndef evaluate(model, xs):\n    for x, y in zip(xs, ys):\n        model(x)",
        "eval-with-grad",
    ),
    ("clf.eval()\nfor x, y in held_out:\n    n += (clf(x) == y).sum()", "eval-with-grad"),
    ("net.train()\nval_loss = loss(net(x_val), y_val)", "eval-with-grad"),
    ("model = torch.compile(model, dynamic=False)\npad_sequence(x)", "compile-static-shapes"),
    ("model.compile(dynamic=False)\ntok(x, padding='longest')", "compile-static-shapes"),
    *((f"m = torch.compile(m, dynamic=False)\n{lines}", "compile-static-shapes") for lines in VARY),
    (
        "from transformers import TrainingArguments\nargs = TrainingArguments('out')",
        "trainer-workers",
    ),
    (
        "import tensorflow as tf\nd = tf.data.Dataset.from_tensor_slices(x).batch(8)\nmodel.fit(d)",
        "tf-data-prefetch",
    ),
    (
        "import tensorflow as tf\nd = tf.data.Dataset.list_files('*')\n"
        "d = d.map(decode).batch(8).prefetch(2)",
        "tf-data-map",
    ),
    (
        "from sklearn.ensemble import RandomForestClassifier\nRandomForestClassifier(100)",
        "estimator-on-gpu",
    ),
    ("from sklearn import cluster\ncluster.KMeans(8).fit(x)", "estimator-on-gpu"),
]


@pytest.mark.parametrize("identifier", FIRES)
def test_a_hint_is_given(identifier: str) -> None:
    assert identifier in ids(FIRES[identifier])


@pytest.mark.parametrize("name", SILENT)
def test_no_hint_is_given(name: str) -> None:
    assert ids(SILENT[name]) == []


def names(folder: Path) -> set[str]:
    """Every string constant of the files in a folder that is written as identifiers are."""
    return {
        node.value
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z]+(?:-[a-z]+)+", node.value)
    }


def test_every_hint_names_a_rule_that_exists() -> None:
    """Hints are given without a rule being loaded, so that they name what confirms them; one that
    names a rule which was renamed, anywhere in their source, is found here."""
    texts = [*FIRES.values(), *(HEAD + lines for lines, _ in OTHER_KINDS)]
    hints = [hint for text in texts for hint in lint_text(text)]
    named_rules = {hint.confirmed_by for hint in hints} - {""}
    known = {rule.id for rule in load_rules(config={})}
    written = names(Path(advisor.lint.__file__).parent)
    assert written <= known | {hint.id for hint in hints} | {"site-packages"}
    assert named_rules <= known and len(named_rules) > 8


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("sync-in-loop", "loss.detach()"),
        ("loss-keeps-graph", "loss.detach()"),
        ("data-parallel", "DistributedDataParallel(model, device_ids=[local_rank])"),
        ("blocking-copy", "x.to(device, non_blocking=True)"),
        ("eval-with-grad", "@torch.inference_mode()\ndef evaluate(...):"),
        ("backward-retain-graph", "backward()"),
        ("zero-grad-set-to-none", "zero_grad()"),
        ("sampler-epoch", "sampler.set_epoch(epoch)"),
        ("accumulation-without-no-sync", "nullcontext() if i % 4 == 0 else net.no_sync():"),
    ],
)
def test_hint_shows_code_to_write(identifier: str, expected: str) -> None:
    assert expected in code(FIRES[identifier], identifier)


def test_a_tensor_filled_element_by_element_is_made_of_a_list() -> None:
    """The code to take over makes the same tensor, for a shorter list too."""
    torch = pytest.importorskip("torch")
    fix = code(HEAD + FILLED, "element-writes")
    assert fix.splitlines()[1] == "ids[:len(values)] = torch.tensor(values)"
    names = {"torch": torch, "VOCAB": {"a": 3, "b": 5}, "row": 0, "ids": torch.zeros(32).long()}
    exec(fix.replace("self.titles[row]", "'a b a'"), names)
    assert names["ids"].tolist() == [3, 5, 3] + [0] * 29
    numpy = FILLED.replace("torch.zeros(32, dtype=torch.long)", "np.zeros(32)")
    rows = FILLED.replace("ids[k] =", "ids[k, :] =")
    listed = FILLED.replace("torch.zeros(32, dtype=torch.long)", "[0] * 32")
    other = FILLED.replace("__getitem__", "vocabulary")
    for silent in (numpy, rows, listed, other):
        assert "element-writes" not in ids(HEAD + silent)


def test_a_program_of_the_cpu_reads_values_without_waiting() -> None:
    text = loop(BACKWARD + "total = loss.item()")
    assert "sync-in-loop" in ids(text)
    assert "sync-in-loop" not in ids(text.replace("cuda, ", ""))


def test_print_in_every_step_gets_periodic_logging_advice() -> None:
    assert code(loop(BACKWARD + "print(loss)"), "sync-in-loop").startswith("if step % 50 == 0:")


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (3, 2), (64, 2)])
def test_two_workers_are_the_number_to_begin_with(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    for given_ in ("", ", num_workers=0"):
        text = f"{HEAD}loader = DataLoader(data, batch_size=8{given_})\n"
        assert f"num_workers={workers}," in code(text, "dataloader-arguments") + ","


def test_lines_and_columns_are_where_the_code_is() -> None:
    text = "# ümläut 宽\x0c\n" + loop("loss = 'ü' and f(x)\nloss.backward()\ntotal += loss")
    (hint,) = lint_text(text)
    line = text.replace("\x0c", " ").splitlines()[hint.line - 1]
    assert line[hint.column :] == "loss"


@pytest.mark.parametrize("text", ["def f(:", "\0", "x = (" * 500, "'" * 7])
def test_a_script_that_is_not_python_is_one_line_error(text: str) -> None:
    with pytest.raises(AdvisorError) as caught:
        lint_text(text, "train.py")
    assert "train.py" in str(caught.value) and "\n" not in str(caught.value)


@given(st.text(alphabet="abloss .()[]:=+\n\t'\"\\,#x0", max_size=120))
def test_arbitrary_text_gives_hints_or_one_error(text: str) -> None:
    try:
        lint_text(FIRES["sync-in-loop"] + text)
    except AdvisorError:
        return


@pytest.mark.slow
def test_the_standard_library_is_read_without_an_error() -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::2]
    hints, problems = lint_paths([str(file) for file in files])
    assert problems == []
    assert [hint.id for hint in hints] == []


# -- the command line -----------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_lint(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(["lint", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_lint


def test_hints_are_shown_with_place_and_code(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FIRES["loss-keeps-graph"])
    code, out, err = run(file)
    assert code == 0 and err == ""
    assert "train.py:8" in out and "loss.detach()" in out and "memory-leak" in out
    assert "@@" not in out  # nothing to apply unseen


def test_json_has_every_field(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FIRES["loss-keeps-graph"])
    code, out, _ = run(file, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "advisor.hints/2" and document["problems"] == []
    (hint,) = document["hints"]
    assert hint["id"] == "loss-keeps-graph" and hint["line"] == 8 and hint["code"]


def test_hints_fail_the_command_with_fail_option(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FIRES["loss-keeps-graph"])
    assert run(file, "--fail")[0] == 1
    file.write_text("x = 1\n")
    code, out, _ = run(file, "--fail")
    assert code == 0 and "No hints" in out


def test_folders_are_searched_and_unparsable_files_reported(run: Any, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(FIRES["loss-keeps-graph"])
    (tmp_path / "bad.py").write_text("def f(:")
    hidden = tmp_path / ".venv"
    hidden.mkdir()
    (hidden / "train.py").write_text(FIRES["loss-keeps-graph"])
    code, out, _ = run(tmp_path)
    assert code == 0 and out.startswith("1 hint from the source:") and "bad.py" in out


def test_bad_input_is_one_line_error(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none.py", tmp_path / "bad.py", tmp_path / "empty"):
        code, _, err = run(path)
        assert code == 2 and err.count("\n") == 1


IN_MEMORY = """
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

class Images(Dataset):
    def __getitem__(self, i):
        return decode(self.files[i])

"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("loader = DataLoader(TensorDataset(x, y), batch_size=8)", 0),
        ("data = TensorDataset(x, y)\nloader = DataLoader(data, 8, shuffle=True)", 0),
        ("a, b = random_split(TensorDataset(x, y), [8, 2])\nloader = DataLoader(a, 8)", 0),
        ("self.data = TensorDataset(x, y)\nloader = DataLoader(self.data, num_workers=0)", 0),
        ("loader = DataLoader(dataset=Rows(x, y), batch_size=8)", 0),
        ("rows = [(x, y) for x, y in zip(xs, ys)]\nloader = DataLoader(rows, batch_size=8)", 0),
        ("loader = DataLoader(Images(files), batch_size=8)", 1),
        ("loader = DataLoader(make(files), batch_size=8)", 1),
        ("data = TensorDataset(x)\ndata = Images(files)\nloader = DataLoader(data)", 1),
    ],
)
def test_in_memory_dataset_needs_no_workers(lines: str, expected: int) -> None:
    assert ids(IN_MEMORY + lines + "\n").count("dataloader-arguments") == expected


def test_a_dataset_in_memory_may_still_be_pinned() -> None:
    text = IN_MEMORY + "loader = DataLoader(TensorDataset(x, y).to('cuda'))\n"
    text += "loader = DataLoader(TensorDataset(x, y))\n"
    hints = [hint for hint in lint_text(text) if hint.line == text.count("\n")]
    assert [hint.title for hint in hints] == ["DataLoader without pin_memory"]


@pytest.mark.parametrize(("lines", "identifier"), OTHER_KINDS)
def test_programs_of_other_kinds(lines: str, identifier: str) -> None:
    assert identifier in ids(HEAD + lines + "\n")


@pytest.mark.parametrize(
    "lines",
    [
        "torch.set_num_threads(1)",
        "torch.set_num_threads(int(os.environ['CORES']))",
        "model.eval()\nwith torch.no_grad():\n    for x in rows:\n        model(x)",
        "net.train()\nval_loss = loss(net(x_val), y_val)\nval_loss.backward()",
        "model.eval()\nmodel.train()\nfor x in rows:\n    out = model(x)",
        *(f"m = torch.compile(m, dynamic=False)\n{fixed}" for fixed in FIXED),
        "TrainingArguments('out', dataloader_num_workers=4)",
        "TrainingArguments(**options)",
        "import tensorflow as tf\nd = tf.data.Dataset.from_tensor_slices(x).map(f, "
        "num_parallel_calls=4).prefetch(1)",
        "from sklearn.model_selection import train_test_split\ntrain_test_split(x)",
        "from sklearn.naive_bayes import GaussianNB\nGaussianNB()",
    ],
)
def test_correct_programs_have_no_hint(lines: str) -> None:
    assert ids(HEAD + lines + "\n") == []


def test_a_loader_built_in_a_loop_is_built_once_before_it() -> None:
    """Persistent workers live as long as their loader: one of each epoch starts them again."""
    lines = (
        "for epoch in range(3):\n    for x in DataLoader(D(), batch_size=64{}):\n        net(x)\n"
    )
    for more in ("", ", num_workers=2, persistent_workers=True, pin_memory=True"):
        text = HEAD + lines.format(more)
        hint = next(h for h in lint_text(text) if h.id == "dataloader-arguments")
        assert "Build the loader once, before the loop" in hint.fix
        assert hint.code is not None and hint.code.startswith(
            "loader = DataLoader(D(), batch_size=64"
        )
        assert hint.code.endswith("# before the loop") and "GPU" not in hint.why
