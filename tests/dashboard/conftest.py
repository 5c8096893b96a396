"""A dashboard to ask and, where there is a browser, to look at."""

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

PATIENCE_MS = 30_000
FRAMES = """() => new Promise(done =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""
"""Done once two frames are drawn: however slow the machine, what came before has been shown."""
PATHS = {page.module: page.path for page in PAGES}
MODULES = tuple(PATHS)


@dataclass
class Shown:
    """A dashboard that is being served."""

    session: DashboardSession
    address: str
    token: str | None


@contextmanager
def serving(session: DashboardSession) -> Iterator[Shown]:
    """Serve a session on a free port, as ``advisor dashboard`` does."""
    access = Access.for_host()
    with _answering(create_app(session, access).server, access) as address:
        try:
            yield Shown(session, address, access.token)
        finally:
            session.close()


@contextmanager
def _answering(application: Callable[..., Any], access: Access) -> Iterator[str]:
    server = bind(application, access, 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.base_address.rstrip("/")
    finally:
        server.close()


@dataclass
class Stage:
    """Dashboards that take turns at one address.

    A browser keeps the scripts of an address, compiled: some seconds that are spent once then,
    and not for each recording.
    """

    access: Access = field(default_factory=Access.for_host)
    address: str = ""
    now: Callable[..., Any] | None = None
    """The application that answers."""
    made: dict[tuple[str, ...], tuple[Shown, Callable[..., Any]]] = field(default_factory=dict)

    def answer(self, environ: Any, start: Any) -> Any:
        """WSGI: what the application whose turn it is answers."""
        assert self.now is not None
        return self.now(environ, start)

    def show(self, *paths: object) -> Shown:
        """A dashboard of these paths; read and analysed once."""
        key = tuple(map(str, paths))
        if key not in self.made:
            session = DashboardSession(key).load()
            application = create_app(session, self.access).server
            self.made[key] = Shown(session, self.address, self.access.token), application
        return self.made[key][0]

    def turn(self, shown: Shown) -> bool:
        """From now on this one answers; false: it has an address of its own."""
        for made, application in self.made.values():
            if made is shown:
                self.now = application
                return True
        return False


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Where the dashboards of all tests of this process are shown."""
    made = Stage()
    with _answering(made.answer, made.access) as made.address:
        yield made
    for shown, _ in made.made.values():
        shown.session.close()


@pytest.fixture(scope="session")
def show(stage: Stage) -> Callable[..., Shown]:
    """``show(path, …)``: a dashboard of these paths."""
    return stage.show


@pytest.fixture
def served() -> Callable[[DashboardSession], Any]:
    """``with served(session) as shown``: a session that is not loaded yet, or is followed."""
    return serving


@dataclass
class Tab:
    """A browser tab that notes what should not happen."""

    page: Any
    address: str
    token: str | None
    wrong: list[str] = field(default_factory=list)
    pending: set[Any] = field(default_factory=set)
    """Requests that are not answered yet."""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        self.page.on("request", self._request)
        self.page.on("requestfinished", self._answered)
        self.page.on("requestfailed", self._answered)
        self.page.on("response", self._response)

    def enter(self) -> None:
        """Come with the token. To an image: an empty page would get another process, and lose the
        scripts that are compiled."""
        self.page.goto(f"{self.address}/assets/favicon.svg?token={self.token}")

    def open(self, path: str) -> Any:
        """Go to a page of the dashboard and wait until it is there."""
        self.page.goto(self.address + path)
        self.page.locator("main h1").first.wait_for(state="attached", timeout=PATIENCE_MS)
        return self.page

    def walk(self, *modules: str) -> Iterator[str]:
        """Go to each page by the navigation, as a person does; yields its module once it is
        there. Much quicker than loading everything again for each."""
        self.open("/")
        for module in modules or MODULES:
            link = self.page.locator(f"nav .to-{module} a")
            if link.count():
                link.first.click()
            else:  # nothing to show, so only its address leads there
                self.page.goto(self.address + PATHS[module])
            self.page.locator(f".page-{module} main h1").first.wait_for(state="attached")
            self.settle()
            yield module

    def settle(self) -> None:
        """Wait until all that was asked of the server is answered and shown."""
        quiet, deadline = 0, time.monotonic() + PATIENCE_MS / 1e3
        while quiet < 3 and time.monotonic() < deadline:
            self.page.wait_for_timeout(20)
            if not self.pending:
                self.page.evaluate(FRAMES)
            quiet = 0 if self.pending else quiet + 1

    def text(self, selector: str = "main") -> str:
        """What is written there."""
        found: str = self.page.locator(selector).first.inner_text()
        return found

    def leave(self) -> None:
        """As new, but for the scripts that the browser has compiled: kept are no view, theme,
        permission or route of the one who used it."""
        context = self.page.context
        assert context.pages == [self.page]
        self.page.unroute_all()
        context.unroute_all()
        context.clear_permissions()
        context.clear_cookies()
        self.enter()
        self.page.evaluate("localStorage.clear(), sessionStorage.clear()")
        self.page.mouse.move(0, 0)
        self.pending.clear()
        self.wrong.clear()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console {message.type}: {message.text[:300]}")

    def _request(self, request: Any) -> None:
        self.pending.add(request)
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.wrong.append(f"request to elsewhere: {request.url}")

    def _answered(self, request: Any) -> None:
        self.pending.discard(request)

    def _response(self, answer: Any) -> None:
        if answer.status >= 400:
            self.wrong.append(f"{answer.status} for {answer.url}")


