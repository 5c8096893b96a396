"""Redaction: what is planted anywhere does not come out, and what advice needs does."""

from __future__ import annotations

import json
import random
import re
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import advisor.export.redact
from advisor import cli
from advisor.advise.engine import analyze, analyze_in_full
from advisor.core.credentials import clean_value
from advisor.core.finding import Edit
from advisor.core.report import Report
from advisor.export import rewrite
from advisor.export.redact import REDACTED, Redactor, is_random, names_in, redact
from advisor.measure import Analysis
from advisor.render.formats import REPORTS
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host
from advisor.testing import TraceBuilder

SECRETS = [
    "hf_" + "aB3dE5gH7jK9mN1pQ3sT",
    "sk-" + "proj-abcDEF123456ghiJKL",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ghp_" + "0123456789abcdefABCDEF0123456789abcd",
    "glpat-" + "abcdefGHIJKL12345678",
    "xoxb-" + "123456789012-abcdefGHIJKL",
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.abcDEF123",
    "dapi" + "0123456789abcdef0123456789abcdef",
    "hvs." + "CAESIJ0123456789abcdefABCDEF",
    "dop_v1_" + "0123456789abcdef0123456789abcdef",
    "sk_live_" + "0123456789abcdefABCD",
    "nvapi-" + "0123456789abcdefABCDEF",
    "9f86d081884c7d659a2feaa0c55ad015",
    "T7kQ2mZx9RvB4nLc8WpY3sHd6FgJ1aEu",
]
"""Credentials that are recognised by themselves, wherever they stand."""
IN_CONTEXT = [
    ("WANDB_API_KEY={}", "hunter2"),
    ("export MY_TOKEN='{}'", "correct horse"),
    ("--password {}", "tr0ub4dor"),
    ("db_password: {}", "letmein"),
    ("postgres://admin:{}@db/x", "s3cr3t"),
    ("Authorization: Bearer {}", "abcdef0123456789"),
    ("/home/{}/train.py", "jdoe"),
    ("C:\\Users\\{}\\train.py", "jdoe"),
    ("/data/{}/run7/train.py(12): forward", "acme-team"),
    ("src/{}/train.py(12): forward", "acme-team"),
    ("../{}/runs/trace_w0.json.gz", "acme-team"),
    ("see {}\\\\model.py", "acme-team"),
    ("mail {}@example.com", "jane.doe"),
    ("ssh://git.{}.example.com/x", "acme"),
    ("10.20.{}.41", "30"),
    ("node7.{}.internal:29500", "acme"),
    ("collector.{}.io:4317", "acme"),
    ("login.cs.{}.nl", "acme"),
    ("tcp://[2001:db8:85a3::8a2e:{}:7334]:29500", "370"),
    ("[fe80::1ff:fe23:{}:890a%eth0]", "4567"),
    ("2001:db8:0:0:0:0:{}:1", "beef"),
    ("aa:bb:cc:{}:ee:ff", "d7"),
    ("nas01:/nfs/{}/run", "acme"),
    ("{}:/export/x.py", "nas01"),
    ("{}@nas01:/export/x.py", "alice"),
    ("ssh {}@gpu17 python", "alice"),
    ("{}@gpu17(3): run", "alice"),
    ("alice@{}(", "gpu17"),
    ("git@example:{}/project.git", "acme"),
    ("git@example:org/{}.git", "moonshot"),
    ("git clone git@example.org:acme/{}", "moonshot"),
    ("\\\\{}\\share\\x.py", "fileserver"),
    ("//{}/share/x.py", "fileserver"),
    ("%2Fhome%2F{}%2Fproj%2Ftrain.py", "alice"),
    ("\\/home\\/{}\\/proj\\/train.py", "alice"),
    ("/home/{}/my\\-proj/train\\.py", "alice"),
    ('{{\\"password\\": \\"{} x\\"}}', "hunter2"),
    ('password="a\\"b{}"', "hunter2"),
    ("password='a\\'b{}'", "hunter2"),
    ('{{"db": {{"password" : "{}"}}}}', "hunter2"),
    ("secrets: {{x: 1, y: {}}}", "hunter2"),
    ("db.passwd: |\n  {}\n  more", "hunter2"),
    ("+secrets.x={}", "hunter2"),
    ("--s3.key {}", "hunter2"),
    ("--password 'a {}'", "hunter2"),
    ("SLURM_JOB_USER={}", "jdoe7"),
    ("SLURM_JOB_NODELIST={}[01-04]", "gpu"),
    ("MASTER_ADDR={}", "node17"),
    ("https://u:{}@x.org/a", "p4ss"),
    ("AccountKey={}==;EndpointSuffix=core", "abc123xyz"),
    ("AWS_ACCESS_KEY_ID={}", "AKQWE"),
]
"""Texts with a private part."""


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path and the text of each string in a JSON value; the path of a key ends in
    ``(key,)``."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, (key,))
            yield from strings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings(item, (*path, index))


