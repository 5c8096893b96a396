"""Fault: attention over a cache that grows by a token takes cuDNN's backend, which plans each new length; cure: another backend, or repeated lengths.

Speech-to-text decoding, a batched beam search. One step is one decoded token. Planted was another fault: each token also
reorders the constant keys and values of the audio. Only that one has a switch here (same tokens and scores).
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
DTYPE = torch.bfloat16
UTTERANCES, BEAMS = 16, 5
FRAMES, MELS = 3000, 80                # 30 s of audio, halved by the encoder's stem
DIM, HEADS = 1024, 16
ENC_LAYERS, DEC_LAYERS = 4, 16
VOCAB, MAX_TOKENS = 51865, 64
BLOCK = 8
if os.environ.get("TINY"):
    DEVICE, DTYPE = "cpu", torch.float32
    UTTERANCES, BEAMS, FRAMES, DIM, HEADS = 2, 3, 120, 64, 4
    ENC_LAYERS, DEC_LAYERS, VOCAB, MAX_TOKENS = 1, 2, 300, 16

BOS, EOS = 1, 2


def split_heads(x):
    return x.view(x.size(0), x.size(1), HEADS, -1).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).flatten(2)


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = Mlp()

    def forward(self, x):
        q, k, v = (split_heads(p) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        return x + self.mlp(self.norm2(x))


class AudioEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem1 = nn.Conv1d(MELS, DIM, 3, padding=1)
        self.stem2 = nn.Conv1d(DIM, DIM, 3, stride=2, padding=1)
        self.pos = nn.Parameter(torch.randn(FRAMES // 2, DIM) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(ENC_LAYERS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, mel):
        x = F.gelu(self.stem2(F.gelu(self.stem1(mel)))).transpose(1, 2) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(DIM) for _ in range(3))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.audio_q, self.audio_kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.audio_out = nn.Linear(DIM, DIM)
        self.mlp = Mlp()

    def prefill(self, audio, beams):
        k, v = (split_heads(p) for p in self.audio_kv(audio).chunk(2, -1))
        empty = k.new_empty(k.size(0) * beams, HEADS, 0, DIM // HEADS)
        return {
            "text_k": empty,
            "text_v": empty,
            "audio_k": k.repeat_interleave(beams, 0),
            "audio_v": v.repeat_interleave(beams, 0),
        }

    def forward(self, x, past):
        q, k, v = (split_heads(p) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        past["text_k"] = torch.cat([past["text_k"], k], 2)
        past["text_v"] = torch.cat([past["text_v"], v], 2)
        attended = F.scaled_dot_product_attention(q, past["text_k"], past["text_v"])  # FAULT
        x = x + self.out(merge_heads(attended))
        q = split_heads(self.audio_q(self.norm2(x)))
        attended = F.scaled_dot_product_attention(q, past["audio_k"], past["audio_v"])
        x = x + self.audio_out(merge_heads(attended))
        return x + self.mlp(self.norm3(x))


class TextDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(MAX_TOKENS, DIM) * 0.02)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(DEC_LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, position, cache):
        x = self.embed(tokens) + self.pos[position]
        for layer, past in zip(self.layers, cache):
            x = layer(x, past)
        return self.head(self.norm(x))


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = AudioEncoder(), TextDecoder()


class BeamSearch:
    """Beam search over a batch of utterances; hypothesis b of utterance u is row u * beams + b of every tensor."""

    def __init__(self, model, mel, beams, cured=False):
        self.decoder, self.beams, self.cured = model.decoder, beams, cured
        audio = model.encoder(mel)
        self.cache = [layer.prefill(audio, beams) for layer in self.decoder.layers]
        n, dev = mel.size(0), mel.device
        self.tokens = torch.full((n * beams, 1), BOS, device=dev)
        self.scores = torch.full((n, beams), float("-inf"), device=dev)
        self.scores[:, 0] = 0.0
        self.finished = torch.zeros(n, beams, dtype=torch.bool, device=dev)
        self.base = torch.arange(n, device=dev)[:, None] * beams
        self.only_eos = torch.full((VOCAB,), float("-inf"), device=dev)
        self.only_eos[EOS] = 0.0

    def reorder_cache(self, rows):
        for past in self.cache:
            for name, states in past.items():
                if self.cured and name.startswith("audio_"):
                    continue
                past[name] = states.index_select(0, rows)

    def step(self, position):
        logits = self.decoder(self.tokens[:, -1:], position, self.cache)[:, -1]
        logp = F.log_softmax(logits.float(), -1).view(*self.scores.shape, VOCAB)
        logp = torch.where(self.finished[..., None], self.only_eos, logp)
        total = (self.scores[..., None] + logp).flatten(1)
        self.scores, best = total.topk(self.beams, -1)
        parent = torch.div(best, VOCAB, rounding_mode="floor")
        token = best % VOCAB
        rows = (self.base + parent).flatten()
        self.tokens = torch.cat([self.tokens.index_select(0, rows), token.view(-1, 1)], 1)
        self.finished = self.finished.gather(1, parent) | (token == EOS)
        self.reorder_cache(rows)

    def best(self):
        return self.tokens.view(-1, self.beams, self.tokens.size(1))[:, 0]


def build():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Recogniser()
    return model.to(DTYPE).eval()


def audio_batches(n=4):
    g = torch.Generator().manual_seed(1)
    mels = [torch.randn(UTTERANCES, MELS, FRAMES, generator=g).to(DTYPE) for _ in range(n)]
    return [m.pin_memory() if DEVICE == "cuda" else m for m in mels]


def transcribe(model, batches, cured, results):
    """Endless stream of decoding steps over the batches; yields after every token."""
    while True:
        for mel in batches:
            search = BeamSearch(model, mel.to(DEVICE, non_blocking=True), BEAMS, cured)
            for position in range(MAX_TOKENS):
                search.step(position)
                yield
            results.append(search.best())
            del search


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def run(cured: bool, seconds: float) -> float:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = False
    model, results = build(), []
    tokens = transcribe(model, audio_batches(), cured, results)
    for _ in range(2 * BLOCK):
        next(tokens)
    sync()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(BLOCK):
            next(tokens)
        sync()
        times.append((time.perf_counter() - start) / BLOCK * 1e3)
        del results[:-8]
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", action="store_true")
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    print(json.dumps({"name": "asr_beam", "cured": args.cured, "step_ms": run(args.cured, args.seconds)}))
