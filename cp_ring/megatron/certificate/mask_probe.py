"""Probes the mask of one attention layer: which outputs depend on a token, and which gradients
depend on a query.

With equal scores everything is linear in the values, and each channel of the value heads belongs to
one token. So one call probes as many tokens as there are channels.

Shapes: as in `tested_layer`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer

CHANNELS = 512  # most channels of values that a call needs


def mask_probes(tested: TestedLayer, rounds: int) -> list[Probe]:
    """Change one token's value, or the gradient of one query's output, and find the outputs, or the
    gradients of values, that change. `rounds` limits the number of calls.
    """
    channels = min(CHANNELS, tested.kind.groups * tested.kind.e)
    tokens = _chosen_tokens(tested, rounds * channels)
    rounds_of_tokens = [tokens[at : at + channels] for at in range(0, len(tokens), channels)]
    probes = []
    for name, of_keys in (("mask", True), ("mask of gradients", False)):
        wrong = [_wrong_pairs(tested, picked, of_keys) for picked in rounds_of_tokens]
        count = float(sum(number for number, _ in wrong))
        probes.append(tested.probe(name, count, 0.0, next((w for _, w in wrong if w), "")))
    return probes


def _chosen_tokens(tested: TestedLayer, most: int) -> list[int]:
    """Return at most `most` positions to probe, evenly spread and beside edges of chunks, documents
    and windows, where a mask is most likely wrong.
    """
    n, window, parts = tested.kind.tokens, tested.kind.probed[0], 2 * tested.group.size()
    edges = [n * i // parts for i in range(parts)]
    edges += [edge + window for edge in edges] if window >= 0 else []
    edges += [edge for rule in tested.batch.rules for edge in rule.edges]
    near = {edge + side for edge in edges for side in (-1, 0, 1)} & {*range(n)}
    chosen = sorted(near.union(range(0, n, -(-n // most))))
    return chosen[:: -(-len(chosen) // most)]


def _ones(tested: TestedLayer, heads: int, picked: list[int]) -> Tensor:
    """Return zeros [b, n, heads, e] with a one for each picked token, in its own channel of the
    first head that shares a key/value head.
    """
    kind, x = tested.kind, tested.zeros(heads, tested.kind.e)
    for number, token in enumerate(picked):
        group, channel = divmod(number, kind.e)
        x[:, token, group * (heads // kind.groups), channel] = 1
    return x


def _changed(tested: TestedLayer, picked: list[int], of_keys: bool) -> Tensor:
    """Return [b, s, g, e]: what each picked key adds to outputs, or what the output of each picked
    query adds to the gradients of values.
    """
    kind = tested.kind
    q, k = (tested.zeros(heads, kind.d) for heads in (kind.heads, kind.groups))  # equal scores
    v = _ones(tested, kind.groups, picked if of_keys else []).requires_grad_()
    with torch.enable_grad():
        out = tested.call(q, k, v)
    if of_keys:
        return out.detach()[:, :, :: kind.heads // kind.groups]
    (dv,) = torch.autograd.grad(out, v, tested.local(_ones(tested, kind.heads, picked)))
    return tested.local(dv)


def _smallest_weight(tested: TestedLayer) -> float:
    """Return a quarter of the smallest weight that a visible token can have."""
    sink = getattr(tested.layer, "softmax_offset", None)
    extra = 0.0 if sink is None else float(sink.detach().double().exp().max())
    return 0.25 / (tested.kind.tokens + extra)


def _wrong_pairs(tested: TestedLayer, picked: list[int], of_keys: bool) -> tuple[int, str]:
    """Return the number of pairs on which the layer and the declared mask disagree, and the first
    pair as text. `picked` are keys of this rank's queries, or queries of its keys.
    """
    changed = _changed(tested, picked, of_keys)
    seen = changed.flatten(2)[..., : len(picked)].abs() > _smallest_weight(tested)
    others, count, where = torch.tensor(picked, device=seen.device), 0, ""
    of_rows = zip(tested.positions, tested.batch.rules, strict=True)
    for batch_row, (mine, rule) in enumerate(of_rows):
        queries, keys = (mine, others) if of_keys else (others, mine)
        allowed = rule.allowed(queries, keys, tested.kind.probed)
        wrong = (seen[batch_row] != (allowed if of_keys else allowed.T)).nonzero()
        count += len(wrong)
        if len(wrong) and not where:
            local, other = wrong[0].tolist()
            query, key = (int(mine[local]), picked[other])[:: 1 if of_keys else -1]
            found = "sees" if seen[batch_row, local, other] else "does not see"
            declared = "hidden" if found == "sees" else "visible"
            where = f"query {query} {found} key {key} of batch row {batch_row}"
            where += f", which is declared {declared}"
    return count, where