def plant(value: Any, path: tuple[Any, ...], secret: str, glue: str = " ") -> Any:
    """Put a secret into one place of a value."""
    if not path:
        return f"{value}{glue}{secret}"
    head, *rest = path
    if isinstance(head, tuple):
        return {(f"{k}{glue}{secret}" if k == head[0] else k): v for k, v in value.items()}
    if isinstance(value, list):
        return [
            plant(item, tuple(rest), secret, glue) if index == head else item
            for index, item in enumerate(value)
        ]
    return {
        k: plant(item, tuple(rest), secret, glue) if k == head else item
        for k, item in value.items()
    }


def small_trace() -> dict[str, Any]:
    """A trace with one event of each kind, metadata, nested arguments and unusual extra keys."""
    b = TraceBuilder(rank=0, world_size=2)
    with b.step():
        b.loader_wait(100)
        with b.python("/home/someone/project/train.py(12): step"):
            with b.op("aten::mm", [[8, 8], [8, 8]], concrete=["a", "b"]):
                b.launch("ampere_sgemm_128x64_nn", 50)
            b.copy("HtoD", 4096, pinned=False)
            b.collective("allreduce", 4096, 30)
        b.sync()
    document: dict[str, Any] = json.loads(b.json())
    document["traceEvents"].append(
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}
    )
    document["traceEvents"].append(
        {
            "ph": "X",
            "name": "x",
            "ts": 5.125,
            "dur": 1,
            "args": {"deep": [{"a": ["b", {"c": "d"}]}]},
        }
    )
    document["traceName"] = "/tmp/host_17.pt.trace.json"
    document["environment"] = {"PATH": "/usr/bin", "LANG": "C"}
    document["hostname"] = "node17"
    return document


TRACE = small_trace()
PLACES = [place for place in strings(TRACE) if place != (("traceEvents",),)]


@settings(max_examples=120, deadline=None)
@given(
    place=st.sampled_from(PLACES), secret=st.sampled_from(SECRETS), glue=st.sampled_from(" _:/=(.")
)
def test_a_secret_in_any_text_of_a_trace_does_not_come_out(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], secret: str, glue: str
) -> None:
    folder = tmp_path_factory.mktemp("redact")
    source, target = folder / "in.json", folder / "out.json"
    source.write_text(json.dumps(plant(TRACE, place, secret, glue)))
    rewrite(str(source), target, redacted=True)
    written = target.read_bytes()
    assert secret.encode() not in written
    json.loads(written)


def test_secret_is_removed_from_all_places_at_once(tmp_path: Path) -> None:
    secret = SECRETS[0]
    document = json.loads(json.dumps(TRACE))
    for place in PLACES:
        if not isinstance(place[-1], tuple):  # keys are tried one by one above
            document = plant(document, place, secret)
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(document))
    assert secret.encode() in source.read_bytes()
    rewrite(str(source), target, redacted=True)
    assert secret.encode() not in target.read_bytes()


def test_escaped_secret_is_removed(tmp_path: Path) -> None:
    escaped = "".join(f"\\u{ord(c):04x}" for c in SECRETS[0])
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(
        '{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"' + escaped + '","ts":1,"dur":1}]}'
    )
    rewrite(str(source), target, redacted=True)
    text = target.read_text()
    assert escaped not in text
    assert SECRETS[0] not in json.loads(text)["traceEvents"][0]["name"]
    assert REDACTED in text


@pytest.mark.parametrize(("form", "private"), IN_CONTEXT)
def test_values_private_by_context_are_removed(form: str, private: str) -> None:
    text = Redactor().text(f"before {form.format(private)} after")
    assert private not in text
    assert text.startswith("before ")


