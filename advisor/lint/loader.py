"""Hints about loading data and copying it to the GPU."""

import ast
import re
from collections.abc import Iterator

from advisor.core.cgroup import count_cores
from advisor.lint.script import (
    Function,
    Hint,
    Script,
    find_keyword,
    hint_position,
    is_constant,
    is_method,
    names_in,
)

LOADER_NAMES = {"torch.utils.data.DataLoader", "DataLoader", "torch_geometric.loader.DataLoader"}
MAX_WORKERS = 2
"""Number of workers to begin with: one that loads, and one more for slow batches."""
_WORKERS_POSITION = 5
"""Index of ``num_workers`` among the positional arguments."""


_IN_MEMORY_DATASET = re.compile(r"(?:^|\.)TensorDataset$")
_DATASET_PARTS = re.compile(r"(?:^|\.)(?:Subset|random_split|ConcatDataset)$")
_TRAINING_ARGUMENTS = re.compile(r"(?:^|\.)\w*TrainingArguments$|(?:^|\.)SFTConfig$")


def check_loader(source: Script) -> Iterator[Hint]:
    """Check DataLoader arguments, blocking copies of pinned batches, samplers without an epoch,
    Hugging Face's Trainer and tf.data pipelines."""
    yield from _check_trainer_arguments(source)
    yield from _check_tf_data(source)
    loaders = [call for call in source.calls if source.qualified_name(call.func) in LOADER_NAMES]
    for call in loaders:
        yield from _check_arguments(source, call)
    if any(is_constant(find_keyword(call, "pin_memory"), True) for call in loaders):
        yield from _check_blocking_copies(source)
    yield from _check_sampler_epoch(source)
    yield from _check_element_writes(source)


def _check_arguments(source: Script, call: ast.Call) -> Iterator[Hint]:
    if any(item.arg is None for item in call.keywords) or any(
        isinstance(item, ast.Starred) for item in call.args
    ):
        return  # with **options the call does not show its arguments
    workers = find_keyword(call, "num_workers")
    if workers is None and len(call.args) > _WORKERS_POSITION:
        workers = call.args[_WORKERS_POSITION]
    no_workers = workers is None or is_constant(workers, 0)
    dataset = call.args[0] if call.args else find_keyword(call, "dataset")
    in_memory = no_workers and is_in_memory(source, dataset)
    missing = []
    if workers is None and not in_memory:
        missing.append(f"num_workers={_suggest_workers()}")
    if find_keyword(call, "pin_memory") is None and re.search(r"\bcuda\b", source.text):
        missing.append("pin_memory=True")
    if (
        find_keyword(call, "persistent_workers") is None
        and (workers is None or not no_workers)
        and not in_memory
    ):
        missing.append("persistent_workers=True")
    loop = _find_rebuilding_loop(source, call) if not no_workers or missing else None
    if not missing and (not no_workers or in_memory) and loop is None:
        return
    suggested = list(missing)
    if workers is not None and no_workers and not in_memory:
        missing.append("num_workers above 0")
        suggested.append(f"num_workers={_suggest_workers()}")
        if find_keyword(call, "persistent_workers") is None:
            suggested.append("persistent_workers=True")
    rebuilt_notes = [] if loop is None or in_memory else ["built again in each pass of a loop"]
    if rebuilt_notes and not no_workers:
        why = "each pass of the loop starts the workers again, persistent_workers or not"
        rule = "workers-respawned"
    elif missing == ["persistent_workers=True"]:
        why = "workers restart for every epoch, and its first batch waits for them"
        rule = "workers-respawned"
    elif no_workers and not in_memory:
        why = "the training process loads and transforms every batch itself, and the step waits"
        rule = "single-process-loader"
    else:
        why = "a copy from pageable memory blocks the host"
        rule = "pageable-copies"
    names = [argument.partition("=")[0] for argument in missing]
    missing_notes = [f"without {' and '.join(names)}"] if missing else []
    advice = f"Add {' and '.join(suggested)}."
    number = next((each for each in suggested if each.startswith("num_workers=")), "")
    if in_memory:
        advice = "Pin the memory of batches that go to a GPU."
    elif number:
        advice = f"Begin with {number}. A recording shows how many the step needs."
    fixes = [advice] * bool(missing)
    build_once = ["Build the loader once, before the loop: its workers live as long as it does."]
    build_once *= bool(rebuilt_notes)
    yield Hint(
        id="dataloader-arguments",
        title=f"DataLoader {', '.join([*missing_notes, *rebuilt_notes])}",
        why=why if in_memory else f"{why}; a dataset in memory may be faster without workers",
        fix=" ".join([*fixes, *build_once]),
        code=_add_arguments(call, suggested, before_loop=bool(rebuilt_notes)),
        confirmed_by=rule,
        **hint_position(call),
    )


def _find_rebuilding_loop(source: Script, call: ast.Call) -> ast.AST | None:
    """Return the loop that builds the same loader again in each pass, or ``None``."""
    loop = source.loop_around(call)
    if loop is None:
        return None
    changed = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    return None if changed & used else loop


