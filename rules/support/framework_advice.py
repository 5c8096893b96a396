"""Advice for programs that are not written with PyTorch, where several rules share it."""

from collections.abc import Mapping

from advisor.core.rule import ANY_FRAMEWORK, Citation, FrameworkAdvice
from advisor.core.trace import CUDA, JAX, TENSORFLOW

HIP_NAMES = (
    ("cudaHostAllocDefault", "hipHostMallocDefault"), ("cudaHostAlloc", "hipHostMalloc"),
    ("cudaMallocAsync", "hipMallocAsync"), ("CUDA", "HIP"), ("NCCL", "RCCL"), ("cuda", "hip"),
    ("cublas", "hipblas"), ("CUBLAS", "HIPBLAS"),
)  # fmt: skip
"""HIP's names of CUDA's calls and libraries."""


def in_any_language(
    fix: str,
    *,
    cuda: str = "",
    code: str = "",
    verify: str = "",
    title: str = "",
    falsified_by: str = "",
    terms: Mapping[str, str] | None = None,
) -> dict[str, FrameworkAdvice]:
    """Return entries of ``Rule.framework_advice``: ``fix`` in any language, and in C++ with CUDA or
    HIP also the calls and ``code``."""
    any_language = FrameworkAdvice(fix, "", verify, title, falsified_by, terms or {})
    in_cuda = any_language._replace(fix=f"{fix} {cuda}".strip(), code=code)
    in_hip = in_cuda._replace(
        fix=f"{fix} {_translate_to_hip(cuda)}".strip(),
        code=_translate_to_hip(code),
        terms={name: _translate_to_hip(text) for name, text in in_cuda.terms.items()},
    )
    return {ANY_FRAMEWORK: any_language, CUDA: in_cuda._replace(amd=in_hip)}


def _translate_to_hip(calls: str) -> str:
    """Replace calls of CUDA by HIP's names."""
    for cuda, hip in HIP_NAMES:
        calls = calls.replace(cuda, hip)
    return calls


# -- TensorFlow and JAX ---------------------------------------------------------------------------

NO_READS = (
    "Do not read GPU values in the Python loop: every float(x), .numpy() and print waits for all "
    "work before it. Keep metrics on the GPU and read them every hundredth step, or read the "
    "value of the previous step, which has arrived."
)
JIT_STEP = (
    "Compile the whole step, not parts of it, so that XLA fuses it and launches it in one call. "
    "Take several steps in one call where the data allows. Let XLA put launches into CUDA graphs "
    "(--xla_gpu_enable_command_buffer)."
)
NO_GRADIENT = "# has no gradient: in training, in an autograd.Function\n"
"""First line of code with a collective of torch.distributed."""
OVERLAP_FLAGS = (
    "Let XLA overlap collectives with compute: its latency-hiding scheduler starts them early and "
    "waits late."
)
FLAGS = 'os.environ["XLA_FLAGS"] = "--xla_gpu_enable_latency_hiding_scheduler=true"'
TF_PREFETCH = (
    "dataset = (dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)\n"
    "                  .batch(batch_size)\n"
    "                  .prefetch(tf.data.AUTOTUNE))"
)
TF_COMPILE = (
    "@tf.function(jit_compile=True)  # in tf.distribute: what strategy.run calls\n"
    "def train_step(x, y): ...\n\n"
    "model.compile(..., jit_compile=True, steps_per_execution=10)  # Keras"
)
JAX_JIT = (
    "@partial(jax.jit, donate_argnums=(0,))\n"
    "def train_steps(state, batches):\n"
    "    return jax.lax.scan(train_step, state, batches)"
)
JAX_AHEAD = (
    "following = jax.device_put(next(batches))\n"
    "for _ in range(steps):\n"
    "    batch, following = following, jax.device_put(next(batches))  # returns at once\n"
    "    state = train_step(state, batch)"
)
BATCHES_AHEAD = {
    TENSORFLOW: FrameworkAdvice(
        "Let tf.data copy batches to the GPU ahead of the step.",
        'dataset.apply(tf.data.experimental.prefetch_to_device("/GPU:0"))',
    ),
    JAX: FrameworkAdvice("Copy batches to the GPU ahead of the step.", JAX_AHEAD),
}
READ_SELDOM = {
    TENSORFLOW: FrameworkAdvice(NO_READS, "if step % 100 == 0:\n    print(float(loss))"),
    JAX: FrameworkAdvice(
        f"{NO_READS} JAX dispatches asynchronously until you ask for a value.",
        "if step % 100 == 0:\n    print(float(loss))",
    ),
}
COMPILE_STEP = {
    TENSORFLOW: FrameworkAdvice(JIT_STEP, TF_COMPILE),
    JAX: FrameworkAdvice(JIT_STEP, JAX_JIT),
}
CAPTURE_CALLS = (
    "Use cudaStreamBeginCapture and cudaGraphInstantiate once, then cudaGraphLaunch in each "
    "iteration."
)
CAPTURE_CODE = (
    "cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);\n"
    "iteration(stream);                            // launches only, no waiting\n"
    "cudaStreamEndCapture(stream, &graph);\n"
    "cudaGraphInstantiate(&run, graph, 0);\n"
    "for (int i = 0; i < iterations; ++i) cudaGraphLaunch(run, stream);"
)


