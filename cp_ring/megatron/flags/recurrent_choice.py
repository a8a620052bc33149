"""What ranks exchange for the recurrent layers of a Megatron job where the flags ask for `auto`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from cp_ring.megatron.flags.attention_rules import STATES
from cp_ring.megatron.flags.rule import Job, check_rules
from cp_ring.megatron.rejection import note
from cp_ring.options import Options


def settle(args: argparse.Namespace, config: Options) -> Options:
    """The settings with heads or states for each kind of recurrent layers of the model. Says which,
    and why.

    Heads, but states where heads do not divide among the ranks, or where states fork.
    """
    ways, cp = config.recurrent_ways, args.context_parallel_size
    kinds = Job(args, config).recurrent_with("auto")
    if kinds and config.forks:
        forking = replace(config, recurrent=_text(ways | dict.fromkeys(kinds, "states")))
        check_rules(Job(args, forking), STATES)
        note(
            f"--cp-ring-recurrent {config.recurrent} is states for {', '.join(kinds)} layers: "
            f"these fork at the branches of --cp-ring-mask-kinds {config.mask_kinds}"
        )
        return forking
    if cp == 1 or not kinds:
        chosen = {kind: "heads" if way == "auto" else way for kind, way in ways.items()}
        return config if chosen == ways else replace(config, recurrent=_text(chosen))
    for kind in kinds:
        heads = _heads_to_exchange(args, kind)
        if heads % cp:
            ways[kind] = "states"
            note(
                f"--cp-ring-recurrent {config.recurrent} is states for {kind} layers: their "
                f"{heads} heads do not divide among {cp} ranks"
            )
    final = {kind: "heads" if way == "auto" else way for kind, way in ways.items()}
    return replace(config, recurrent=_text(final))


def _heads_to_exchange(args: argparse.Namespace, kind: str) -> int:
    """Heads of a tensor-parallel rank that must divide among the ranks."""
    heads = getattr(args, "linear_num_key_heads", None) or 16
    if kind == "mamba":
        size = getattr(args, "mamba_head_dim", None) or 64
        heads = getattr(args, "mamba_num_heads", None) or 2 * args.hidden_size // size
    return int(heads) // args.tensor_model_parallel_size


def _text(ways: dict[str, str]) -> str:
    values = set(ways.values())
    if len(values) == 1:
        return values.pop()
    return ",".join(f"{kind}={way}" for kind, way in ways.items())
