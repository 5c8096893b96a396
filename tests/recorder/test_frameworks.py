"""``advisor record`` on programs as people write them, unchanged: steps are counted exactly."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.core.run_directory import RankRecord, read_recording

pytestmark = pytest.mark.timed

RECORD = ("-m", "advisor", "record", "--no-report", "-o", "run")
Program = Callable[..., Any]

DATA = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
"""

PLAIN = (
    DATA
    + """
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters())
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8):
            net(x)
print(sys.argv[1:], __name__, __file__)
"""
)

COMPILED = (
    DATA
    + """
net = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(),
                                        torch.nn.Linear(8, 1)), backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for x, y in DataLoader(data, batch_size=2):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""
)

DDP = (
    DATA
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=2, sampler=sampler, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""
)

ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator

for every in map(int, sys.argv[1:]):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=2))
    val = accelerator.prepare(DataLoader(data, batch_size=8))
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = torch.nn.functional.mse_loss(net(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for x, y in val:
                net(x)
"""
)

LIGHTNING = (
    DATA
    + """
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)
    def validation_step(self, batch, index):
        self.net(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

how, *numbers = sys.argv[1:]
for every in map(int, numbers):
    callbacks = []
    if how == "callback":
        from advisor.recorder.callbacks.lightning import AdvisorCallback
        callbacks = [AdvisorCallback(f"run{every}", report=False)]
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False,
        accumulate_grad_batches=every, enable_model_summary=False)
    trainer.fit(Model(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=8))
    print("global_step", trainer.global_step)
"""
)

TRANSFORMERS = (
    DATA
    + """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

mask = [1] * 6 + [0] * 2
rows = [{"input_ids": torch.randint(0, 50, (8,)), "attention_mask": torch.tensor(mask),
         "labels": torch.tensor(i % 2)} for i in range(40)]
how, *numbers = sys.argv[1:]
for every in map(int, numbers):
    model = BertForSequenceClassification(BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16))
    callbacks = []
    if how == "callback":
        from advisor.recorder.callbacks.transformers import AdvisorCallback
        callbacks = [AdvisorCallback(f"run{every}", report=False)]
    trainer = Trainer(model, TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, num_train_epochs=2, report_to=[],
        gradient_accumulation_steps=every, eval_strategy="epoch", save_strategy="no",
        use_cpu=True, disable_tqdm=True), train_dataset=rows, eval_dataset=rows[:8],
        callbacks=callbacks)
    trainer.train()
    print("global_step", trainer.state.global_step)
"""
)


def skip_without(name: str) -> Any:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def read_record(tmp_path: Path) -> RankRecord:
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert record.has_ended
    return record


def test_a_plain_loop(program: Program, tmp_path: Path) -> None:
    result = program(PLAIN, "--lr", "3", before=RECORD)
    assert result.returncode == 0, result.stderr
    script = tmp_path / "train.py"
    assert result.stdout == f"['--lr', '3'] __main__ {script}\n"
    record = read_record(tmp_path)
    assert len(record.steps) == 40
    assert all(
        step.phases.keys() >= {"data", "forward", "backward", "optimizer"} for step in record.steps
    )
    assert record.events_of("window")[-1]["file"] == "trace_w0.json.gz"
    assert record.events_of("end") == [{"steps": 40, "reason": "finished"}]


def test_the_line_at_the_end_names_the_run_and_a_finding(program: Program, tmp_path: Path) -> None:
    slow = PLAIN.replace(
        "data = TensorDataset",
        "import time\nclass Slow(TensorDataset):\n"
        "    def __getitem__(self, i):\n        time.sleep(0.004)\n"
        "        return super().__getitem__(i)\ndata = Slow",
    )
    result = program(slow, before=("-m", "advisor", "record", "-o", "run"))
    lines = [line for line in result.stderr.splitlines() if line.startswith(("advisor: ", " "))]
    assert lines[0] == "advisor: recorded in run"
    assert max(map(len, lines)) <= 80
    message = " ".join(" ".join(lines).split())
    assert "40 steps, " in message
    assert "DataLoader" in message.partition("First finding: ")[2]
    assert message.endswith("More: advisor analyze run")
    assert result.stdout.startswith("[] __main__")


