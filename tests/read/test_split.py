"""A stream cut between events: nothing lost, nothing doubled, whatever the text looks like."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import string
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.errors import AdvisorError
from advisor.core.trace import ANOTHER_TRACE
from advisor.read import source as source_module
from advisor.read.formats.kineto import json_pieces as split_module
from advisor.read.formats.kineto.decode import decode_piece
from advisor.read.formats.kineto.json_pieces import Splitter, last_boundary
from advisor.read.formats.kineto.reader import KinetoReader
from advisor.read.json_repair import repair_json, scan_list, split_objects
from advisor.read.reader import ReadOptions
from advisor.read.source import ByteSource

HEAD = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]}
TAIL = {"traceName": "t.json", "more": [{"name": 1}], "displayTimeUnit": "ms"}


def event(number: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": f"op {number}",
        "pid": 1,
        "tid": 1,
        "ts": number,
        "dur": 1,
        "args": {"External id": number, **args},
    }


EVENTS = [
    event(0),
    event(1, weird='}, {"ph": "X"} ] " \\'),
    event(2, nested=[{"name": 1}, {"name": 2}], deep={"args": [{"ph": "X"}, {"ph": "X"}]}),
    event(3, path="C:\\temp\\", empty="", list=[], object={}),
    event(4, dims=[[1, 2], [], [[3]]]),
]


def split_text(text: bytes, **options: Any) -> tuple[list[bytes], Splitter]:
    splitter = Splitter(ByteSource("x", data=text), **options)
    return list(splitter.pieces()), splitter


def contents(pieces: list[bytes]) -> list[Any]:
    return [element for piece in pieces for element in json.loads(piece)]


def message(text: bytes) -> str:
    with pytest.raises(AdvisorError) as caught:
        split_text(text)
    error_text = str(caught.value)
    assert "\n" not in error_text
    assert error_text.startswith("x: ")
    return error_text.removeprefix("x: ")


def layouts(events: list[Any]) -> dict[str, bytes]:
    """Serialize the same events as different tools do."""
    document = {**HEAD, "traceEvents": events, **TAIL}
    compact = json.dumps(document, separators=(",", ":")).encode()
    return {
        "compact": compact,
        "python": json.dumps(document).encode(),
        "indented": json.dumps(document, indent=4).encode(),
        "windows lines": json.dumps(document, indent=2).replace("\n", "\r\n").encode(),
        "byte order mark": b"\xef\xbb\xbf" + compact,
        "space around": b" \n\t" + compact + b"\n\n ",
        "zeros behind": compact + bytes(100),
        "garbage behind": compact + b"}\ngarbage",
        "no other keys": json.dumps({"traceEvents": events}).encode(),
        "events last": json.dumps({**HEAD, **TAIL, "traceEvents": events}).encode(),
        "bare list": json.dumps(events).encode(),
        "bare list, indented": b"\n " + json.dumps(events, indent=1).encode() + b"\n",
        "bare list with a stray comma": json.dumps(events).encode() + b",",
    }


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", layouts(EVENTS))
def test_every_layout_gives_the_same_events(layout: str, exact: bool) -> None:
    pieces, splitter = split_text(layouts(EVENTS)[layout], exact=exact)
    assert contents(pieces) == EVENTS
    assert not splitter.truncated
    assert splitter.bare_list == layout.startswith("bare")
    if layout != "no other keys" and not splitter.bare_list:
        assert splitter.head == {**HEAD, **TAIL}


@pytest.mark.parametrize("size", [1, 7, 100, 300, 1000])
@pytest.mark.parametrize("layout", layouts(EVENTS))
def test_exact_cuts_give_whole_events_at_any_piece_size(layout: str, size: int) -> None:
    pieces, splitter = split_text(layouts(EVENTS * 5)[layout], exact=True, piece_bytes=size)
    assert contents(pieces) == EVENTS * 5
    assert not splitter.truncated


PLAIN = [event(i, text=f'a "quoted" name }} , {{ {i}') for i in range(200)]


@pytest.mark.parametrize("layout", layouts(PLAIN))
def test_fast_and_exact_cuts_agree(layout: str) -> None:
    for size in (50, 333, 5000):
        text = layouts(PLAIN)[layout]
        fast, exact = (
            split_text(text, piece_bytes=size),
            split_text(text, piece_bytes=size, exact=True),
        )
        assert contents(fast[0]) == contents(exact[0]) == PLAIN
        assert len(fast[0]) > 3 or size == 5000
        assert fast[1].head == exact[1].head


def test_a_fast_cut_inside_a_nested_list_cannot_go_unnoticed() -> None:
    """The fast cut leaves both pieces unbalanced, which makes the reader cut exactly instead."""
    nested = [event(i, kernels=[{"name": "a"}, {"name": "b"}, {"name": "c"}]) for i in range(100)]
    text = json.dumps({"traceEvents": nested}).encode()
    wrong = 0
    for size in range(60, 400, 7):
        pieces, _ = split_text(text, piece_bytes=size)
        try:
            assert contents(pieces) == nested
        except json.JSONDecodeError:
            wrong += 1
            assert sum(decode_piece(piece).unsound for piece in pieces) > 0
    assert wrong > 10


def test_pieces_are_about_as_long_as_asked() -> None:
    text = json.dumps({"traceEvents": [event(i) for i in range(5000)]}).encode()
    for size in (1000, 10_000, 100_000):
        pieces, _ = split_text(text, piece_bytes=size)
        assert max(map(len, pieces)) < 2 * size + 400
        assert len(pieces) > len(text) / (2 * size + 400)


def test_an_empty_list_is_a_list() -> None:
    for text in (b'{"traceEvents": []}', b"[]", b"[ ]", b'{"a": 1, "traceEvents": [ ] , "b": 2}'):
        pieces, splitter = split_text(text)
        assert contents(pieces) == []
        assert not splitter.truncated


def test_a_traceevents_key_inside_something_else_is_not_the_list() -> None:
    document = {
        "meta": {"traceEvents": [{"name": "not this"}]},
        "s": '"traceEvents": [',
        "traceEvents": EVENTS,
    }
    pieces, splitter = split_text(json.dumps(document).encode())
    assert contents(pieces) == EVENTS
    assert splitter.head["s"] == '"traceEvents": ['


def test_keys_after_the_events_are_read_at_any_piece_size() -> None:
    text = layouts(PLAIN)["python"]
    for size, exact in itertools.product((10, 400, 30_000, 1 << 20), (False, True)):
        assert split_text(text, piece_bytes=size, exact=exact)[1].head == {**HEAD, **TAIL}


def test_a_long_tail_behind_the_events_is_found_exactly() -> None:
    tail = [{"name": i, "args": {}} for i in range(2000)]
    text = json.dumps({"traceEvents": PLAIN, "long": tail, "rank": 3}).encode()
    pieces, splitter = split_text(text, piece_bytes=5000, exact=True)
    assert contents(pieces) == PLAIN
    assert splitter.head == {"long": tail, "rank": 3}


# -- cut off ------------------------------------------------------------------------------------


def ends_of_events(text: str) -> list[int]:
    """Find the end of each event with Python's own decoder."""
    decoder = json.JSONDecoder()
    at = text.index("[", text.index('"traceEvents"')) + 1 if text.lstrip()[0] == "{" else 1
    ends = []
    while True:
        while text[at] in " \n\t\r,":
            at += 1
        if text[at] == "]":
            return ends
        _, at = decoder.raw_decode(text, at)
        ends.append(at)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", ["compact", "indented", "events last", "bare list"])
