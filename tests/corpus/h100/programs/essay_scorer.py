"""Fine-tuning RoBERTa-base as an essay scorer (six rubric scores), with layer-wise learning-rate decay.

Own training loop on Hugging Face transformers: bf16 autocast, AdamW, cosine schedule with warm-up,
gradient clipping, essays padded to the longest of the batch, mean pooling over the real tokens.

The cured variant gives the same parameters after each step: bit-equal arithmetic per element
(only the gradient-clipping norm and atomics in the embedding backward may differ by rounding between runs).
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import RobertaConfig, RobertaModel, get_cosine_schedule_with_warmup

DEV = torch.device("cuda")
LAYERS, HIDDEN, HEADS, FFN = 12, 768, 12, 3072
VOCAB = 50265
BATCH = 24
MIN_LEN, MAX_LEN = 160, 384
N_ESSAYS = 3000
WORKERS = 4
BLOCK = 8
if os.environ.get("TINY"):
    DEV = torch.device("cpu")
    LAYERS, HIDDEN, HEADS, FFN = 2, 32, 2, 64
    VOCAB, BATCH, MIN_LEN, MAX_LEN, N_ESSAYS, WORKERS, BLOCK = 500, 4, 8, 24, 64, 0, 5

ENCODER_LR, HEAD_LR, WEIGHT_DECAY, LLRD = 2e-5, 1e-4, 0.01, 0.9
MAX_STEPS = 20000
TARGETS = ("cohesion", "syntax", "vocabulary", "phraseology", "grammar", "conventions")


class Essays(Dataset):
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(MIN_LEN, MAX_LEN + 1, (n,), generator=g)
        self.ids = [torch.randint(5, VOCAB, (int(k),), generator=g) for k in lengths]
        self.scores = 1 + 4 * torch.rand(n, len(TARGETS), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.scores[i]


def collate(items):
    width = max(len(ids) for ids, _ in items)
    width = (width + 7) // 8 * 8
    ids = torch.full((len(items), width), 1)          # 1 = <pad>
    mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, (tokens, _) in enumerate(items):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask, torch.stack([s for _, s in items])


class EssayScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = RobertaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=FFN, max_position_embeddings=MAX_LEN + 16, type_vocab_size=1,
            attn_implementation="sdpa",
        )
        self.backbone = RobertaModel(self.config, add_pooling_layer=False)
        self.head = nn.Linear(HIDDEN, len(TARGETS))

    def forward(self, ids, mask):
        hidden = self.backbone(ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        return self.head(pooled)


def param_groups(model, cured):
    """Head at HEAD_LR; encoder layers from the top down, each LLRD times the one above; no decay on biases and norms."""
    no_decay = ("bias", "LayerNorm.weight")
    groups = [{"params": list(model.head.parameters()), "lr": HEAD_LR, "weight_decay": 0.0}]
    blocks = [model.backbone.embeddings] + list(model.backbone.encoder.layer)
    lr = ENCODER_LR
    for block in reversed(blocks):
        if cured:
            named = list(block.named_parameters())
            plain = [p for n, p in named if any(nd in n for nd in no_decay)]
            decayed = [p for n, p in named if not any(nd in n for nd in no_decay)]
            groups += [{"params": decayed, "lr": lr, "weight_decay": WEIGHT_DECAY},
                       {"params": plain, "lr": lr, "weight_decay": 0.0}]
        else:
            for name, p in block.named_parameters():
                wd = 0.0 if any(nd in name for nd in no_decay) else WEIGHT_DECAY
                groups.append({"params": [p], "lr": lr, "weight_decay": wd})
        lr *= LLRD
    return groups


def build(cured):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    with torch.device(DEV):
        model = EssayScorer().train()
    data = Essays(N_ESSAYS)
    loader = DataLoader(
        data, batch_size=BATCH, collate_fn=collate, num_workers=WORKERS, drop_last=True,
        sampler=RandomSampler(data, num_samples=BATCH * MAX_STEPS, generator=torch.Generator().manual_seed(1)),
        pin_memory=DEV.type == "cuda", prefetch_factor=4 if WORKERS else None,
    )
    optimizer = torch.optim.AdamW(param_groups(model, cured), lr=ENCODER_LR, eps=1e-6, betas=(0.9, 0.999))
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=MAX_STEPS)
    batches = iter(loader)
    running = torch.zeros((), device=DEV)

    def step():
        ids, mask, scores = (t.to(DEV, non_blocking=True) for t in next(batches))
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            pred = model(ids, mask)
        loss = F.smooth_l1_loss(pred.float(), scores)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        running.mul_(0.98).add_(loss.detach(), alpha=0.02)

    return step, model


def sync():
    if DEV.type == "cuda":
        torch.cuda.synchronize()


def run(cured: bool, seconds: float) -> float:
    step, _ = build(cured)
    for _ in range(10):
        step()
    sync()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
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
    ms = run(a.cured, a.seconds)
    print(json.dumps({"name": "essay_scorer", "cured": a.cured, "step_ms": round(ms, 3)}))