FRAMES = r"""
/home/bob/my {} proj/train.py(12): step
/data/my {} proj/train.py(12): step
D:\work dir\{} x\train.py(12): step
{} team/models/net.py(3): forward
/efs/"{}"/train.py(9): f
/efs/<{}>/train.py(9): f
""".strip().splitlines()
"""Frames that stand alone: their folders may have any characters."""
PLACES_OF_PEOPLE = r"""
/mnt/nas/{} (v2)/run 3/train.py(12): step
C:\Users\bob\{} team\a b\train.py(12): step
../../{} team/net.py(3): forward
./{}/net.py(3): forward
{}/net.ipynb(3): forward
/tmp/ipykernel_77/{}/123.py(3): <module>
/opt/{}/envs/torch/lib/python3.11/site-packages/torch/nn/x.py(9): f
/home/bob/.conda/envs/{}/lib/python3.10/site-packages/{}/x.py(9): f
<frozen {}/x.py(9): f
/efs/{}:v2/train.py(9): f
/efs/a,{}/train.py(9): f
/efs/it's {}/train.py(9): f
/efs/a|{}/train.py(9): f
/efs/a;{}/train.py(9): f
/efs/übung/{}/train.py(9): f
/efs/数据/{}/train.py(9): f
/efs/{}/数据.py(9): f
file:///efs/{}/a.py
file://host/efs/{}/a.py
s3://bucket/{}/x
gs://{}/x
hdfs://{}:9000/x
abfss://{}@acct.dfs.core.windows.net/x
az://{}/x
dbfs:/mnt/{}/x.parquet
wandb: https://wandb.ai/{}/project/runs/1
git+ssh://git@github.com/{}/x.git
git@github.com:{}/x.git
https://github.com/{}/x
https://huggingface.co/{}/x
hf://{}/x
ssh bob@{}
bob@{}:~/x
rank 3 on {}.cluster.local
node {}-gpu-017.us-east-1.compute.internal
http://{}:8080/
{}:29500
tcp://{}:29500
MASTER_ADDR={}
host={}
hostname: {}
"hostname": "{}"
user={}
User: {}
username="{}"
by {}@example.org
{}@localhost
/home/{}
/Users/{}/x
~{}/x
~/{}/train.py
$HOME/{}/train.py
%USERPROFILE%\{}\train.py
\\?\C:\{}\train.py
\\wsl$\{}\train.py
//{}/share/train.py
/proc/self/cwd/{}/train.py
/dbfs/{}/train.py
/workspace/{}/x.cu:33
"/workspace/{}/x.cu", line 33
File "/workspace/{} b/x.py", line 33, in f
File "/workspace/b {}/x.py", line 33, in f
#0: /workspace/{}/x.so(+0x12)
/workspace/{}/libfoo.so.2
/workspace/{}
/workspace/{}/
outputs/{}/2024-01-01/ckpt
checkpoints/{}/epoch=3.ckpt
./outputs/{}/ckpt
../{}
runs/{}/trace.json.gz
runs\{}\trace.json.gz
cwd /workspace/{} x
cd /workspace/{} && python train.py
python /workspace/{}/train.py --data /data/{}
--data-dir=/data/{}/x
--data-dir {}/x/y.parquet
data_dir: /data/{}
PYTHONPATH=/a:/b/{}:/c
LD_LIBRARY_PATH=/a/lib:/b/{}/lib
docker://registry.{}.com/x
registry.{}.com/x:tag
{}.slack.com
jdbc:postgresql://{}/db
torchinductor_{}/ab/cd.py
/tmp/torchinductor_{}/ab/cd.py
/tmp/{}_cache/x.py
C:/Users/{}/x.py
c:\{}\x.py
/c/Users/{}/x.py
/cygdrive/c/{}/x.py
/mnt/c/Users/{}/x.py
%2Fefs%2F{}%2Fx.py
\/efs\/{}\/x.py
efs\\{}\\x.py
""".strip().splitlines()


