"""Faults of context parallelism, planted one at a time: each must turn a cell of the matrix red."""

import contextlib
import functools
import pkgutil
from dataclasses import replace

import numpy as np
import torch


@contextlib.contextmanager
def planted(name):
    """Plants the fault `name` (none for "") in cp_ring until the context ends. The patches must be
    installed before.
    """
    if not name:
        yield
        return
    owner, attribute, faulty = FAULTS[name]()
    right = getattr(owner, attribute)
    setattr(
        owner,
        attribute,
        functools.wraps(right)(lambda *args, **kwargs: faulty(right, *args, **kwargs)),
    )
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def at(name, faulty):
    """A fault in place of the function or method `name`, as in `cp_ring.megatron.gpt.get_batch`."""

    def found():
        owner, _, attribute = name.rpartition(".")
        return pkgutil.resolve_name(owner), attribute, faulty

    return found


def _mask_widened(make_plan, mask, n, cp, window, *rest):
    return make_plan("no_mask", n, cp, (window[0], 1), *rest)


def _window_widened(make_plan, mask, n, cp, window, *rest):
    left, right = window
    return make_plan(mask, n, cp, (left if left < 0 else left + 1, right), *rest)


def _window_everywhere(window_of_layer, config, layer):
    return tuple(config.window_size)


def _sink_dropped(inputs, q, k, v, sink, *more):
    return inputs(q, k, v, None, *more)


def _sink_gradient_dropped(inputs, q, k, v, sink, *more):
    return inputs(q, k, v, sink.detach(), *more)


def _scale_of_head_size(attention_of, plan, group, options, inputs):
    """Multi-latent attention has another scale than its head size gives; the others lose the root."""
    default = inputs.q.shape[-1] ** -0.5
    scale = default if abs(options.softmax_scale - default) > 1e-6 else default**2
    return attention_of(plan, group, replace(options, softmax_scale=scale), inputs)


def _positions_of_another_split(shard, batch, rank, cp, carried):
    return {name: tensor.chunk(cp, 1)[rank] for name, tensor in batch.items()}


def _with_pieces(mask, documents, data, *args, **kwargs):
    from cp_ring.plan.tiles import Tiles

    whole = replace(documents.whole, pieces=Tiles(data))
    return mask(replace(documents, whole=whole), *args, **kwargs)


def _shifted(mask, documents, *args, **kwargs):
    data = documents.whole.pieces.data.copy()
    data[0:3:2, 1:] += 1
    data[1:4:2, :-1] += 1
    return _with_pieces(mask, documents, data, *args, **kwargs)


def _merged(mask, documents, *args, **kwargs):
    data = documents.whole.pieces.data[:, :1].copy()
    data[1:4:2] = documents.layout.n
    return _with_pieces(mask, documents, data, *args, **kwargs)


def _positions_of_zigzag(positions, documents, rank):
    from cp_ring import Layout

    n, cp = documents.layout.n // documents.batch, documents.layout.cp
    zigzag = Layout.batch([Layout.zigzag(n, cp)] * documents.batch)
    return positions(replace(documents, layout=zigzag), rank)


def _one_section(positions, batch):
    return {name: ids[:1].expand(3, -1, -1) for name, ids in positions(batch).items()}


def _labels_of_another_chunk(chunks, logits, labels, *more):
    return chunks(logits, labels.roll(1, 1), *more)


def _in_order(by_document, padded, cp):
    from cp_ring import Layout

    return Layout.contiguous(int(padded[-1]), cp)


def _siblings_seen(mask, declared, *args, **kwargs):
    """A response sees the responses before it."""
    from cp_ring import Mask

    n = declared.layout.n // declared.batch
    return Mask.union(
        mask(declared, *args, **kwargs), Mask.documents([n * i for i in range(declared.batch + 1)])
    )


def _cut_at_borders(mask, declared, *args, **kwargs):
    """No query sees later tokens of another chunk of the layout, as if each rank had made the mask
    of its own tokens.
    """
    from cp_ring.plan.tiles import split_at_edges

    whole = mask(declared, *args, **kwargs)
    edges = declared.layout.edges
    tiles, query, key = split_at_edges(whole.pieces, edges, edges)
    return replace(whole, pieces=tiles[key <= query])


def _globals_hidden(mask, declared, *args, **kwargs):
    return mask(declared, *args, **kwargs) & (7, 0)


def _positions_not_continued(positions, declared, rank):
    return declared.places(rank) % declared.longest  # which the table of embeddings has


def _roll_across(last, documents):
    return torch.arange(documents.layout.n) == documents.layout.n - 2


def _in_another_layout(documents_of, packed, shape, cp, ring):
    """Batch rows as another layout would split them."""
    other = "contiguous" if ring.layout == "zigzag" else "zigzag"
    return documents_of(packed, shape, cp, replace(ring, layout=other))


