"""Hints about how the model runs: validation with gradients, and training on several GPUs."""

import ast
import re
from collections.abc import Iterator

from advisor.lint.script import (
    Function,
    Hint,
    Script,
    hint_position,
    is_method,
    is_occasional,
    names_in,
)

_EVALUATION_NAME = re.compile(
    r"(?:^|_)(?:eval\w*|valid\w*|val|test|infer\w*|predict\w*)(?:$|_)", re.IGNORECASE
)
_NO_GRAD_NAMES = {
    "torch.no_grad", "torch.inference_mode", "no_grad", "inference_mode", "torch.set_grad_enabled",
    "torch.autograd.no_grad", "torch.autograd.inference_mode",
}  # fmt: skip
_DDP_NAMES = {"torch.nn.parallel.DistributedDataParallel", "DistributedDataParallel", "DDP"}
_DATA_PARALLEL_NAMES = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "DataParallel"}


def check_evaluation(source: Script) -> Iterator[Hint]:
    """Check for loops over validation data outside ``no_grad``."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.For | ast.AsyncFor) or not _is_evaluation(source, node):
            continue
        if _runs_without_grad(source, node) or any(
            isinstance(inner, ast.With | ast.AsyncWith) and _disables_grad(source, inner)
            for inner in ast.walk(node)
        ):
            continue
        function = next((n for n in source.ancestors(node) if isinstance(n, Function)), None)
        if function is not None and _EVALUATION_NAME.search(function.name):
            code = f"@torch.inference_mode()\ndef {function.name}(...):"
        else:
            code = f"with torch.inference_mode():\n    {source.text_of(node).splitlines()[0]}"
        yield Hint(
            id="eval-with-grad",
            title="Validation without torch.inference_mode()",
            why="every forward pass keeps its activations for a backward pass that does not follow",
            fix="Run it under torch.inference_mode() or torch.no_grad().",
            code=code,
            confirmed_by="eval-without-no-grad",
            **hint_position(node),
        )


def _model_names(source: Script) -> set[str]:
    """Return the names that the file uses as models: ``net.train()``, ``clf.parameters()``."""
    names = set()
    for call in source.calls:
        if is_method(call, "train", "eval", "parameters", "state_dict", "zero_grad"):
            assert isinstance(call.func, ast.Attribute)
            names.add(source.qualified_name(call.func.value))
    return names - {"", "optimizer", "self"}


def _follows_eval_call(source: Script, loop: ast.AST) -> bool:
    """Return whether ``model.eval()`` precedes a loop, with no ``model.train()`` in between."""
    parent = source.parents.get(loop)
    for body in (getattr(parent, "body", []), getattr(parent, "orelse", [])):
        if loop not in body:
            continue
        for statement in reversed(body[: body.index(loop)]):
            if isinstance(statement, ast.Expr) and is_method(statement.value, "eval", "train"):
                func = statement.value.func
                return isinstance(func, ast.Attribute) and func.attr == "eval"
    return False


def _is_evaluation(source: Script, loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a loop validates, by its function's or loader's name or ``eval()``. It also
    calls a model and runs no backward pass."""
    iterable_names = " ".join(
        names_in(loop.iter)
        | {node.attr for node in ast.walk(loop.iter) if isinstance(node, ast.Attribute)}
    )
    iterates_loader = re.search(
        r"loader|dataset|batches|_dl\b|iterator", iterable_names, re.IGNORECASE
    )
    function = next((n for n in source.ancestors(loop) if isinstance(n, Function)), None)
    if not (
        _follows_eval_call(source, loop)
        or (
            iterates_loader
            and any(_EVALUATION_NAME.search(word) for word in iterable_names.split())
        )
        or (function is not None and _EVALUATION_NAME.search(function.name))
    ):
        return False
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    if any(is_method(call, "backward", "step") for call in calls):
        return False
    models = _model_names(source)
    return any(
        _calls_model(call.func) or source.qualified_name(call.func) in models for call in calls
    )


