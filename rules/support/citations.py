"""Sources of the rules' numbers: other tools' thresholds, vendors' guides, our measurements.

``address`` is a public one, or the file of this repository in which the number is measured."""

from advisor.core.rule import Citation

# -- thresholds of other tools ------------------------------------------------------------------

FOURNEX = Citation("fournex 0.3.1", "https://pypi.org/project/fournex/")
GPU_IDLE = Citation("gpu-idle 0.1.0", "https://pypi.org/project/gpu-idle/")
GPUPROF = Citation(
    "gpuprof 0.7.1", "https://github.com/peppe-tringali/gpuprof/blob/main/src/gpuprof/insights.py"
)
NCU = Citation("Nsight Compute", "https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html")
INDUCTOR_SPILLS = Citation(
    "TorchInductor's spill_threshold: 16 registers, on ROCm 32",
    "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py",
)
SAGEMAKER = Citation(
    "SageMaker Debugger",
    "https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-profiler-rules.html",
)
SAGEMAKER_CPU = Citation("SageMaker Debugger (CPUBottleneck: 90%)", SAGEMAKER.address)
TENSORBOARD = Citation("TensorBoard", "https://pypi.org/project/torch-tb-profiler/")
TRACELENS = Citation("TraceLens", "https://github.com/AMD-AGI/TraceLens")
TRACEML = Citation(
    "TraceML", "https://github.com/traceopt-ai/traceml/tree/main/src/traceml/diagnostics"
)
XPROF = Citation(
    "XProf",
    "https://github.com/openxla/xprof/blob/main/xprof/convert/op_stats_to_input_pipeline_analysis.cc",
)
XPROF_LAUNCH = Citation("XProf: 3 to 15%", XPROF.address)

# -- vendors, papers, documentation -------------------------------------------------------------

CACHING_ALLOCATOR = Citation(
    "PyTorch's caching allocator reuses blocks",
    "https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
)
CHECKPOINT = Citation(
    "one more forward pass: a quarter of forward, backward and forward again",
    "https://arxiv.org/abs/1604.06174",
)
CUFFT = Citation(
    "cuFFT: Bluestein's algorithm for prime factors above 127",
    "https://docs.nvidia.com/cuda/cufft/index.html",
)
FLASH_2 = Citation(
    "FlashAttention 2: 50 to 73% of an A100's peak", "https://arxiv.org/abs/2307.08691"
)
FLASH_3 = Citation(
    "FlashAttention 3: up to 75% of an H100's peak", "https://arxiv.org/abs/2407.08608"
)
FOREACH = Citation(
    "PyTorch's optimizers: for-loop, foreach, fused", "https://pytorch.org/docs/stable/optim.html"
)
FULLY_SHARD = Citation(
    "PyTorch's fully_shard: set_reshard_after_backward",
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
)
INTERLEAVED = Citation(
    "Narayanan et al. 2021: the bubble of a schedule, and of v stages on each rank",
    "https://arxiv.org/abs/2104.04473",
)
LLAMA = Citation("LLaMA's vocabulary", "https://arxiv.org/abs/2302.13971")
GPIPE = Citation(
    "GPipe: the bubble is negligible from four micro-batches per stage on",
    "https://arxiv.org/abs/1811.06965",
)
MEGATRON = Citation(
    "Megatron-LM: tensor parallelism within a server, pipeline parallelism across (takeaway 1)",
    "https://arxiv.org/abs/2104.04473",
)
MATMUL_GUIDE = Citation(
    "NVIDIA's guide to matrix products",
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/",
)
MKL_FFT = Citation(
    "Intel's FFT length advisor: MKL has kernels for the factors 2, 3, 5, 7, 11 and 13",
    "https://www.intel.com/content/www/us/en/developer/articles/technical/fft-length-and-layout-advisor.html",
)
NCCL_TUNING = Citation(
    "NCCL's own model of latency, by protocol, ranks and nodes",
    "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc",
)
NCCL_TESTS = Citation(
    "NCCL's bus bandwidth over message size",
    "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
)
NCCL_OVERHEAD = Citation(
    "NCCL attains 370 of 450 GB/s of NVLink 4: some 20% are overhead",
    "https://github.com/NVIDIA/nccl-tests/issues/212",
)
PAGEABLE_64K = Citation(
    "CUDA programming guide (64 KB)",
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#concurrent-execution-between-host-and-device",
)
PINNED_BLOG = Citation(
    "NVIDIA's blog: 2.5 times as fast on a laptop, 1.15 times on a desktop with a fast CPU",
    "https://developer.nvidia.com/blog/how-optimize-data-transfers-cuda-cc/",
)
SAM_LAUNCHES = Citation(
    "a public pair of traces: 5,768 of 19,746 launches once masks are encoded together",
    "docs/accuracy.md",
)
SAM_PAIR = Citation(
    "attention of a public pair of traces, rewritten in 16 bits: 3.8 times as fast",
    "tests/rules/test_rates_on_real_traces.py",
)
SIGNIFICANCE = Citation("1% level of a test", "https://en.wikipedia.org/wiki/Binomial_test")
TF32_BLOG = Citation(
    "NVIDIA's networks: 2 to 5 times as fast with TF32, of the 8 times that the peaks allow",
    "https://developer.nvidia.com/blog/getting-immediate-speedups-with-a100-tf32/",
)
TF32_NOTES = Citation(
    "PyTorch's notes on TF32",
    "https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
)

