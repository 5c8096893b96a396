"""Hooks of MkDocs: links between the repository's files fit the site, and the rules' pages are in
its navigation."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {f"{name.upper()}.md": f"{name}.md" for name in ("glossary", "contributing", "changelog")}
"""Pages at the top of the repository -> their place in the site (symbolic links in docs/)."""


GENERATED = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)
"""Comment above a page's heading, which would hide the heading from MkDocs."""
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
CATEGORY = re.compile(r"^## (.+)$|^- \[[^\]]+\]\(([^)]+\.md)\)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Put the pages of the rules, by category, where the navigation names their list."""
    categories: list[dict[str, list[str]]] = []
    for title, rule in CATEGORY.findall((ROOT / "docs/rules/README.md").read_text()):
        if title:
            categories.append({title: []})
        elif categories:
            next(iter(categories[-1].values())).append(f"rules/{rule}")
    for section in config.nav or []:
        for pages in section.values():
            for place, page in enumerate(pages):
                if page == {"Rules": "rules/README.md"}:
                    pages[place] = {"Rules": ["rules/README.md", *categories]}
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Relative links to pages lead to them from here, by title in place of a file's name; those to
    other files of the repository lead to its address, or are text alone where that is not known."""
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
            if text.endswith(".md"):  # in a file its name; on a site its title
                text = HEADING.findall((ROOT / inside).read_text(encoding="utf-8"))[0]
            return f"[{text}]({to}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url}/blob/main/{inside}{anchor})"
        return text

    return LINK.sub(replaced, GENERATED.sub("", markdown))
