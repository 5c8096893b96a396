"""The step waits for the DataLoader: for its workers, or for the loading in the main process."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, Select, SkippedCheck
from advisor.core.rule import Evidence, Factor, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.rules.support.citations import (
    CHOSEN,
    ENGINE_FLOOR,
    HAND_OVER,
    SILENT_TRACES,
    TENSORBOARD,
    TRIED_ON_TRACES,
    XPROF,
)
from advisor.rules.support.common import (
    amount_per_step,
    cores_per_process,
    costliest_places,
    estimate_contended_loading,
    find_loader,
    has_trainer,
    of_step,
    run_steps_of,
    scale_edit,
    workers_needed,
    workers_of,
)
from advisor.rules.support.framework_advice import JAX_AHEAD, TF_PREFETCH
from advisor.rules.support.library_functions import LibraryUse
from advisor.rules.support.loader_waits import (
    SINGLE_PROCESS,
    WORKERS,
    LoaderWaits,
    LoadingRule,
    LoadingSamples,
    find_loading_calls,
    find_waits,
    is_recurring,
    library_of_loading,
    lines_of,
    move_loading,
    prepares_images,
    sample_loading,
    skip_single_wait,
    table_of_dataset,
)
from advisor.testing import Examples, TraceBuilder


class LoaderWaitRule(Rule):
    """Base of the rules about waits for one kind of loader, which its ranges in the trace name."""

    min_share = Threshold(0.05, "of the step", TENSORBOARD, XPROF)
    min_batch_ms = Threshold(
        3.0, "ms: taking over a ready batch from a worker takes as long", HAND_OVER
    )

    falsified_by = "the same step time when the loop reuses one batch"
    confidence = 0.9
    looks_at: ClassVar[Mapping[str, str]] = {
        "loader": "little to gain from workers if loading takes under {min_share:.0%} of the time, "
        "or under {min_batch_ms:g} ms per batch, as long as it takes to hand one over"
    }

    _ranges: ClassVar[str]

    def _report(self, a: Analysis, waits: LoaderWaits, share: float, batch: float) -> Finding:
        raise NotImplementedError

    def _report_pass(self, a: Analysis, share: float) -> Outcomes:
        yield from ()

    def check(self, a: Analysis) -> Outcomes:
        waits = find_waits(a, self._ranges)
        if waits is None:
            return
        moved_share = sample_loading(a, waits).movable_share
        share = moved_share * waits.exposed / a.span_ns
        batch = moved_share * waits.total / len(waits.host)
        if share < self.min_share or batch < self.min_batch_ms * 1e6:
            yield from self._report_pass(a, share)
            return
        if not is_recurring(waits, self.min_share * a.step_ns):
            yield skip_single_wait(waits, _loader_name(a))
            return
        yield self._report(a, waits, share, batch)


def _loader_name(a: Analysis) -> str:
    return "tf.data" if a.trace.meta.framework in (TENSORFLOW, JAX) else "the DataLoader"


class DataLoaderWait(LoaderWaitRule):
    """The GPU idles while the training loop waits for the loader's workers, so the step is as slow
    as the input pipeline.

    PyTorch marks each fetch of a batch, ``enumerate(DataLoader)#….__next__``. Only the part of that
    wait counts during which the GPU idles and its next work comes after the wait. A wait while the
    GPU still works through its queue costs nothing. Without GPU work in the trace (training on the
    CPU) the full wait counts. A loader without worker processes (``num_workers=0``) is the subject
    of the rule single-process-loader.

    A ready batch is not free. Taking it over (queue, shared memory, wake-up) took 1.5 ms for 8 KiB
    and 4 ms for 2 MiB. It did so with 2 workers and with 6 (torch 2.13, two busy cores). Such short
    waits say nothing about the workers, and more workers would not help.

    Where workers and training share all cores of the process, the advice is a cheaper batch. The
    high end is then a training that has these cores for itself.

    Traps: the first batch of an epoch, for which workers are started, says nothing about the
    others. When one step of three or more has nearly all the wait, the rule abstains. A custom
    loader leaves no mark in the trace. Its time shows as Python before the first kernel."""

    id = "dataloader-wait"
    title = "The step waits for the DataLoader"
    host_check = "loading data"
    knobs = ("workers", "loader-prefetch")
    found_in = ("workloads/cpu_transforms",)
    silent_in = (*SILENT_TRACES, "workloads/cpu_transforms")
    validation_note = (
        "CPU recordings, torch 2.13: fires with 2 workers that need 80 ms per batch (6 workers: "
        "step 102 to 54 ms). Silent where only the hand-over shows. Silent on A100 and V100 traces "
        "whose loader keeps up (0.1% and 0.0% of the step)"
    )
    references = (
        "https://pytorch.org/docs/stable/data.html",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    max_healthy_share = Threshold(
        0.01, "of the step, exposed: below it the loader keeps up", ENGINE_FLOOR
    )
    worker_ratio = Factor(
        2,
        "times the workers, for the estimate: one doubling, where cores are free",
        TRIED_ON_TRACES,
    )

    fix = (
        "Raise num_workers up to the cores that this process may use. Keep workers alive between "
        "epochs, and prefetch more. If the cores are busy already, move decoding and augmentation "
        "to the GPU or cache their result. If the storage is busy, read larger shards from a local "
        "disk."
    )
    code = (
        "cores = len(os.sched_getaffinity(0)) // local_world_size\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., num_workers=max(1, cores - 1),\n"
        "                    prefetch_factor=4, persistent_workers=True)"
    )
    verify = (
        "Profile again: the exposed wait falls. Iterate over the loader alone, without the model, "
        "to see the fastest step that this loader allows."
    )
    assumptions = ("cores and storage bandwidth are free for more workers",)
    cases = {
        "no core is left for another worker": {
            "fix": "Make a batch cheaper. The training and its workers have {cores} in all, where "
            "one more worker only takes turns with them. Keep what several samples read or "
            "compute again: a file that holds many, decoded data, tables. Prepare the rest once, "
            "ahead of the training.",
            "code": "@functools.lru_cache(maxsize=64)    # in each worker\n"
            "def read_file(path):                # what samples share\n"
            "    ...",
            "assumptions": ("a batch can be made in half the time",),
        }
    }

    framework_advice = {
        TENSORFLOW: FrameworkAdvice(
            "Let tf.data work ahead of the step. Prefetch last, map and interleave in parallel "
            "with AUTOTUNE, and batch before cheap maps so that they are vectorized. Cache what "
            "stays the same, read several files at once, and take Python functions "
            "(tf.py_function) out of the pipeline.",
            "files.interleave(tf.data.TFRecordDataset,\n"
            "                 num_parallel_calls=tf.data.AUTOTUNE)\n" + TF_PREFETCH,
            title="The step waits for tf.data",
        ),
        JAX: FrameworkAdvice(
            "Let the input pipeline work ahead of the step: prefetch last and map in parallel "
            "(tf.data), or use worker processes (Grain). Copy the next batch to the GPU while "
            "this step runs.",
            TF_PREFETCH + "\n" + JAX_AHEAD,
            title="The step waits for its input",
        ),
    }

    _ranges = WORKERS

    def check(self, a: Analysis) -> Outcomes:
        if a.trace.cpu.is_empty():
            yield SkippedCheck(
                what="waits for the input pipeline",
                why="the trace has no host events",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
            return
        yield from super().check(a)

    def _report_pass(self, a: Analysis, share: float) -> Outcomes:
        if share < self.max_healthy_share and a.device_id is not None:
            yield PassedCheck(
                text=f"{_loader_name(a)} keeps up: the GPU waits {share:.1%} {t.format_of(a.per)}"
            )

    def _report(self, a: Analysis, waits: LoaderWaits, share: float, batch: float) -> Finding:
        calls = find_loading_calls(a, waits)
        source = _loader_name(a)
        source = source if source == "tf.data" else "the loader's workers"
        overlap = "" if a.device_id is None else " while the GPU idles"
        return Finding(
            summary=(
                f"The step waits {of_step(a, waits.exposed)} for {source}{overlap}. Batches arrive "
                f"more slowly than the step uses them.{calls.summary}"
            ),
            evidence=[
                amount_per_step(a, "exposed wait", waits.exposed),
                self.compare("exposed wait, share", share, "min_share", per=a.per),
                amount_per_step(a, "wait for the loader", waits.total),
                self.compare("mean wait for a batch", batch, "min_batch_ms", "ns", times=1e6),
                Evidence("steps that wait", float(np.mean(waits.by_step > 0)), "share"),
                Evidence("longest wait of a step", int(waits.by_step.max()), "ns"),
                *calls.evidence,
            ],
            where=[*calls.where, *costliest_places(a, waits.host, waits.exposed_ns)],
            **self._build_advice(a),
        )

    def _build_advice(self, a: Analysis) -> dict[str, Any]:
        """Return the edits. If each core of this process has a worker or the training, add the
        advice for that case. Cores that were not recorded count as free."""
        edit = Edit(
            op="parallelize", select=Select(on="host", name=WORKERS), workers=self.worker_ratio
        )
        loader = None if a.run_steps is None else find_loader(a)
        cpus = None if a.rank_record is None else a.rank_record.rank.cpus
        workers = None if loader is None else workers_of(loader)
        if cpus is None or workers is None:
            return {"edits": [edit]}
        cores = int(cores_per_process(a, cpus))
        if workers < cores - 1:
            return {"edits": [edit]}
        threads = run_steps_of(a).flag("num_threads")
        edits = [edit]
        if a.trains_on_host and isinstance(threads, int) and threads + workers > cores:
            part = cores / (min(threads, cores) + workers)  # the training's share of the cores
            edits.append(scale_edit(Select(on="host", kind=("op",)), 1.0, min(1.0, part), 1.0))
        return {
            **self.case("no core is left for another worker", cores=t.count_noun(cores, "core")),
            "edits": edits,
        }

    @staticmethod
    def examples() -> Examples:
        slow, host_only = TraceBuilder(), TraceBuilder(gpu=None)
        full = TraceBuilder(gpu=None)
        for b in (slow, full):
            for _ in b.steps():
                b.loader_wait(4000)
                b.product(3000, wait=True)
        r = full.record_of_run(cpus=2, flags={"num_threads": 2})
        r.event("loader", id=1, workers=1)
        r.event("loader_iter", id=1)
        r.steps(60, 8, data=4, forward=3)
        for _ in host_only.steps():
            host_only.loader_wait(4000)
            host_only.on_host("aten::mm", 3000)
        hidden, single, first = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in hidden.steps():
            hidden.product(6000)
            hidden.loader_wait(4000)
        for _ in single.steps():
            single.loader_wait(4000, workers=0)
            single.product(3000, wait=True)
        for number in first.steps():
            first.loader_wait(14000 if number == 0 else 30)
            first.product(30000, wait=True)
        return {
            "slow workers": slow,
            "a worker on the only free core": full,
            "training on the CPU": host_only,
            "hidden behind GPU work": (hidden, "share < self.min_share"),
            "no workers": (single, "waits is None"),
            "first batch": (first, "not is_recurring("),
        }


class SingleProcessLoader(LoadingRule, LoaderWaitRule):
    """The DataLoader has no workers (``num_workers=0``), so the training process prepares each
    batch itself, and the step waits. Workers would prepare it during the previous step.

    PyTorch names the iterator in its range, ``_SingleProcessDataLoaderIter.__next__``. As for
    dataloader-wait, only the part of the loading that leaves the GPU idle counts. A short load does
    not need a worker. Taking a ready batch over from one (queue, shared memory, wake-up) took 1.5
    ms for 8 KiB and 4 ms for 2 MiB. That was measured with torch 2.13 and two busy cores. If the
    data is in memory already, slice whole tensors instead.

    Half of the stacks sampled in the loading may be in one kind of library function. Examples are
    an .npz file read again for each sample, a parser, ``copy.deepcopy``. Its own cure comes first,
    as it needs no free core, and the gain covers its share of the samples. Workers come second."""

    id = "single-process-loader"
    title = "The DataLoader has no workers and the step waits for it"
    host_check = "loading data"
    sampled_part = "data"
    knobs = ("workers",)
    found_in = (
        "traces/pairs/loader_autograd_workers0",
        "traces/pairs/loader_profiler_workers0",
        "workloads/loader_bound",
    )
    silent_in = (*SILENT_TRACES, "workloads/loader_bound")
    validation_note = (
        "one training with num_workers 0 and 4 (median step 155 to 121 ms). CPU recordings, torch "
        "2.13: 80 ms of loading per step, gain estimated at 65% of the step. With 4 workers the "
        "unprofiled step went from 169 to 58 ms (65%). A small CNN that trains on both of two "
        "cores: no estimated gain, and 26 to 55% slower with two workers"
    )
    references = (
        "https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    max_workers = Threshold(
        8,
        "workers, where the cores are not recorded: shared machines give a GPU as many",
        TRIED_ON_TRACES,
    )
    max_taken = Threshold(
        0.5, "of the loading would run on cores that the step needs for its own compute", CHOSEN
    )
    min_cheaper_share = Threshold(
        0.3, "of the step in loading that workers cannot take, to advise on its code", CHOSEN
    )

    fix = (
        "Set num_workers={workers} to load in worker processes: on average {needed} would be "
        "enough{spare}. If the whole dataset fits in memory, index tensors one batch at a "
        "time{on_gpu}."
    )
    code = (
        "# keep your other arguments\n"
        "loader = DataLoader(..., num_workers={workers},\n"
        "                    persistent_workers=True)"
    )
    verify = (
        "Profile again: the ranges read _MultiProcessingDataLoaderIter, and their exposed part is "
        "near zero."
    )
    assumptions = ("this many cores are free for workers", "the dataset can be pickled")
    cases = {
        "a batch that takes more workers than there are cores": {
            "fix": "Set num_workers={workers}. To keep up, {needed} workers are needed, and there "
            "are fewer cores. So make a batch cheaper too: it takes {batch}, the maximum "
            "saving. Do work once that repeats for every sample: {prepare} ahead, cache, store "
            "in a few large files. Work on whole batches{to_gpu}."
        },
        "the training computes on the same cores": {
            "fix": "Make loading cheaper, which saves up to {loading}: {cheaper}keep what repeats "
            "for every sample{images}. Or set num_workers={workers}, and leave cores to the "
            "workers with torch.set_num_threads. The training itself computes on all cores, so "
            "measure that: advisor try --only workers.",
            "code": "def __getitems__(self, indices):   # of the Dataset: a batch at once\n"
            "    return list(zip(self.x[indices], self.y[indices]))",
        },
        "loading is much of the step": {
            "title": "Loading in the loop's own process takes much of the step",
            "fix": "Do once what {function} repeats for each sample, or prepare a whole batch at "
            "once. {rest}",
            "verify": "Record again: the phase 'data' shrinks.",
            "assumptions": ("the loading repeats work, or a cheaper call does the same",),
        },
        "other programs take the cores": {
            "fix": "Make loading cheaper, which needs no free core: {cheaper}keep what repeats for "
            "every sample{images}. Once the other programs end, set num_workers={workers}.",
            "code": "def __getitems__(self, indices):   # of the Dataset: a batch at once\n"
            "    return list(zip(self.x[indices], self.y[indices]))",
        },
        "a table in memory": {
            "title": "The Dataset prepares rows of a table for each batch",
            "fix": "Prepare the whole table once, in the Dataset's __init__, and keep it as "
            "tensors: {function} repeats this in each epoch. For each batch, index them. What is "
            "random in each epoch stays in __getitem__.",
            "code": "# of the Dataset; `prepare` is what each batch repeats\n"
            "def __init__(self, table):\n"
            "    self.tensors = prepare(table)\n\n"
            "def __getitem__(self, index):\n"
            "    return tuple(each[index] for each in self.tensors)",
            "verify": "Record again: the phase 'data' shrinks.",
            "assumptions": ("the run has several epochs, and the prepared table fits in memory",),
        },
        "batches made by the Dataset": {
            "code": "# keep your other arguments\n"
            "loader = DataLoader(dataset, batch_size=None, sampler=sampler,\n"
            "                    num_workers={workers}, persistent_workers=True)"
        },
        "Hugging Face's Trainer": {
            "code": "TrainingArguments(..., dataloader_num_workers={workers},\n"
            "                  dataloader_persistent_workers=True)"
        },
    }

    remaining_table_share = Factor(
        0.2, "of the work on a table is left: its rows are indexed", CHOSEN
    )
    best_remaining_table_share = Factor(0.05, "of it is left, at best", CHOSEN)
    worst_remaining_table_share = Factor(0.5, "of it is left, at worst", CHOSEN)

    _ranges = SINGLE_PROCESS

    def _report(self, a: Analysis, waits: LoaderWaits, share: float, batch: float) -> Finding:
        samples = sample_loading(a, waits)
        moved_share = samples.movable_share
        hot_line = samples.other_line if moved_share < 1 else None
        exposed = moved_share * waits.exposed
        calls = find_loading_calls(a, waits)
        moved_ns = moved_share * waits.total / a.step_count
        needed = workers_needed(moved_ns, a.step_ns - exposed / a.step_count)
        cores = None if a.rank_record is None else a.rank_record.rank.cpus
        workers = min(needed + 1, self.max_workers if cores is None else max(1, cores))
        fix, code = self.fix, self.code
        if needed > workers:
            fix = self.case("a batch that takes more workers than there are cores")["fix"]
        if has_trainer(a):
            code = self.case("Hugging Face's Trainer")["code"]
        taken = estimate_contended_loading(a, share)
        own_share = estimate_contended_loading(a, share, alone=True)
        if own_share is not None and own_share > self.max_taken:
            fix, code = self.case("the training computes on the same cores").values()
        elif _have_others_the_cores(a):
            fix, code = self.case("other programs take the cores").values()
        loaders = [] if a.run_steps is None else a.run_steps.loaders
        by_batch = bool(loaders) and all(x.get("batch_size", 0) is None for x in loaders)
        if by_batch:
            code = self.case("batches made by the Dataset")["code"]
        is_image_data, has_gpu = prepares_images(a), a.device_id is not None
        texts: dict[str, Any] = {
            "fix": fix.format(
                needed=needed,
                workers=workers,
                spare=", and one more covers slow batches" * (workers > needed),
                batch=t.format_duration(batch),
                loading=f"{t.format_share(share)} {t.format_of(a.per)}",
                prepare="decode and resize" if is_image_data else "prepare it",
                images=" (decoded, resized)" * is_image_data,
                cheaper="" if by_batch else "work on whole batches, and ",
                on_gpu=", or keep them on the GPU" * has_gpu,
                to_gpu=", or move transforms to the GPU" * has_gpu,
            ),
            "code": code.format(workers=workers),
            "edits": [move_loading(moved_share, workers, SINGLE_PROCESS, taken)],
            "assumptions": [_assume_cores(a, workers, cores), self.assumptions[1]],
        }
        use = library_of_loading(a, waits)
        is_much = (own_share or 0.0) > self.max_taken and share >= self.min_cheaper_share
        texts |= self._advise_on_code(a, samples, use, texts["fix"], workers, is_much=is_much)
        idle = "nothing else runs" if a.device_id is None else "the GPU idles"
        return Finding(
            summary=(
                f"The main process loads data itself (num_workers=0), and {idle} for "
                f"{of_step(a, exposed)}."
                + (calls.summary if use is None else use.sentence("the loading"))
                + " Its sampler is not counted: it stays in this process." * (moved_share < 1)
                + _warn_of_busy_cores(a)
            ),
            evidence=[
                amount_per_step(a, "exposed loading", exposed),
                self.compare("exposed loading, share", share, "min_share", per=a.per),
                self.compare("mean time of one batch", batch, "min_batch_ms", "ns", times=1e6),
                Evidence("workers that would keep up", needed, "count"),
                *(
                    [self.compare("part of the loading that needs busy cores", taken, "max_taken")]
                    if taken is not None
                    else []
                ),
                *calls.evidence,
            ],
            where=[
                *(lines_of(use) or ([] if hot_line is None else [hot_line.location])),
                *calls.where,
                *costliest_places(a, waits.host, waits.exposed_ns),
            ],
            **texts,
        )

    def _advise_on_code(
        self,
        a: Analysis,
        samples: LoadingSamples,
        use: LibraryUse | None,
        fix: str,
        workers: int,
        *,
        is_much: bool,
    ) -> dict[str, Any]:
        """Return the fields of advice on the code that loads: on a table, a library function, or on
        its hottest line if loading ``is_much`` of the step and workers cannot take it. ``fix``: the
        advice on workers. Empty if nothing is known of this code."""
        table, line, moved_share = table_of_dataset(a), samples.other_line, samples.movable_share
        select = Select(on="host", name=SINGLE_PROCESS)
        if table is not None:
            left = self.range_of("remaining_table_share")
            edits = [scale_edit(select, *(1 - moved_share * (1 - x) for x in left))]
            return {**self.case("a table in memory", function=table), "edits": edits}
        if use is not None and use.cure is not None:
            return self.advise_library(use, use.cure, fix, moved_share, workers)
        if line is None or not is_much:
            return {}
        function = str(line.location.function)
        return {
            **self.case("loading is much of the step", function=function, rest=fix),
            "edits": [scale_edit(select, 1 - moved_share, 1 - moved_share, 1.0)],
        }

    @staticmethod
    def examples() -> Examples:
        device, host_only = TraceBuilder(), TraceBuilder(gpu=None)
        for _ in device.steps():
            device.loader_wait(5000, workers=0)
            device.product(4000, wait=True)
        for _ in host_only.steps():
            host_only.loader_wait(5000, workers=0)
            host_only.on_host("aten::mm", 4000)
        hidden, workers, memory = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in hidden.steps():
            hidden.product(7000)
            hidden.loader_wait(5000, workers=0)
        for _ in workers.steps():
            workers.loader_wait(5000, workers=4)
            workers.product(4000, wait=True)
        for _ in memory.steps():
            memory.loader_wait(300, workers=0)
            memory.product(2000, wait=True)
        return {
            "with a GPU": device,
            "training on the CPU": host_only,
            "hidden behind GPU work": (hidden, "share < self.min_share"),
            "workers": (workers, "waits is None"),
            "in memory": (memory, "min_batch_ms"),
        }


class SamplerTime(Rule):
    """The sampler of a DataLoader without workers takes much of each step. Workers do not change
    that. They load the samples that it names, and it runs in the thread that drives the loop.

    The rule takes the time in ``_next_index`` from the window's Python stacks, or its share of the
    stacks sampled while the run loads. Usual causes grow with the dataset: a list is filtered,
    searched or shuffled for each batch, or ``list.remove`` moves all entries after one. The rule
    skips a loader with workers: the trace does not separate its sampler from the wait."""

    id = "sampler-time"
    title = "The batch sampler takes much of each step in the loop's own process"
    is_python_time = True
    found_in = ("recorded/batch_sampler.slow",)
    silent_in = ("recorded/worker_cpu.slow",)
    validation_note = (
        "CPU recordings, torch 2.13: a sampler that filters and searches lists for each batch "
        "(median step 41 ms), and one that shuffles once (9.2 ms)"
    )
    references = ("https://docs.pytorch.org/docs/stable/data.html#data-loading-order-and-sampler",)

    min_share = Threshold(0.05, "of the step, exposed", TENSORBOARD, XPROF)
    min_ms = Threshold(1.0, "ms per step: drawing random indices takes less", CHOSEN)

    fix = (
        "Make the order of an epoch once: shuffle NumPy arrays of indices in __iter__, and take "
        "each batch as a slice. Do not search lists or remove from them for each batch. "
        "num_workers does not move a sampler."
    )
    code = (
        "def __iter__(self):   # of the batch sampler\n"
        "    order = self.rng.permutation(len(self.labels))\n"
        "    # or, for as many of each class: rows_of has an index array per class\n"
        "    order = np.stack([self.rng.permutation(rows)[: self.per_class]\n"
        "                      for rows in self.rows_of], axis=1).ravel()\n"
        "    for start in range(0, len(order), self.batch_size):\n"
        "        yield order[start : start + self.batch_size].tolist()"
    )
    verify = "Record again: the line of the sampler has few of the sampled stacks."
    falsified_by = "the same step time with a list of batches made before the loop"
    assumptions = ("the order of an epoch can be made at its start",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        waits = find_waits(a, SINGLE_PROCESS)
        if waits is None:
            return
        share, line, _ = sample_loading(a, waits)
        sampler_ns = share * waits.exposed
        if sampler_ns < self.min_share * a.span_ns or sampler_ns < self.min_ms * 1e6 * a.step_count:
            return
        if not is_recurring(waits, self.min_share * a.step_ns):
            return
        place_text = ""
        if line is not None:
            part = "Most" if line.share > 0.5 else f"The largest part ({line.share:.0%})"
            place_text = f" {part} of it is in {line.location.function}."
        yield Finding(
            summary=(
                "The sampler makes the indices of each batch in the loop's own process, in "
                f"{of_step(a, sampler_ns)}.{place_text}"
            ),
            evidence=[
                amount_per_step(a, "exposed time of the sampler", sampler_ns),
                self.compare(
                    "exposed time of the sampler, share of the step",
                    sampler_ns / a.span_ns,
                    "min_share",
                ),
                Evidence("time of the sampler, share of the loading", share, "share"),
            ],
            where=[
                *([] if line is None else [line.location]),
                *costliest_places(a, waits.host, waits.exposed_ns),
            ],
            edits=[
                scale_edit(
                    Select(on="host", name=SINGLE_PROCESS),
                    *(1 - saved * share for saved in (0.9, 1.0, 0.5)),
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        once = TraceBuilder(gpu=None)
        for number in once.steps():
            once.loader_wait(14000 if number == 1 else 30, workers=0)
            once.on_host("aten::mm", 30000)
        _add_stacks(once)
        return {
            "stacks sampled outside the window": _build_loading_with_stacks(5000),
            "a fast sampler": (_build_loading_with_stacks(5000, 100_000), "min_share"),
            "short steps": (_build_loading_with_stacks(900, 900), "min_ms"),
            "workers": (_build_loading_with_stacks(5000, workers=2), "waits is None"),
            "one step": (once, "not is_recurring("),
        }


def _build_loading_with_stacks(us: int, compute_us: int = 5000, workers: int = 0) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(us, workers=workers)
        b.on_host("aten::mm", compute_us)
    _add_stacks(b)
    return b


def _add_stacks(b: TraceBuilder) -> None:
    """Record 60 samples of the loading, 40 of which are in the sampler."""
    frames = [
        "train.py(70): main",
        "torch/utils/data/dataloader.py(784): _SingleProcessDataLoaderIter._next_data",
        "torch/utils/data/dataloader.py(715): _BaseDataLoaderIter._next_index",
        "train.py(50): BalancedSampler.__iter__",
        "train.py(20): Clicks.__getitem__",
    ]
    run = b.record_of_run()
    run.steps(60, 10, data=5, forward=5)
    stacks = [[40, [0, 1, 2, 3]], [20, [0, 1, 4]]]
    run.event("stacks", frames=frames, stacks=stacks)


def _have_others_the_cores(a: Analysis) -> bool:
    """Return whether no core is free for workers, and one would be without other programs."""
    free = None if a.run_steps is None else a.run_steps.free_cores
    others = None if a.run_steps is None else a.run_steps.other_programs_cores
    return free is not None and others is not None and free < 1 <= free + others


def _warn_of_busy_cores(a: Analysis) -> str:
    """Say that no core is free for workers. Empty if one is, or if it is unknown."""
    cores = None if a.rank_record is None else a.rank_record.rank.cpus
    free = None if a.run_steps is None else a.run_steps.free_cores
    if cores is None or free is None or free >= 1:
        return ""
    return f" {cores - free:.1f} of {t.count_noun(cores, 'core')} are busy: workers share them."


def _assume_cores(a: Analysis, workers: int, cores: int | None) -> str:
    """Return ``2 cores are free for workers (the process may use 8 and keeps 1.1 busy)``."""
    text = f"{t.count_noun(workers, 'core')} {'is' if workers == 1 else 'are'} free for workers"
    if a.trains_on_host:
        text += " besides those that the step computes on"
    if cores is None:
        return text
    used = None if a.run_steps is None else a.run_steps.used_cores
    others = None if a.run_steps is None else a.run_steps.other_programs_cores
    busy_text = "" if used is None else f" and keeps {used:.1f} busy"
    busy_text += "" if used is None or others is None else f", other programs {others:.1f}"
    return f"{text} (the process may use {cores}{busy_text})"