# -- this repository ----------------------------------------------------------------------------

ALIGNED_RATE = Citation(
    "measured on public traces: 0.56 to 0.70 of the FLOP rate",
    "tests/rules/test_real_traces_kernel.py",
)
ALIGNED_REACH = Citation(
    "measured on public traces of busy GPUs: large aligned products reach 72 to 100% of the rate",
    "tests/rules/test_real_traces_kernel.py",
)
ARITHMETIC = Citation("arithmetic, from the definition")
ENGINE_FLOOR = Citation(
    "1% of the step: two profiled runs differ by as much", "advisor/advise/impact.py"
)
HAND_OVER = Citation(
    "measured: 1.5 ms for a ready batch of 8 KiB, 4 ms for 2 MiB", "benchmarks/bench_hand_over.py"
)
SMT = Citation(
    "two threads of a physical core share its units; in a cloud, a CPU is usually one such thread",
    "https://cloud.google.com/compute/docs/cpu-platforms",
)
SLOW_ARGUMENTS = Citation(
    "measured: FFTs, sorts, reductions, pairs, filters, chains of products, products with zeros, "
    "one thread of a CPU",
    "benchmarks/bench_slow_arguments.py",
)
SPARSE_UPDATE = Citation(
    "measured: sparse and dense gradients of embeddings, one thread of a CPU",
    "benchmarks/bench_sparse_update.py",
)
TENSORRT = Citation(
    "layer times of NVIDIA's public engines of ResNet-50", "tests/read/test_tensorrt.py"
)
TRIED_ON_TRACES = Citation("our choice, tried on public traces", "docs/thresholds.md")
CHOSEN = Citation("our choice, checked by examples and recordings only", "docs/thresholds.md")
"""Source of a number that we chose, as no public one is known."""
PEAKS = Citation("datasheets of the GPUs", "advisor/core/gpus/gpus.json")
RATES = Citation(
    "public traces of busy devices: median product 38 to 98% of the rate, median memory-bound "
    "operator 51 to 97%",
    "tests/rules/test_rates_on_real_traces.py",
)
REAL_HOST = Citation("measured on public traces", "tests/rules/test_real_traces_host.py")
REAL_KERNEL = Citation("measured on public traces", "tests/rules/test_real_traces_kernel.py")
SMALL_GRIDS_TRACES = Citation(
    "public traces: 4 to 16% of the time in small kernels where the GPU is well used, 36 to 78% "
    "where it idles",
    "tests/rules/test_real_traces_kernel.py",
)
STEP_SERIES = Citation(
    "as the step series excludes steps: beyond 1.5 times the median",
    "advisor/measure/steps/steps.py",
)


# -- public traces ------------------------------------------------------------------------------


def public_traces(names: str) -> tuple[str, ...]:
    """Return public traces by name, as ``found_in`` and ``silent_in`` have them."""
    return tuple(f"traces/{name}" for name in names.split())


SILENT_TRACES = public_traces("a100_train_6steps v100_train_copy_heavy two_ranks_rank0 b200_eager")
"""Public traces of training and inference without what most rules look for: their ``silent_in``."""
CURED_RECORDINGS = ("recorded/anomaly.cured", "recorded/gc_pauses.cured", "recorded/leak.cured")
"""Recordings of fixed programs, for ``silent_in``."""
SILENT_INPUTS = (*SILENT_TRACES, *CURED_RECORDINGS)
