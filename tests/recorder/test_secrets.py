"""Secrets around a program, searched for in every file of its run directory."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.core.credentials import clean_command
from advisor.recorder.folder import new_run
from tests.export.test_redact import SECRETS

PROGRAM = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise RuntimeError("postgres://admin:" + "s3cr3tpw@db/x refused " + sys.argv[2])
"""
SEEDED = {
    "argument": SECRETS[0],
    "value of an option": "tr0ub4dor-and-three",
    "user of an address": "AKQWERTYUIOP0987",
    "password of an address": "p4ssw0rd-of-alice",
    "signature": "deadbeefdeadbeef",
    "variable": SECRETS[-1],
    "password in a message": "s3cr3tpw",
    "remote": "ghp_" + "Z123456789abcdefABCDEF0123456789abcd",
    "organisation": "acme-moonshot",
}


def test_no_file_of_a_run_directory_has_a_secret(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)
    remote = f"https://bob:{SEEDED['remote']}@example.com/{SEEDED['organisation']}/project.git"
    for command in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    where = f"s3://{SEEDED['user of an address']}:{SEEDED['password of an address']}@bucket/x"
    arguments = ["--api-key", SEEDED["argument"], f"--db-password={SEEDED['value of an option']}"]
    arguments += [f"{where}?X-Amz-Signature={SEEDED['signature']}"]
    env = {**os.environ, "NCCL_WANDB_API_KEY": SEEDED["variable"], "TORCH_PASSWORD": "hunter2"}
    result = subprocess.run(
        [sys.executable, "-m", "advisor", "record", "--out", "runs/a", "train.py", *arguments],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    run = tmp_path / "runs" / "a"
    files = [file for file in run.rglob("*") if file.is_file()]
    assert len(files) > 4, result.stderr
    results = []
    for file in files:
        data = file.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        results += [(file.name, kind) for kind, text in SEEDED.items() if text.encode() in data]
    messages = result.stderr[
        result.stderr.rfind("advisor: ") :
    ]  # before it stands the program's traceback
    results += [("the lines at the end", kind) for kind, text in SEEDED.items() if text in messages]
    assert results == []
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_login_before_a_secret_parameter_is_removed_too() -> None:
    (clean,) = clean_command(["s3://user1:secret2@bucket/x?token=abc"])
    assert clean == "s3://***@bucket/x?token=***"


def test_new_run_directory_is_private_to_its_owner(tmp_path: Path) -> None:
    assert new_run(str(tmp_path / "a")).stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert new_run(str(shared)) == shared
    assert shared.stat().st_mode & 0o777 == 0o755