@pytest.mark.parametrize("word", ["zorvax", "Qwombat-9", "fnord_lab", "marlowe.k", "plimsoll"])
def test_folder_host_and_user_are_removed_in_any_spelling(word: str) -> None:
    """Paths and addresses keep only what is known: a file's name, a library's place."""
    texts = [form.format(word, word) for form in (*FRAMES, *PLACES_OF_PEOPLE)]
    texts += [f"x {form.format(word, word)} y" for form in PLACES_OF_PEOPLE]
    unredacted = [text for text in texts if word.lower() in Redactor()._redact(text).lower()]
    assert unredacted == [] and len(texts) > 180


@pytest.mark.parametrize("secret", SECRETS)
def test_credentials_go_and_the_text_around_them_stays(secret: str) -> None:
    assert Redactor().text(f"load({secret}) of 3") == f"load({REDACTED}) of 3"


def test_a_user_name_found_in_one_place_is_removed_everywhere(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "model_of_jdoe7", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "jdoe7::op on gpu-node-12", "ts": 2, "dur": 1},
        {"ph": "X", "cat": "python_function", "name": "/home/jdoe7/a.py(3): f", "ts": 2, "dur": 1},
        {"ph": "M", "name": "x", "pid": 1, "args": {"hostname": "gpu-node-12"}},
    ]
    source.write_text(json.dumps({"traceEvents": events}))
    rewrite(str(source), target, redacted=True)
    text = target.read_text()
    assert "jdoe7" not in text
    assert "gpu-node-12" not in text
    assert "a.py(3): f" in text


