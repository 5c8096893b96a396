"""LoRA instruction tuning of a Llama-style decoder on packed 1k sequences.

The base model is held in bf16, the adapters (on q_proj and v_proj) in fp32; the optimiser sees the adapters only.
cured: same adapters after every step, bit for bit (up to the order of atomics in the attention backward).
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda"
VOCAB, DIM, LAYERS, HEADS, FFN = 32000, 2048, 10, 16, 5504
SEQ, BATCH, N_SEQ = 1024, 8, 512
RANK, ALPHA, DROPOUT = 16, 32, 0.05
LR, CLIP, LOG_EVERY = 2e-4, 1.0, 50
BLOCK = 5
if os.environ.get("TINY"):
    DEVICE = "cpu"
    VOCAB, DIM, LAYERS, HEADS, FFN = 128, 64, 2, 4, 128
    SEQ, BATCH, N_SEQ = 32, 2, 16
    RANK = 4


def rope_table(seq, head_dim, device):
    inv = 1.0 / (10000 ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim))
    ang = torch.outer(torch.arange(seq, device=device).float(), inv)
    ang = torch.cat([ang, ang], dim=-1)
    return ang.cos().to(torch.bfloat16), ang.sin().to(torch.bfloat16)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM, bias=False)
        self.v_proj = nn.Linear(DIM, DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, t, HEADS, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, t, HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, DIM))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, FFN, bias=False)
        self.up_proj = nn.Linear(DIM, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm = nn.RMSNorm(DIM, eps=1e-5)
        self.self_attn = Attention()
        self.post_norm = nn.RMSNorm(DIM, eps=1e-5)
        self.mlp = MLP()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, cos, sin):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base = base
        dev = base.weight.device
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, device=dev) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=dev))
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank

    def forward(self, x):
        low = F.linear(self.dropout(x), self.lora_A.to(x.dtype))
        return self.base(x) + F.linear(low, self.lora_B.to(x.dtype)) * self.scale


def add_adapters(model, targets=("q_proj", "v_proj")):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, RANK, ALPHA, DROPOUT))
    return model


def build(cured):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.device(DEVICE):
        model = Decoder()
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    model = add_adapters(model.to(torch.bfloat16)).train()
    if cured:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapters, lr=LR, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))

    cos, sin = rope_table(SEQ, DIM // HEADS, DEVICE)
    # the packed corpus is small: it lives on the device; prompt tokens carry label -100
    corpus = torch.randint(VOCAB, (N_SEQ, SEQ + 1), device=DEVICE)
    is_prompt = torch.rand(N_SEQ, SEQ + 1, device=DEVICE) < 0.3
    state = {"i": 0, "loss": torch.zeros((), device=DEVICE)}

    def step():
        at = (state["i"] * BATCH) % (N_SEQ - BATCH + 1)
        rows = corpus[at:at + BATCH]
        labels = rows[:, 1:].masked_fill(is_prompt[at:at + BATCH, 1:], -100)
        logits = model(rows[:, :-1], cos, sin)
        loss = F.cross_entropy(logits.view(-1, VOCAB).float(), labels.reshape(-1), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        state["i"] += 1
        state["loss"] += loss.detach()
        if state["i"] % LOG_EVERY == 0:
            state["mean_loss"] = state["loss"].item() / LOG_EVERY
            state["loss"].zero_()
        return loss.detach()

    return step


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def run(cured: bool, seconds: float) -> float:
    step = build(cured)
    for _ in range(8):
        step()
    sync()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        t0 = time.perf_counter()
        for _ in range(BLOCK):
            step()
        sync()
        times.append((time.perf_counter() - t0) / BLOCK * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--cured", action="store_true")
    ap.add_argument("--seconds", type=float, default=4)
    a = ap.parse_args()
    print(json.dumps({"name": "lora_instruct", "cured": a.cured, "step_ms": run(a.cured, a.seconds)}))
