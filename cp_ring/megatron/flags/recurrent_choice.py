"""What ranks exchange for the recurrent layers of a Megatron job where the flags ask for `auto`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from cp_ring.comm.nodes import ranks_per_node
from cp_ring.megatron.flags.attention_rules import STATES
from cp_ring.megatron.flags.rule import Job, check_rules, problem
from cp_ring.megatron.plans import make_layout
from cp_ring.megatron.rejection import note
from cp_ring.options import Options


def settle(args: argparse.Namespace, config: Options) -> Options:
    """The settings with heads or states for each kind of recurrent layers of the model. Says which,
    and why.

    Predicted for whole sequences as documents. States are not chosen where a rule rejects them, nor
    heads that do not divide among the ranks, or where states fork.
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
    import numpy as np

    from cp_ring.plan.costs.recurrent_costs import RecurrentSizes, heads_cost, states_cost
    from cp_ring.plan.exchange.chains import Chains
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.sizes.device_rates import HOST_RATES, RATES

    tp, batch = args.tensor_model_parallel_size, getattr(args, "micro_batch_size", None) or 1
    near = config.node_size or max((ranks_per_node() or 1) // tp, 1)
    rates = HOST_RATES if config.cpu else RATES
    layouts = [make_layout(config.layout, args.seq_length, cp)] * batch
    chains = Chains.build(Layout.batch(layouts), np.arange(batch) * args.seq_length)
    for kind in kinds:
        sizes = RecurrentSizes.from_megatron(args, kind, tp)
        heads = heads_cost(sizes, chains.layout.n, cp, rates, near)
        states = states_cost(sizes, chains, rates, near)
        asked = replace(config, recurrent=_text(ways | {kind: "states"}))
        why = problem(Job(args, asked), STATES)
        if sizes.shared % cp:
            why = f"its {sizes.shared} heads do not divide among {cp} ranks"
            ways[kind] = "states"
        else:
            ways[kind] = "heads" if why or heads.seconds <= states.seconds else "states"
        note(
            f"--cp-ring-recurrent {config.recurrent} is {ways[kind]} for {kind} layers: "
            f"{states.bytes:,} bytes of states a layer, {heads.bytes:,} of heads; predicted "
            f"{states.seconds * 1e3:.3g} and {heads.seconds * 1e3:.3g} ms" + f" ({why})" * bool(why)
        )
    final = {kind: "heads" if way == "auto" else way for kind, way in ways.items()}
    return replace(config, recurrent=_text(final))


def _text(ways: dict[str, str]) -> str:
    values = set(ways.values())
    if len(values) == 1:
        return values.pop()
    return ",".join(f"{kind}={way}" for kind, way in ways.items())