def test_a_text_cut_at_any_byte_keeps_exactly_the_whole_events(layout: str, exact: bool) -> None:
    text = layouts(EVENTS)[layout]
    ends = ends_of_events(text.decode())
    for cut in range(1, len(text)):
        complete_count = sum(end <= cut for end in ends)
        try:
            pieces, splitter = split_text(text[:cut], exact=exact)
        except AdvisorError as error:
            assert complete_count == 0
            assert "cut off" in str(error)
            continue
        assert sum(decode_piece(piece).events for piece in pieces) == complete_count, cut
        assert sum(decode_piece(piece).unsound for piece in pieces) == 0, cut
        assert splitter.truncated


def test_a_gzip_cut_at_any_byte_keeps_the_whole_events() -> None:
    text = layouts(EVENTS)["compact"]
    ends = ends_of_events(text.decode())
    packed = gzip.compress(text)
    kept = []
    for cut in range(20, len(packed)):
        source = ByteSource("x", data=packed[:cut])
        splitter = Splitter(source)
        try:
            kept.append(sum(decode_piece(piece).events for piece in splitter.pieces()))
        except AdvisorError as error:
            assert "cut off" in str(error)
            kept.append(0)
            continue
        assert kept[-1] == sum(end <= source.bytes_read for end in ends)
        assert splitter.truncated or source.truncated
    assert kept[-1] == len(EVENTS)
    assert kept == sorted(kept)


