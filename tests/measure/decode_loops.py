"""Three loops that decode on the CPU, recorded by PyTorch's profiler: ``python decode_loops.py
(generate|by-hand|engine) FILE``. Each prints what it did as JSON, for tests to count by."""

from __future__ import annotations

import json
import sys

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 64, 4, 2
BATCH, PROMPT, NEW = 3, 12, 9


class Block(torch.nn.Module):
    """A transformer layer with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """Attend to the cache and to ``x``, which joins it."""
        batch, new, _ = x.shape
        q, k, v = self.qkv(x).view(batch, new, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=new > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, new, WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    """A decoder with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the logits of the last token of each sequence."""
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x[:, -1])


def generate() -> dict[str, object]:
    """``generate`` of transformers, of a Llama made from a configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(VOCABULARY, (BATCH, PROMPT))
    model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return {"prefill": 1, "decode": NEW - 1, "batch": BATCH, "prompt": BATCH * PROMPT}


def loop_by_hand() -> dict[str, object]:
    """A loop that calls a model token by token."""
    model = Model().eval()
    tokens = torch.randint(VOCABULARY, (BATCH, PROMPT))
    caches: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for _ in range(NEW):
        tokens = model(tokens, caches).argmax(-1, keepdim=True)
    return {"prefill": 1, "decode": NEW - 1, "batch": BATCH, "prompt": BATCH * PROMPT}


def engine() -> dict[str, object]:
    """Continuous batching: requests join while others decode, and a mark says so, as vLLM's do."""
    model = Model().eval()
    waiting = [(5, 4), (7, 6), (3, 5), (9, 3)]  # tokens of the prompt, tokens to come
    running: list[tuple[list[list[torch.Tensor]], torch.Tensor, int]] = []
    steps = []
    while waiting or running:
        joined = []
        if waiting and len(running) < 3:
            prompt, new = waiting.pop(0)
            joined = [([[] for _ in range(LAYERS)], torch.randint(VOCABULARY, (1, prompt)), new)]
        new_tokens = sum(tokens.shape[1] for _, tokens, _ in joined)
        mark = (
            f"execute_context_{len(joined)}({new_tokens})_generation_{len(running)}({len(running)})"
        )
        steps.append([len(joined), new_tokens, len(running)])
        with record_function(mark):
            step = []
            for caches, tokens, remaining in [*running, *joined]:
                token = model(tokens, caches).argmax(-1, keepdim=True)
                step.append((caches, token, remaining - 1))
            running = [request for request in step if request[2]]
    return {"steps": steps}


def main(loop: str, path: str) -> None:
    """Record one of them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    program = {"generate": generate, "by-hand": loop_by_hand, "engine": engine}[loop]
    with torch.inference_mode():
        program()  # warms up
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            with_stack="--stacks" in sys.argv,
            with_modules="--stacks" in sys.argv,
        ) as recording:
            totals = program()
    recording.export_chrome_trace(path)
    print(json.dumps(totals))


if __name__ == "__main__":
    main(*sys.argv[1:3])
