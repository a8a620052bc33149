"""Chooses how recurrent layers share a sequence: ranks exchange heads, or states."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of, shown_pattern
from cp_ring.megatron.options import Options
from cp_ring.recurrent.choice import MixerSizes

NODE = 8  # ranks, of which tensor-parallel ones are neighbors

UNITS = {"M": "groups of heads", "G": "key heads"}
"""What ranks that exchange heads share, by the letter of a layer."""

FOLLOWED = ("documents", "tree", "shared-prefix", "causal")
"""Kinds of masks in which each token sees all that its state holds."""


def rejection(args: Asked, options: Options) -> str | None:
    """Reject masks that the states of recurrent layers cannot follow, heads that the ranks cannot
    share, and states in CUDA graphs.
    """
    pattern = shown_pattern(args)
    layers = [RECURRENT[letter] for letter, _ in mixers(args)]
    line = undivided_heads(args)
    if line and options.recurrent == "heads":
        return f"{pattern}: {line}: leave out --cp-ring-recurrent heads"
    masks = [kind for kind in options.kinds if kind not in FOLLOWED]
    if layers and masks:
        return (
            f"--cp-ring-mask-kinds {masks[0]}: the {layers[0]} layers of {pattern} are recurrent "
            f"and ignore this mask: give {', '.join(FOLLOWED[:-1])} or {FOLLOWED[-1]}"
        )
    if "Mamba" in layers and _graphed(args) and (line or options.recurrent == "states"):
        return (
            f"--cuda-graph-modules mamba: states of the Mamba layers of {pattern} travel, which a "
            "CUDA graph cannot hold: leave mamba out"
        )
    return None


def _graphed(args: Asked) -> bool:
    """Return True if CUDA graphs hold Mamba layers."""
    return "mamba" in f"{args.cuda_graph_modules} {args.cuda_graph_scope}"


def choose(args: Asked) -> str:
    """Return heads or states for the recurrent layers of a job: states where heads do not divide,
    else what is predicted to be faster for one layer of each kind.
    """
    if undivided_heads(args):
        return "states"
    if _graphed(args):
        return "heads"
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
        state = args.mamba_state_dim or 128
        groups = (args.mamba_num_groups or 8) // args.tp
        channels = heads * (3 * size + 1) + 2 * groups * state
        yield "M", MixerSizes(heads, 1, size * state, channels, element, groups)
    if "G" in letters:
        keys = args.linear_num_key_heads or 16
        values = args.linear_num_value_heads or 32
        k = args.linear_key_head_dim or 128
        v = args.linear_value_head_dim or 128
        channels = (2 * keys * k + values * (3 * v + 2)) // args.tp
        yield "G", MixerSizes(values // args.tp, k, v, channels, element, keys // args.tp)


def undivided_heads(args: Asked) -> str:
    """Return a text about heads of recurrent layers that the context-parallel ranks cannot share,
    or "". Mamba's heads are shared in whole groups.
    """
    for letter, sizes in mixers(args):
        if sizes.units % args.cp:
            return (
                f"the {sizes.units} {UNITS[letter]} of the {RECURRENT[letter]} layers do not "
                f"divide among {args.cp} ranks"
            )
    return ""
