# ruff: noqa: PLW0108
"""Run torch feature by feature and print what a program sees of torch and of itself, as lines of
JSON.

    python features.py [FOLDER]

With a folder it is recorded. All features run before, between and after training steps.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


torch.manual_seed(11)
X = torch.linspace(-1, 1, 12).reshape(3, 4)
net = Net()


def fresh_model() -> Any:
    torch.manual_seed(7)
    return Net().eval()


def as_hex(x: Any) -> list[str]:
    return [v.hex() for v in x.detach().double().flatten().tolist()]


def outcome(call: Any) -> str:
    """The value of a call, or how it fails."""
    try:
        return f"fine: {type(call()).__name__}"
    except Exception as error:
        return re.sub(r"0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")


# -- features: each function that begins with f_ ---------------------------------------------------


def f_script() -> Any:
    scripted = torch.jit.script(fresh_model())
    return as_hex(scripted(X)), str(scripted.graph)


def f_script_the_model_that_trains() -> Any:
    return len(str(torch.jit.script(net).code))


def f_trace() -> Any:
    return as_hex(torch.jit.trace(fresh_model(), X)(X))


def f_export() -> Any:
    return str(torch.export.export(fresh_model(), (X,)).graph)


def f_export_strict() -> Any:
    return str(torch.export.export(fresh_model(), (X,), strict=True).graph)


def f_symbolic_trace() -> Any:
    return torch.fx.symbolic_trace(fresh_model()).code


def count_compilations(make: Any) -> Any:
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounter()
    call = make(backend)
    got = [as_hex(call(X)) for _ in range(3)]
    return got, backend.frame_count, backend.op_count, dict(counters["graph_break"])


def f_compile() -> Any:
    return count_compilations(
        lambda backend: torch.compile(fresh_model(), backend=backend, fullgraph=True)
    )


def f_compile_in_place() -> Any:
    def make(backend: Any) -> Any:
        model = fresh_model()
        model.compile(backend=backend)
        return model

    return count_compilations(make)


def f_compile_sequential_in_place() -> Any:
    def make(backend: Any) -> Any:
        model = fresh_model().body
        model.compile(backend=backend)
        return model

    return count_compilations(make)


def f_compile_function_with_a_break() -> Any:
    def make(backend: Any) -> Any:
        model = fresh_model()

        def function(x: Any) -> Any:
            y = model(x).to("cpu")
            torch._dynamo.graph_break()
            return model.head(model.body(x)).to(torch.float64) + y

        return torch.compile(function, backend=backend)

    return count_compilations(make)


def f_compile_a_step() -> Any:
    def make(backend: Any) -> Any:
        model = fresh_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return torch.compile(step, backend=backend)

    return count_compilations(make)


def f_compile_super_call() -> Any:
    class CallingModel(Net):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) + 1

    def make(backend: Any) -> Any:
        torch.manual_seed(7)
        return torch.compile(CallingModel().eval(), backend=backend)

    return count_compilations(make)


def f_make_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fresh_model())(X).code


def f_functional_call() -> Any:
    model = fresh_model()
    state = {k: v * 2 for k, v in model.state_dict().items()}
    return as_hex(torch.func.functional_call(model, state, (X,)))


def f_vmap_grad_jvp() -> Any:
    model = fresh_model()
    one = lambda x: model(x).sum()  # noqa: E731
    slopes = torch.func.vmap(torch.func.grad(one))(X)
    _, tangent = torch.func.jvp(one, (X,), (torch.ones_like(X),))
    return as_hex(slopes), as_hex(tangent), as_hex(torch.func.jacrev(one)(X))


def f_copies() -> Any:
    model = fresh_model()
    twins = copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))
    return [as_hex(twin(X)) for twin in twins], sorted(vars(net)), sorted(vars(twins[0]))


def f_pickles_of_functions() -> Any:
    functions = (
        torch.save,
        torch.load,
        torch.Tensor.to,
        torch.autograd.grad,
        torch.autograd.backward,
        torch.nn.Module.__call__,
        torch.nn.Module.zero_grad,
        torch.optim.Optimizer.zero_grad,
    )
    return [outcome(lambda f=f: pickle.loads(pickle.dumps(f)) is f) for f in functions]


def f_save_and_load() -> Any:
    buffer = io.BytesIO()
    torch.save({"model": fresh_model(), "state": fresh_model().state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    return as_hex(loaded["model"](X)), len(buffer.getvalue()) > 0, list(loaded["state"])


def f_parametrizations() -> Any:
    from torch.nn.utils import parametrizations as p

    model = fresh_model()
    p.weight_norm(model.head)
    p.orthogonal(model.body[2])
    p.spectral_norm(model.body[0])
    return as_hex(model(X)), [name for name, _ in model.named_modules()]


def f_average() -> Any:
    from torch.optim.swa_utils import AveragedModel, update_bn

    model = fresh_model()
    average = AveragedModel(model)
    average.update_parameters(model)
    update_bn([X], average)
    return as_hex(average(X))


def f_checkpoint() -> Any:
    from torch.utils.checkpoint import checkpoint

    model = fresh_model().train()
    result = []
    for reentrant in (True, False):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        checkpoint(model.body, x, use_reentrant=reentrant).sum().backward()
        result.append(as_hex(x.grad))
    return result


def f_autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        out = fresh_model()(X)
    return str(out.dtype), as_hex(out)


def f_scaler() -> Any:
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return as_hex(model(X)), scaler.state_dict(), outcome(lambda: scaler.step())


def f_function_mode() -> Any:
    from torch.overrides import TorchFunctionMode, resolve_name

    heard = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append((func.__name__, resolve_name(func)))
            return func(*args, **(kwargs or {}))

    model = fresh_model()
    with Mode():
        model(X.to("meta").to("cpu", torch.float64) if False else X)
        X.to("meta")
        X.to(torch.float64)
        model.to("cpu")
        model(X).sum().backward()
    return heard


def f_dispatch_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    heard = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        model = fresh_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X.to(torch.float32)).sum().backward()
        optimizer.step()
    return heard


def f_subclass() -> Any:
    heard = []

    class CustomSubclass(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(func.__name__)
            assert func is not torch.Tensor.to or func == torch.Tensor.to
            return super().__torch_function__(func, types, args, kwargs or {})

    x = X.as_subclass(CustomSubclass)
    y = fresh_model()(x.to("cpu"))
    y.sum().backward()
    return heard, type(y).__name__, type(x.to("meta")).__name__


def f_saved_tensors_hooks() -> Any:
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        fresh_model()(X).sum().backward()
    return packed


def f_anomaly() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            x = torch.zeros(1, requires_grad=True)
            return outcome(lambda: (x.sqrt() * 0).sum().backward())


def f_deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return as_hex(fresh_model()(X))
    finally:
        torch.use_deterministic_algorithms(False)


ASKED: dict[str, Any] = {
    "Module.__call__": nn.Module.__call__,
    "zero_grad": torch.optim.Optimizer.zero_grad,
    "Module.zero_grad": nn.Module.zero_grad,
    "SGD.step": torch.optim.SGD.step,
    "DataLoader.__iter__": DataLoader.__iter__,
    "scaler": torch.amp.GradScaler.step,
    "save": torch.save,
    "grad": torch.autograd.grad,
    "compile": torch.compile,
}


def f_signatures() -> Any:
    now = {
        "Module.__call__": nn.Module.__call__,
        "zero_grad": torch.optim.Optimizer.zero_grad,
        "Module.zero_grad": nn.Module.zero_grad,
        "SGD.step": torch.optim.SGD.step,
        "DataLoader.__iter__": DataLoader.__iter__,
        "scaler": torch.amp.GradScaler.step,
        "save": torch.save,
        "grad": torch.autograd.grad,
        "compile": torch.compile,
        "next": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
    }
    signatures = {
        name: (
            str(inspect.signature(f)),
            f.__name__,
            f.__qualname__,
            f.__module__,
            f.__doc__,
            inspect.getsource(f)[:300],
            inspect.getsourcelines(f)[1],
        )
        for name, f in now.items()
    }
    same = (
        nn.Module.__call__ is ASKED["Module.__call__"],
        nn.Module.__call__ is nn.Module._wrapped_call_impl,
    )
    return (
        signatures,
        same,
        torch.Tensor.to.__name__,
        torch.Tensor.to.__doc__ == torch._C.TensorBase.to.__doc__,
    )


def f_names() -> Any:
    classes = (
        nn.Module,
        nn.Linear,
        torch.Tensor,
        torch.optim.Optimizer,
        torch.optim.SGD,
        DataLoader,
        torch.amp.GradScaler,
        torch.autograd,
        torch,
        torch.utils.data.dataloader._BaseDataLoaderIter,
    )
    loaded = lambda name: f"torch.{name}" in sys.modules  # noqa: E731
    names = [[n for n in dir(c) if not loaded(n)] for c in classes]
    return names, [
        sorted(vars(net.body)),
        hasattr(net, "_compiled_call_impl"),
        net._compiled_call_impl,
    ]


def f_wrong_calls() -> Any:
    loader = DataLoader(TensorDataset(X), batch_size=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return [
        outcome(call)
        for call in (
            lambda: net(),
            lambda: net(1, 2, 3),
            lambda: net(x=X, y=X),
            lambda: net(torch.ones(7)),
            lambda: nn.Module.__call__(),
            lambda: nn.Module()(X),
            lambda: nn.Linear(2, 2)("a"),
            lambda: X.to(),
            lambda: X.to("nowhere"),
            lambda: X.to(1.5),
            lambda: X.to(None),
            lambda: X.to(device="nowhere"),
            lambda: torch.Tensor.to(),
            lambda: torch.Tensor.to(3, "meta"),
            lambda: torch.Tensor.to("meta", "meta"),
            lambda: torch.Tensor.cuda(),
            lambda: torch.Tensor.cuda(3),
            lambda: X.cuda(),
            lambda: X.sum().backward(),
            lambda: X.backward(1, 2, 3, 4, 5, 6),
            lambda: torch.autograd.grad(X.sum(), X),
            lambda: torch.autograd.grad(),
            lambda: torch.autograd.backward(3),
            lambda: optimizer.step(3),
            lambda: optimizer.step(1, 2, 3),
            lambda: optimizer.zero_grad(1, 2, 3),
            lambda: torch.optim.Optimizer.zero_grad(),
            lambda: nn.Module.zero_grad(),
            lambda: torch.optim.SGD.step(),
            lambda: net.zero_grad(5, 6),
            lambda: DataLoader.__iter__(),
            lambda: DataLoader.__iter__(3),
            lambda: next(iter(loader), 1, 2),
            lambda: iter(loader).__next__(4),
            lambda: torch.save(),
            lambda: torch.save(X),
            lambda: torch.save(X, "/nowhere/x"),
            lambda: torch.amp.GradScaler("cpu").step(),
            lambda: torch.amp.GradScaler("cpu").step(3),
            lambda: torch.compile(3),
            lambda: torch.Tensor.to(X),
            lambda: list(DataLoader([1, "a"], batch_size=2)),
        )
    ]


def f_tracebacks() -> Any:
    import traceback

    try:
        net.body[0](torch.ones(7))
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
    return [(f.name, f.line) for f in frames if "torch" in f.filename][:1]


def f_optimizer_hooks() -> Any:
    heard = []
    optimizer = torch.optim.SGD(fresh_model().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(lambda *_: heard.append("all"))
    optimizer.step()
    handle.remove()
    return heard


def f_schedulers() -> Any:
    states = []
    for first in ("optimizer", "schedule"):
        model = fresh_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in (first, "schedule", "optimizer", "schedule"):
                optimizer.step() if name == "optimizer" else schedule.step()
        states.append(
            (
                [str(w.message)[:80] for w in caught],
                schedule.get_last_lr(),
                optimizer.step.__name__,
                hasattr(optimizer.step, "_wrapped_by_lr_sched"),
            )
        )
    return states


def f_lbfgs() -> Any:
    model = fresh_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        return loss

    return [optimizer.step(closure).item().hex() for _ in range(2)]


def f_quantization() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(
            fresh_model(), {nn.Linear}, dtype=torch.qint8
        )
    return as_hex(quantized(X))


def f_profiler() -> Any:
    with torch.profiler.profile(with_stack=True) as seen:
        fresh_model()(X).sum().backward()
    events = [e.name for e in seen.events()]
    modules = sorted({n for n in events if n.startswith("nn.Module")})
    return sorted(n for n in events if n.startswith("aten")), modules


def f_loader_subclass() -> Any:
    class CustomSubclass(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch[0] * 2

    iterator = iter(DataLoader(TensorDataset(X), batch_size=1))
    pairs = [as_hex(b) for b in CustomSubclass(TensorDataset(X), batch_size=2)]
    return pairs, sorted(vars(iterator)), type(iterator).__name__


def f_hooks_of_modules() -> Any:
    heard = []
    model = fresh_model()
    model.register_forward_pre_hook(lambda *_: heard.append("pre"))
    model.head.register_forward_hook(lambda *_: heard.append("head"), always_call=True)
    model.register_full_backward_hook(lambda *_: heard.append("backward"))
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, *_: heard.append(type(m).__name__)
    )
    model(X.clone().requires_grad_()).sum().backward()
    handle.remove()
    return heard, len(model._forward_hooks), len(nn.modules.module._global_forward_hooks)


def f_patched_call() -> Any:
    """Somebody else wraps every module's call, and takes it back."""
    heard = []
    before = nn.Module.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(type(self).__name__)
        return before(self, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        got = as_hex(fresh_model()(X))
    finally:
        nn.Module.__call__ = before
    return heard, got, nn.Module.__call__ is before


def f_meta_and_fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shape = fresh_model()(torch.ones(5, 4).to("cpu")).shape
    with torch.device("meta"):
        deferred = Net()
    return list(shape), str(deferred(X.to("meta")).device)


def f_double_backward() -> Any:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(fresh_model()(x).pow(2).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    gradcheck = torch.autograd.gradcheck(torch.tanh, (X.double().requires_grad_(),))
    return as_hex(x.grad), gradcheck


def f_lazy_and_transfer() -> Any:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    torch.manual_seed(2)
    return as_hex(lazy(X)), str(lazy), str(net.to(torch.float32))


def f_data_parallel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return as_hex(nn.DataParallel(fresh_model())(X)), len(
            vars(fresh_model()._replicate_for_data_parallel())
        )


def f_distributed() -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(fresh_model())
    model(X).sum().backward()
    sharded = fresh_model()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(sharded, mesh=mesh)
    out = sharded(X)
    out.sum().backward()
    return as_hex(model(X)), as_hex(out), sorted(vars(model.module))


def f_amp_custom_function() -> Any:
    class DoubleFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 2

    x = X.clone().requires_grad_()
    DoubleFunction.apply(fresh_model()(x)).sum().backward()
    return as_hex(x.grad)


def f_warnings() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        leaf = torch.ones(2, requires_grad=True) * 2
        _ = leaf.grad
        nn.functional.mse_loss(torch.ones(2), torch.ones(2, 1))
    return [(w.category.__name__, str(w.message)[:60], Path(w.filename).name) for w in caught]


def f_overridable() -> Any:
    from torch.overrides import get_overridable_functions, is_tensor_method_or_property

    names = sorted(f.__name__ for f in get_overridable_functions()[torch.Tensor])
    return names, is_tensor_method_or_property(torch.Tensor.to), callable(torch.Tensor.to)


def f_threads_and_state() -> Any:
    import threading

    names = [t.name for t in threading.enumerate() if not t.name.startswith("advisor")]
    return names, torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed()


def f_module_surgery() -> Any:
    model = fresh_model()
    model.body[0].forward = lambda x: x.new_ones(3, 8)
    model.head.__class__ = type("Head", (nn.Linear,), {})
    return as_hex(model(X)), as_hex(
        torch.nn.utils.fusion.fuse_linear_bn_weights(
            torch.ones(2, 2),
            torch.ones(2),
            torch.zeros(2),
            torch.ones(2),
            1e-5,
            torch.ones(2),
            torch.ones(2),
        )[0]
    )


FEATURES = {name: f for name, f in globals().items() if name.startswith("f_")}


def train(steps: int) -> list[str]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(2 * steps, 4), torch.ones(2 * steps, 1))
    losses = []
    for x, y in DataLoader(data, batch_size=2):
        optimizer.zero_grad()
        loss = (net(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def print_features(when: str) -> None:
    for name, feature in FEATURES.items():
        try:
            outcome_text: Any = feature()
        except Exception as error:
            outcome_text = f"failed: {type(error).__name__}: {error}"[:400]
        text = re.sub(r"0x[0-9a-f]{6,}|/tmp/\S+", "", json.dumps(outcome_text, default=str))
        print(json.dumps([when, name, text]), flush=True)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    recorded: Any = contextlib.nullcontext()
    if len(sys.argv) > 1:
        from advisor.recorder.api import Recorder

        recorded = Recorder(
            sys.argv[1], telemetry=0.0, report=False, skip=8, warmup=1, active=3, guard=1e9
        )
    with recorded:
        print_features("before")
        print(json.dumps(["steps", "first", train(7)]))
        print_features("between")
        print(json.dumps(["steps", "second", train(12)]))
        print_features("after")
    if len(sys.argv) > 1:
        from advisor.recorder.session import current_session

        assert current_session() is None and recorded._session is None
    print(json.dumps(["end", "steps", "19"]), flush=True)
    os._exit(0)  # process groups and compilers are not waited for


if __name__ == "__main__":
    main()
