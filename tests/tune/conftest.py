"""Programs to try."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.tune.knob import KnobSetting, TrialResult
from advisor.tune.trial_process import TrialProgram

TRAPS = '''
import gc, os, resource, sys
import torch
from torch import nn
torch.set_num_threads(1)

class Net(nn.Module):
    """Each part is broken by one knob."""
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.frozen = nn.Linear(16, 16)
        self.extra = nn.Parameter(torch.ones(16))
    def forward(self, x, step):
        y = self.first(x)
        # sees the order in memory, as code that was written for one order does
        flat = torch.as_strided(y, (len(x), 16), (16, 1))
        out = self.frozen(flat)
        if step % 2 == 0:                   # decays in the other steps too, where it is zeroed
            out = out * self.extra
        # the difference of two large numbers: what fewer bits leave of it is noise
        return (out + 3000) - self.offset(out)
    def offset(self, out):
        return nn.functional.linear(torch.ones_like(out), torch.full((16, 16), 187.5))

def main():
    torch.manual_seed(0)
    os.makedirs("checkpoints", exist_ok=True)
    open("log.txt", "a").write("started\\n")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, weight_decay=0.5)
    x = torch.randn(8, 3, 4, 4)
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
    for step in range(200):
        optimizer.zero_grad(set_to_none=False)
        loss = net(x, step).square().mean()
        loss.backward()
        optimizer.step()
        cycle = [torch.empty(4 << 20)]      # 16 MB that only the collector frees
        cycle.append(cycle)
        many = [[] for _ in range(2000)]    # so that it runs
        torch.save(net.state_dict(), "checkpoints/last.pt")
        assert os.path.exists("checkpoints/last.pt") and "last.pt" in os.listdir("checkpoints")
        os.replace("checkpoints/last.pt", "checkpoints/best.pt")
    raise SystemExit("too far")

if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[TrialResult, Path]]:
    """Runs a program once with knobs pulled: the result, and the folder that it ran in."""

    def run_program(
        text: str, *knob_settings: KnobSetting, here: Path | None = None, steps: int = 45
    ) -> TrialResult:
        folder = here or tmp_path_factory.mktemp("program")
        script = folder / "program.py"
        script.write_text(text)
        # in the folder, as a user would be
        words = [
            sys.executable,
            "-c",
            f"import os,runpy;os.chdir({str(folder)!r});"
            f"runpy.run_path({str(script)!r},run_name='__main__')",
        ]
        program = TrialProgram(words, tmp_path_factory.mktemp("trial").resolve())
        return program.run(knob_settings, warmup=4, steps=steps, seconds=900, timeout=900)

    return run_program
