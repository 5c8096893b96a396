"""``advisor skill``: a file that agents find, with commands that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cli import COMMANDS
from advisor.cli.agents import SKILL

Run = Callable[..., tuple[int, str, str]]


def test_skill_is_installed_for_agents_without_overwriting(
    advisor: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".agents" / "skills").mkdir(parents=True)
    for _ in range(2):
        assert advisor("skill", "install")[0] == 0
    target = tmp_path / ".agents" / "skills" / "advisor" / "SKILL.md"
    assert target.read_text() == SKILL.read_text()
    target.write_text("mine")
    code, _, err = advisor("skill", "install")
    assert (code, err.count("\n"), target.read_text()) == (2, 1, "mine")


def test_the_commands_of_the_skill_exist_and_its_head_is_valid() -> None:
    text = SKILL.read_text()
    assert re.match(r"---\nname: advisor\ndescription: .{40,}\n---\n", text)
    used = set(re.findall(r"`advisor (\w+)", text))
    assert len(used) >= 6 and used <= set(COMMANDS)