def _add_arguments(call: ast.Call, suggested: list[str], *, before_loop: bool) -> str:
    """Return the program's own call with the arguments added, and where to put it."""
    arguments = ast.parse(f"f({', '.join(suggested)})", mode="eval").body
    assert isinstance(arguments, ast.Call)
    new_names = {item.arg for item in arguments.keywords}
    kept_keywords = [item for item in call.keywords if item.arg not in new_names]
    positional = call.args[:_WORKERS_POSITION]  # further ones are rare, and their names unknown
    text = ast.unparse(ast.Call(call.func, positional, [*kept_keywords, *arguments.keywords]))
    return f"loader = {text}   # before the loop" if before_loop else text


def is_in_memory(source: Script, node: ast.expr | None, depth: int = 4) -> bool:
    """Return whether a dataset's items are in memory and only indexed: a TensorDataset, a list,
    parts of these, or a class of the file whose ``__getitem__`` only indexes. Workers would only
    copy the items."""
    if node is None or not depth:
        return False
    if isinstance(node, ast.List | ast.ListComp | ast.Tuple):
        return True
    if isinstance(node, ast.Call):
        name = source.qualified_name(node.func)
        if _IN_MEMORY_DATASET.search(name) or name in {"list", "sorted"}:
            return True
        if _DATASET_PARTS.search(name):
            return is_in_memory(source, node.args[0] if node.args else None, depth - 1)
        return _only_indexes(source, name)
    if isinstance(node, ast.Name | ast.Attribute):
        values = source.assignments_to(node)
        return bool(values) and all(is_in_memory(source, value, depth - 1) for value in values)
    return isinstance(node, ast.Subscript) and is_in_memory(source, node.value, depth - 1)


def _only_indexes(source: Script, name: str) -> bool:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
                statements = [n for n in method.body if not isinstance(n, ast.Expr)]
                return len(statements) == 1 and not any(
                    isinstance(inner, ast.Call) for inner in ast.walk(statements[0])
                )
    return False


def _check_trainer_arguments(source: Script) -> Iterator[Hint]:
    """Check Hugging Face's Trainer, whose DataLoader has no workers by default."""
    for call in source.calls:
        if not _TRAINING_ARGUMENTS.search(source.qualified_name(call.func)):
            continue
        workers = find_keyword(call, "dataloader_num_workers")
        if any(item.arg is None for item in call.keywords) or not (
            workers is None or is_constant(workers, 0)
        ):
            continue
        yield Hint(
            id="trainer-workers",
            title="Trainer without dataloader_num_workers",
            why="the training process loads and collates every batch itself, and the step waits",
            fix="Set dataloader_num_workers; a small tokenized dataset may need none.",
            code=(
                f"{source.text_of(call.func)}(..., dataloader_num_workers={_suggest_workers()}, "
                "dataloader_persistent_workers=True)"
            ),
            confirmed_by="single-process-loader",
            **hint_position(call),
        )


def _check_tf_data(source: Script) -> Iterator[Hint]:
    """Check tf.data pipelines for ``prefetch()``, and their maps for parallel calls."""
    pipelines = [
        call
        for call in source.calls
        if source.qualified_name(call.func).startswith(("tensorflow.data.", "tf.data."))
        or (
            is_method(call, "from_tensor_slices", "from_generator")
            and "data" in source.qualified_name(call.func).split(".")
        )
    ]
    if not pipelines:
        return
    if not any(is_method(call, "prefetch") for call in source.calls):
        yield Hint(
            id="tf-data-prefetch",
            title="tf.data pipeline without prefetch()",
            why="the next batch is prepared only when the step before has ended",
            fix="End the pipeline with prefetch.",
            code="dataset = dataset.prefetch(tf.data.AUTOTUNE)",
            confirmed_by="",
            **hint_position(pipelines[0]),
        )
    for call in source.calls:
        if (
            is_method(call, "map")
            and isinstance(call.func, ast.Attribute)
            and len(call.args) == 1
            and find_keyword(call, "num_parallel_calls") is None
            and _is_tf_dataset(source, call.func.value)
        ):
            yield Hint(
                id="tf-data-map",
                title="map() of a tf.data pipeline takes one element at a time",
                why="elements are transformed one after the other, on one core",
                fix="Let tf.data choose how many to transform at a time.",
                code="dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE)",
                confirmed_by="",
                **hint_position(call),
            )


def _is_tf_dataset(source: Script, node: ast.expr, depth: int = 8) -> bool:
    """Return whether a chain of calls begins with tf.data."""
    if not depth:
        return False
    if isinstance(node, ast.Call):
        name = source.qualified_name(node.func)
        if name.startswith(("tensorflow.data.", "tf.data.")):
            return True
        return isinstance(node.func, ast.Attribute) and _is_tf_dataset(
            source, node.func.value, depth - 1
        )
    if isinstance(node, ast.Name):
        values = source.assignments_to(node)
        return any(
            _is_tf_dataset(source, value, depth - 1)
            for value in values
            if not (isinstance(value, ast.Name) and value.id == node.id)
        )
    return False


