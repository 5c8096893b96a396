"""Short texts padded to the longest that could ever come.

The tokenizer fills every batch up to 256 positions, while most texts have fewer than fifty. All
of them go through every layer, and the loss leaves them out at the end.

The cure: texts sorted by length, and each batch padded to its own longest. (Here both variants see
the same texts in the same batches.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("padding-waste",), shown_on="cpu", cpu_scale=1 / 32, around=260)

LONGEST, ROUND = 256, 16
VOCABULARY = 4096


class Texts(Dataset):
    """Seeded tokens; 64 texts in a row are of similar length, in shuffled groups."""

    def __init__(self, seed: int, words: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = (torch.rand(1 << 12, generator=generator) ** 4 * 200 + 16).int()
        groups = lengths.sort().values.view(-1, 64)
        self.lengths = groups[torch.randperm(64, generator=generator)].flatten().tolist()
        self.tokens = torch.randint(1, words, (1 << 12, LONGEST), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, : self.lengths[index]]


class Collate:
    """Texts to one batch with its mask."""

    def __init__(self, to_longest: bool) -> None:
        self.to_longest = to_longest

    def __call__(self, texts: list[Any]) -> dict[str, Any]:
        length = LONGEST
        if not self.to_longest:
            length = -(-max(len(text) for text in texts) // ROUND) * ROUND
        tokens = torch.zeros(len(texts), length, dtype=torch.long)
        mask = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return {"input_ids": tokens, "attention_mask": mask}


def loop(run: Setup) -> Iterator[Any]:
    """Train a model to say its input; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, words = run.size(1024, 32), run.size(VOCABULARY, 64)
    loader = DataLoader(
        Texts(run.seed, words),
        batch_size=run.size(64, 8),
        collate_fn=Collate(to_longest=not run.cured),
        num_workers=2,
        persistent_workers=True,
        pin_memory=run.on_gpu,
    )
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, words)).to(
        run.device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        for batch in loader:
            tokens = batch["input_ids"].to(run.device, non_blocking=True)
            mask = batch["attention_mask"].to(run.device, non_blocking=True)
            optimizer.zero_grad()
            each = cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none")
            loss = (each * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            yield loss.detach()