_VALIDATION_DATA_NAME = re.compile(
    r"(?:^|_)(?:val|valid|validation|test|eval|dev)(?:$|_)", re.IGNORECASE
)


def check_single_evaluation(source: Script) -> Iterator[Hint]:
    """Check for a model called on a validation batch, outside ``no_grad`` and without backward."""
    models = _model_names(source)
    for call in source.calls:
        if source.qualified_name(call.func) not in models or not call.args:
            continue
        if not any(
            _VALIDATION_DATA_NAME.search(name) for arg in call.args for name in names_in(arg)
        ):
            continue
        statement = source.statement(call)
        if not isinstance(statement, ast.Assign) or _runs_without_grad(source, call):
            continue
        if any(isinstance(outer, ast.For) and _is_evaluation(source, outer)
               for outer in source.ancestors(call)):  # fmt: skip
            continue
        targets = {name for target in statement.targets for name in names_in(target)}
        if _reaches_backward(source, targets):
            continue
        yield Hint(
            id="eval-with-grad",
            title=f"{source.text_of(statement).splitlines()[0][:60]} builds a graph",
            why="the forward pass keeps its activations for a backward pass that does not follow",
            fix="Run it under torch.inference_mode() or torch.no_grad().",
            code=f"with torch.inference_mode():\n    {source.text_of(statement).splitlines()[0]}",
            confirmed_by="eval-without-no-grad",
            **hint_position(statement),
        )


def _reaches_backward(source: Script, names: set[str]) -> bool:
    """Return whether a backward pass may start from one of these names or from derived ones."""
    for _ in range(4):
        names = names | {
            name
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Assign) and names_in(node.value) & names
            for target in node.targets
            for name in names_in(target)
        }
    return any(
        is_method(call, "backward") and isinstance(call.func, ast.Attribute)
        and names_in(call.func.value) & names
        for call in source.calls
    )  # fmt: skip


_CUML_ESTIMATORS = {
    "cluster": {"KMeans", "DBSCAN", "AgglomerativeClustering", "SpectralClustering"},
    "decomposition": {"PCA", "TruncatedSVD", "IncrementalPCA"},
    "ensemble": {"RandomForestClassifier", "RandomForestRegressor"},
    "linear_model": {"LinearRegression", "LogisticRegression", "Ridge", "Lasso", "ElasticNet"},
    "manifold": {"TSNE", "SpectralEmbedding"},
    "neighbors": {"NearestNeighbors", "KNeighborsClassifier", "KNeighborsRegressor"},
    "svm": {"SVC", "SVR", "LinearSVC", "LinearSVR"},
    "kernel_ridge": {"KernelRidge"},
    "covariance": {"LedoitWolf"},
}
"""Estimators of scikit-learn that RAPIDS cuML runs on a GPU (docs.rapids.ai/api/cuml/stable)."""


def check_estimators(source: Script) -> Iterator[Hint]:
    """Check for scikit-learn estimators that also exist for GPUs, once per file."""
    estimators = []
    for call in source.calls:
        parts = source.qualified_name(call.func).split(".")
        in_cuml = (
            parts[0] == "sklearn"
            and len(parts) > 2
            and parts[-1] in _CUML_ESTIMATORS.get(parts[1], ())
        )
        if in_cuml or source.qualified_name(call.func) in {"umap.UMAP", "hdbscan.HDBSCAN"}:
            estimators.append((call, parts[-1]))
    if not estimators:
        return
    names = ", ".join(dict.fromkeys(name for _, name in estimators))
    yield Hint(
        id="estimator-on-gpu",
        title=f"{names} of scikit-learn: cuML has the same for GPUs",
        why="scikit-learn computes on the CPU; with many rows an NVIDIA GPU is much faster",
        fix="Start the program with cuML's accelerator; the code stays as it is.",
        code=f"python -m cuml.accel {source.name.rsplit('/', 1)[-1]}",
        confirmed_by="",
        **hint_position(estimators[0][0]),
    )


