"""Decoding in several processes: workers that read pieces and write columns over pipes.

Plain child processes rather than a ``multiprocessing`` pool: those import the caller's main
module again (or fork a process that has threads), and a library must do neither.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import msgspec
import numpy as np

from advisor.ingest.columns import Piece
from advisor.ingest.decode import decode_piece

_HEADER = 8
_MAIN = "from advisor.ingest.pool import serve; serve()"
_PIPE_BYTES = 1 << 20  # the most an unprivileged process may ask for: fewer switches
_F_SETPIPE_SZ = 1031  # Linux; fcntl has the name only from Python 3.10 on some builds
_GOODBYE_S = 10


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, np.ascontiguousarray(value).data]
    raise TypeError(type(value).__name__)


def _dec(kind: type, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype))


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)
_decoder = msgspec.msgpack.Decoder(Piece, dec_hook=_dec)


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_HEADER, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """One message; ``None``: the other side has ended."""
    header = pipe.read(_HEADER)
    if len(header) < _HEADER:
        return None
    size = int.from_bytes(header, "little")
    data = pipe.read(size)
    return data if len(data) == size else None


def serve() -> None:
    """A worker's life: read a piece, write its columns, until the input closes."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, by closing the pipe
    gc.disable()  # the decoded structs hold no cycles; collecting them only costs time
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        while (piece := _receive(source)) is not None:
            result = _encoder.encode(decode_piece(piece))
            del piece
            _send(sink, result)
    except BrokenPipeError:  # the parent is gone
        os._exit(0)


class Pool:
    """A few worker processes, used in order: results come back in the order of the pieces."""

    def __init__(self, workers: int) -> None:
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        for _ in range(workers):
            worker = _spawn()
            if worker is not None:
                self._all.append(worker)
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="advisor-decode")
        self._ahead = workers + 1

    def map(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Decode pieces, at most a few in flight. A worker that dies costs only its help."""
        waiting: deque[Future[Piece]] = deque()
        for piece in pieces:
            waiting.append(self._threads.submit(self._decode, piece))
            del piece
            if len(waiting) >= self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _decode(self, piece: bytes) -> Piece:
        worker = self._idle.get()
        answer = None
        if worker is not None and worker.stdin is not None and worker.stdout is not None:
            try:
                _send(worker.stdin, piece)
                answer = _receive(worker.stdout)
            except (OSError, ValueError):
                answer = None
        self._idle.put(worker if answer is not None else None)
        return decode_piece(piece) if answer is None else _decoder.decode(answer)

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        for worker in self._all:
            try:
                worker.wait(_GOODBYE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _spawn() -> subprocess.Popen[bytes] | None:
    """A worker; ``None`` where no process can be started."""
    if not sys.executable:
        return None
    root = str(Path(__file__).resolve().parents[2])
    # our own search path, spelled out, and nothing else: -S skips site, -P the current folder
    path = [root, *(entry for entry in sys.path if entry)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(path), PYTHONDONTWRITEBYTECODE="1")
    try:
        worker = subprocess.Popen(
            [sys.executable, "-S", "-P", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
    except (OSError, ValueError):
        return None
    for pipe in (worker.stdin, worker.stdout):
        _widen(pipe)
    return worker


def _widen(pipe: IO[bytes] | None) -> None:
    try:
        import fcntl

        if pipe is not None and sys.platform == "linux":
            fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):
        pass
