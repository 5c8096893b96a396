"""The distribution without a checkout: the whole source, links that lead somewhere, commands
that work."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import advisor
from advisor.core import errors

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "a" * 40


def repository_files() -> set[str]:
    """Files of the repository, but hidden ones."""
    command = ["git", "ls-files", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout")
    names = set(result.stdout.split("\0")) - {""}
    return {name for name in names if not any(p.startswith(".") for p in Path(name).parts)}


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    names = repository_files()
    (tmp_path / "source.tar").write_bytes(archive.stdout)
    with tarfile.open(tmp_path / "source.tar") as tar:
        tar.extractall(source, filter="tar")
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path]
    subprocess.run([*command, source], check=True, capture_output=True, timeout=300)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as tar:
        inside = {member.name.partition("/")[2] for member in tar.getmembers()}
    committed = {name for name in names if (source / name).is_file()}
    assert sorted(committed - inside) == []
    assert any(name.startswith("tests/corpus/") for name in inside)


def test_the_citation_and_the_changelog_have_the_packages_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (.+)$", citation, re.MULTILINE)
    date = re.search(r"^date-released: (.+)$", citation, re.MULTILINE)
    assert version is not None and version[1] == advisor.__version__
    assert date is not None
    assert f"## [{version[1]}] - {date[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_project_metadata_has_valid_urls_and_python_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project  # until the project is published somewhere
    minors = {int(line.rpartition(".")[2]) for line in project["classifiers"]
              if re.search(r"Python :: 3\.\d", line)}  # fmt: skip
    assert min(minors) == int(project["requires-python"].rpartition(".")[2])


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 'pip install "gpu-advisor[record]"'),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f'pip install "gpu-advisor[record] @ git+https://host/a.git@{COMMIT}"',
        ),
        (
            {"url": "file:///w/gpu_advisor-1-py3-none-any.whl", "archive_info": {}},
            'pip install "gpu-advisor[record] @ file:///w/gpu_advisor-1-py3-none-any.whl"',
        ),
        (
            {"url": ROOT.as_uri(), "dir_info": {"editable": True}},
            f'pip install "{ROOT}[record]"',
        ),
        (
            {"url": "file:///gone", "dir_info": {}},
            'pip install "gpu-advisor[record] @ file:///gone"',
        ),
    ],
)
def test_an_extra_is_installed_from_where_advisor_came(
    origin: dict[str, object] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    distribution = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    assert errors.install_command("record") == expected


def test_a_package_without_metadata_is_described_by_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_not_found(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", raise_not_found)
    assert errors.install_command("mcp") == f'pip install "{ROOT}[mcp]"'
