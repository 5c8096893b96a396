"""The docs build as a site, strictly: every link and anchor leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = (
    '<pre><code><span class="gp">$ </span>advisor demo\n'
    '<span class="go">GPU busy</span></code></pre>'
)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    warnings = [
        line for line in result.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))
    ]
    assert (result.returncode, warnings) == (0, [])
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Your first report in two minutes" in first
    assert '<link rel="next" href="own-script/">' in first and "md-footer__link--next" in first
    page = (tmp_path / "getting-a-trace" / "index.html").read_text(encoding="utf-8")
    assert ">Nsight Systems<" in page and ".md</a>" not in page
    assert (tmp_path / "rules" / "single-process-loader" / "index.html").exists()
    assert (tmp_path / "glossary" / "index.html").exists()


def test_the_copy_button_of_a_console_block_copies_its_commands(browser: Any) -> None:
    """The site's script marks the block while it reads its text (``data-md-copying``)."""
    page = browser.new_page()
    page.set_content(f"<style>{(ROOT / 'docs' / 'site.css').read_text()}</style>{CONSOLE}")
    code = page.locator("code")
    assert code.inner_text() == "$ advisor demo\nGPU busy"
    code.evaluate("block => block.setAttribute('data-md-copying', '')")
    assert code.inner_text().rstrip() == "advisor demo"
    page.close()
