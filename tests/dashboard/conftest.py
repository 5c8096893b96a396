"""Fixtures of dashboards that are served, and of browser tabs on them."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("dash", reason="the dashboard's packages are not installed")

from advisor.dashboard.app import PAGES, create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access, bind
from advisor.dashboard.timeline import encoding

TIMEOUT_MS = 30_000
WAIT_FOR_TWO_FRAMES = """() => new Promise(done =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""
"""JavaScript that resolves after two drawn frames: by then earlier changes are on the screen."""
PATHS = {page.module: page.path for page in PAGES}
MODULES = tuple(PATHS)


@dataclass
class ServedDashboard:
    """Dashboard that is being served."""

    session: DashboardSession
    address: str
    token: str | None


@contextmanager
def serve(session: DashboardSession) -> Iterator[ServedDashboard]:
    """Serve a session on a free port, as ``advisor dashboard`` does."""
    access = Access.for_host()
    with _serve_application(create_app(session, access).server, access) as address:
        try:
            yield ServedDashboard(session, address, access.token)
        finally:
            session.close()


@contextmanager
def _serve_application(application: Callable[..., Any], access: Access) -> Iterator[str]:
    server = bind(application, access, 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.base_address.rstrip("/")
    finally:
        server.close()


@dataclass
class SharedAddress:
    """Address that serves one of several dashboards at a time.

    A browser keeps the compiled scripts of an address. Compiling them takes seconds, which are
    spent once instead of for each recording.
    """

    access: Access = field(default_factory=Access.for_host)
    address: str = ""
    current_application: Callable[..., Any] | None = None
    """Application that answers at the moment."""
    dashboards: dict[tuple[str, ...], tuple[ServedDashboard, Callable[..., Any]]] = field(
        default_factory=dict
    )

    def handle(self, environ: Any, start: Any) -> Any:
        """Answer a WSGI request by the current application."""
        assert self.current_application is not None
        return self.current_application(environ, start)

    def dashboard_of(self, *paths: object) -> ServedDashboard:
        """Return a dashboard of these paths, which are read and analysed once."""
        key = tuple(map(str, paths))
        if key not in self.dashboards:
            session = DashboardSession(key).load()
            application = create_app(session, self.access).server
            self.dashboards[key] = (
                ServedDashboard(session, self.address, self.access.token),
                application,
            )
        return self.dashboards[key][0]

    def switch_to(self, dashboard: ServedDashboard) -> bool:
        """Make this dashboard the current one. Return False if it has its own address."""
        for own_dashboard, application in self.dashboards.values():
            if own_dashboard is dashboard:
                self.current_application = application
                return True
        return False


@pytest.fixture(scope="session")
def shared_address() -> Iterator[SharedAddress]:
    """Serve the dashboards of all tests of this process at one address."""
    shared = SharedAddress()
    with _serve_application(shared.handle, shared.access) as shared.address:
        yield shared
    for dashboard, _ in shared.dashboards.values():
        dashboard.session.close()


@pytest.fixture(scope="session")
def dashboard_of(shared_address: SharedAddress) -> Callable[..., ServedDashboard]:
    """Return ``dashboard_of(path, …)``, which serves a dashboard of these paths."""
    return shared_address.dashboard_of


@pytest.fixture
def serve_session() -> Callable[[DashboardSession], Any]:
    """Return ``serve_session(session)``, a context manager for sessions that change."""
    return serve


@dataclass
class Tab:
    """Browser tab that notes errors and unexpected requests in ``problems``."""

    page: Any
    address: str
    token: str | None
    problems: list[str] = field(default_factory=list)
    pending: set[Any] = field(default_factory=set)
    """Requests without an answer yet."""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._check_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("request", self._request_started)
        self.page.on("requestfinished", self._request_ended)
        self.page.on("requestfailed", self._request_ended)
        self.page.on("response", self._check_response)

    def sign_in(self) -> None:
        """Get access by the token. The page is an image, because an empty page would get another
        process without the compiled scripts."""
        self.page.goto(f"{self.address}/assets/favicon.svg?token={self.token}")

    def open(self, path: str) -> Any:
        """Open a page of the dashboard, and wait until it is shown."""
        self.page.goto(self.address + path)
        self.page.locator("main h1").first.wait_for(state="attached", timeout=TIMEOUT_MS)
        return self.page

    def visit_pages(self, *modules: str) -> Iterator[str]:
        """Open each page by the menu, as a user does, and yield its module when it is shown.

        This is much faster than loading the document for each page."""
        self.open("/")
        for module in modules or MODULES:
            link = self.page.locator(f"nav .to-{module} a")
            if link.count():
                link.first.click()
            else:  # a page without content is not in the menu
                self.page.goto(self.address + PATHS[module])
            self.page.locator(f".page-{module} main h1").first.wait_for(state="attached")
            self.wait_until_idle()
            yield module

    def wait_until_idle(self) -> None:
        """Wait until all requests are answered and their results are drawn."""
        idle_checks, deadline = 0, time.monotonic() + TIMEOUT_MS / 1e3
        while idle_checks < 3 and time.monotonic() < deadline:
            self.page.wait_for_timeout(20)
            if not self.pending:
                self.page.evaluate(WAIT_FOR_TWO_FRAMES)
            idle_checks = 0 if self.pending else idle_checks + 1

    def text(self, selector: str = "main") -> str:
        """Return the text of an element."""
        result: str = self.page.locator(selector).first.inner_text()
        return result

    def reset(self) -> None:
        """Reset view, theme, permissions and routes. Only the compiled scripts are kept."""
        context = self.page.context
        assert context.pages == [self.page]
        self.page.unroute_all()
        context.unroute_all()
        context.clear_permissions()
        context.clear_cookies()
        self.sign_in()
        self.page.evaluate("localStorage.clear(), sessionStorage.clear()")
        self.page.mouse.move(0, 0)
        self.pending.clear()
        self.problems.clear()

    def _check_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text[:300]}")

    def _request_started(self, request: Any) -> None:
        self.pending.add(request)
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"request to elsewhere: {request.url}")

    def _request_ended(self, request: Any) -> None:
        self.pending.discard(request)

    def _check_response(self, response: Any) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status} for {response.url}")