@pytest.fixture(scope="session")
def used_tabs() -> list[Tab]:
    """Tabs that may be used again."""
    return []


@pytest.fixture
def tab(browser: Any, stage: Stage, used_tabs: list[Tab]) -> Iterator[Callable[..., Tab]]:
    """``tab(shown)``: a tab on a dashboard. ``fresh``: of a browser that was never here, with
    nothing kept and no script loaded."""
    out, fresh_ones = [], []

    def get(shown: Shown, *, dark: bool = False, width: int = 1440, fresh: bool = False) -> Tab:
        size, scheme = {"width": width, "height": 900}, "dark" if dark else "light"
        again = stage.turn(shown) and not fresh
        if again and used_tabs:
            made = used_tabs.pop()
            made.page.set_viewport_size(size)
            made.page.emulate_media(media="null", color_scheme=scheme, reduced_motion="null")
        else:
            context = browser.new_context(viewport=size, color_scheme=scheme)
            made = Tab(context.new_page(), shown.address, shown.token)
            made.enter()
        (out if again else fresh_ones).append(made)
        return made

    yield get
    for made in fresh_ones:
        made.page.context.close()
    for made in out:
        try:
            made.leave()
        except (AssertionError, playwright_error()):
            made.page.context.close()
        else:
            used_tabs.append(made)


def playwright_error() -> type[Exception]:
    """What Playwright raises; imported late, as it may be absent."""
    from playwright.sync_api import Error

    return Error


@pytest.fixture(scope="session")
def truncated(
    shared_trace: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """The first 60% of a real trace, cut in the middle of an event."""

    @cache
    def make() -> Path:
        whole = gzip.decompress(Path(shared_trace("h100_bert_small_inference")).read_bytes())
        target = tmp_path_factory.mktemp("truncated") / "cut.json"
        target.write_bytes(whole[: len(whole) * 6 // 10])
        return target

    return make


@pytest.fixture(scope="session")
def two_ranks(
    shared_trace: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """A folder with the traces of two ranks."""

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
    """Four steps of a small model, recorded here and now by torch's own profiler."""

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
"""Two epochs with validation: arguments are the samples of an epoch and the seconds for one."""


@pytest.fixture(scope="session")
def recording_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, subprocess.Popen[bytes]]]:
    """``recording_process(samples, seconds)``: a training that ``advisor record`` records."""
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
        made = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return folder / "run", made

    return start


@pytest.fixture(scope="session")
def recorded_run(recording_process: Any) -> Callable[[], Path]:
    """Sixty-four steps in two epochs, recorded here and now by our own recorder."""

    @cache
    def make() -> Path:
        run, process = recording_process(256, 0.001)
        assert process.wait(120) == 0
        return Path(run)

    return make


class ViewReply(NamedTuple):
    """A decoded answer: header fields by name, then the columns in order."""

    head: dict[str, Any]
    slices: tuple[NDArray[Any], ...]
    runs: tuple[NDArray[Any], ...]
    flagged: tuple[NDArray[Any], ...]
    counters: tuple[NDArray[Any], ...]


REPLY_FIELDS = """
    magic slices runs flagged counters px k seen x0 x1 cell0 ms version zero
    """.split()


def decode_reply(data: bytes) -> ViewReply:
    """The binary answer to a view, in columns. Raises ValueError for anything else."""
    if len(data) < encoding.HEADER.size or data[:4] != encoding.MAGIC:
        raise ValueError("not an answer")
    head = dict(zip(REPLY_FIELDS, encoding.HEADER.unpack_from(data), strict=True))
    place = encoding.HEADER.size

    def column(kind: str, count: int) -> NDArray[Any]:
        nonlocal place
        size = np.dtype(kind).itemsize * count
        if place + size > len(data):
            raise ValueError("the answer is cut off")
        values = np.frombuffer(data, dtype=kind, count=count, offset=place)
        place += size + -size % 8
        return values

    slices = tuple(column(kind, head["slices"]) for kind in encoding._SLICES)
    runs = tuple(column(kind, head["runs"]) for kind in encoding._RUNS)
    flagged = tuple(column(kind, head["flagged"]) for kind in encoding._FLAGGED)
    size = head["counters"] * head["px"]
    counters = tuple(column("<f4", size) for _ in range(2))
    if place != len(data):
        raise ValueError("the answer is too long")
    return ViewReply(head, slices, runs, flagged, counters)


@pytest.fixture(scope="session")
def decode() -> Callable[[bytes], ViewReply]:
    """Reads the binary answer to a view, as the browser does."""
    return decode_reply
