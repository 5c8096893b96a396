"""Endpoints of the timeline: their answers, and refusal of invalid parameters."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.dashboard.timeline.routes import _ANSWERS as ANSWERS
from advisor.testing import TraceBuilder

dash = pytest.importorskip("dash", reason="the dashboard extra is not installed")

from advisor.dashboard.app import create_app  # noqa: E402
from advisor.dashboard.loaded_runs import DashboardSession  # noqa: E402
from advisor.dashboard.server import Access  # noqa: E402

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x00'\"&"


def training_loop(rank: int) -> TraceBuilder:
    b = TraceBuilder(gpu="A100", rank=rank, world_size=2)
    for _ in range(4):
        with b.step():
            b.loader_wait(3000, workers=0)
            with b.op("aten::mm", [[64, 64], [64, 64]], "float"):
                b.launch(HOSTILE, 200, blocks=16)
            b.collective("allreduce", 1 << 20, 300)
    return b


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        training_loop(rank).write(Path(folder, f"rank{rank}.json"))
    session = DashboardSession([str(folder)]).load()
    assert session.entries[0].state == "ready", session.entries[0].failure_reason
    return create_app(session, Access()).server.test_client()


def get(client, endpoint: str, **query):
    return client.get(f"/_advisor/timeline/{endpoint}?{urlencode(query)}")


def test_answers_are_consistent(client, decode_view):
    info = get(client, "info").json
    lanes = sum(group["count"] for group in info["groups"])
    names = get(client, "names").json["names"]
    whole = {"x0": info["first_ns"], "x1": info["last_ns"], "px": 800, "lanes": f"0-{lanes - 1}"}
    response = get(client, "view", **whole)
    assert response.mimetype == "application/octet-stream"
    answer = decode_view(response.data)
    assert answer.header["seen"] == info["slices"]
    assert answer.slices[4].max() < lanes
    assert HOSTILE.replace("\x00", "") in "".join(names).replace("\x00", "")
    at = int(answer.slices[3][0])
    assert get(client, "slice", id=at).json["ts"] == info["first_ns"] + answer.slices[0][0]
    assert get(client, "table", **whole).json["total"] == info["slices"]


def test_each_rank_has_its_own_timeline(client):
    assert get(client, "info").json["ranks"] == [0, 1]
    for rank in (0, 1):
        info = get(client, "info", rank=rank).json
        assert info["rank"] == rank


def test_a_focused_finding_flags_its_events(client, decode_view):
    info = get(client, "info").json
    keys = [finding["key"] for finding in info["findings"]]
    assert keys and len(set(keys)) == len(keys)
    lanes = sum(group["count"] for group in info["groups"])
    whole = {"x0": info["first_ns"], "x1": info["last_ns"], "px": 800, "lanes": f"0-{lanes - 1}"}
    outlined = {}
    for key in keys:
        answer = decode_view(get(client, "view", focus=key, **whole).data)
        outlined[key] = int((answer.slices[6] & 1).sum()) + len(answer.flagged[0])
    assert any(outlined.values())
    assert decode_view(get(client, "view", focus="no-such-rule", **whole).data).slices[6].max() == 0


def test_a_search_flags_its_matches(client, decode_view):
    info = get(client, "info").json
    lanes = sum(group["count"] for group in info["groups"])
    query = {"x0": info["first_ns"], "x1": info["last_ns"], "px": 800, "lanes": f"0-{lanes - 1}"}
    answer = decode_view(get(client, "view", q="aten::mm", **query).data)
    assert (answer.slices[6] & 2).sum() + len(answer.flagged[0]) > 0
    assert get(client, "search", q="aten::mm").json["total"] == 4
    assert get(client, "search", q="no such name").json["total"] == 0
    assert get(client, "search", q="").json["total"] == 0


@pytest.mark.parametrize(
    ("endpoint", "query"),
    [
        ("view", {}),
        ("view", {"x0": "0", "x1": "0", "px": "100"}),
        ("view", {"x0": "0", "x1": "1e6", "px": "100"}),
        ("view", {"x0": "0", "x1": "100000", "px": "0"}),
        ("view", {"x0": "0", "x1": "100000", "px": "99999999"}),
        ("view", {"x0": "0", "x1": "100000", "px": "100", "lanes": "5000"}),
        ("view", {"x0": "0", "x1": "100000", "px": "100", "lanes": "3-1"}),
        ("view", {"x0": "0", "x1": "100000", "px": "100", "lanes": ",".join(["0"] * 600)}),
        ("view", {"x0": "0", "x1": "100000", "px": "100", "counters": "0"}),
        ("view", {"x0": "0", "x1": "9" * 18, "px": "100"}),
        ("view", {"x0": "0", "x1": "9" * 40, "px": "100"}),
        ("view", {"x0": "0", "x1": "100000", "px": "100", "q": "x" * 201}),
        ("slice", {"id": "4294967295"}),
        ("slice", {"id": "-1"}),
        ("slice", {"id": "٣"}),
        ("info", {"rank": "7"}),
        ("info", {"run": "../../etc/passwd"}),
        ("at", {"lane": "99999", "t": "0", "reach": "1"}),
        ("search", {"q": "x", "back": "2"}),
        ("names", {"page": "-1"}),
    ],
)
def test_invalid_parameters_are_refused_with_a_reason(client, endpoint, query):
    response = get(client, endpoint, **query)
    assert response.status_code == 400
    assert response.json["error"]


INVALID_VALUES = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(
        ["", "0", "0-3", "1,2", "nan", "inf", "-0", "0x10", "1_000", "\x00", "%", "../", "[]"]
    ),
    st.text(max_size=30),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(sorted(ANSWERS)),
    st.dictionaries(
        st.sampled_from(
            ["x0", "x1", "px", "lanes", "counters", "focus", "q", "id", "rank", "run", "lane", "t",
             "reach", "dur", "page", "back"]
        ),
        INVALID_VALUES,
        max_size=8,
    ),
)  # fmt: skip
def test_random_parameters_are_answered_or_refused(client, decode_view, endpoint, query):
    parts = "&".join(
        f"{key}={quote(value, safe='', errors='replace')}" for key, value in query.items()
    )
    response = client.get(f"/_advisor/timeline/{endpoint}?{parts}")
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert set(json.loads(response.data)) == {"error"}
    elif endpoint == "view":
        decode_view(response.data)


def test_post_requests_are_refused(client):
    for endpoint in ANSWERS:
        assert client.post(f"/_advisor/timeline/{endpoint}").status_code == 405


def test_a_run_that_is_not_read_yet_is_reported(tmp_path):
    session = DashboardSession([str(tmp_path)])
    app = create_app(session, Access())
    response = app.server.test_client().get("/_advisor/timeline/info")
    assert response.status_code == 503
    assert response.json["state"] == "loading"
    session.load()
    response = app.server.test_client().get("/_advisor/timeline/info")
    assert response.status_code == 409
    assert response.json["error"]
