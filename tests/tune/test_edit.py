"""The change as a diff, where there is one place that it can be in."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.tune.pipeline import write_diff

LOADER = frozenset({"torch.utils.data.DataLoader"})
HEAD = "from torch.utils.data import DataLoader\n"


def diff_of(tmp_path: Path, text: str) -> str:
    file = tmp_path / "train.py"
    file.write_text(text)
    return write_diff(file, LOADER, {"num_workers": 4})


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("DataLoader(data)", "DataLoader(data, num_workers=4)"),
        ("DataLoader(data, batch_size=8,)", "DataLoader(data, batch_size=8, num_workers=4,)"),
        ("DataLoader(data, num_workers=0)", "DataLoader(data, num_workers=4)"),
    ],
)
def test_the_only_loader_is_changed(call: str, after: str, tmp_path: Path) -> None:
    diff = diff_of(tmp_path, f"{HEAD}loader = {call}\n")
    assert f"-loader = {call}\n+loader = {after}\n" in diff


@pytest.mark.parametrize(
    "text",
    [
        "a = DataLoader(x)\nb = DataLoader(y)\n",
        "a = DataLoader(x, **options)\n",
        "a = DataLoader(*x)\n",
        "a = other(x)\n",
        "a = DataLoader(\n",
        "a = DataLoader(x, batch_size=(1 + 2))\n",
    ],
)
def test_an_uncertain_place_is_no_place(text: str, tmp_path: Path) -> None:
    assert diff_of(tmp_path, HEAD + text) == ""
