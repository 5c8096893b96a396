"""Writer of the session of docs/mcp.md: a client finds, prices, tries, makes and verifies a change.

    .venv/bin/python docs/mcp_session.py

The program is the sample workload ``loader_bound`` as a script of its own. Takes two minutes.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

PAGE = Path(__file__).with_name("mcp.md")
BEGIN, END = "<!-- session -->\n", "<!-- end of session -->"
SCRIPT = """\
import torch
from torch.utils.data import DataLoader

from advisor.sample_workloads.loading import Stored

torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(Stored(16), batch_size=16, num_workers=0)
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step, batch in zip(range(120), loader):
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
"""
OLD = "batch_size=16, num_workers=0)"
NEW = "batch_size=16, num_workers=2, persistent_workers=True)"


async def session(folder: Path) -> list[tuple[str, Any, Any]]:
    """(tool or what the agent does, arguments, answer) in order."""
    calls: list[tuple[str, Any, Any]] = []
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "advisor", "mcp", str(folder), "--allow-run"]
    )
    async with Client(server) as client:

        async def call(tool: str, **arguments: Any) -> Any:
            reply = await client.call_tool(tool, arguments)
            if reply.is_error:
                raise RuntimeError(f"{tool}: {reply.content[0].text}")
            calls.append((tool, arguments, reply.structured_content))
            return reply.structured_content

        script = folder / "train.py"
        script.write_text(SCRIPT)
        await call("record", script="train.py", out="before", timeout_s=300)
        first = (await call("analyze", path="before", top=3))["findings"][0]
        full = await call("finding", path="before", id=first["id"])
        await call("what_if", path="before", edits=full["from_trace"]["edits"])
        await call("try", script="train.py", out="tried", only=["workers=2"], budget_s=90)
        changed = SCRIPT.replace(OLD, NEW)
        lines = difflib.unified_diff(SCRIPT.splitlines(), changed.splitlines(), n=1, lineterm="")
        calls.append(("the agent changes train.py", "\n".join(list(lines)[2:]), None))
        script.write_text(changed)
        await call("record", script="train.py", out="after", timeout_s=300)
        await call("compare", before="before", after="after")
    return calls


def shortened(value: Any) -> Any:
    """Shorten a value for the page: long texts and lists cut, the folder and the note left out."""
    if isinstance(value, dict):
        return {k: shortened(v) for k, v in value.items() if k not in ("untrusted", "limits")}
    if isinstance(value, list):
        return [shortened(item) for item in value[:3]] + (["…"] if len(value) > 3 else [])
    if isinstance(value, str):
        return value if len(value) <= 160 else f"{value[:157]}…"
    return round(value, 4) if isinstance(value, float) else value


def written(calls: list[tuple[str, Any, Any]], folder: Path) -> str:
    """The transcript as Markdown."""
    parts = []
    for what, arguments, answer in calls:
        if answer is None:
            parts.append(f"**{what}**\n\n```diff\n{arguments}\n```\n")
            continue
        text = json.dumps(shortened(answer), indent=2, ensure_ascii=False)
        text = text.replace(str(folder), "FOLDER").replace(sys.prefix, ".venv")
        parts.append(f"**{what}** `{json.dumps(arguments)}`\n\n```json\n{text}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Run the session and write it into the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        text = written(asyncio.run(session(folder)), folder)
    page = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: BEGIN + text + END, page))
    print(f"{PAGE}: {len(text):,} characters")


if __name__ == "__main__":
    main()
