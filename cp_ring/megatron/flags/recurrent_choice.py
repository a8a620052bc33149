"""Chooses how recurrent layers share a sequence: ranks exchange heads, or states."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of, shown_pattern
from cp_ring.megatron.options import Options
from cp_ring.recurrent.choice import MixerSizes

PRODUCTS = ("gdp_stack_spec", "gated_delta_product_stack_spec")
"""Names of specifications whose layers M are gated delta products, as Megatron tells them."""

NODE = 8  # ranks, of which tensor-parallel ones are neighbors

UNITS = {"M": "groups of heads", "G": "key heads", "K": "heads"}
"""What ranks that exchange heads share, by the letter of a layer."""

FOLLOWED = ("documents", "tree", "shared-prefix", "causal")
"""Kinds of masks in which each token sees all that its state holds."""


def rejection(args: Asked, options: Options) -> str | None:
    """Reject masks that the states of recurrent layers cannot follow, heads that the ranks cannot
    share, and states in CUDA graphs.
    """
    pattern = shown_pattern(args)
    letters = [letter for letter, _ in mixers(args)]
    way = options.recurrent
    if way != "auto" and (line := undivided_heads(args, way)):
        return f"{pattern}: {line}: leave out --cp-ring-recurrent {way}"
    masks = [kind for kind in options.kinds if kind not in FOLLOWED]
    if letters and masks:
        return (
            f"--cp-ring-mask-kinds {masks[0]}: the {RECURRENT[letters[0]]} layers of {pattern} are "
            f"recurrent and ignore this mask: give {', '.join(FOLLOWED[:-1])} or {FOLLOWED[-1]}"
        )
    if "M" in letters and _graphed(args) and (way in ("states", "M") or undivided_heads(args, "G")):
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
    every, chosen = set(), set()
    for letter, sizes in mixers(args):
        every.add(_decided_with(letter))
        heads, states = sizes.seconds(tokens, args.cp, node)
        faster = args.cp > 1 and states < heads and not (letter == "M" and _graphed(args))
        if faster or sizes.units % args.cp:
            chosen.add(_decided_with(letter))
    if chosen in (every, set()):
        return "states" if chosen else "heads"
    return chosen.pop()


def _decided_with(letter: str) -> str:
    """Return the letter of the layers that share a sequence as these do: all delta nets alike."""
    return "M" if letter == "M" else "G"


def mixers(args: Asked) -> Iterator[tuple[str, MixerSizes]]:
    """Yield the kind of each recurrent layer of a job, as a letter, with its sizes on a rank."""
    letters = letters_of(args) or "MG" * bool(args.is_hybrid_model)
    element = 2 if args.bf16 or args.fp16 else 4
    if "M" in letters:
        size = args.mamba_head_dim or 64
        heads = (args.mamba_num_heads or 2 * args.hidden_size // size) // args.tp
        state = args.mamba_state_dim or 128
        groups = (args.mamba_num_groups or 8) // args.tp
        if str(args.spec).rstrip("']").endswith(PRODUCTS):
            learned = (args.gdp_num_householder or 3) + 1
            channels = learned * (heads * (size + 1) + groups * state)
            yield "M", MixerSizes(heads, state, size, channels, element, groups)
        else:
            channels = heads * (3 * size + 1) + 2 * groups * state
            yield "M", MixerSizes(heads, 1, size * state, channels, element, groups)
    keys = args.linear_num_key_heads or 16
    values = args.linear_num_value_heads or 32
    k = args.linear_key_head_dim or 128
    v = args.linear_value_head_dim or 128
    for letter, gates in (("G", 2 * values), ("K", keys * (k + 1))):
        if letter in letters:
            channels = (2 * keys * k + 3 * values * v + gates) // args.tp
            yield letter, MixerSizes(values // args.tp, k, v, channels, element, keys // args.tp)


def undivided_heads(args: Asked, way: str = "heads") -> str:
    """Return a text about heads of recurrent layers that the context-parallel ranks cannot share,
    or "", if the layers of `way` exchange states. Mamba's heads are shared in whole groups.
    """
    for letter, sizes in mixers(args):
        if sizes.units % args.cp and way not in ("states", _decided_with(letter)):
            return (
                f"the {sizes.units} {UNITS[letter]} of the {RECURRENT[letter]} layers do not "
                f"divide among {args.cp} ranks"
            )
    return ""
