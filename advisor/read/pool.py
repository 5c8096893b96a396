"""Decoding the pieces of a large trace in several processes.

The process that reads the file decodes too whenever all workers have enough to do, so two processes
keep two cores busy.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from advisor.core.pool import ProcessPool, WorkerDied
from advisor.read.columns import Piece
from advisor.read.decode import decode_piece

AHEAD = 3
"""Pieces that wait at one worker."""


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, np.ascontiguousarray(value).data]
    raise TypeError(type(value).__name__)


def _dec(kind: type, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype))


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)
_decoder = msgspec.msgpack.Decoder(Piece, dec_hook=_dec)


def decode_apart(piece: bytes) -> bytes:
    """A piece's columns, encoded: what a worker does."""
    import gc

    gc.disable()  # the decoded structs hold no cycles; collecting them only costs time
    return _encoder.encode(decode_piece(piece))


def decode_all(pieces: Iterable[bytes], processes: int) -> Iterator[Piece]:
    """Decode pieces in this process and ``processes - 1`` workers, as far as they can be started;
    results come in their order. A worker that dies costs only its help."""
    workers = processes - 1 if os.name == "posix" else 0
    if not workers:
        yield from map(decode_piece, pieces)
        return
    waiting: deque[tuple[bytes, Future[bytes] | Piece]] = deque()
    lost = 0

    def decoded(piece: bytes, answer: Future[bytes] | Piece) -> Piece:
        nonlocal lost
        if isinstance(answer, Piece):
            return answer
        try:
            return _decoder.decode(answer.result())
        except (WorkerDied, msgspec.DecodeError):
            lost += 1
            return decode_piece(piece)

    with ProcessPool(workers, depth=AHEAD) as pool:
        for piece in pieces:
            busy = sum(isinstance(at, Future) and not at.done() for _, at in waiting)
            if lost < workers and busy < workers * AHEAD:
                waiting.append((piece, pool.submit(decode_apart, piece)))
            else:
                waiting.append((b"", decode_piece(piece)))
            while waiting and _is_done(waiting[0][1]):
                yield decoded(*waiting.popleft())
        while waiting:
            yield decoded(*waiting.popleft())


def _is_done(answer: Future[bytes] | Piece) -> bool:
    return not isinstance(answer, Future) or answer.done()
