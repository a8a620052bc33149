"""Reads Megatron's `--cp-comm-type` for each layer as a plan specification: how many ranks exchange
heads, and the schedule of the ring.

| type | here |
|---|---|
| `p2p` | the ring, with `--cp-ring-heads` and `--cp-ring-schedule` |
| `all_gather` | the ring with the schedule `gather`: all keys that a rank needs arrive at one hop |
| `a2a` | heads exchanged among all context-parallel ranks; no ring |
| `a2a+p2p` | heads exchanged among the first hierarchical size, a ring of the second |

Nothing heavy is imported here: the flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

from typing import Any

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.options import CallSettings
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import resolve

_TYPES = "p2p", "all_gather", "a2a", "a2a+p2p"


def spec_of_layer(
    kind: str | None, settings: CallSettings, model: Any, tp: int, cp: int
) -> PlanSpec:
    """Return the plan specification of a layer with `cp_comm_type` `kind` over `cp` ranks.

    `model` is Megatron's arguments or the configuration of a layer. Here `auto` heads mean the
    ring: see `cp_ring.megatron.adapter.heads_choice`. Raises `ConfigError` with a line that names
    the flag, also if the ranks cannot exchange the heads of one of `tp` tensor-parallel ranks, or
    if the schedule has no hop for each member or too many sources at a hop.
    """
    asked = Asked(model)
    heads = 1 if settings.heads == "auto" else int(settings.heads)
    schedule = settings.schedule
    kind = known(kind or "p2p")
    if kind not in _TYPES:
        raise ConfigError(
            f"--cp-comm-type {kind} is unknown: give {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
        )
    if cp == 1:  # the ring of one rank, whatever the flags say of others
        kind, heads = "p2p", 1
    if heads != 1 and kind != "p2p":
        raise ConfigError(
            f"--cp-comm-type {kind} and --cp-ring-heads {heads} both set the Ulysses degree: leave "
            "out one of the two"
        )
    if cp % heads:
        raise ConfigError(
            f"--cp-ring-heads {heads} does not divide the {cp} context-parallel ranks: give a "
            f"divisor of {cp}"
        )
    if kind == "all_gather":
        if schedule not in ("auto", "gather"):
            raise ConfigError(
                f"--cp-comm-type all_gather is --cp-ring-schedule gather, not {schedule}: leave "
                "out one of the two"
            )
        schedule = "gather"
    of_kind = {"p2p": heads, "all_gather": 1, "a2a": cp}
    members = of_kind.get(kind) or _first_of(asked.hierarchical_context_parallel_sizes, cp)
    _check_heads(kind, members, asked, tp)
    schedule = schedule if members < cp else "auto"
    try:
        resolve(schedule, cp // members, settings.slot_shards)
    except PlanError as error:
        line = str(error).replace("schedule ", "--cp-ring-schedule ", 1)
        raise ConfigError(line.replace("slot_shards", "--cp-ring-slot-shards")) from None
    return PlanSpec(settings.layout, settings.route, schedule, members, settings.slot_shards)


def _first_of(sizes: list[int] | None, cp: int) -> int:
    """Return the number of ranks that exchange heads with a2a+p2p."""
    if not sizes:
        raise ConfigError(
            "--cp-comm-type a2a+p2p exchanges heads among U ranks in a ring of R members: give "
            "--hierarchical-context-parallel-sizes U R"
        )
    if len(sizes) != 2 or sizes[0] * sizes[1] != cp:
        shown = " ".join(map(str, sizes))
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {shown} is not two sizes for "
            f"--context-parallel-size {cp}: give U R with U * R = {cp}"
        )
    return sizes[0]


def known(kind: str) -> str:
    return "all_gather" if kind == "allgather" else kind  # Megatron's help has this spelling too


def _check_heads(kind: str, members: int, model: Asked, tp: int) -> None:
    """Raise `ConfigError` unless the members can exchange the heads of a tensor-parallel rank."""
    heads = model.num_attention_heads
    key_heads = model.key_heads
    if kind == "p2p":
        named = f"--cp-ring-heads {members}"
        other = "--cp-ring-heads 1"
    else:
        named = f"--cp-comm-type {kind} among {members} ranks"
        other = "--cp-comm-type p2p"
    if heads and heads // tp % members:
        raise ConfigError(
            f"{named} does not divide the {heads // tp} query heads of a tensor-parallel rank: "
            f"give {other}"
        )
    held = max(key_heads // tp, 1) if key_heads else members
    if held % members and members % held:
        raise ConfigError(
            f"{named} is neither a divisor nor a multiple of the {held} key/value heads of a "
            f"tensor-parallel rank: give {other}"
        )