def test_small_pieces_have_the_same_events_as_large_ones() -> None:
    text = layouts(PLAIN[:40])["python"]
    ends = ends_of_events(text.decode())
    for cut in range(300, len(text), 31):
        for exact in (False, True):
            pieces, _ = split_text(text[:cut], piece_bytes=500, exact=exact)
            assert len(contents(pieces)) == sum(end <= cut for end in ends)


def test_the_lost_event_is_counted() -> None:
    text = json.dumps({"traceEvents": EVENTS}).encode()
    assert split_text(text[:-20])[1].cut_events == 1
    assert split_text(text[: text.rindex(b"]}")])[1].cut_events == 0


# -- what is no trace ---------------------------------------------------------------------------

GIVE = "give a PyTorch profiler trace"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"   \n\n ", f"nothing but white space; {GIVE}"),
        (b"hello", f"not JSON; {GIVE} (.json, .json.gz or .json.zst)"),
        (b"<xml></xml>", f"not JSON; {GIVE} (.json, .json.gz or .json.zst)"),
        (
            b"\n<!DOCTYPE html><html></html>",
            "a web page; give the address of the file itself; you may need to log in first",
        ),
        (b'"text"', f"not JSON; {GIVE} (.json, .json.gz or .json.zst)"),
        (b"12", f"not JSON; {GIVE} (.json, .json.gz or .json.zst)"),
        ("[{}]".encode("utf-16"), "not UTF-8 text (UTF-16?); convert it to UTF-8"),
        ("{}".encode("utf-16-le"), "not UTF-8 text (UTF-16?); convert it to UTF-8"),
        ("{}".encode("utf-16-be"), "not UTF-8 text (UTF-16?); convert it to UTF-8"),
        (
            b"SQLite format 3\0",
            f"an SQLite file without the tables of a known profiler; {GIVE}",
        ),
        (b"\x80\x04\x95", f"a pickle (a memory snapshot?); {GIVE}"),
        (b"\0" * 257 + b"ustar", "a tar archive; unpack it and give the file or folder in it"),
        (b'{"traceEvents": {}}', f"traceEvents is not a list but an object; {GIVE}"),
        (b'{"traceEvents": null}', f"traceEvents is not a list but null; {GIVE}"),
        (b'{"traceEvents": "x"}', f"traceEvents is not a list but a string; {GIVE}"),
        (b'{"traceEvents": 3}', f"traceEvents is not a list but a number; {GIVE}"),
        (b'{"a": 1, "b": ', "cut off before its first event; copy or record it again"),
        (b'{"a": 1, "b"}}', "not valid JSON; copy or record it again"),
        (
            b"{}",
            "JSON without traceEvents (its keys: none); give a trace written by "
            "export_chrome_trace or tensorboard_trace_handler",
        ),
        (
            b'{"b": 1, "a\\u001b[2J": 2}',
            "JSON without traceEvents (its keys: a\\x1b[2J, b); give a "
            "trace written by export_chrome_trace or tensorboard_trace_handler",
        ),
        (
            b'[["a", 2]]',
            'a JSON list that begins with ["a", 2]], not with a trace event; '
            "give a trace written by export_chrome_trace or tensorboard_trace_handler",
        ),
        (
            b"[1, 2]",
            "a JSON list that begins with 1, 2], not with a trace event; "
            "give a trace written by export_chrome_trace or tensorboard_trace_handler",
        ),
    ],
)
def test_file_that_is_no_trace_has_its_own_error(text: bytes, expected: str) -> None:
    assert message(text) == expected


