"""`cp-ring status --watch`: the state of a run in the terminal, until it is done."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from cp_ring.observe import progress
from cp_ring.tools.slurm.status import show, status

SECONDS = 2.0


def follow(run_dir: Path) -> None:
    """Shows the state of a run, again every `SECONDS`, until it is DONE or the user ends it
    (Ctrl-C).
    """
    with contextlib.suppress(KeyboardInterrupt), Live(refresh_per_second=1) as live:
        while True:
            facts = status(run_dir)
            live.update(picture(facts, progress.read(run_dir)))
            if facts["state"] == "DONE":
                return
            time.sleep(SECONDS)


def picture(facts: dict[str, Any], steps: list[dict[str, Any]]) -> Group:
    """What the terminal shows: the state, the last steps, and where the time of the last sampled
    step went.
    """
    lines = [show(facts)]
    for step in steps[-5:]:
        rate, loss = step.get("tokens per second"), step.get("lm loss")
        lines.append(
            f"step {step['step']}"
            + (f" | loss {loss:.4f}" if isinstance(loss, float) else "")
            + (f" | {rate:,.0f} tokens/s" if isinstance(rate, float) else "")
        )
    times = [step["timing"] for step in steps if isinstance(step.get("timing"), dict)]
    if times:
        last, rank = times[-1], times[-1].get("slowest_rank")
        slow = (
            f", slowest rank {rank['rank']} ({rank['host']}) {rank['slower'] - 1:+.0%}"
            if rank
            else ""
        )
        lines.append(
            f"step {last['step']}: {last['exposed_share']:.1%} of attention is waiting{slow}"
        )
    return Group(*map(Text, lines))
