"""``advisor dashboard``: says where it is, and in one line why it cannot be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_path_that_is_not_there_is_one_line(advisor: Callable[..., Any]) -> None:
    done = advisor("dashboard", "nowhere.json", "--no-browser")
    assert done.code == 2
    assert done.err == "advisor: nowhere.json: no such file or directory\n"


def test_help_names_the_options(advisor: Callable[..., Any]) -> None:
    out = advisor("dashboard", "--help").out
    for option in ("--host", "--port", "--live", "--no-browser", "--rank"):
        assert option in out


def test_it_serves_on_this_machine_only_and_ends_with_ctrl_c(busy_trace: Path) -> None:
    pytest.importorskip("dash")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "advisor", "dashboard", str(busy_trace), "--no-browser",
             "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.removeprefix("advisor dashboard: ").strip()
            assert address.startswith("http://127.0.0.1:")
            assert not address.endswith(f":{port}/")
            with urllib.request.urlopen(f"{address}_advisor/status", timeout=60) as answer:
                assert b'"entries"' in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == 0
    assert "next free one" in err