def test_unreadable_gzip_is_reported() -> None:
    packed = bytearray(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    packed[10:] = b"\xff" * 40
    assert message(bytes(packed)).startswith("damaged gzip (")
    assert message(bytes(packed)).endswith(", nothing could be unpacked; copy or record it again")


# -- hostile ------------------------------------------------------------------------------------


def test_one_endless_event_is_skipped_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "EVENT_LIMIT", 20_000)
    text = json.dumps({"traceEvents": [event(0), event(1, x="y" * 100_000), event(2), event(3)]})
    for exact in (False, True):
        pieces, splitter = split_text(text.encode(), piece_bytes=1000, exact=exact)
        kept = [decode_piece(piece) for piece in pieces]
        assert sum(piece.events for piece in kept) >= 2
        assert splitter.skipped == 1
        assert max(map(len, pieces)) < 30_000


def test_endless_white_space_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "HEAD_LIMIT", 100_000)
    assert message(b" " * 3_000_000 + b"{}").startswith("nothing but white space")


def test_many_false_beginnings_end_soon() -> None:
    """Each would be a reason to decode all that comes before it."""
    text = b'{"a":' * 20 + b'{"traceEvents":[],"b":' * 50_000
    pieces, _ = split_text(text)  # the head is damaged: what follows the first is taken for events
    assert sum(decode_piece(piece).events for piece in pieces) == 0


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"traceEvents":[' + b"[" * 200_000,
        b'{"traceEvents":[{"args":' + b'{"a":' * 200_000,
    ],
)
def test_deep_nesting_is_not_a_recursion(text: bytes) -> None:
    try:
        pieces, _ = split_text(text)
    except AdvisorError:
        return
    assert sum(decode_piece(piece).events for piece in pieces) == 0


def test_a_head_of_a_million_keys_is_kept_small() -> None:
    head = {f"k{i}": "v" * 10 for i in range(20_000)}
    _, splitter = split_text(
        json.dumps({**head, "big": "x" * (2 << 20), "traceEvents": EVENTS}).encode()
    )
    assert len(splitter.head) <= 1000


# -- the scanner --------------------------------------------------------------------------------

