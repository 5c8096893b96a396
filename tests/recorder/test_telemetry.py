"""The sampler writes what it sees, and never harms the process it lives in."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from advisor.core.run_directory import Sample
from advisor.recorder.telemetry import MAX_HZ, HostSampler, Sampler, SampleSource
from tests.recorder import fake_nvml as fake

pytestmark = pytest.mark.timed


def wait_for(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake.FakeNvml(init_error=12))


def test_host_is_sampled_without_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_driver(monkeypatch)
    written: list[Sample] = []
    sampler = Sampler(written.append, hz=20)
    sampler.start()
    wait_for(lambda: len(written) >= 3)
    sampler.stop()
    assert sampler.without_gpu == "no NVIDIA driver" and sampler.problem is None
    assert all(sample.gpus == [] and sample.host is not None for sample in written)
    times = [sample.t for sample in written]
    assert times == sorted(times) and times[0] <= time.perf_counter_ns()


def test_costly_fields_are_sampled_first_and_then_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake.FakeNvml(fake.healthy_gpu()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    written: list[Sample] = []
    sampler = Sampler(written.append, hz=20, slow_every_s=3600)
    sampler.start()
    wait_for(lambda: len(written) >= 4)
    sampler.stop()
    seen = [sample.gpus[0].ecc_uncorrected for sample in written]
    assert seen[0] == 0 and set(seen[1:]) == {None}
    assert all(sample.gpus[0].utilisation == 97 for sample in written)


def test_failing_writer_ends_only_the_sampling(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_driver(monkeypatch)

    def raise_disk_full(_: Sample) -> None:
        raise OSError(28, "No space left on device")

    sampler = Sampler(raise_disk_full, hz=20)
    sampler.start()
    wait_for(lambda: sampler.problem is not None)
    sampler.stop()
    assert sampler.problem is not None and "No space left" in sampler.problem
    assert capfd.readouterr().err == ""


def test_a_gpu_lost_in_mid_run_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = fake.healthy_gpu("GPU-one"), fake.healthy_gpu("GPU-two")
    monkeypatch.setitem(sys.modules, "pynvml", fake.FakeNvml(one, two))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with SampleSource() as source:
        assert [gpu.uuid for gpu in source.sample(slow=True).gpus] == ["GPU-one", "GPU-two"]
        one.errors["utilisation"] = 15
        for _ in range(2):
            assert [gpu.uuid for gpu in source.sample(slow=True).gpus] == ["GPU-two"]
        assert source.without_gpu is not None and "GPU-one" in source.without_gpu


def test_driver_handles_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake.FakeNvml(fake.healthy_gpu(gpm=True))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with SampleSource() as source:
        source.sample(slow=True)
    assert module.users == 0 and sorted(module.freed) == ["events", "gpm", "gpm"]


def test_stopping_is_quick_and_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    others = set(threading.enumerate())

    def threads() -> int:
        return sum(t.name == "advisor telemetry" for t in set(threading.enumerate()) - others)

    sampler = Sampler(lambda _: None, hz=0.01)
    sampler.stop()
    sampler.start()
    sampler.start()
    assert threads() == 1
    start_s = time.monotonic()
    sampler.stop()
    sampler.stop()
    assert time.monotonic() - start_s < 1.5
    wait_for(lambda: not threads())


def test_the_rate_is_bounded() -> None:
    assert Sampler(lambda _: None, hz=1e9).interval == 1 / MAX_HZ
    assert Sampler(lambda _: None, hz=0).interval == 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_child_runs_no_sampling_and_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    written: list[Sample] = []
    sampler = Sampler(written.append, hz=20)
    sampler.start()
    wait_for(lambda: bool(written))
    pid = os.fork()
    if pid == 0:
        count = len(written)
        sampler.stop()
        time.sleep(0.2)
        os._exit(0 if len(written) == count else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    count = len(written)
    wait_for(lambda: len(written) > count)
    sampler.stop()


def test_work_of_this_process_and_of_a_child_is_its_cpu_use() -> None:
    import subprocess

    host = HostSampler()
    if host.psutil is None:
        pytest.skip("psutil is not installed")
    spin = "import time\nend=time.time()+30\nwhile time.time()<end: pass"
    child = subprocess.Popen([sys.executable, "-c", spin])
    child_process = host.psutil.Process(child.pid)
    try:
        time.sleep(0.3)
        host.sample(slow=True)
        assert child.pid in host.pids
        start_s, worked, own_cpu_s = (
            time.perf_counter(),
            child_process.cpu_times().user,
            time.process_time(),
        )
        # how much of a core it gets is the machine's affair
        wait_for(lambda: child_process.cpu_times().user - worked > 0.3)
        sample = host.sample(slow=False)
        seen, by_child = sample.process_cpu, sample.children_cpu
        wall = time.perf_counter() - start_s
        of_child = child_process.cpu_times().user - worked
        used = of_child + time.process_time() - own_cpu_s
    finally:
        child.kill()
        child.wait()
    assert seen is not None
    assert seen == pytest.approx(100 * used / wall, rel=0.25)
    assert by_child == pytest.approx(100 * of_child / wall, rel=0.25)


def test_wait_for_a_busy_core_is_counted() -> None:
    import subprocess

    if not hasattr(os, "sched_setaffinity") or HostSampler().sample(slow=False).run_delay is None:
        pytest.skip("the kernel does not count it, or a process cannot choose its core")
    program = (
        "import os, subprocess, sys, time\n"
        "from advisor.recorder.telemetry import HostSampler\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "spin = 'import time\\nend = time.time() + 30\\nwhile time.time() < end: pass'\n"
        "rival = subprocess.Popen([sys.executable, '-c', spin])\n"
        "host = HostSampler()\n"
        "time.sleep(0.3)\n"
        "before = host.sample(slow=False).run_delay\n"
        "start, on_core = time.time(), time.process_time()\n"
        "while time.time() - start < 1: pass\n"
        "wall, worked = time.time() - start, time.process_time() - on_core\n"
        "waited = (host.sample(slow=False).run_delay - before) / 1e9\n"
        "rival.kill()\n"
        "print(wall, worked, waited)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    wall, worked, waited = map(float, done.stdout.split())
    assert waited > 0.2 * wall, "the rival gets about half of the core"
    assert waited + worked == pytest.approx(wall, rel=0.1)


def test_workers_started_between_slow_samples_are_counted() -> None:
    import multiprocessing

    host = HostSampler()
    if host.psutil is None:
        pytest.skip("psutil is not installed")
    host.sample(slow=True)
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        host.sample(slow=False)
        assert worker.pid in host.pids
    finally:
        worker.kill()
        worker.join()


def test_a_child_that_has_ended_is_not_an_error() -> None:
    import subprocess

    host = HostSampler()
    if host.psutil is None:
        pytest.skip("psutil is not installed")
    before = host.sample(slow=True).children_rss or 0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert (host.sample(slow=True).children_rss or 0) > before
    child.kill()
    child.wait()
    assert host.sample(slow=False).process_cpu is not None


def test_host_sample_without_psutil_has_no_process_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    sample = HostSampler().sample(slow=True)
    assert sample.cpu is None and sample.rss is None
