"""Advice and code for each change of ``memory_savings.find_changes``."""

from collections.abc import Mapping

EXPANDABLE = (
    "# shell; settings of the allocator in the program override it: remove them\n"
    "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
    "# older PyTorch: PYTORCH_CUDA_ALLOC_CONF"
)
"""Shell command that lets segments grow."""
_SETTINGS = "lr=lr, betas=betas, weight_decay=weight_decay"
_PARAMETERS = f"\n    model.parameters(), {_SETTINGS}"
_OFFLOADED = f"model.parameters(), torch.optim.AdamW,\n    {_SETTINGS}"

CHANGES: Mapping[str, Mapping[str, str]] = {
    "checkpointing": {
        "fix": "Checkpoint the blocks called there",
        "code": "from torch.utils.checkpoint import checkpoint\n"
        "x = checkpoint(block, x, use_reentrant=False)",
    },
    "fused attention": {
        "fix": "Use fused attention, which stores no scores and no softmax of them",
        "code": "from torch.nn.functional import scaled_dot_product_attention\n"
        "# not softmax(q @ k.mT / sqrt(d), -1) @ v\n"
        "out = scaled_dot_product_attention(q, k, v, attn_mask=mask)\n"
        "# a causal mask: is_causal=True instead of attn_mask",
    },
    "smaller logits": {
        "fix": "Compute the loss in chunks, or with a fused linear cross entropy",
        "code": "# the loss without whole logits: pip install liger-kernel\n"
        "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss\n"
        "loss = LigerFusedLinearCrossEntropyLoss()(\n"
        "    head.weight, hidden.flatten(0, -2), target.flatten(), head.bias)",
    },
    "references": {
        "fix": "Release the outputs of the previous step (del, detach)",
        "code": "# total is a sum of losses: add each without its graph.\n"
        "total += loss.detach()\n"
        "del output, loss   # at the end of the step",
    },
    "set_to_none": {
        "fix": "Set gradients to None before the forward pass",
        "code": "optimizer.zero_grad(set_to_none=True)   # before the forward pass",
    },
    "offload activations": {
        "fix": "Keep activations in pinned host memory until the backward pass",
        "code": "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    loss = model(batch)",
    },
    "16-bit optimizer state": {
        "fix": "Keep the optimizer's state in bf16",
        "code": "# pip install torchao\n"
        "from torchao.optim import _AdamW\n"
        f"optimizer = _AdamW({_PARAMETERS},\n    bf16_stochastic_round=True)",
    },
    "offload optimizer state": {
        "fix": "Keep the optimizer's state in host memory",
        "code": "# pip install torchao\n"
        "from torchao.optim import CPUOffloadOptimizer\n"
        f"optimizer = CPUOffloadOptimizer(\n    {_OFFLOADED})   # your class and settings",
    },
    "fused optimizer": {
        "fix": "Use the fused optimizer, which needs no temporaries",
        "code": f"optimizer = torch.optim.AdamW({_PARAMETERS},\n    fused=True)",
    },
    "autocast without cache": {
        "fix": "Switch off autocast's cache of weights",
        "code": "with torch.autocast('cuda', torch.bfloat16, cache_enabled=False):\n"
        "    output = model(batch)",
    },
    "BF16 autocast": {
        "fix": "Compute the forward pass under BF16 autocast",
        "code": "with torch.autocast('cuda', torch.bfloat16):\n"
        "    loss = loss_function(model(batch), target)\n"
        "loss.backward()               # outside of autocast",
    },
    "16-bit weights": {
        "fix": "Convert the model to bf16, in place of autocast if it is used",
        "code": "model = model.to(torch.bfloat16)",
    },
    "share graph pools": {
        "fix": "Let CUDA graphs that never run at once share one memory pool",
        "code": "pool = torch.cuda.graph_pool_handle()\n"
        "with torch.cuda.graph(graph, pool=pool):\n"
        "    output = model(static_input)",
    },
    "8-bit optimizer": {
        "fix": "Use an 8-bit optimizer",
        "code": "# pip install bitsandbytes\n"
        "import bitsandbytes\n"
        "# AdamW8bit in place of AdamW: other optimizers have such a class too\n"
        f"optimizer = bitsandbytes.optim.AdamW8bit({_PARAMETERS})",
    },
    "half the batch": {
        "fix": "Halve the micro-batch and accumulate gradients",
        "code": "# keep your other arguments\n"
        "loader = DataLoader(..., batch_size=batch_size // 2)\n"
        "for step, (batch, target) in enumerate(loader, 1):\n"
        "    loss = loss_function(model(batch), target) / 2\n"
        "    loss.backward()                   # adds to the gradients of the first half\n"
        "    if step % 2 == 0:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()",
    },
    "expandable segments": {
        "fix": "Let segments grow and shrink (expandable segments)",
        "code": EXPANDABLE,
    },
}
"""Texts by change, for programs that train."""
CHANGES_OF_INFERENCE: Mapping[str, Mapping[str, str]] = {
    "smaller logits": {
        "fix": "Compute the logits in chunks, or only those of the last position",
        "code": "logits = head(hidden[:, -1:])",
    },
    "references": {
        "fix": "Release the outputs of the previous step",
        "code": "del output                    # at the end of the step",
    },
    "half the batch": {
        "fix": "Run half as many requests at a time",
        "code": "outputs = [model(part) for part in batch.chunk(2)]",
    },
}
"""Texts for programs that do not train, if they differ."""
CHANGES_OF_UNKNOWN: Mapping[str, Mapping[str, str]] = {
    "half the batch": {
        "fix": "Halve the batch; if the program trains, accumulate gradients over two",
        "code": "# keep your other arguments\nloader = DataLoader(..., batch_size=batch_size // 2)",
    }
}
"""Texts if it is unknown whether the program trains, if they differ."""
SHARDING = {
    "fix": "Shard the states over the ranks",
    "code": "from torch.distributed.fsdp import fully_shard\n"
    "fully_shard(model)                # ZeRO 3; 1 and 2: ZeroRedundancyOptimizer, DeepSpeed",
}


def advise_change(change: str, trains: bool | None) -> tuple[str, str]:
    """Return the advice for a change, and its code. ``trains``: whether the program trains, or
    ``None`` if unknown."""
    overrides = {None: CHANGES_OF_UNKNOWN, False: CHANGES_OF_INFERENCE}.get(trains, {})
    texts = {**CHANGES.get(change, SHARDING), **overrides.get(change, {})}
    return texts["fix"], texts["code"]