def _across_documents(starts, carried):
    rows = np.arange(carried.batch) * (carried.layout.n // carried.batch)
    return rows, np.full_like(rows, -1)


def _anew_too_late(starts, carried):
    """The first token of each document but the first counts as one of the document before it."""
    found, before = starts(carried)
    return found + (found % (carried.layout.n // carried.batch) != 0), before


def _averaged_by_rank(loss_function, loss_mask, losses, **more):
    loss, tokens, report = loss_function(loss_mask, losses, **more)
    return loss / loss_mask.sum().clamp(min=1), torch.ones_like(tokens), report


def _of_the_rank(average, outputs, group, divide):
    return outputs


def _counted_by_rank(total, mask):
    return mask.part.sum()


def _rolled_by_rank(roll, tensor, **more):
    mine, total = roll(tensor, **more)
    return mine, total if mine is None else torch.Tensor.sum(mine)


def _weight_gradient_twice(finish, gradients):
    dk, dv, dlatent, *weights = finish(gradients)
    return dk, dv, dlatent, *(2 * x for x in weights)


def _rotated_part_not_returned(of_latents, gradients, hop):
    found = of_latents(gradients, hop)
    found[..., gradients._codec.latent.shape[-1] :] = 0
    return found


def _latent_not_summed(of_all_tokens, tap, latent, config):
    """Each tensor-parallel rank returns what its own heads owe, as if the others owed nothing."""
    from megatron.core.tensor_parallel import mappings

    if not config.sequence_parallel:
        return latent
    return mappings.gather_from_sequence_parallel_region(
        latent, tensor_parallel_output_grad=False, group=tap._tp_group
    )


FAULTS = {
    "weight gradient twice": at(
        "cp_ring.comm.latent.LatentGradients.finish", _weight_gradient_twice
    ),
    "rotated part not returned": at(
        "cp_ring.comm.latent.LatentGradients._of_latents", _rotated_part_not_returned
    ),
    "latent not summed over tp": at(
        "cp_ring.megatron.adapter.latent_tap.LatentTap._of_all_tokens", _latent_not_summed
    ),
    "loss averaged by rank": at("cp_ring.megatron.gpt.loss_function", _averaged_by_rank),
    "tokens of the loss counted by rank": at("cp_ring.patches.loss_average.average", _of_the_rank),
    "tokens of predictions counted by rank": at(
        "megatron.core.transformer.multi_token_prediction.roll_tensor", _rolled_by_rank
    ),
    "tokens counted by rank": at("cp_ring.megatron.next_tokens.CountedMask.sum", _counted_by_rank),
    "boundary shifted by one": at("cp_ring.megatron.adapter.documents.Documents.mask", _shifted),
    "documents merged": at("cp_ring.megatron.adapter.documents.Documents.mask", _merged),
    "state in the order of another layout": at(
        "cp_ring.megatron.adapter.recurrent.documents_of", _in_another_layout
    ),
    "state across documents": at(
        "cp_ring.megatron.adapter.microbatch_mask.MicrobatchMask.starts", _across_documents
    ),
    "state begins anew too late": at(
        "cp_ring.megatron.adapter.microbatch_mask.MicrobatchMask.starts", _anew_too_late
    ),
    "positions of zigzag": at(
        "cp_ring.megatron.adapter.documents.Documents.positions", _positions_of_zigzag
    ),
    "siblings seen": at("cp_ring.megatron.data.masks.DeclaredMask.mask", _siblings_seen),
    "spans cut at borders": at("cp_ring.megatron.data.masks.DeclaredMask.mask", _cut_at_borders),
    "global tokens hidden": at("cp_ring.megatron.data.masks.DeclaredMask.mask", _globals_hidden),
    "positions not continued": at(
        "cp_ring.megatron.data.masks.DeclaredMask.positions", _positions_not_continued
    ),
    "roll in one sequence": at("cp_ring.megatron.data.masks.DeclaredMask.last", _roll_across),
    "roll across documents": at("cp_ring.megatron.adapter.documents.Documents.last", _roll_across),
    "labels of another chunk": at(
        "cp_ring.megatron.loss_chunks.Logits.chunks", _labels_of_another_chunk
    ),
    "packed documents in order": at("cp_ring.Layout.per_document_zigzag", _in_order),
    "one position in all sections": at("cp_ring.megatron.gpt._mrope_positions", _one_section),
    "mask widened": at("cp_ring.megatron.adapter.planned.make_plan", _mask_widened),
    "window widened": at("cp_ring.megatron.adapter.planned.make_plan", _window_widened),
    "window on every layer": at(
        "cp_ring.megatron.adapter.planned.window_of_layer", _window_everywhere
    ),
    "sink dropped": at("cp_ring.megatron.adapter.attention.Inputs", _sink_dropped),
    "sink gradient dropped": at(
        "cp_ring.megatron.adapter.attention.Inputs", _sink_gradient_dropped
    ),
    "scale of the head size": at(
        "cp_ring.megatron.adapter.attention.attention_of", _scale_of_head_size
    ),
    "positions of another split": at(
        "cp_ring.megatron.gpt.on_this_cp_rank", _positions_of_another_split
    ),
}