@pytest.fixture(scope="session")
def idle_tabs() -> list[Tab]:
    """Return the list of tabs that can be used again."""
    return []


@pytest.fixture
def open_tab(
    browser: Any, shared_address: SharedAddress, idle_tabs: list[Tab]
) -> Iterator[Callable[..., Tab]]:
    """Return ``open_tab(dashboard)``, which opens a tab on a dashboard.

    ``fresh``: in a new browser context, without cookies or loaded scripts."""
    shared_tabs, fresh_tabs = [], []

    def open_in_tab(
        dashboard: ServedDashboard, *, dark: bool = False, width: int = 1440, fresh: bool = False
    ) -> Tab:
        size, scheme = {"width": width, "height": 900}, "dark" if dark else "light"
        is_shared = shared_address.switch_to(dashboard) and not fresh
        if is_shared and idle_tabs:
            tab = idle_tabs.pop()
            tab.page.set_viewport_size(size)
            tab.page.emulate_media(media="null", color_scheme=scheme, reduced_motion="null")
        else:
            context = browser.new_context(viewport=size, color_scheme=scheme)
            tab = Tab(context.new_page(), dashboard.address, dashboard.token)
            tab.sign_in()
        (shared_tabs if is_shared else fresh_tabs).append(tab)
        return tab

    yield open_in_tab
    for tab in fresh_tabs:
        tab.page.context.close()
    for tab in shared_tabs:
        try:
            tab.reset()
        except (AssertionError, playwright_error()):
            tab.page.context.close()
        else:
            idle_tabs.append(tab)


def playwright_error() -> type[Exception]:
    """Return Playwright's exception. It is imported late, because Playwright may be missing."""
    from playwright.sync_api import Error

    return Error


