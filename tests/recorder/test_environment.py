"""The description of a run, written once: enough for advice, nothing secret, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.core.cgroup import Cgroup, Throttled
from advisor.core.credentials import HIDDEN, clean_command, clean_value, is_secret_name
from advisor.core.run_directory import Manifest, RankInfo
from advisor.recorder import environment

SECRET = "s3cr3tvalue0123456789"


def test_a_manifest_and_a_rank_survive_the_disk() -> None:
    manifest = environment.build_manifest({"active": 5}, "context", "ab12")
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    rank = environment.rank_info()
    assert msgspec.json.decode(msgspec.json.encode(rank), type=RankInfo) == rank
    assert manifest.entry == "context" and manifest.run_id == "ab12"
    assert rank.pid == os.getpid() and rank.cpus is not None and rank.cpus >= 1
    assert rank.ulimits["nofile"] != 0


def test_only_listed_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_SETTING", "HOME"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rank = environment.rank_info()
    assert SECRET not in msgspec.json.encode(rank).decode()
    assert rank.env["NCCL_DEBUG"] == "TRACE" and rank.env["OMP_NUM_THREADS"] == "3"
    assert set(rank.env) <= environment.ENV | {
        name for name in rank.env if name.startswith(environment.ENV_PREFIXES)
    }


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["python", "train.py", "--api-key", SECRET], ["--api-key", HIDDEN]),
        (["python", "train.py", f"--wandb_api_key={SECRET}"], [f"--wandb_api_key={HIDDEN}"]),
        (["python", "train.py", f"wandb.apiKey={SECRET}"], [f"wandb.apiKey={HIDDEN}"]),
        (["python", "train.py", "--password", SECRET, "--lr", "1"], ["--lr", "1"]),
        (["python", "train.py", f"--data=s3://user:{SECRET}@host/x"], ["--data=s3://***@host/x"]),
        (["python", "t.py", f"https://host/f?sig=1&token={SECRET}"], []),
        (["python", "t.py", "--header", f"Authorization: Bearer {SECRET}"], []),
        (["python", "t.py", f"hf_{SECRET}abc"], [HIDDEN]),
        (["python", "-c", f"key = '{SECRET}'"], ["-c", "…"]),
        (["python", "train.py", "--use-token", "--epochs", "3"], ["--use-token", "--epochs", "3"]),
        (["python", "train.py", f"--openai-key={SECRET}"], ["--openai-key=***"]),
        (["python", "train.py", "--s3.key", SECRET, "-v"], ["--s3.key", "-v"]),
        (["python", "train.py", f"+secrets.x={SECRET}"], ["+secrets.x=***"]),
        (["python", "train.py", f"++trainer.logger.wandb_key={SECRET}"], []),
        (["python", "train.py", f'{{"password": "{SECRET}"}}'], ['{"password": "***"}']),
        (["python", "train.py", f"--c={{'db': {{'api_key': '{SECRET}'}}}}"], []),
        (["python", "train.py", f"db={{password:{SECRET},user:a}}"], ["db={password:***,user:a}"]),
        (["python", "train.py", "--cfg", f"a: 1\npassword: {SECRET}\n"], ["--cfg"]),
        (["python", "train.py", f"hvs.CAESIJ{SECRET}"], []),
        (["python", "train.py", f"--dsn=postgres://u:{SECRET}@h/x"], []),
        (
            ["python", "train.py", "--image-key=jpg", "model.token_dim=5"],
            ["--image-key=jpg", "model.token_dim=5"],
        ),
        (["python", "train.py", "--max-tokens", "512"], ["--max-tokens", "512"]),
        (["python", "train.py", "--tokenizer", "gpt2"], ["--tokenizer", "gpt2"]),
        (["python", "train.py", "--keyframes", "3"], ["--keyframes", "3"]),
    ],
)
def test_credentials_in_a_command_line_are_replaced(command: list[str], kept: list[str]) -> None:
    cleaned = clean_command(command)
    assert SECRET not in " ".join(cleaned)
    assert [word for word in kept if word in cleaned] == kept
    assert len(cleaned) == len(command)


def test_spawned_process_has_the_command_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = ["python3", "-c", "spawn_main(pipe_handle=8)", "--multiprocessing-fork"]
    monkeypatch.setattr(sys, "orig_argv", spawned)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    assert environment.command_line()[1:] == ["train.py", "--steps", "3"]


@given(st.lists(st.text(max_size=60), max_size=30))
def test_any_command_line_is_cleaned_without_an_error(command: list[str]) -> None:
    assert len(clean_command(command)) == len(command)


@given(st.text(max_size=400))
def test_cleaning_twice_equals_cleaning_once(value: str) -> None:
    assert clean_value(clean_value(value)) == clean_value(value)


def test_names_are_judged_by_their_last_words() -> None:
    assert all(map(is_secret_name, ["TOKEN", "hf-token", "dbPassword", "ssh_key", "api.key"]))
    assert not any(map(is_secret_name, ["tokens", "key", "monkey", "token-dim", "", "---"]))


def test_both_clock_anchors_are_the_same_instant() -> None:
    unix, perf = environment.clock_anchors()
    offset = time.time_ns() - time.perf_counter_ns()
    assert abs((unix - perf) - offset) < 50_000_000


def test_environment_imports_no_module_and_initializes_no_cuda() -> None:
    code = (
        "import sys\n"
        "from advisor.recorder.environment import build_manifest, rank_info\n"
        "rank_info(); build_manifest({}, 'context', 'x')\n"
        "print('torch' in sys.modules, 'polars' in sys.modules, 'pynvml' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False", "False"] and result.stderr == ""


def test_flags_of_torch_are_as_torch_has_them() -> None:
    torch = pytest.importorskip("torch")
    before = torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    try:
        torch.backends.cudnn.benchmark = True
        with torch.autograd.set_detect_anomaly(True), torch.autocast("cpu", torch.bfloat16):
            flags = environment.read_flags()
    finally:
        torch.backends.cudnn.benchmark = before[0]
    assert flags["cudnn.benchmark"] is True and flags["anomaly_mode"] is True
    assert flags["autocast"] == "bfloat16"
    assert flags["num_threads"] == torch.get_num_threads()
    assert "autocast" not in environment.read_flags()


def test_failing_torch_queries_cost_only_the_torch_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BrokenModule:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "torch", BrokenModule())
    rank = environment.rank_info()
    assert rank.devices == [] and rank.pid == os.getpid()
    assert "python" in environment.build_manifest({}, "context", "x").versions
    assert "gc_enabled" in rank.flags


def test_mixed_tf32_settings_are_read_by_the_newer_one() -> None:
    class Backend:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    assert environment._allows_tf32(Backend()) is True


# -- git ------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are not forked here")
def test_git_query_leaves_no_pipe_to_forked_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe() -> None:
        raise AssertionError("a pipe")

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(os, "pipe", pipe)
    assert environment.git_state(tmp_path) == (None, False)


def test_commit_and_changes_are_reported(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "new.txt").write_text("not tracked")
    assert environment.git_state(repository) == (commit, False)
    (repository / "train.py").write_text("2")
    assert environment.git_state(repository) == (commit, True)
    inside = repository / "inside"
    inside.mkdir()
    assert environment.git_state(inside)[0] == commit


def test_without_git_the_commit_is_read_from_its_files(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    worktree = repository.parent / f"{repository.name}-other"
    git(repository, "worktree", "add", "-q", "-b", "other", str(worktree))
    monkeypatch.setattr(environment.subprocess, "run", _no_git)
    assert environment.git_state(repository) == (commit, None)
    assert environment.git_state(worktree) == (commit, None)


def _no_git(*_: object, **__: object) -> None:
    raise FileNotFoundError("git")


def test_no_commit_is_reported_outside_a_repository(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) == (None, None)


# -- limits ---------------------------------------------------------------------------------


def files(root: Path, **contents: str) -> None:
    for name, text in contents.items():
        file = root / name.replace("__", "/").replace("·", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_quota_of_the_container_limits_the_cpus(tmp_path: Path) -> None:
    cgroup_file = tmp_path / "self"
    cgroup_file.write_text("0::/job/task\n")
    (tmp_path / "job" / "task").mkdir(parents=True)
    files(
        tmp_path,
        job__task__cpu·max="max 100000",
        job__cpu·max="250000 100000",
        job__task__cpu·stat="usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 900\n",
        job__memory·max="1000000",
        job__task__memory·max="max",
        job__task__memory·current="700000",
        job__task__memory·stat="anon 1\ninactive_file 200000\n",
    )
    group = Cgroup(tmp_path, cgroup_file)
    assert group.cpu_quota() == 2.5
    assert group.throttled() == Throttled(4, 900)
    assert group.memory_limit() == 1_000_000 and group.memory_used() == 500_000
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert environment.usable_cpus(group) == min(2, cpus or 1)


def test_cgroups_v1_is_read(tmp_path: Path) -> None:
    cgroup_file = tmp_path / "self"
    cgroup_file.write_text("4:memory:/m\n2:cpu,cpuacct:/c\n")
    files(
        tmp_path,
        cpu__c__cpu·cfs_quota_us="-1",
        cpu__cpu·cfs_quota_us="150000",
        cpu__cpu·cfs_period_us="100000",
        cpu__c__cpu·stat="nr_periods 1\nnr_throttled 7\nthrottled_time 3000000\n",
        memory__m__memory·limit_in_bytes="9223372036854771712",
    )
    group = Cgroup(tmp_path, cgroup_file)
    assert group.cpu_quota() == 1.5
    assert group.throttled() == Throttled(7, 3000)
    assert group.memory_limit() is None


def test_no_cgroups_is_not_a_limit(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "none", tmp_path / "self")
    assert group.cpu_quota() is None and group.throttled() is None
    assert group.memory_limit() is None and group.memory_used() is None


def test_cpu_lists_are_parsed_in_kernel_format() -> None:
    assert environment.cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert environment.cpu_list("") == set()


def test_numa_nodes_without_cpus_do_not_count(tmp_path: Path) -> None:
    own_cpu = min(os.sched_getaffinity(0))
    for name, cpus in (("node0", f"{own_cpu}"), ("node1", "100000-100007"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    assert environment.numa_nodes(tmp_path) == (2, [0])


def test_a_gpu_on_no_known_node_has_none(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    for text, node in (("-1\n", None), ("1\n", 1)):
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
        assert environment.gpu_node("0000:3B:00.0", tmp_path) == node
