"""A hook of MkDocs: links between the repository's files fit the site."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {f"{name.upper()}.md": f"{name}.md" for name in ("glossary", "contributing", "changelog")}
"""Pages at the top of the repository -> their place in the site (symbolic links in docs/)."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Relative links to pages lead to them from here; those to other files of the repository lead
    to its address, or are text alone where that is not known."""
    source = PurePosixPath(page.file.src_uri)
    top = source.name in PAGES.values() and len(source.parts) == 1
    folder = ROOT if top else ROOT / "docs" / source.parent

    def replaced(link: re.Match[str]) -> str:
        text, to, anchor = link[1], link[2], link[3] or ""
        if "://" in to or to.startswith("mailto:"):
            return link[0]
        inside = os.path.relpath(os.path.normpath(folder / to), ROOT)
        if inside in PAGES:
            inside = f"docs/{PAGES[inside]}"
        if inside.startswith("docs/") and not inside.endswith(".py"):
            to = os.path.relpath(inside.removeprefix("docs/"), source.parent)
            return f"[{text}]({to}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url}/blob/main/{inside}{anchor})"
        return text

    return LINK.sub(replaced, markdown)
