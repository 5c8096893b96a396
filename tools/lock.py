"""Writer of ``requirements.lock``: the versions of ``constraints.txt`` with the hashes of their
files; and of ``requirements-base.lock``, its part that the demo needs.

    make lock        (needs uv: pip install uv)

Every file of a version is listed, for all systems and all Pythons that advisor runs on, so that
``pip install --require-hashes`` takes the same ones from PyPI, a mirror or a cache, and no others.
torch and its NVIDIA packages are left out: its builds for CPU, CUDA and ROCm have one version and
different files, and the machine decides which one is right. What has no wheel somewhere (scalene on
ARM Linux, nvtx on macOS) is built there from a source that is checked, with tools that pip fetches
unchecked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"
EXTRAS = ("dev", "integrations")
MIN_PYTHON = "3.11"
APART = ("triton", "nvidia", "cuda", "intel", "pytorch-triton")
"""First words of the packages that come with a build of torch."""
HEAD = """# Made by `make lock`: the versions of constraints.txt, with the hashes of their files.
# `make` installs these with --require-hashes. torch, whose builds differ by machine, is not here.
"""


BASE_LOCK = ROOT / "requirements-base.lock"
BASE_HEAD = """# Made by `make lock`: advisor without extras and what builds it, with hashes.
# `make demo` installs these with --require-hashes.
"""


def main() -> int:
    """Write both locks."""
    uv = shutil.which("uv")
    if uv is None:
        print("uv is not installed: pip install uv", file=sys.stderr)
        return 2
    base = resolved(uv, ["setuptools"], [])
    # what torch needs besides its builds, which a resolution without it would not see
    full = resolved(uv, needed_by_torch(), [f"--extra={extra}" for extra in EXTRAS])
    if base is None or full is None:
        return 1
    BASE_LOCK.write_text(BASE_HEAD + base)
    LOCK.write_text(HEAD + full)
    missing = pins(CONSTRAINTS.read_text()) - pins(full)
    print(
        f"{LOCK.name}: {len(pins(full))} packages; of constraints.txt not there: "
        f"{', '.join(sorted(name for name, _ in missing)) or 'none'}"
    )
    return 0


def resolved(uv: str, needed: list[str], extras: list[str]) -> str | None:
    """The lock of pyproject.toml's requirements and ``needed``; ``None``: there is none."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, overrides = Path(folder, "needed.in"), Path(folder, "overrides.txt")
        inputs.write_text("\n".join(needed))
        overrides.write_text("torch; sys_platform == 'none'\n")
        command = [
            uv,
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--generate-hashes",
            "--no-annotate",
            "--no-header",
            "--no-emit-package",
            "torch",
            "--python-version",
            MIN_PYTHON,
            "--constraints",
            str(CONSTRAINTS),
            "--overrides",
            str(overrides),
            *extras,
            str(ROOT / "pyproject.toml"),
            str(inputs),
            *sys.argv[1:],
        ]
        result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        print(result.stderr, file=sys.stderr)
        return None
    return result.stdout


def needed_by_torch() -> list[str]:
    """Requirements of the installed torch that are no part of its build."""
    result = [text for text in requires("torch") or [] if "extra ==" not in text]
    return [text for text in result if not name(text).startswith(APART)]


def pins(text: str) -> set[tuple[str, str]]:
    """Name and version of each ``name==version`` line."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {(name(one), version) for one, version in lines}


def name(requirement: str) -> str:
    """A requirement's project name, as PEP 503 has it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match is not None else ""


if __name__ == "__main__":
    sys.exit(main())
