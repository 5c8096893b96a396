"""Decoding in several processes: workers that take pieces from shared memory and answer in columns.

Plain child processes rather than a ``multiprocessing`` pool: those import the caller's main
module again (or fork a process that has threads), and a library must do neither. The process that
reads the file decodes too whenever all workers have enough to do, so two processes keep two
cores busy.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from advisor.read.columns import Piece
from advisor.read.decode import decode_piece

SLOTS = 3
"""Pieces that wait at one worker."""
SLOT_BYTES = 16 << 20
"""The longest piece that is handed to a worker. Only what is used of it takes memory."""
ANSWER_BYTES = 64 * SLOT_BYTES
"""No answer to such a piece is longer."""

_MAIN = "from advisor.read.pool import serve; serve()"
_ORDER = 12  # slot and length of a piece
_HEADER = 8  # length of an answer
_PIPE_BYTES = 1 << 20  # the most an unprivileged process may ask for: answers fit in
_F_SETPIPE_SZ = 1031  # Linux
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


def serve() -> None:
    """A worker's life: decode the pieces it is told of until its input closes."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, by closing the pipe
    gc.disable()  # the decoded structs hold no cycles; collecting them only costs time
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with mmap.mmap(int(sys.argv[1]), SLOTS * SLOT_BYTES) as memory:
        while len(order := source.read(_ORDER)) == _ORDER:
            at = int.from_bytes(order[:4], "little") * SLOT_BYTES
            piece = memory[at : at + int.from_bytes(order[4:], "little")]
            answer = _encoder.encode(decode_piece(piece))
            del piece
            try:
                sink.write(len(answer).to_bytes(_HEADER, "little") + answer)
                sink.flush()
            except BrokenPipeError:  # the parent is gone
                os._exit(0)


class _Worker:
    """A child process, the memory shared with it, and what it has been told to do."""

    def __init__(self) -> None:
        self._file = _shared_file()
        self._memory = mmap.mmap(self._file, SLOTS * SLOT_BYTES)
        self._free = list(range(SLOTS))
        self.pending: list[tuple[int, int, int]] = []
        """Number, slot and length of the pieces that it has not answered yet, oldest first."""
        # our own search path, spelled out, and nothing else: -S skips site, -P the current folder
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-c", _MAIN, str(self._file)],
                bufsize=0,  # what is read ahead would be invisible to poll()
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(os.environ, PYTHONPATH=os.pathsep.join(path)),
                pass_fds=[self._file],
            )
        except OSError:
            self._release()
            raise
        self.orders, self.answers = _pipe(self._process.stdin), _pipe(self._process.stdout)

    def submit(self, number: int, piece: bytes) -> bool:
        """Hand it a piece; False: it has no room, or is no more."""
        if not self._free or len(piece) > SLOT_BYTES:
            return False
        slot = self._free[-1]
        at = slot * SLOT_BYTES
        self._memory[at : at + len(piece)] = piece
        try:
            self.orders.write(slot.to_bytes(4, "little") + len(piece).to_bytes(8, "little"))
        except OSError:
            return False
        self.pending.append((number, self._free.pop(), len(piece)))
        return True

    def receive(self) -> tuple[int, Piece]:
        """Its next answer. Raises EOFError when it has died."""
        size = int.from_bytes(_exactly(self.answers, _HEADER), "little")
        if size > ANSWER_BYTES:
            raise EOFError  # nonsense
        answer = _exactly(self.answers, size)
        number, slot, _ = self.pending.pop(0)
        self._free.append(slot)
        return number, _decoder.decode(answer)

    def abandoned(self) -> Iterator[tuple[int, bytes]]:
        """The pieces that it took with it when it died."""
        for number, slot, size in self.pending:
            yield number, self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + size]
        self.pending.clear()

    def close(self) -> None:
        """End it."""
        for pipe in (self.orders, self.answers):
            with suppress(OSError):
                pipe.close()
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        self._memory.close()
        os.close(self._file)


class Pool:
    """This process and ``processes - 1`` workers, as far as they can be started."""

    def __init__(self, processes: int) -> None:
        self.workers: list[_Worker] = []
        for _ in range(processes - 1 if os.name == "posix" and sys.executable else 0):
            try:
                self.workers.append(_Worker())
            except OSError:
                break

    def map(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Decode pieces; results come in their order. A worker that dies costs only its help."""
        done: dict[int, Piece] = {}
        following = 0
        for number, piece in enumerate(pieces):
            done.update(self._answers(wait=False))
            # the least busy first, so that the first pieces go to different workers
            for worker in sorted(self.workers, key=lambda worker: len(worker.pending)):
                if worker.submit(number, piece):
                    break
            else:
                done[number] = decode_piece(piece)
            while following in done:
                yield done.pop(following)
                following += 1
        while any(worker.pending for worker in self.workers):
            done.update(self._answers(wait=True))
        for number in sorted(done):
            yield done[number]

    def _answers(self, *, wait: bool) -> Iterator[tuple[int, Piece]]:
        """What the workers have answered so far; at least one answer when ``wait``."""
        busy = {worker.answers.fileno(): worker for worker in self.workers if worker.pending}
        poll = select.poll()
        for number in busy:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(None if wait else 0) if busy else ():
            worker = busy[number]
            try:
                yield worker.receive()
            except (EOFError, OSError, msgspec.DecodeError):
                self.workers.remove(worker)
                for lost, piece in worker.abandoned():
                    yield lost, decode_piece(piece)
                worker.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _exactly(pipe: IO[bytes], size: int) -> bytearray:
    """So many bytes of a pipe. Raises EOFError when there are fewer."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = pipe.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        at += count
    return data


def _shared_file() -> int:
    """A descriptor of memory that a child process can map too."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("advisor")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, SLOTS * SLOT_BYTES)  # not written, not there
    return file


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """A pipe that was asked for, made as wide as may be."""
    if pipe is None:
        raise OSError("no pipe")
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
    return pipe
