"""Pictures of the documentation: every page, light and dark, at three widths.

    python docs/screenshots.py OUT PATH [PATH …] [--only overview,findings] [--all]

Without ``--all``: the pictures that the documentation shows. Needs Playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from advisor.dashboard.app import PAGES, create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access, DashboardServer, bind

SHOWN = (
    ("overview", 1440, "light"),
    ("findings", 1440, "light"),
    ("timeline", 1440, "dark"),
    ("kernels", 1440, "dark"),
    ("overview", 390, "dark"),
)
SIZES = {1440: "", 1024: "-medium", 390: "-narrow"}
"""Widths, and what the pictures of each are called by."""
SETTLE_MS = 1500


def main() -> None:
    """Serve the paths and photograph the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (page.module, width, theme)
        for page in PAGES
        for width in SIZES
        for theme in ("light", "dark")
        if args.all or (page.module, width, theme) in SHOWN
    ]
    only = {name for name in args.only.split(",") if name}
    session = DashboardSession(args.paths).load()
    access = Access.for_host()
    server = bind(create_app(session, access).server, access, 0)
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for module, width, theme in wanted:
            if not only or module in only:
                shoot(browser, server, module, width, theme, args.out, full=args.all)
        browser.close()
    server.close()


def shoot(
    browser: Any,
    server: DashboardServer,
    module: str,
    width: int,
    theme: str,
    out: Path,
    *,
    full: bool,
) -> None:
    """Shoot a page: from its top, or all of it."""
    context = browser.new_context(
        viewport={"width": width, "height": 900 if width > 500 else 844}, color_scheme=theme
    )
    page = context.new_page()
    path = next(page.path for page in PAGES if page.module == module)
    page.goto(server.address)  # with the token, for which the browser is given a cookie
    page.goto(f"{server.base_address.rstrip('/')}{path}")
    page.locator("main h1").first.wait_for(state="attached")
    if full:  # grids draw themselves once they are in view
        for grid in page.locator(".grid").all():
            grid.scroll_into_view_if_needed()
            grid.locator(".ag-row").first.wait_for()
        page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=out / f"{module}{SIZES[width]}-{theme}.png", full_page=full)
    context.close()


if __name__ == "__main__":
    main()