def _suggest_workers() -> int:
    """Return a number of workers to begin with, at most one per core."""
    return min(MAX_WORKERS, count_cores())


def _check_blocking_copies(source: Script) -> Iterator[Hint]:
    for call in source.calls:
        if not is_method(call, "to", "cuda") or find_keyword(call, "non_blocking") is not None:
            continue
        assert isinstance(call.func, ast.Attribute)
        if source.in_training_loop(call) is None:
            continue
        if call.func.attr == "to" and not (call.args and _is_device(call.args[0])):
            continue
        yield Hint(
            id="blocking-copy",
            title=f"{source.text_of(call)[:60]} waits for the copy",
            why="the batch is in pinned memory, so the copy does not have to block the host",
            fix="Copy with non_blocking=True.",
            code=f"{_open_call_text(source, call)}, non_blocking=True)",
            confirmed_by="blocking-pinned-copy",
            **hint_position(call),
        )


def _open_call_text(source: Script, call: ast.Call) -> str:
    """Return the text of a call up to its closing bracket, ready for another argument."""
    text = source.text_of(call)[:-1].rstrip().rstrip(",")
    return text if call.args or call.keywords else f"{text}device"


def _is_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("cuda")
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return "device" in name.lower() or name in {"rank", "local_rank"}


def _check_sampler_epoch(source: Script) -> Iterator[Hint]:
    """Check for a DistributedSampler without ``set_epoch()``: every epoch has the same order."""
    if any(is_method(call, "set_epoch") for call in source.calls):
        return
    for call in source.calls:
        if source.qualified_name(call.func).rsplit(".", 1)[-1] != "DistributedSampler":
            continue
        if is_constant(find_keyword(call, "shuffle"), False):
            continue
        yield Hint(
            id="sampler-epoch",
            title="DistributedSampler without set_epoch()",
            why="every epoch has the same order, which costs quality, not time",
            fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
            code="sampler.set_epoch(epoch)   # before the epoch's loop over the loader",
            confirmed_by="",
            **hint_position(call),
        )


_LOADING_FUNCTIONS = re.compile(r"__getitems?__|\w*collate\w*")
_NEW_TENSORS = {"torch.zeros", "torch.ones", "torch.empty", "torch.full"}


def _check_element_writes(source: Script) -> Iterator[Hint]:
    """Check the functions that load samples for a tensor that a loop fills element by element."""
    for function in ast.walk(source.tree):
        if not isinstance(function, Function) or not _LOADING_FUNCTIONS.fullmatch(function.name):
            continue
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For):
                continue
            for node in loop.body:
                if _writes_element(source, function, loop, node):
                    assert isinstance(node, ast.Assign)
                    yield _element_write_hint(source, loop, node)


def _writes_element(source: Script, function: ast.AST, loop: ast.For, node: ast.stmt) -> bool:
    """Return whether a statement of the loop writes an element of a tensor of the function."""
    if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Subscript):
        return False
    if not isinstance(target.value, ast.Name) or not names_in(target.slice) & names_in(loop.target):
        return False
    if any(isinstance(part, ast.Slice | ast.Call) for part in ast.walk(target.slice)):
        return False
    return any(
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and source.qualified_name(statement.value.func) in _NEW_TENSORS
        and any(isinstance(t, ast.Name) and t.id == target.value.id for t in statement.targets)
        for statement in ast.walk(function)
    )


def _element_write_hint(source: Script, loop: ast.For, node: ast.Assign) -> Hint:
    target = node.targets[0]
    assert isinstance(target, ast.Subscript)
    name, value = source.text_of(target.value), source.text_of(node.value)
    code = None
    counters = loop.target.elts[:1] if isinstance(loop.target, ast.Tuple) else [loop.target]
    is_counted = (
        isinstance(loop.iter, ast.Call)
        and len(loop.iter.args) == 1
        and (source.qualified_name(loop.iter.func) in ("enumerate", "range"))
    )
    if is_counted and len(loop.body) == 1 and ast.dump(target.slice) == _load_of(counters[0]):
        pairs = f"for {source.text_of(loop.target)} in {source.text_of(loop.iter)}"
        code = f"values = [{value} {pairs}]\n{name}[:len(values)] = torch.tensor(values)"
    return Hint(
        id="element-writes",
        title=f"{source.text_of(node).splitlines()[0][:60]} writes one element at a time",
        why="each write is an operator of its own, some microseconds of the loading of a sample",
        fix="Fill a list, and make a tensor of it once.",
        code=code,
        confirmed_by="single-process-loader",
        **hint_position(node),
    )


def _load_of(node: ast.expr) -> str:
    """Return the dump of a loop's variable as it is read."""
    return ast.dump(ast.Name(node.id, ast.Load())) if isinstance(node, ast.Name) else ""
