"""Client for ``advisor record --attach``: makes a live inference server profile itself for seconds.

vLLM and SGLang have ``/start_profile`` and ``/stop_profile``
(https://docs.vllm.ai/en/stable/contributing/profiling/,
https://docs.sglang.io/developer_guide/benchmark_and_profiling.html). Whatever happens in between,
the client asks the profiler to stop."""

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from advisor.core.errors import AdvisorError

_MAX_SECONDS = 120.0
"""Maximum length of a profile, s: two minutes of a server are hundreds of millions of events."""
ANSWER_SECONDS = 15.0
"""Timeout for an answer of a running server, s."""
STOP_SECONDS = 1800.0
"""Timeout for a stop, s: the engine first writes its files, minutes for a large model."""
MAX_STOP_TRIES = 3
_MAX_ANSWER = 1 << 20
"""Maximum number of bytes read of an answer."""
HOW_TO_ENABLE = {
    "vllm": "start vLLM with --profiler-config "
    '\'{"profiler": "torch", "torch_profiler_dir": "/traces"}\' '
    "(before 0.13: VLLM_TORCH_PROFILER_DIR=/traces)",
    "sglang": "set SGLANG_TORCH_PROFILER_DIR=/traces for the server, or give --out",
}
_VERSION_PATHS = (("vllm", "/version"), ("sglang", "/get_server_info"), ("sglang", "/server_info"))


class Server(NamedTuple):
    """Address of an inference server."""

    secure: bool
    host: str
    port: int
    base: str
    """Path that precedes the paths of the endpoints."""

    def ask(self, method: str, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        """Send a request and return the answer's status and text. Redirects are not followed.
        Raises OSError and http.client.HTTPException."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=seconds)
        try:
            text = None if body is None else json.dumps(body)
            headers = {} if text is None else {"Content-Type": "application/json"}
            connection.request(method, self.base + path, text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_ANSWER).decode("utf-8", "replace")
        finally:
            connection.close()


class AttachedRecording(NamedTuple):
    """Result of a recording by ``attach``."""

    engine: str
    seconds: float
    """Time between start and stop, s."""
    interrupted: bool
    """True if it ended early. The profiler was stopped anyway."""
    files: list[Path]
    """New files in the given folder. Empty if none was given, or it is on another machine."""


def server_of(url: str) -> Server:
    """Parse a server's address. Raises AdvisorError if it is invalid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise AdvisorError(f"--attach {url}: not an address") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AdvisorError(f"--attach {url}: give http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise AdvisorError("--attach: give the address alone, without a user or a query")
    secure = parts.scheme == "https"
    return Server(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))


def engine_of(server: Server) -> str:
    """Return ``vllm`` or ``sglang``. Raises AdvisorError if no such engine answers."""
    for engine, path in _VERSION_PATHS:
        try:
            status, text = server.ask("GET", path)
        except (OSError, http.client.HTTPException) as error:
            raise AdvisorError(
                f"{_url_of(server)}: no server answers ({_reason_of(error)})"
            ) from None
        if status == 200 and _is_object(text):
            return engine
    raise AdvisorError(
        f"{_url_of(server)}: neither vLLM nor SGLang; name it with --engine if it has "
        "/start_profile"
    )


def attach(
    url: str,
    seconds: float,
    engine: str | None = None,
    folder: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> AttachedRecording:
    """Make a server profile itself for ``seconds``. ``folder``: where it writes its files, as seen
    from the server (SGLang is asked to write there; vLLM sets its folder when it starts).

    Raises AdvisorError if there is no such server, or it does not profile. The error says if the
    profiler may have started and could not be stopped."""
    if not 0 < seconds <= _MAX_SECONDS:
        raise AdvisorError(f"--seconds: above 0, at most {_MAX_SECONDS:.0f}")
    server = server_of(url)
    known = engine or engine_of(server)
    files_before = _list_files(folder)
    body: dict[str, Any] | None = None
    if known == "sglang":
        body = {"activities": ["CPU", "GPU"], "record_shapes": True, "with_stack": True}
        if folder is not None:
            body["output_dir"] = str(folder.absolute())
    begun = time.monotonic()
    interrupted = False
    with _signals_as_interrupts():
        try:
            # the profiler may run from here on, whatever goes wrong
            _start_profile(server, known, body)
            begun = time.monotonic()
            say(f"{known} profiles itself for {seconds:g} s. Send it requests")
            threading.Event().wait(seconds)
        except KeyboardInterrupt:
            interrupted = True
        except AttachRefused as error:
            raise AdvisorError(str(error)) from None
        except BaseException:
            _stop_profile(server)
            raise
        duration = time.monotonic() - begun
        say("stopping: the engine writes its files, which can take minutes for a large model")
        _stop_profile(server)
    return AttachedRecording(
        known, duration, interrupted, sorted(_list_files(folder) - files_before)
    )


class AttachRefused(Exception):
    """Server's refusal to profile, because its profiler is not enabled."""


def _start_profile(server: Server, engine: str, body: dict[str, Any] | None) -> None:
    try:
        status, text = server.ask("POST", "/start_profile", body)
    except (OSError, http.client.HTTPException) as error:
        raise AdvisorError(
            f"{_url_of(server)}: no answer to /start_profile ({_reason_of(error)}); it was asked "
            "to stop"
        ) from None
    if status in (404, 405, 501):
        raise AttachRefused(
            f"{_url_of(server)}: its profiler is not enabled; {HOW_TO_ENABLE.get(engine, '')}"
        )
    if status >= 300:
        raise AdvisorError(
            f"{_url_of(server)}: /start_profile answered {status} "
            f"({' '.join(text.split())[:100]}); it was asked to stop"
        )


def _stop_profile(server: Server) -> None:
    """Ask the server to stop profiling, up to ``MAX_STOP_TRIES`` times. Raises AdvisorError on
    failure."""
    why = ""
    for attempt in range(MAX_STOP_TRIES):
        try:
            status, text = server.ask("POST", "/stop_profile", seconds=STOP_SECONDS)
        except KeyboardInterrupt:  # ask the server first
            why = "interrupted"
            continue
        except (OSError, http.client.HTTPException) as error:
            why = _reason_of(error)
        else:
            if status < 300:
                return
            why = f"it answered {status} ({' '.join(text.split())[:100]})"
        time.sleep(0.2 * 2**attempt)
    raise AdvisorError(
        f"{_url_of(server)}: the profiler may still run, /stop_profile failed ({why}); send "
        f"'curl -X POST {_url_of(server)}/stop_profile' or restart the server"
    )


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the profiler stops first."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
    old_handlers = {number: signal.signal(number, interrupt) for number in names}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _list_files(folder: Path | None) -> set[Path]:
    try:
        return set() if folder is None else {p for p in folder.rglob("*.json*") if p.is_file()}
    except OSError:
        return set()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _url_of(server: Server) -> str:
    scheme = "https" if server.secure else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"{scheme}://{host}:{server.port}{server.base}"


def _reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError | socket.timeout):
        return "timed out"
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)[:100]