VLLM_TUNING = Citation(
    "vLLM: optimization and tuning", "https://docs.vllm.ai/en/stable/configuration/optimization/"
)
VLLM_KV = Citation(
    "vLLM: quantized KV cache",
    "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/",
)
SGLANG_ARGUMENTS = Citation(
    "SGLang: server arguments", "https://docs.sglang.io/advanced_features/server_arguments.html"
)
SGLANG_TUNING = Citation(
    "SGLang: hyperparameter tuning",
    "https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
)
SGLANG_KV = Citation(
    "SGLang: quantized KV cache", "https://docs.sglang.io/docs/advanced_features/quantized_kv_cache"
)

GRAPHS_ON = {
    "vllm": FrameworkAdvice(
        "Let vLLM replay CUDA graphs: drop --enforce-eager, and raise max_cudagraph_capture_size "
        "above the tokens of a step. By default it captures up to min(2 × max_num_seqs, 512) "
        "tokens, and larger steps run eagerly. Before 0.12, list cudagraph_capture_sizes.",
        "vllm serve MODEL --compilation-config \\\n"
        '  \'{"cudagraph_mode": "FULL_AND_PIECEWISE",\n'
        '    "max_cudagraph_capture_size": 1024}\'',
        "Profile again: cudaGraphLaunch replaces most launches of the step.",
    ),
    "sglang": FrameworkAdvice(
        "Start SGLang without --disable-cuda-graph, and set --cuda-graph-max-bs to the largest "
        "batch that decodes: larger ones run without graphs.",
        "python -m sglang.launch_server --model-path MODEL --cuda-graph-max-bs 256",
        "The server's log says 'cuda graph: True' for each decode batch.",
    ),
    "tensorrt-llm": FrameworkAdvice(
        "Set cuda_graph_config with the batch sizes that decode, and enable_padding.",
        "cuda_graph_config:\n  enable_padding: true\n  max_batch_size: 256",
        "Profile again: one cudaGraphLaunch per decode step.",
    ),
    "transformers": FrameworkAdvice(
        "Use a static cache and compile the forward pass: torch.compile then replays CUDA graphs "
        "while tokens are decoded.",
        'model.generation_config.cache_implementation = "static"\n'
        "model.forward = torch.compile(\n"
        '    model.forward, mode="reduce-overhead", fullgraph=True)',
        "Profile again: cudaGraphLaunch replaces most launches.",
    ),
}
"""Ways to replay launches as graphs, by engine."""

STAGING_CODE = (
    "staging = torch.empty(max_batch_shape, dtype=dtype, pin_memory=True)   # once\n"
    "copied = torch.cuda.Event()\n"
    "for batch in loader:\n"
    "    copied.synchronize()                     # the copy of the step before\n"
    "    part = staging[: len(batch)].copy_(batch)\n"
    "    x = part.to(device, non_blocking=True)\n"
    "    copied.record()"
)
"""Code with one pinned buffer for all batches, refilled only when its last copy is over."""
