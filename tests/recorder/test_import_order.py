"""``advisor record`` on unchanged programs of each framework, whatever they import first: steps
recorded are steps run, losses are the same bit for bit, and so is the exit code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

pytest.importorskip("torch")
RECORD = ("-m", "advisor", "record", "--no-report", "-o", "run")
Program = Callable[..., Any]

HELPER = """
import importlib.metadata
if importlib.util.find_spec("torch") is not None:
    importlib.metadata.version("torch")
for name in ("tensorflow", "jax", "flax"):
    importlib.util.find_spec(name)
import logging, multiprocessing, concurrent.futures
"""
"""A library of data sets that asks for frameworks, and imports none."""

PROGRAM = f"""
import importlib.util, sys
first, *kinds = sys.argv[1:]
if first == "helper":
{"".join(f"    {line}" + chr(10) for line in HELPER.strip().splitlines())}
else:
    exec(first)

import argparse
import copy
import hashlib
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(40, 4), torch.randn(40, 1))


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def tell(kind, steps, losses):
    text = " ".join(float(loss).hex() for loss in losses)
    print(kind, steps, len(losses), hashlib.sha256(text.encode()).hexdigest(), flush=True)


def transformers(own_loss):
    from transformers import (BertConfig, BertForSequenceClassification, Trainer,
                              TrainerCallback, TrainingArguments, set_seed)

    set_seed(0)
    rows = [{{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)}}
            for i in range(40)]
    losses = []

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
            losses.append(loss.item())
            return (loss, outputs) if return_outputs else loss

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    model = BertForSequenceClassification(BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16))
    trainer = (OwnLoss if own_loss else Trainer)(model, TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, num_train_epochs=1, report_to=[],
        gradient_accumulation_steps=2 if own_loss else 1, save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_steps=1), train_dataset=rows,
        callbacks=[] if own_loss else [Losses()])
    trainer.train()
    return trainer.state.global_step, losses


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=2), schedule)
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return len(losses), losses


def lightning(name):
    pl = importlib.import_module(name)
    losses = []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
        def training_step(self, batch, index):
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            losses.append(loss.item())
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(Model(), DataLoader(data(), batch_size=2))
    return trainer.global_step, losses


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


class Prefetched:
    # a batch ahead, as loaders that upload on a stream of their own have it
    def __init__(self, loader):
        self.loader = loader
    def __len__(self):
        return len(self.loader)
    def __iter__(self):
        before = None
        for batch in self.loader:
            batch = [part.to(torch.float32).sub_(0.1).div_(0.9) for part in batch]
            if before is not None:
                yield before
            before = batch
        yield before


def timm():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args([])
    model = net()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    losses, meter = [], AverageMeter()
    loader, held_out = (Prefetched(DataLoader(data(), batch_size=b)) for b in (2, 8))
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.lerp_(now, 0.01)
            meter.update(loss.item(), x.size(0))
            losses.append(loss.item())
        for each in (model, average):
            each.eval()
            with torch.no_grad():
                for x, y in held_out:
                    losses.append(torch.nn.functional.mse_loss(each(x), y).item())
    return args.epochs * len(loader), losses


KINDS = {{
    "trainer": lambda: transformers(False),
    "own_loss": lambda: transformers(True),
    "accelerate": accelerate,
    "lightning": lambda: lightning("lightning.pytorch"),
    "pytorch_lightning": lambda: lightning("pytorch_lightning"),
    "timm": timm,
}}
if __name__ == "__main__":
    for kind in kinds:
        tell(kind, *KINDS[kind]())
    raise SystemExit(5)
"""

NEEDS = {
    "trainer": "transformers",
    "own_loss": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch_lightning",
}
ORDERS = [
    # after torch, as in test_frameworks.py, they are tried with ADVISOR_THOROUGH
    ("import transformers", ("trainer", "own_loss", "accelerate", "lightning", "timm")),
]
FURTHER = [
    ("import torch", ("trainer", "accelerate", "lightning", "timm")),
    ("helper", ("own_loss", "timm")),
    ("from accelerate.utils import is_xpu_available", ("accelerate",)),
    ("import lightning", ("lightning",)),
    ("from transformers import Trainer, is_torch_available", ("trainer",)),
    ("import accelerate", ("accelerate", "timm")),
    ("from lightning.pytorch.callbacks import Callback", ("lightning",)),
    ("import pytorch_lightning", ("pytorch_lightning",)),
]


def is_installed(kinds: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(NEEDS.get(kind, "torch")) for kind in kinds)


@pytest.fixture(scope="module")
def expected_output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lines that each kind of program prints by itself, by kind."""
    folder = tmp_path_factory.mktemp("unrecorded")
    (folder / "train.py").write_text(PROGRAM)
    thorough = FURTHER if os.environ.get("ADVISOR_THOROUGH") else []
    kinds = sorted(
        {kind for _, order in (*ORDERS, *thorough) for kind in order if is_installed((kind,))}
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py", "pass", *kinds],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 5, result.stderr
    lines = parse_lines(result.stdout)
    assert list(lines) == kinds
    return lines


def parse_lines(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.split(" ")[0] in {*NEEDS, "timm"}]
    return {line.split(" ")[0]: line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "kinds"),
    [*ORDERS, *(pytest.param(*order, marks=pytest.mark.thorough) for order in FURTHER)],
)
def test_any_import_order_records_the_same(
    program: Program,
    tmp_path: Path,
    expected_output: dict[str, str],
    first: str,
    kinds: tuple[str, ...],
) -> None:
    if not is_installed(kinds):
        pytest.skip(f"not all of {', '.join(kinds)} are installed")
    result = program(PROGRAM, first, *kinds, before=RECORD)
    assert result.returncode == 5, result.stderr
    lines = parse_lines(result.stdout)
    assert lines == {kind: expected_output[kind] for kind in kinds}
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == sum(int(line.split(" ")[1]) for line in lines.values())
