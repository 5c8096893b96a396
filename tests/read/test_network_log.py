"""NCCL's logs and topologies: what is read of each version, and what follows from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from advisor import analyze, cli
from advisor.core.auxiliary_inputs import NetworkLog
from advisor.core.report import Report
from advisor.testing import TraceBuilder
from tests.read.nccl import logs


def read(folder: Path, *texts: str) -> tuple[Report, NetworkLog]:
    for number, text in enumerate(texts):
        (folder / f"nccl.node{number}.{number}.log").write_text(text)
    report = analyze(str(folder))
    assert report.network is not None
    return report, report.network


def rules(report: Report) -> set[str]:
    return {finding.rule for finding in [*report.findings, *report.notes]}


# -- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", logs.HEAD)
def test_every_version_names_ranks_paths_and_channels(version: str, tmp_path: Path) -> None:
    within = "P2P/IPC/read" if version in ("2.14", "2.18", "rccl") else "P2P/CUMEM/read"
    text = logs.job(version, within=within, more=(logs.VERBS,))
    report, log = read(tmp_path, text)
    assert log.hosts == 2 and log.ranks == 8 and log.node_ranks == 4
    # of the 8 steps of the ring 6 stay in a node; the receiving side is not counted again
    assert log.paths == {f"P2P/{within.split('/')[1]}": 6, "NET/IB/GDRDMA": 2}
    assert log.networks == {"IB": 8} and log.devices == ["mlx5_0:1/IB", "mlx5_1:1/IB"]
    assert log.channels == 2 and log.versions[0].startswith(logs.HEAD[version][:4])
    assert rules(report) == set() and report.status == "limited"
    assert "No fault" in report.verdict


def test_files_of_single_processes_read_as_one_log(tmp_path: Path) -> None:
    log_lines = logs.job(more=(logs.VERBS, logs.GRAPH)).splitlines()
    parts = [
        "\n".join([*log_lines[:1], *(x for x in log_lines if f":{1000 + r}:" in x)])
        for r in range(8)
    ]
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    _, one = read(tmp_path / "one", "\n".join(log_lines))
    _, many = read(tmp_path / "many", *parts)
    assert many.files == 8
    assert (many.paths, many.networks, many.ranks, many.node_ranks, many.ring_gb_per_s) == (
        one.paths, one.networks, one.ranks, one.node_ranks, 192.0,
    )  # fmt: skip


def test_graph_lines_give_the_ring_and_the_adapters(tmp_path: Path) -> None:
    _, log = read(tmp_path, logs.job(more=(logs.GRAPH, logs.SYSTEM)))
    assert log.ring == "NVL/PIX" and log.ring_gb_per_s == 8 * 24
    assert log.nic_gb_per_s == 4 * 50


def test_algorithms_are_named_in_old_numbers_and_new_words(tmp_path: Path) -> None:
    tuned = (
        "AllReduce: 8388608 Bytes -> Algo 1 proto 2 time 120.5",
        "AllReduce: 8192 Bytes -> Algo TREE proto LL channel{{Lo..Hi}}={{0..3}}",
    )
    _, log = read(tmp_path, logs.job(more=tuned))
    assert log.algorithms == {"RING/SIMPLE": 8, "TREE/LL": 8}


def test_lines_in_a_jobs_own_log_are_found(tmp_path: Path) -> None:
    text = "epoch 1\n" + logs.job(prefix="[default0]: ") + "loss 0.3\n"
    file = tmp_path / "slurm-1.out"
    file.write_text(text)
    report = analyze(str(file))
    assert report.network is not None and report.network.ranks == 8


@pytest.mark.parametrize(
    ("text", "links", "nics"),
    [
        (logs.matrix(8, "NV18", 4), {"NV18": 28}, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]),
        (logs.matrix(4, "NODE", 2, legend=False), {"NODE": 6}, ["mlx5_0", "mlx5_1"]),
        (logs.rocm(4, "XGMI"), {"XGMI": 6}, []),
    ],
    ids=["legend", "columns", "rocm"],
)
def test_a_topology_counts_each_pair_once(
    text: str, links: dict[str, int], nics: list[str], tmp_path: Path
) -> None:
    (tmp_path / "topology.txt").write_text(text)
    log = analyze(str(tmp_path)).network
    assert log is not None
    assert log.gpu_links == links and log.nics == nics
    assert sum(log.nic_links.values()) == (log.gpus if nics else 0)


# -- what follows -------------------------------------------------------------------------------


def only_finding_text(report: Report, rule: str) -> str:
    assert rules(report) == {rule}
    (finding,) = [*report.findings, *report.notes]
    return f"{finding.title} {finding.summary} {finding.fix} {finding.code}"


def test_unused_adapters_are_reported_with_container_flags(tmp_path: Path) -> None:
    (tmp_path / "topology.txt").write_text(logs.matrix(4, "NV12", 2))
    text = logs.job(network="Socket", across="NET/Socket/0", more=(logs.SOCKET, logs.NO_DEVICE))
    report, log = read(tmp_path, text)
    result = only_finding_text(report, "nccl-sockets")
    assert "mlx5_0" in result and "/dev/infiniband" in result and "eth0" in result
    assert log.without_device == 8
    (finding,) = report.notes
    assert finding.confidence > 0.4 and report.status == "bottlenecks"


def test_sockets_with_no_adapter_in_sight_have_low_confidence(tmp_path: Path) -> None:
    text = logs.job(network="Socket", across="NET/Socket/0", more=(logs.SOCKET, logs.NO_DEVICE))
    report, _ = read(tmp_path, text)
    (finding,) = report.notes
    assert finding.rule == "nccl-sockets" and finding.confidence <= 0.4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Failed to open libibverbs.so[.1]", "Install libibverbs"),
        ("WARN Call to ibv_open_device failed", "--device=/dev/infiniband"),
        ("NET/Socket : Using [0]docker0:172.17.0.1<0>", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_log_gives_the_reason_for_sockets(line: str, words: str, tmp_path: Path) -> None:
    report, _ = read(tmp_path, logs.job(network="Socket", across="NET/Socket/0", more=(line,)))
    assert words in only_finding_text(report, "nccl-sockets")


def test_infiniband_switched_off_is_one_finding_not_two(tmp_path: Path) -> None:
    off = "NCCL_IB_DISABLE set by environment to 1."
    text = logs.job(network="Socket", across="NET/Socket/0", more=(off, logs.SOCKET))
    assert "unset NCCL_IB_DISABLE" in only_finding_text(read(tmp_path, text)[0], "nccl-settings")


@pytest.mark.parametrize(
    ("line", "words"), [(logs.NO_MODULE, "nvidia-peermem"), (logs.FAR, "NCCL_NET_GDR_LEVEL")]
)
def test_missing_gpudirect_has_its_reason_and_cure(line: str, words: str, tmp_path: Path) -> None:
    report, log = read(tmp_path, logs.job(across="NET/IB/0", more=(logs.VERBS, line)))
    assert (
        words in only_finding_text(report, "nccl-gpudirect") and sum(log.gdr_disabled.values()) == 8
    )


def test_distant_adapters_are_no_fault_if_near_ones_are_used(
    tmp_path: Path,
) -> None:
    assert rules(read(tmp_path, logs.job(more=(logs.FAR,)))[0]) == set()


def test_shared_memory_is_a_fault_only_beside_nvlink(tmp_path: Path) -> None:
    text = logs.job(hosts=1, within="SHM/direct/direct")
    for name, link in (("nv", "NV12"), ("sys", "SYS")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "topology.txt").write_text(logs.matrix(4, link))
        report, _ = read(folder, text)
        assert rules(report) == ({"nccl-node-path"} if name == "nv" else set())


def test_disabled_peer_access_names_gpu_pairs_once(tmp_path: Path) -> None:
    off = "P2P is disabled between connected GPUs 1 and 0. You can repress this message with X=1."
    report, log = read(tmp_path, logs.job(hosts=1, within="SHM/direct/direct", more=(off,)))
    assert "--ipc=host" in only_finding_text(report, "nccl-node-path") and log.p2p_disabled == 1


def test_locked_memory_and_multicast_are_reported(tmp_path: Path) -> None:
    failed = "WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"
    assert "memlock" in only_finding_text(
        read(tmp_path, logs.job(more=(failed,)))[0], "nccl-limits"
    )
    folder = tmp_path / "nvls"
    folder.mkdir()
    (folder / "topo.txt").write_text(logs.matrix(8, "NV18"))
    line = "NVLS multicast support is not available on dev {gpu}"
    assert "NV18" in only_finding_text(read(folder, logs.job(gpus=8, more=(line,)))[0], "nccl-nvls")


def test_trace_beside_a_log_gets_a_replayed_gain(tmp_path: Path) -> None:
    size, rate = 256 << 20, 25.0
    us = size * 2 * 7 / 8 / rate / 1e3
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.run("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", 3000)
            b.collective("allreduce", size, us, group_size=8, wait=True)
            b.sync()
    b.write(tmp_path / "rank0.json")
    (tmp_path / "topology.txt").write_text(logs.matrix(8, "NV12"))
    report, log = read(tmp_path, logs.job(hosts=1, gpus=8, within="SHM/direct/direct"))
    assert log.node_ranks == 8
    result = {each.rule: each for each in report.findings}
    impact = result["nccl-node-path"].impact
    # an A100's links: 300 GB/s, of which NCCL attains 240; the rest of the step stays
    assert impact is not None and impact.gain_ns is not None
    assert impact.gain_ns == pytest.approx(us * 1e3 * (1 - rate / 240), rel=0.05)


def test_the_recorders_environment_is_enough_for_settings(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.record_of_run(env={"NCCL_P2P_DISABLE": "1"}).steps(10, 10)
    from advisor.advise.rule_loading import load_rules
    from advisor.advise.rule_runner import run_rules

    (rule,) = [each for each in load_rules(config={}) if each.id == "nccl-settings"]
    (finding,) = run_rules(-1, b.analysis(), [rule]).findings
    assert "NCCL_P2P_DISABLE=1" in finding.title


# -- hostile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_damaged_logs_are_read_in_part_or_one_line_errors(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    data = bytearray((logs.job() + logs.matrix(8, "NV18", 4)).encode())
    for _ in range(200):
        data[chance.randrange(len(data))] = chance.randrange(256)
    file = tmp_path / "nccl.log"
    file.write_bytes(data[: chance.randrange(1, len(data))])
    assert cli.run(["analyze", str(file)]) in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1


def test_lines_without_end_and_ranks_without_number_cost_little(tmp_path: Path) -> None:
    prefix = "node0:1:2 [0] NCCL INFO "
    text = "\n".join(
        [
            prefix + "Channel 00/0 : " + "9" * 100_000 + "[0] -> 1[1] via SHM",
            prefix + "comm 0x1 rank 99999999999 nranks 99999999999",
            prefix + "NET/Socket : Using " + "[0]eth0:" * 50_000,
            "a." * 500_000 + " NCCL INFO " + "b" * 100,
            *(f"{prefix}NCCL_X{n} set by environment to {n}" for n in range(1000)),
            *(f"h{n}:1:2 [0] file.cc:3 NCCL WARN w{n}" for n in range(1000)),
        ]
    )
    _, log = read(tmp_path, text)
    assert len(log.settings) <= 64 and len(log.warnings) <= 64 and log.paths == {}


def test_a_file_without_a_line_of_nccl_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl.log"
    file.write_text("hello\n")
    assert cli.run(["analyze", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_formats_show_the_path_and_redaction_hides_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl.log"
    file.write_text(logs.job(across="NET/IB/0", more=(logs.NO_MODULE,)))
    for form in ("terminal", "markdown", "html", "json"):
        assert cli.run(["analyze", str(file), "--format", form]) == 0
        assert "NET/IB" in capsys.readouterr().out, form
    assert cli.run(["analyze", str(file), "--redact"]) == 0
    assert "node0" not in capsys.readouterr().out
