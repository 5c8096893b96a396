"""Decoding in several processes: workers that read pieces and write columns over pipes.

Plain child processes rather than a ``multiprocessing`` pool: those import the caller's main
module again (or fork a process that has threads), and a library must do neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import msgspec
import numpy as np

from advisor.ingest.decode import Piece, decode_piece

_HEADER = 8
_MAIN = "from advisor.ingest.pool import serve; serve()"


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
    header = pipe.read(_HEADER)
    if len(header) < _HEADER:
        return None
    return pipe.read(int.from_bytes(header, "little"))


def serve() -> None:
    """A worker's life: read a piece, write its columns, until the input closes."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    import gc

    gc.disable()  # the decoded structs hold no cycles; collecting them only costs time
    while (piece := _receive(source)) is not None:
        result = _encoder.encode(decode_piece(piece))
        del piece
        _send(sink, result)


class Pool:
    """A few worker processes, used in order: results come back in the order of the pieces."""

    def __init__(self, workers: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([root, *sys.path]))
        env.pop("PYTHONSTARTUP", None)
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._all = [
            subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for _ in range(workers)
        ]
        for worker in self._all:
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
        try:
            assert worker.stdin is not None and worker.stdout is not None
            _send(worker.stdin, piece)
            answer = _receive(worker.stdout)
        except (OSError, ValueError):
            answer = None
        finally:
            self._idle.put(worker)
        if answer is None:
            return decode_piece(piece)
        return _decoder.decode(answer)

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        pass
        for worker in self._all:
            worker.wait()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