@pytest.fixture(scope="session")
def truncated_trace(
    shared_trace: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """Return a function that writes the first 60% of a real trace, cut inside an event."""

    @cache
    def make() -> Path:
        content = gzip.decompress(Path(shared_trace("h100_bert_small_inference")).read_bytes())
        target = tmp_path_factory.mktemp("truncated") / "cut.json"
        target.write_bytes(content[: len(content) * 6 // 10])
        return target

    return make


@pytest.fixture(scope="session")
def two_ranks(
    shared_trace: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """Return a function that makes a folder with the traces of two ranks."""

    @cache
    def make() -> Path:
        folder = tmp_path_factory.mktemp("two_ranks")
        for number in (0, 1):
            source = Path(shared_trace(f"two_ranks_rank{number}"))
            (folder / source.name).symlink_to(source)
        return folder

    return make


@pytest.fixture(scope="session")
def cpu_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that records four steps of a small model by torch's profiler."""

    @cache
    def make() -> Path:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        target = tmp_path_factory.mktemp("cpu") / "cpu.json"
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=4),
            on_trace_ready=lambda done: done.export_chrome_trace(str(target)),
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        ) as profiler:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(32, 64)).square().mean().backward()
                optimizer.step()
                profiler.step()
        return target

    return make


PROGRAM = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        time.sleep(float(sys.argv[2]))
        return torch.full((64,), float(i % 7)), i % 8

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters())
samples = int(sys.argv[1])
train = DataLoader(Numbers(samples), batch_size=8, shuffle=True)
valid = DataLoader(Numbers(samples // 4), batch_size=32)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        sum(model(x).sum().item() for x, _ in valid)
"""
"""Training of two epochs with validation. Arguments: samples per epoch, and seconds per sample."""


@pytest.fixture(scope="session")
def recording_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, subprocess.Popen[bytes]]]:
    """Return ``recording_process(samples, seconds)``, which starts ``advisor record``."""
    pytest.importorskip("torch", reason="torch is not installed")

    def start(samples: int, seconds: float) -> tuple[Path, subprocess.Popen[bytes]]:
        folder = tmp_path_factory.mktemp("recorded")
        (folder / "train.py").write_text(PROGRAM)
        command = [
            sys.executable,
            "-m",
            "advisor",
            "record",
            "--out",
            "run",
            "--skip",
            "15",
            "--active",
            "4",
            "--no-report",
            "train.py",
            str(samples),
            str(seconds),
        ]
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return folder / "run", process

    return start


@pytest.fixture(scope="session")
def recorded_run(recording_process: Any) -> Callable[[], Path]:
    """Return a function that records 64 steps in two epochs by ``advisor record``."""

    @cache
    def make() -> Path:
        run, process = recording_process(256, 0.001)
        assert process.wait(120) == 0
        return Path(run)

    return make


class ViewReply(NamedTuple):
    """Decoded answer to a view: header fields by name, and columns in order."""

    header: dict[str, Any]
    slices: tuple[NDArray[Any], ...]
    runs: tuple[NDArray[Any], ...]
    flagged: tuple[NDArray[Any], ...]
    counters: tuple[NDArray[Any], ...]


REPLY_FIELDS = """
    magic slices runs flagged counters px k seen x0 x1 cell0 ms version zero
    """.split()


def decode_reply(data: bytes) -> ViewReply:
    """Decode the binary answer to a view. Raises ValueError for invalid data."""
    if len(data) < encoding.HEADER.size or data[:4] != encoding.MAGIC:
        raise ValueError("not an answer")
    header = dict(zip(REPLY_FIELDS, encoding.HEADER.unpack_from(data), strict=True))
    offset = encoding.HEADER.size

    def column(kind: str, count: int) -> NDArray[Any]:
        nonlocal offset
        size = np.dtype(kind).itemsize * count
        if offset + size > len(data):
            raise ValueError("the answer is cut off")
        values = np.frombuffer(data, dtype=kind, count=count, offset=offset)
        offset += size + -size % 8
        return values

    slices = tuple(column(kind, header["slices"]) for kind in encoding._SLICES)
    runs = tuple(column(kind, header["runs"]) for kind in encoding._RUNS)
    flagged = tuple(column(kind, header["flagged"]) for kind in encoding._FLAGGED)
    size = header["counters"] * header["px"]
    counters = tuple(column("<f4", size) for _ in range(2))
    if offset != len(data):
        raise ValueError("the answer is too long")
    return ViewReply(header, slices, runs, flagged, counters)


@pytest.fixture(scope="session")
def decode_view() -> Callable[[bytes], ViewReply]:
    """Return the decoder of the binary answer to a view."""
    return decode_reply
