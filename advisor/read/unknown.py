"""What a file is that begins like no trace, so far as that can be told."""

from __future__ import annotations

_UTF16 = (b"{\0", b"[\0", b"\0{", b"\0[")


def kind_of(start: bytes) -> tuple[str, str | None] | None:
    """What it is, and what to do about it when that is more than to give something else; ``None``:
    it cannot be told."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or start[:2] in _UTF16:
        return "not UTF-8 text (UTF-16?)", "convert it to UTF-8"
    if start.startswith(b"SQLite format 3"):
        return "an SQLite file without the tables of a profiler that is known", None
    if start.startswith(b"\x80") and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "a pickle (a memory snapshot?)", None
    if start[:1000].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page", "give the address of the file itself; perhaps one must log in first"
    if start.startswith(b"version https://git-lfs.github.com/"):
        return "a pointer of Git LFS in place of the file", "fetch the file itself: git lfs pull"
    if start[257:262] == b"ustar":
        return "a tar archive", "unpack it and give the JSON in it"
    return None