characters = st.text(alphabet='ab"\\{}[], \u00e9', max_size=12)
values = st.recursive(
    st.none() | st.integers() | characters,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(characters, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(values, max_size=6), st.sampled_from([None, 1]))
def test_the_scanner_finds_the_commas_of_json(elements: list[Any], indent: int | None) -> None:
    parts = [json.dumps(e, indent=indent, ensure_ascii=False).encode() for e in elements]
    inside = b" , ".join(parts)
    expected, at = [], 0
    for part in parts[:-1]:
        at += len(part) + 1
        expected.append(at)
        at += 2
    commas, end, depth = scan_list(inside + b" ] , [ tail")
    assert commas.tolist() == expected
    assert end == len(inside) + 1
    commas, end, depth = scan_list(inside)
    assert (commas.tolist(), end, depth) == (expected, None, 0)
    texts, others = split_objects(inside)
    assert [text.strip() for text in texts] == [part for part in parts if part[:1] == b"{"]
    assert others == sum(part[:1] != b"{" for part in parts)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_can_be_scanned_split_and_repaired(data: bytes) -> None:
    scan_list(data)
    last_boundary(data)
    list(split_objects(data)[0])
    repair_json(data).decode()
    for text in (b'{"traceEvents":[' + data, b"[{" + data, b"{" + data):
        for exact in (False, True):
            try:
                pieces, _ = split_text(text, exact=exact, piece_bytes=40)
            except AdvisorError:
                continue
            for piece in pieces:
                decode_piece(piece)


# -- repair -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(values)
def test_repair_leaves_sound_text_as_it_is(value: Any) -> None:
    for text in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        assert msgspec.json.decode(repair_json(text)) == value


@pytest.mark.parametrize(
    ("broken", "repaired"),
    [
        (b'"a\x00b\x1fc\nd"', "a b c d"),
        (b'"\xff\xfe ok \xc3"', "\ufffd\ufffd ok \ufffd"),
        (rb'"C:\Users\me"', r"C:\Users\me"),
        (rb'"\ud800 lone \udfff"', "\ufffd lone \ufffd"),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\\ud800"', r"\ud800"),
        (b'["a", NaN, -Infinity, inf]', ["a", None, None, None]),
        (b'{"a": nan, "nan": "x: nan, y"}', {"a": None, "nan": "x: nan, y"}),
    ],
)
def test_repair(broken: bytes, repaired: Any) -> None:
    assert msgspec.json.decode(repair_json(broken)) == repaired


def blocks_of(text: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    at = 0
    while at < len(text):
        step = next(sizes)
        yield text[at : at + step]
        at += step


def test_blocks_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    text = layouts(PLAIN[:30])["indented"]
    monkeypatch.setattr(
        source_module.ByteSource,
        "blocks",
        lambda self: blocks_of(text, iter(lambda: chance.randrange(1, 90), None)),
    )
    for _ in range(30):
        for exact in (False, True):
            splitter = Splitter(ByteSource("x", data=text), exact=exact, piece_bytes=300)
            assert contents(list(splitter.pieces())) == PLAIN[:30]
            assert splitter.head == {**HEAD, **TAIL}


@pytest.mark.parametrize("between", [b"", b"\n", b"\0\0"])
def test_the_first_of_concatenated_traces_is_read(between: bytes) -> None:
    """``cat a.json b.json``: with both, each instant would be counted twice."""
    for name, text in layouts(PLAIN[:30]).items():
        if text.lstrip()[:1] == b"[":
            continue
        twice = text + between + text.removeprefix(b"\xef\xbb\xbf")
        pieces, splitter = split_text(twice)
        assert contents(pieces) == PLAIN[:30], name
        assert splitter.followed and not splitter.truncated
        assert splitter.head == split_text(text)[1].head
        # in pieces, the quick way notices that something is wrong, and the exact way what
        trace = KinetoReader().read(
            ByteSource("x", data=twice), ReadOptions(piece_bytes=300, processes=1)
        )
        assert trace.meta.events_read == 30
        assert ANOTHER_TRACE in trace.meta.events_dropped
    assert not split_text(layouts(PLAIN[:30])["compact"])[1].followed


def test_execution_trace_is_recognized() -> None:
    text = message(b'{"schema": "1.1.1", "pid": 1, "nodes": [], "finish_ts": 1}')
    assert text.startswith("an execution trace (ExecutionTraceObserver)")


@pytest.mark.parametrize("text", ['{"child_paths": {}}', '{"num_warps": 4, "num_stages": 3}'])
def test_triton_cache_file_is_recognized(text: str) -> None:
    assert message(text.encode()).startswith("a file of Triton's cache of compiled kernels")


def test_printable_names_in_messages() -> None:
    text = message(json.dumps({string.printable: 1}).encode())
    assert text.isprintable()