def _calls_model(func: ast.expr) -> bool:
    """Return whether a call runs a commonly named model: ``model(x)``, ``self.model(x)``."""
    if isinstance(func, ast.Name):
        return bool(re.search(r"model|net|encoder|decoder|backbone", func.id, re.IGNORECASE))
    return (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "self"
        and bool(re.search(r"model|net$", func.attr, re.IGNORECASE))
    )


def _runs_without_grad(source: Script, node: ast.AST) -> bool:
    for outer in source.ancestors(node):
        if isinstance(outer, ast.With | ast.AsyncWith) and _disables_grad(source, outer):
            return True
        if isinstance(outer, Function):
            for decorator in outer.decorator_list:
                func = decorator.func if isinstance(decorator, ast.Call) else decorator
                if source.qualified_name(func) in _NO_GRAD_NAMES:
                    return True
    return any(
        source.qualified_name(call.func) in {"torch.set_grad_enabled", "torch._C._set_grad_enabled"}
        for call in source.calls
    )


def _disables_grad(source: Script, node: ast.With | ast.AsyncWith) -> bool:
    for item in node.items:
        expr = item.context_expr
        func = expr.func if isinstance(expr, ast.Call) else expr
        if source.qualified_name(func) in _NO_GRAD_NAMES:
            return True
    return False


def check_parallel(source: Script) -> Iterator[Hint]:
    """Check for ``DataParallel``, and for gradients reduced after every micro-batch."""
    for call in source.calls:
        if source.qualified_name(call.func) in _DATA_PARALLEL_NAMES:
            yield _data_parallel_hint(source, call)
    if not any(is_method(call, "no_sync", "accumulate") for call in source.calls):
        yield from _check_accumulation(source)


def _data_parallel_hint(source: Script, call: ast.Call) -> Hint:
    model = source.text_of(call.args[0]) if len(call.args) == 1 else "model"
    return Hint(
        id="data-parallel",
        title="torch.nn.DataParallel",
        why=(
            "one process drives all GPUs: every step it copies the model to each, gathers all "
            "outputs on the first, and runs Python on one core"
        ),
        fix=(
            "Use DistributedDataParallel with one process per GPU, started by torchrun: "
            "init_process_group(), local_rank from the environment, a DistributedSampler."
        ),
        code=f"DistributedDataParallel({model}, device_ids=[local_rank])",
        confirmed_by="data-parallel",
        **hint_position(call),
    )


def _check_accumulation(source: Script) -> Iterator[Hint]:
    model = _find_ddp_variable(source)
    if model is None:
        return
    for loop in source.training_loops:
        condition = _find_step_condition(loop)
        backward = [
            n for n in ast.walk(loop) if is_method(n, "backward") and source.loop_around(n) is loop
        ]
        if condition is None or not backward:
            continue
        statement = source.statement(backward[0])
        if statement is None or statement not in loop.body:
            continue
        yield Hint(
            id="accumulation-without-no-sync",
            title="Gradients are reduced across ranks after every micro-batch",
            why="only the last micro-batch before optimizer.step() has to reduce them",
            fix="Run forward and backward of the other micro-batches under model.no_sync().",
            code=(
                f"with contextlib.nullcontext() if {source.text_of(condition)} else "
                f"{model}.no_sync():\n    ...   # forward and backward, both"
            ),
            confirmed_by="missing-no-sync",
            **hint_position(backward[0]),
        )


def _find_ddp_variable(source: Script) -> str | None:
    """Return the variable that holds a DistributedDataParallel, or ``None`` if there is none."""
    for call in source.calls:
        if source.qualified_name(call.func) in _DDP_NAMES:
            statement = source.statement(call)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                return statement.targets[0].id
    return None


def _find_step_condition(loop: ast.AST) -> ast.expr | None:
    """Return the condition, with a remainder, under which the optimizer steps, or ``None``."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and is_occasional(node.test):
            for inner in node.body:
                for call in ast.walk(inner):
                    if is_method(call, "step") and not (call.args or call.keywords):
                        return node.test
    return None
