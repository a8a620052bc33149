"""Chooses how recurrent layers share a sequence: ranks exchange heads, or states."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of, shown_pattern
from cp_ring.megatron.options import Options
from cp_ring.recurrent.choice import MixerSizes

NODE = 8  # ranks, of which tensor-parallel ones are neighbors

FOLLOWED = ("documents", "tree", "shared-prefix", "causal")
"""Kinds of masks in which each token sees all that its state holds."""


def rejection(args: Asked, options: Options) -> str | None:
    """Reject masks that the states of recurrent layers cannot follow, heads that the ranks cannot
    share, and states in CUDA graphs.
    """
    pattern = shown_pattern(args)
    way = options.recurrent
    letters = [letter for letter, _ in mixers(args)]
    if way != "auto" and (line := undivided_heads(args, way)):
        return f"{pattern}: {line}: leave out --cp-ring-recurrent {way}"
    masks = [kind for kind in options.kinds if kind not in FOLLOWED]
    if letters and masks:
        return (
            f"--cp-ring-mask-kinds {masks[0]}: the {RECURRENT[letters[0]]} layers of {pattern} are "
            f"recurrent and ignore this mask: give {', '.join(FOLLOWED[:-1])} or {FOLLOWED[-1]}"
        )
    asked = way in ("states", "M")
    travel = [x == "M" and (asked or sizes.units % args.cp) for x, sizes in mixers(args)]
    if any(travel) and _graphed(args):
        return (
            f"--cuda-graph-modules mamba: states of the Mamba layers of {pattern} travel, which a "
            "CUDA graph cannot hold: leave mamba out"
        )
    return None


def _graphed(args: Asked) -> bool:
    """Return True if CUDA graphs hold Mamba layers."""
    return "mamba" in f"{args.cuda_graph_modules} {args.cuda_graph_scope}"


def choose(args: Asked) -> str:
    """Return heads or states for the recurrent layers of a job, or the letter of those that take
    states: states where heads do not divide, else what is predicted to be faster.
    """
    tokens = (args.seq_length or 0) * (args.micro_batch_size or 1) // args.cp
    node = max(NODE // args.tp, 1)
    every = set()
    chosen = set()
    for letter, sizes in mixers(args):
        every.add(letter)
        heads, states = sizes.seconds(tokens, args.cp, node)
        faster = args.cp > 1 and states < heads and not (letter == "M" and _graphed(args))
        if faster or sizes.units % args.cp:
            chosen.add(letter)
    if len(chosen) == 1 < len(every):
        return chosen.pop()
    return "states" if chosen else "heads"


def mixers(args: Asked) -> Iterator[tuple[str, MixerSizes]]:
    """Yield the kind of each recurrent layer of a job, as a letter, with its sizes on a rank."""
    letters = letters_of(args) or "MG" * bool(args.is_hybrid_model)
    element = 2 if args.bf16 or args.fp16 else 4
    if "M" in letters:
        size = args.mamba_head_dim or 64
        heads = args.mamba_num_heads or 2 * args.hidden_size // size
        state = args.mamba_state_dim or 128
        groups = args.mamba_num_groups or 8
        channels = heads * (3 * size + 1) + 2 * groups * state
        k = 1
        v = size * state
        if "gated_delta_product" in str(args.spec):  # Megatron's own sign of them
            learned = (args.gdp_num_householder or 3) + 1
            channels = learned * (heads * (size + 1) + groups * state)
            k = state
            v = size
        yield "M", MixerSizes(heads, k, v, channels, element, groups).of_rank(args.tp)
    keys = args.linear_num_key_heads or 16
    values = args.linear_num_value_heads or 32
    k = args.linear_key_head_dim or 128
    v = args.linear_value_head_dim or 128
    for letter, gates in (("G", 2 * values), ("K", keys * (k + 1))):
        if letter in letters:
            channels = 2 * keys * k + 3 * values * v + gates
            yield letter, MixerSizes(values, k, v, channels, element, keys).of_rank(args.tp)


def undivided_heads(args: Asked, way: str) -> str:
    """Return a text about heads of recurrent layers that the context-parallel ranks cannot share,
    or "", if the layers of `way` exchange states. Mamba's heads are shared in whole groups.
    """
    for letter, sizes in mixers(args):
        if sizes.units % args.cp and way not in ("states", letter):
            units = "groups of heads" if letter == "M" else "key heads"
            return (
                f"the {sizes.units} {units} of the {RECURRENT[letter]} layers do not divide among "
                f"{args.cp} ranks"
            )
    return ""