def test_environment_and_unknown_keys_are_removed_device_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(TRACE))
    rewrite(str(source), target, redacted=True)
    kept = json.loads(target.read_text())
    assert kept.keys() == {"traceEvents", "schemaVersion", "deviceProperties", "distributedInfo"}
    assert kept["deviceProperties"] == TRACE["deviceProperties"]
    assert kept["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 2}


def test_numbers_stay_as_they_are_written(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(
        '{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,'
        '"ts":1705000000000000.123,"dur":12.340,"args":{"External id":18446744073709551615}}]}'
    )
    rewrite(str(source), target, redacted=True)
    text = target.read_text()
    for number in ("1705000000000000.123", "12.340", "18446744073709551615"):
        assert number in text


@pytest.mark.parametrize(
    "name",
    [
        "aten::_scaled_dot_product_flash_attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, "
        "std::array<char*, 3ul> >(int, at::native::AddFunctor<float>, std::array<char*, 3ul>)",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_T1_",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute",
        "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0_AFC1_AFEM1",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvSlidingOrChunkedCausalP16VarSeqQ128Kv128"
        "PersistentContext",
        "ProfilerStep#1009",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "Memcpy HtoD (Pageable -> Device)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "torch/nn/modules/module.py(1518): _call_impl",
        "<built-in method run_backward of torch._C._EngineBase object at 0x7f8e1c0a2b30>",
        "Torch-Compiled Region: 0/0",
        "https://pytorch.org/docs/stable/amp.html",
        "num_tokens 4096, token_embedding.weight",
        "pad_token=0, image_key=jpg, sort_key=loss, max_token: 5",
        "torchvision.io::decode_jpeg, aten::conv2d, ::fused::add",
        "memcpy@GLIBC_2.14 (inlined)",
        "1:23:45, 0000:3b:00.0, 12.8.0, cuda:0, sm_90",
        "_fwd_kernel_aligned_0d1d2d3d45d6de7de8c9de10de11c12de13de14c15de16de17c18de19de20c",
        "a // b, x = y // 2",
    ],
)
def test_names_that_advice_needs_stay(name: str) -> None:
    assert Redactor().text(name) == name


def test_files_keep_their_name_or_their_place_in_a_library() -> None:
    r = Redactor()
    assert r.text("/opt/v/lib/python3.11/site-packages/torch/nn/x.py(9): f") == (
        "torch/nn/x.py(9): f"
    )
    assert r.text("/home/j/proj/train.py(12): step") == "train.py(12): step"
    assert r.text("D:\\work\\proj\\train.py(12): step") == "train.py(12): step"
    assert r.text("/home/j/proj") == REDACTED


@pytest.mark.parametrize("length", [32, 40, 64])
def test_random_keys_are_seldom_missed(length: int) -> None:
    dice = random.Random(length)
    letters = string.ascii_letters + string.digits
    keys = ["".join(dice.choices(letters, k=length)) for _ in range(2000)]
    assert sum(map(is_random, keys)) > 0.96 * len(keys)


def test_names_of_real_traces_are_hardly_touched(shared_trace: Callable[[str], str]) -> None:
    """Kernel, operator and annotation names of public traces come out as they went in."""
    import gzip

    for trace in (
        "a100_train_6steps", "h100_qwen_inference", "b200_eager", "mi300_torch_compile",
        "nccl_collectives", "pairs/particle_batch2", "dlrm_8ranks/worker3.pt.trace",
    ):  # fmt: skip
        with gzip.open(shared_trace(trace)) as file:
            text = file.read()
        r = Redactor(names_in(text))
        events = json.loads(text)["traceEvents"]
        names = {e["name"] for e in events if str(e.get("cat", "")) != "python_function"}
        args = [e["args"] for e in events if isinstance(e.get("args"), dict)]
        names |= {key for one in args for key in one}
        names |= {value for one in args for value in one.values() if isinstance(value, str)}
        names = {n for n in names if isinstance(n, str) and "/torchinductor_" not in n}
        assert {name for name in names if r.text(name) != name} == set()


def test_redacted_report_keeps_everything_but_private_data(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "jdoe" / "runs"
    folder.mkdir(parents=True)
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.python(f"/home/jdoe/proj/train.py(12): step_{SECRETS[0]}"):
            b.loader_wait(5000, workers=0)
            with b.op(f"aten::mm_{SECRETS[1]}", [[512, 512], [512, 512]], "float"):
                b.launch(f"gemm {SECRETS[2]}", 900)
            b.sync()
    path = b.write(folder / "trace.json")
    report = analyze(path)
    clean = redact(report)
    assert isinstance(clean, Report)
    assert [f.rule for f in clean.findings] == [f.rule for f in report.findings]
    assert [f.impact for f in clean.findings] == [f.impact for f in report.findings]
    assert clean.scope.step_ns == report.scope.step_ns
    assert clean.host == report.host
    assert clean.inputs[0].path == "trace.json"
    assert [f.references for f in clean.findings] == [f.references for f in report.findings]
    for text in (
        clean.to_json().decode(),
        REPORTS.render("html", clean),
        REPORTS.render("markdown", clean),
        REPORTS.render("sarif", clean),
    ):
        for private in (*SECRETS[:3], "jdoe"):
            assert private not in text


KEYS = st.sampled_from(
    ["host", "env", "argv", "name", "user_name", "api_key", 'od"d', "Ev Idx", "é"]
)
TEXTS = st.sampled_from(
    ["plain", "", "hf_abcdefgh12345678", "/home/zoe/a.py", 'q"\\', "alice", "[{", ":"]
)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(rounds=st.lists(VALUES, min_size=1, max_size=4), remembered=st.sampled_from([0, 3, 1000]))
def test_text_is_redacted_as_its_values_are(rounds: list[Any], remembered: int) -> None:
    quick, twin = Redactor(["alice"]), Redactor(["alice"])
    with mock.patch.object(advisor.export.redact, "MAX_REMEMBERED_TEXTS", remembered):
        for value in rounds:
            for spaced in (json.dumps(value, indent=1), json.dumps(value, separators=(",", ":"))):
                assert json.loads(quick.json(spaced.encode())) == twin.value(value)


# -- time ---------------------------------------------------------------------------------------

UNITS = [
    "-", "token-", "a@", "://", "'", '"', "=", ".", "a.", "-a.", "0", "f", "aB3", "/", "\\", '\\"',
    "/a", "\\/", "%2F", "%2Fa", "~", "~a", "_", "_Z", "eyJ_", "eyJa.", "hf_", "--a ", "--token ",
    "token=", "token:", 'password="', "secret:{", "[", "(", ":", "1.", "1:", "ab:", "@", "a-",
    "a.com", "host:/", "a://", "http://a", "file:/", "C:\\", "bearer ", "-----BEGIN ", " ", "\n",
    "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----x", "USER_", "AB1_", "/lib/python3.1",
    "SG.aaaaaaaaaaaaaaaaaaaa", "&sig=", "alice", "/home/a", "torchinductor_", "\u0130", "x:|\n ",
]  # fmt: skip


def seconds(act: Callable[[str], object], text: str) -> float:
    """CPU time; the least of three where it is not next to nothing."""
    result: list[float] = []
    while len(result) < 3 and (not result or result[0] > 0.03):
        begin = time.process_time()
        act(text)
        result.append(time.process_time() - begin)
    return min(result)


def test_redaction_time_is_linear_for_any_text() -> None:
    r = Redactor(["alice", "alicia", *(f"user{i}x" for i in range(900))])
    dice = random.Random(7)
    mixed = ["".join(dice.choices(UNITS, k=dice.choice([2, 3]))) for _ in range(40)]
    acts: list[Callable[[str], object]] = [
        r._redact,
        clean_value,
        lambda text: names_in(text.encode()),
    ]
    for unit in [*UNITS, *mixed]:
        for number, act in enumerate(acts):
            short, long = (unit * (n // len(unit)) for n in (4_000, 32_000))
            took = seconds(act, long)
            assert took < 1.0, (unit, number)
            if took > 0.05:  # eight times the text: some eight times, not sixty-four
                assert took < 24 * max(seconds(act, short), 0.001), (unit, number)


def test_a_hundred_thousand_characters_take_no_time() -> None:
    r = Redactor()
    for unit in ("-", "token-", "a@", "://", "password='", "0", "a."):
        assert seconds(r._redact, unit * (100_000 // len(unit))) < 3.0, unit


# -- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("/home/alice/proj/train.py(12): step", "alice"),
        ("/home/alice/my-proj (old)/train.py(12): step", "alice"),
        ("C:\\Users\\alice\\proj\\train.py(12): step", "alice"),
        (f"load {SECRETS[0]} of model", SECRETS[0]),
        ("jdoe7::op on gpu-node-12", "jdoe7"),
        ("void f<a, (int)3>(x*)", "not there"),
    ],
)
def test_redacted_pattern_matches_original_and_redacted_names(name: str, private: str) -> None:
    r = Redactor(["jdoe7"])
    for pattern in (re.escape(name), f"^(?:{re.escape(name)}|other)$", f"^{re.escape(name)}$"):
        clean = r.pattern(pattern)
        assert private not in clean.replace("\\", "")
        assert re.search(clean, name)
        assert re.search(clean, r.text(name))
        assert not re.search(clean, "aten::mm")


@given(st.text(max_size=60))
def test_redacted_pattern_still_compiles(text: str) -> None:
    for pattern in (re.escape(text), text):
        try:
            re.compile(pattern)
        except re.error:
            continue
        re.compile(Redactor().pattern(pattern))


# -- every way out ------------------------------------------------------------------------------

FOLDER = "/home/alice/proj-x/src"
PRIVATE = ("alice", "proj-x", "gpu-node-12", SECRETS[0])


def private_trace(folder: Path, kernel_us: int = 900) -> Path:
    """An ordinary trace: absolute paths of frames, a user's op, a host named in its metadata."""
    b = TraceBuilder()
    for step in range(5):
        with b.step(), b.python(f"{FOLDER}/train.py(12): step"):
            with b.python(f"{FOLDER}/data (old)/load.py(7): next_batch"):
                b.host(6000)
            with b.python(f"{FOLDER}/model.py(30): forward"), b.range(f"{FOLDER}/fwd"):
                for _ in range(3):
                    with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                        b.launch("gemm_of_alice_on_gpu-node-12", kernel_us)
                with b.op(f"mylib::load_{SECRETS[0]}", [[64]]):
                    b.launch(f"copy_{step % 2}", 20)
            b.item()
    document = json.loads(b.json())
    document["hostname"] = "gpu-node-12"
    document["environment"] = {"USER": "alice"}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trace.json"
    file.write_text(json.dumps(document))
    return file


def spellings(private: str) -> list[str]:
    """The ways to write a text: as it is, escaped for expressions, addresses, JSON."""
    spelled = {private, re.escape(private), quote(private, safe=""), json.dumps(private)[1:-1]}
    spelled.add("".join(f"\\u{ord(c):04x}" for c in private))
    return [text.lower() for text in spelled]


def test_no_command_or_format_leaks_private_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advisor.export.redact, "find_local_names", set)
    before = str(private_trace(tmp_path / "home" / "alice"))
    after = str(private_trace(tmp_path / "alice" / "after", 300))
    out = tmp_path / "out"
    forms = ("terminal", "json", "markdown", "html", "sarif", "github")
    lines = [["analyze", before, "--format", form] for form in forms]
    lines += [["compare", before, after, "--format", form] for form in forms[:3]]
    lines += [["report", before, "--html", str(out)], ["export", before, "--perfetto", str(out)]]
    plain = 0
    for line in lines:
        for redacted in (False, True) if line[0] == "export" or "json" in line else (True,):
            out.unlink(missing_ok=True)
            assert cli.run([*line, *["--redact"][:redacted]]) == 0, line
            output = capsys.readouterr().out + (out.read_text() if out.exists() else "")
            result = [p for p in PRIVATE if any(s in output.lower() for s in spellings(p))]
            plain += bool(result) and not redacted
            assert not (redacted and result), (line, result)
    assert plain == 3  # else there was nothing to hide
    assert cli.run(["analyze", before, "--redact", "-o", str(tmp_path / "r.json")]) == 0
    patterns = [
        text
        for finding in Report.from_json((tmp_path / "r.json").read_bytes()).findings
        for edit in finding.edits
        for text in (edit.select.name, edit.select.under)
        if text
    ]
    assert all(re.compile(text) for text in patterns)


def test_rank_report_leaks_no_private_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor.export.redact, "find_local_names", set)
    job = tmp_path / "home" / "alice" / "job"
    for rank in range(3):
        file = private_trace(job / "gpu-node-12" / f"rank{rank}", 900 + 400 * (rank == 1))
        distributed = {"backend": "nccl", "rank": rank, "world_size": 3}
        document = {**json.loads(file.read_text()), "distributedInfo": distributed}
        file.write_text(json.dumps(document))
    (job / "broken_rank9.json").write_text("[1, 2]")
    plain = 0
    forms = ("terminal", "json", "markdown", "html", "sarif", "github")
    for workers, forms_ in (([], forms), (["--workers", "2"], ("json",))):
        for form in forms_:
            for redacted in (False, True):
                line = ["analyze", str(job), *workers, "--format", form, "--no-progress"]
                assert cli.run([*line, *["--redact"][:redacted]]) == 0
                captured = capsys.readouterr()
                output = captured.out + captured.err
                result = [p for p in PRIVATE if any(s in output.lower() for s in spellings(p))]
                plain += bool(result) and not redacted
                assert not (redacted and result), (line, result)
    assert plain == 7
    assert cli.run(["analyze", str(job), "--redact", "--csv", str(tmp_path / "csv")]) == 0
    written = "".join(file.read_text() for file in (tmp_path / "csv").iterdir())
    assert not [p for p in PRIVATE if p in written]


def test_edits_of_a_redacted_report_select_the_same_work(tmp_path: Path) -> None:
    path = str(private_trace(tmp_path))
    examined = analyze_in_full(path)
    private = {"alice", "gpu-node-12"}  # as the command line learns them from the file
    original, clean = examined.report, redact(examined.report, private)
    assert [len(f.edits) for f in original.findings] == [len(f.edits) for f in clean.findings]
    exported = tmp_path / "clean.json"
    rewrite(path, exported, redacted=True, names=private)
    other = analyze_in_full(str(exported)).main
    checked = 0
    for one, two in zip(original.findings, clean.findings, strict=True):
        for edit, safe in zip(one.edits, two.edits, strict=True):
            if edit == safe:
                continue
            checked += 1
            for a in (examined.main, other):
                assert (
                    selected_rows(a, safe).tolist() == selected_rows(examined.main, edit).tolist()
                )
    assert checked


def selected_rows(a: Analysis, edit: Edit) -> Any:
    """The rows that an edit selects."""
    select = {"gpu": selected_gpu, "host": selected_host, "gap": selected_gaps}
    return select[edit.select.on](a, edit.select)


def test_relative_folders_go_and_places_of_libraries_stay() -> None:
    clean = Redactor().text
    assert clean("src/acme/train.py(12): forward") == "train.py(12): forward"
    for kept in (
        "torch/nn/modules/module.py(1518): _call_impl",
        "transformers/models/gpt2/modeling_gpt2.py(9): forward",
        "json/decoder.py(3): decode",
        "and/or",
        "GB/s",
        "train.py(1): f",
        "aten::div/2.5",
    ):
        assert clean(kept) == kept
    begin = time.perf_counter()
    clean("a/" * 200_000)
    assert time.perf_counter() - begin < 5