def test_grad_scaler_and_compile(program: Program, tmp_path: Path) -> None:
    result = program(COMPILED, before=RECORD)
    assert result.returncode == 0, result.stderr
    assert len(read_record(tmp_path).steps) == 20


@pytest.mark.slow
def test_torchrun_with_two_processes(program: Program, tmp_path: Path) -> None:
    launcher = ("--", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    result = program(DDP, before=RECORD, after=launcher)
    assert result.returncode == 0, result.stderr
    recording = read_recording(tmp_path / "run")
    assert recording.problems == []
    assert recording.manifest.world_size == 2
    assert sorted(recording.ranks) == [0, 1]
    for number, record in recording.ranks.items():
        check_sums(record)
        assert len(record.steps) == 30
        assert record.rank.rank == number
        assert [p.name for p in Path(record.folder).glob("*.gz")] == ["trace_w0.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "train.py"]


@pytest.mark.slow
@skip_without("accelerate")
def test_accelerate_launch(program: Program, tmp_path: Path) -> None:
    """A launcher that imports its framework and starts the script in a process of its own."""
    launcher = ("--", "accelerate", "launch", "--cpu", "--num_processes", "1", "train.py")
    result = program(PLAIN, "--lr", "3", before=RECORD, after=launcher)
    assert result.returncode == 0, result.stderr
    assert "['--lr', '3'] __main__" in result.stdout
    assert len(read_record(tmp_path).steps) == 40


EVERY = {1: 40, 4: 10}
"""Micro-batches per step, and the optimizer steps that two epochs of twenty batches then have."""


def micros(every: int, steps: int) -> list[int]:
    """Micro-steps of each step of two epochs of twenty batches: the last of an epoch has what is
    left."""
    full, rest = divmod(20, every)
    epoch = [every] * full + [rest] * (rest > 0)
    assert len(epoch) * 2 == steps
    return epoch * 2


def reported_steps(process: Any) -> list[int]:
    """Steps that the framework itself counted, one number per training."""
    return [int(n) for n in re.findall(r"^global_step (\d+)$", process.stdout, re.MULTILINE)]


def check_command(program: Program, tmp_path: Path, source: str, every: dict[int, int]) -> None:
    """Several trainings one after another, recorded by the command as one run."""
    result = program(source, "command", *map(str, every), before=RECORD)
    assert result.returncode == 0, result.stderr
    assert reported_steps(result) == list(every.values())
    record = read_record(tmp_path)
    assert [s.micro for s in record.steps] == [m for e, n in every.items() for m in micros(e, n)]
    assert read_recording(tmp_path / "run").manifest.entry == "command"


def check_callback(program: Program, tmp_path: Path, source: str, every: dict[int, int]) -> None:
    """The same, each recorded by the framework's callback as a run of its own."""
    result = program(source, "callback", *map(str, every))
    assert result.returncode == 0, result.stderr
    assert reported_steps(result) == list(every.values())
    for number, steps in every.items():
        record = only_rank(tmp_path / f"run{number}")
        check_sums(record)
        assert record.has_ended
        assert len(record.steps) == steps
        assert read_recording(tmp_path / f"run{number}").manifest.entry == "callback"


@pytest.mark.slow
@skip_without("accelerate")
def test_accelerate(program: Program, tmp_path: Path) -> None:
    result = program(ACCELERATE, *map(str, EVERY), before=RECORD)
    assert result.returncode == 0, result.stderr
    record = read_record(tmp_path)
    assert [s.micro for s in record.steps] == [m for e, n in EVERY.items() for m in micros(e, n)]


@pytest.mark.slow
@skip_without("lightning")
@pytest.mark.parametrize("check", [check_command, check_callback])
def test_lightning(program: Program, tmp_path: Path, check: Callable[..., None]) -> None:
    check(program, tmp_path, LIGHTNING, EVERY)


@pytest.mark.slow
@skip_without("transformers")
@pytest.mark.parametrize("check", [check_command, check_callback])
def test_transformers(program: Program, tmp_path: Path, check: Callable[..., None]) -> None:
    check(program, tmp_path, TRANSFORMERS, {**EVERY, 3: 14})
    for run in tmp_path.glob("run*"):
        assert {step.padding for step in only_rank(run).steps} - {None} == {0.25}
