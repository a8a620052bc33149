"""Chooses how recurrent layers share a sequence: ranks exchange heads, or states."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of
from cp_ring.recurrent.choice import MixerSizes

NODE = 8  # ranks, of which tensor-parallel ones are neighbors


def choose(args: Asked) -> str:
    """Return heads or states for the recurrent layers of a job: states where heads do not divide,
    else what is predicted to be faster for one layer of each kind.
    """
    if undivided_heads(args):
        return "states"
    tokens = (args.seq_length or 0) * (args.micro_batch_size or 1) // args.cp
    node = max(NODE // args.tp, 1)
    pairs = [sizes.seconds(tokens, args.cp, node) for _, sizes in mixers(args)]
    heads, states = (sum(seconds) for seconds in zip((0.0, 0.0), *pairs, strict=True))
    return "states" if args.cp > 1 and states < heads else "heads"


def mixers(args: Asked) -> Iterator[tuple[str, MixerSizes]]:
    """Yield the kind of each recurrent layer of a job, as a letter, with its sizes on a rank."""
    letters = letters_of(args) or "MG" * bool(args.is_hybrid_model)
    element = 2 if args.bf16 or args.fp16 else 4
    if "M" in letters:
        size = args.mamba_head_dim or 64
        heads = (args.mamba_num_heads or 2 * args.hidden_size // size) // args.tp
        state, groups = args.mamba_state_dim or 128, (args.mamba_num_groups or 8) // args.tp
        channels = heads * (3 * size + 1) + 2 * max(groups, args.cp) * state
        yield "M", MixerSizes(heads, 1, size * state, channels, element)
    if "G" in letters:
        keys, values = (args.linear_num_key_heads or 16), (args.linear_num_value_heads or 32)
        k, v = args.linear_key_head_dim or 128, args.linear_value_head_dim or 128
        channels = (2 * keys * k + values * (3 * v + 2)) // args.tp
        yield "G", MixerSizes(values // args.tp, k, v, channels, element)


def undivided_heads(args: Asked) -> str:
    """Return a text about heads of recurrent layers that the context-parallel ranks cannot share,
    or "".
    """
    for letter, sizes in mixers(args):
        keys = (args.linear_num_key_heads or 16) // args.tp
        heads = sizes.heads if letter == "M" else keys
        if heads % args.cp:
            return (
                f"the {heads} heads of the {RECURRENT[letter]} layers do not divide among "
                f"{args.cp} ranks"
            )
    return ""
