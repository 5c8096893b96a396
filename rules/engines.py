"""What rules advise a program that an inference engine runs: the engine's own switches.

Each switch is with the page of the engine that documents it.
"""

from __future__ import annotations

from advisor.core.finding import FrameworkAdvice, Source

VLLM_GRAPHS = Source(
    "vLLM: CUDA graph modes, default FULL_AND_PIECEWISE from 0.11",
    "https://docs.vllm.ai/en/latest/design/cuda_graphs/",
)
VLLM_SIZES = Source(
    "vLLM captures up to min(2 × max_num_seqs, 512) tokens",
    "https://docs.vllm.ai/en/stable/api/vllm/config/compilation/",
)
VLLM_TUNING = Source(
    "vLLM: optimization and tuning", "https://docs.vllm.ai/en/stable/configuration/optimization/"
)
VLLM_KV = Source(
    "vLLM: quantized KV cache",
    "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/",
)
SGLANG_ARGUMENTS = Source(
    "SGLang: server arguments", "https://docs.sglang.io/advanced_features/server_arguments.html"
)
SGLANG_TUNING = Source(
    "SGLang: hyperparameter tuning",
    "https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
)
SGLANG_KV = Source(
    "SGLang: quantized KV cache", "https://docs.sglang.io/docs/advanced_features/quantized_kv_cache"
)
HF_SPEED = Source(
    "transformers: static cache and torch.compile",
    "https://huggingface.co/docs/transformers/llm_optims",
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
"""Engine -> how its launches become graphs."""
