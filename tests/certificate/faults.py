"""The faults that the certificate must stop, for both doors: those of attention are the same, those
of batch and loss are in the code that the door runs.

A fault of a script's own functions is put into its namespace while it runs; its file stays as it
is. It acts at context-parallel sizes above 1 alone: what is the same at size 1 is what the script
means.
"""

import contextlib
import dataclasses
import itertools
import sys
from dataclasses import replace
from unittest.mock import patch

import torch

from tests.parity import faults as parity

SHARDED = ("tokens", "labels", "loss_mask", "position_ids")


def _rank():
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_rank())


def _cp():
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_world_size())


# Faults of the split: what a rank gets instead, from its own parts, the whole tensors, and the
# parts that another rank gets; parts are tensors of a microbatch by name.


def _only(name, change):
    """A rank gets another tensor of this name, where the microbatch has one."""
    return lambda mine, *rest: {name: change(mine, *rest)} if name in mine else {}


def _chunks_swapped(mine, whole, of_rank):
    return {name: torch.cat(part.chunk(2, 1)[::-1], 1) for name, part in mine.items()}


def _ranks_reversed(mine, whole, of_rank):
    return of_rank(_cp() - 1 - _rank())


def _tokens_contiguous(mine, whole, of_rank):
    return {name: whole[name].chunk(_cp(), 1)[_rank()].contiguous() for name in mine}


def _of_another_rank(name):
    return _only(name, lambda mine, whole, of_rank: of_rank((_rank() + 1) % _cp())[name])


def _border_label(mine, *_):
    """The last token of the first chunk predicts the first token of the second."""
    labels, border = mine["labels"].clone(), mine["labels"].shape[1] // 2
    labels[:, border - 1] = mine["tokens"][:, border]
    return labels


def _border_label_of_long_chunks(mine, *_):
    return _border_label(mine) if mine["tokens"].shape[1] >= 256 else mine["labels"]


def _last_label(mine, *_):
    """The last token of the sequence predicts the first token of its rank."""
    last = mine["labels"][:, -1:] if _rank() else mine["tokens"][:, :1]
    return torch.cat([mine["labels"][:, :-1], last], 1)


def _labels_of_the_first_row(mine, *_):
    return mine["labels"][:1].expand_as(mine["labels"]).contiguous()


def _positions_local(mine, *_):
    """Position ids count from 0 on each rank."""
    ids = mine["position_ids"]
    return torch.arange(ids.shape[1]).expand_as(ids).contiguous()


def _positions_repeated(mine, *_):
    """The first token of a document has the position of the last token before it."""
    ids = mine["position_ids"]
    return torch.where(ids == 0, ids.roll(1, 1), ids)


def _of_mask(change):
    """A rank gets another loss mask."""
    return _only("loss_mask", lambda mine, *_: change(mine["loss_mask"]))


def _shifted_on_one_rank(mask):
    return mask.roll(1, 1) if _rank() == 1 else mask


def _twice_at_the_border(mask):
    border = mask.shape[1] // 2
    return torch.cat([mask[:, : border - 1], 2 * mask[:, border - 1 : border], mask[:, border:]], 1)


_MASK_OF_ONES = _of_mask(torch.ones_like)
_LABELS_ROLLED_LOCALLY = _only("labels", lambda mine, *_: mine["tokens"].roll(-1, 1))

OF_WEIGHTS = {
    "fractional weights rounded": _of_mask(torch.round),
    "fractional weights squared": _of_mask(torch.square),
    "weights clipped at 1": _of_mask(lambda mask: mask.clamp(max=1)),
    "loss mask of one rank shifted": _of_mask(_shifted_on_one_rank),
    "weight counted twice at a chunk's border": _of_mask(_twice_at_the_border),
}
OF_LONG_ROWS = {
    "label at the border of chunks of 128 and more": _only("labels", _border_label_of_long_chunks),
    "label at the end of the last chunk": _only("labels", _last_label),
    "labels of the second batch row": _only("labels", _labels_of_the_first_row),
}
OF_BORDERS = {
    "position ids repeated at a document's border": _only("position_ids", _positions_repeated)
}

SPLITS = (
    {
        "chunk order swapped": _chunks_swapped,
        "rank order reversed": _ranks_reversed,
        "loss mask not split": _only(
            "loss_mask",
            lambda mine, whole, _: whole["loss_mask"][:, : mine["loss_mask"].shape[1]],
        ),
        "loss mask of ones": _MASK_OF_ONES,
        "loss mask of another rank": _of_another_rank("loss_mask"),
        "label at a chunk's border": _only("labels", _border_label),
        "labels of another rank": _of_another_rank("labels"),
        "labels rolled within a rank": _LABELS_ROLLED_LOCALLY,
        "position ids of each rank from 0": _only("position_ids", _positions_local),
        "contiguous instead of zigzag": _tokens_contiguous,
    }
    | OF_WEIGHTS
    | OF_LONG_ROWS
    | OF_BORDERS
)


def _own_split(fault):
    def faulty(split, batch, rank, cp, carried):
        mine = split(batch, rank, cp, carried)
        # else the certificate asks for positions, which are no part of training
        if cp == 1 or "labels" not in batch:
            return mine
        parts = {name: mine[name] for name in batch}
        return mine | fault(parts, batch, lambda other: split(batch, other, cp, carried))

    return faulty


def _own_batch(fault):
    def faulty(get_batch, *args):
        mine = get_batch(*args)
        return mine | fault(mine, {}, lambda other: {}) if _cp() > 1 else mine

    return faulty


def _zigzag(whole, rank, cp):
    chunks = {name: tensor.chunk(2 * cp, 1) for name, tensor in whole.items()}
    return {name: torch.cat([of[rank], of[2 * cp - 1 - rank]], 1) for name, of in chunks.items()}


def _script_split(fault):
    def faulty(split, batch, *args, **kwargs):
        cp = _cp()
        if cp == 1:
            return split(batch, *args, **kwargs)
        whole = {name: batch[name] for name in SHARDED if batch.get(name) is not None}
        mine = split(dict(batch), *args, **kwargs)
        return mine | fault(
            {name: mine[name] for name in whole}, whole, lambda other: _zigzag(whole, other, cp)
        )

    return faulty


PACKED = {
    "labels of packed rows rolled within a rank": _LABELS_ROLLED_LOCALLY,
    "loss mask of packed rows of ones": _MASK_OF_ONES,
}
"""Faults of the split of packed batches alone, which scripts have (--sft)."""


def _packed_split(fault):
    def faulty(split, batch, *args, **kwargs):
        wrong = batch.get("cu_seqlens") is not None
        return (
            _script_split(fault)(split, batch, *args, **kwargs)
            if wrong
            else split(batch, *args, **kwargs)
        )

    return faulty


# Faults of the loss: (loss, number of tokens, report) to what is returned instead.


def _divided(loss, tokens, report):
    return loss / _cp(), tokens, report


def _report_halved(loss, tokens, report):
    return loss, tokens, {name: value * torch.tensor([0.5, 1.0]) for name, value in report.items()}


def _tokens_counted_twice(loss, tokens, report):
    return loss, tokens * 2, report


def _averaged_by_rank(loss, tokens, report):
    return loss / tokens.clamp(min=1), torch.ones_like(tokens), report


def _one_rank_silent(loss, tokens, report):
    return (loss * 0 if _rank() == 1 else loss), tokens, report


LOSSES = {
    "loss divided by cp twice": _divided,
    "reported loss halved": _report_halved,
    "tokens counted twice": _tokens_counted_twice,
    "loss averaged by rank": _averaged_by_rank,
    "gradient of one rank lost": _one_rank_silent,
}

OF_MEANS = ("tokens of the loss counted by rank",)
"""Faults of mean losses, without --calculate-per-token-loss, which scripts alone have."""


def _faulty_loss(fault):
    def faulty(loss_function, *args, **kwargs):
        found = loss_function(*args, **kwargs)
        return fault(*found) if _cp() > 1 else found

    return faulty


# Faults of attention.


def _instead(right, faulty):
    return lambda *args, **kwargs: faulty(right, *args, **kwargs)


def _parity(name):
    return lambda: [parity.FAULTS[name]()]


def _at(name, faulty):
    return lambda: [parity.at(name, faulty)()]


def _of_window(change):
    """Plans are made for another window: (keys to the left, tokens) to keys to the left."""

    def faulty(make_plan, mask, n, cp, window, *rest):
        return make_plan(mask, n, cp, (change(window[0], n), window[1]), *rest)

    return _at("cp_ring.megatron.adapter.planned.make_plan", faulty)


def _everywhere(name, package, faulty):
    """`faulty` in place of the function `name` in all modules of a package of Megatron's that have
    it.
    """

    def found():
        loaded = [module for key, module in list(sys.modules.items()) if key.startswith(package)]
        return [(module, name, faulty) for module in loaded if hasattr(module, name)]

    return found


def _pos_emb(faulty):
    """`faulty` in place of the function that picks the rotary embeddings of a rank."""
    return _everywhere("get_pos_emb_on_this_cp_rank", "megatron.core.models", faulty)


def _positions_contiguous(right, pos_emb, seq_dim, cp_group):
    return pos_emb.chunk(cp_group.size(), seq_dim)[cp_group.rank()]


def _stale(stream, self):
    """Every hop reads what the slots held at the first: the rank's own keys, as far as they go."""
    first = None
    for hop, *keys in stream(self):
        first = first or keys
        fits = len(keys[0]) <= len(first[0])
        yield hop, *([x[: len(keys[0])] for x in first] if fits else keys)


def _hop_weighed(weight):
    """The gradients of the first remote hop count so many times."""

    def faulty(start, self, hop):
        total = start(self, hop)
        if hop.index == 1:
            add = total.add
            total.add = lambda *grads: add(*(weight * x for x in grads))
        return total

    return _at("cp_ring.comm.gradients.GradStream.start", faulty)


def _scaled(factor):
    """Attention has another softmax scale, where `factor` says so."""

    def faulty(attention_of, plan, group, options, inputs):
        options = replace(options, softmax_scale=options.softmax_scale * factor())
        return attention_of(plan, group, options, inputs)

    return _at("cp_ring.megatron.adapter.attention.attention_of", faulty)


def _totals(operation, totals_of):
    """After each update, the tensors that `totals_of` its arguments gives are rounded to bf16."""

    def faulty(work, *given):
        work(*given)
        for total in totals_of(*given):
            total.copy_(total.bfloat16())

    return _at(f"cp_ring.ops.totals.{operation}", faulty)


def _padding_attended(in_thd, packed, *args):
    return in_thd(
        dataclasses.replace(
            packed,
            cu_seqlens_q=packed.cu_seqlens_q_padded,
            cu_seqlens_kv=packed.cu_seqlens_kv_padded,
        ),
        *args,
    )


def _second_row_like_the_first(inputs, q, k, v, *more):
    return inputs(
        q, k[:, :1].expand(k.shape).contiguous(), v[:, :1].expand(v.shape).contiguous(), *more
    )


def _key_gradients_in_bf16(finish, self):
    return [total.copy_(total.bfloat16()) for total in finish(self)]


def _aux_loss_twice(attach, self, activation, coefficient, loss, *args, **kwargs):
    """The load-balancing loss weighs twice as much with context parallelism as without."""
    twice = 2 if self.config.context_parallel_size > 1 else 1
    return attach(self, activation, coefficient, loss * twice, *args, **kwargs)


def _group_permuted(make_plan, mask, n, cp, window, spec, split):
    """Attention takes the ranks of the group in another order than the batch."""
    from cp_ring import Plan

    right = make_plan(mask, n, cp, window, spec, split)
    turned = dataclasses.replace(right.layout, owner=cp - 1 - right.layout.owner)
    return Plan.build(right.mask, turned, spec.route, right.schedule)


def _stale_at_four(stream, self):
    """From the third remote hop on the keys are those of the hop before; with fewer ranks nothing
    is wrong.
    """
    before = None
    for hop, *keys in stream(self):
        wrong = hop.index >= 3 and before is not None and len(before[0]) == len(keys[0])
        yield hop, *(before if wrong else keys)
        before = [x.clone() for x in keys]


def _heads_rolled(inputs, q, k, v, *more):
    return inputs(q, k.roll(1, 2), v.roll(1, 2), *more) if _cp() > 1 else inputs(q, k, v, *more)


def _last_key_lost(stream, self):
    """The last token that a hop receives is zero."""
    for hop, *keys in stream(self):
        if hop.index and len(keys[0]):
            keys = [x.clone() for x in keys]
            for x in keys:
                x[-1:] = 0
        yield hop, *keys


def _positions_shifted(right, pos_emb, seq_dim, cp_group):
    """On one rank rotary positions are one further."""
    mine = right(pos_emb, seq_dim, cp_group)
    return mine.roll(-1, seq_dim) if cp_group.size() > 1 and cp_group.rank() == 1 else mine


def _shifted_beyond_256(right, pos_emb, seq_dim, cp_group):
    n = pos_emb.shape[seq_dim]
    place = torch.arange(n)
    place[256:] = (place[256:] + 1).clamp(max=n - 1)
    return right(
        pos_emb.index_select(seq_dim, place) if cp_group.size() > 1 else pos_emb, seq_dim, cp_group
    )


def _layer(attribute, faulty):
    def found():
        from cp_ring.megatron.adapter.attention import RingDotProductAttention

        return [(RingDotProductAttention, attribute, faulty)]

    return found


LAYER = 4  # the layer that alone is wrong


def _window_of_one_layer(window, config, layer_number, mask):
    left, right = window(config, layer_number, mask)
    return left + (layer_number == LAYER and config.context_parallel_size > 1), right


def _window_of_the_last_layer(window, config, layer_number, mask):
    wrong = layer_number == config.num_layers and config.context_parallel_size > 1
    return (-1, -1) if wrong else window(config, layer_number, mask)


def _in_one_layer(attribute, wrong, beyond=0):
    def forward(right, self, query, *args, **kwargs):
        given = getattr(self, attribute)
        if self.layer_number == LAYER and len(query) > beyond:
            setattr(self, attribute, wrong(given))
        try:
            return right(self, query, *args, **kwargs)
        finally:
            setattr(self, attribute, given)

    return forward


def _key_heads_of_one_layer(forward, self, query, key, value, *args, **kwargs):
    key, value = (x.roll(1, -2) if self.layer_number == LAYER else x for x in (key, value))
    return forward(self, query, key, value, *args, **kwargs)


OF_ONE_LAYER = {
    "window of one layer in long rows": _layer(
        "plan_of", _in_one_layer("window", lambda window: (window[0] + 1, window[1]), beyond=100)
    ),
    "window of one layer": _at("cp_ring.megatron.adapter.planned._window", _window_of_one_layer),
    "window of the last layer": _at(
        "cp_ring.megatron.adapter.planned._window", _window_of_the_last_layer
    ),
    "scale of one layer": _layer(
        "forward",
        _in_one_layer("options", lambda x: replace(x, softmax_scale=x.softmax_scale * 1.05)),
    ),
    "sink left out in one layer": _layer(
        "forward", _in_one_layer("softmax_offset", lambda sink: None)
    ),
    "key heads of one layer": _layer("forward", _key_heads_of_one_layer),
}


def _rolled_twice(right, tensor, *args, **kwargs):
    """Multi-token prediction shifts the tokens of long batch rows once too often."""
    rolled = right(tensor, *args, **kwargs)
    if _cp() == 1 or tensor is None or rolled[0].shape[-1] < 256:
        return rolled
    return right(rolled[0], *args, **kwargs)


OF_LENGTH = {
    "rotary positions one further beyond 256": _pos_emb(_shifted_beyond_256),
    "prediction of long rows off by one": _everywhere(
        "roll_tensor", "megatron.core", _rolled_twice
    ),
}

OF_PARITY = (
    "window on every layer",
    "documents merged",
    "boundary shifted by one",
    "sink gradient dropped",
    "weight gradient twice",
    "rotated part not returned",
    "latent not summed over tp",
    "siblings seen",
    "spans cut at borders",
    "global tokens hidden",
    "positions not continued",
    "roll across documents",
    "mask widened",
)
"""Faults of tests.parity that have the same name there."""

ATTENTION = {
    **{name: _parity(name) for name in OF_PARITY},
    "mask dropped to plain causal": _of_window(lambda left, n: -1),
    "window off by one": _parity("window widened"),
    "rotary positions contiguous": _pos_emb(_positions_contiguous),
    "stale slot": _at("cp_ring.comm.streams.KeyStream.__iter__", _stale),
    "gradients of one hop lost": _hop_weighed(0),
    "sink ignored": _parity("sink dropped"),
    "softmax scale": _scaled(lambda: 1.05),
    "softmax denominators accumulated in bf16": _totals("merge", lambda *given: given[4:5]),
    "outputs accumulated in bf16": _totals("merge", lambda *given: given[3::2]),
    "gradients accumulated in bf16": _totals(
        "add", lambda segments, parts, running, results, dim: (*running, *results)
    ),
    "padding attended": _at(
        "cp_ring.megatron.adapter.documents.Documents.in_thd", _padding_attended
    ),
    "window beyond 256 tokens": _of_window(lambda left, n: left if n <= 256 else 200),
    "second batch row like the first": _at(
        "cp_ring.megatron.adapter.attention.Inputs", _second_row_like_the_first
    ),
    "gradients of keys summed in bf16": _at(
        "cp_ring.comm.gradients.GradStream.finish", _key_gradients_in_bf16
    ),
    "aux loss weighed twice": _at(
        "megatron.core.transformer.moe.router.TopKRouter.attach_and_log_load_balancing_loss",
        _aux_loss_twice,
    ),
    "window too small by one": _of_window(lambda left, n: left - (left > 0)),
    "group permuted": _at("cp_ring.megatron.adapter.planned.make_plan", _group_permuted),
    "stale slot at four ranks": _at("cp_ring.comm.streams.KeyStream.__iter__", _stale_at_four),
    "key heads rolled": _at("cp_ring.megatron.adapter.attention.Inputs", _heads_rolled),
    "softmax scale of one rank": _scaled(lambda: 1.01 if _cp() > 1 and _rank() == 1 else 1.0),
    "last key of a hop lost": _at("cp_ring.comm.streams.KeyStream.__iter__", _last_key_lost),
    "gradients of one hop twice": _hop_weighed(2),
    "rotary positions of one rank shifted": _pos_emb(_positions_shifted),
    **OF_ONE_LAYER,
    **OF_LENGTH,
}


# Faults of what production has: pipeline stages, microbatches, and layers that run twice.


def _documents_lost(stage):
    def faulty(get_batch, iterator, vp_stage):
        batch = get_batch(iterator, vp_stage)
        return batch | {"packed_seq_params": None} if stage(vp_stage) else batch

    return _at("cp_ring.megatron.gpt.get_batch", faulty)


def _documents_lost_on_rank(get_batch, *args):
    """Once there is data; before, attention would show it."""
    from megatron.training import get_args

    batch, began = get_batch(*args), hasattr(get_args(), "curr_iteration")
    lost = began and _cp() > 1 and _rank() == 1
    return batch | {"packed_seq_params": None} if lost else batch


def _stage(vp_stage):
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()


def _kept_halved(take, self, layer):
    kept = take(self, layer)
    return kept and kept._replace(parts=[(part[0] * 0.5, *part[1:]) for part in kept.parts])


def _second_lost(function, *args, **kwargs):
    loss, *rest = function(*args, **kwargs)
    return loss * 0 if _cp() > 1 and next(_calls) % 2 else loss, *rest


_calls = itertools.count()
PRODUCTION = {
    "documents lost on later stages": _documents_lost(_stage),
    "documents lost on virtual stages": _documents_lost(lambda vp_stage: vp_stage),
    "kept output halved": _at("cp_ring.megatron.adapter.recomputation.KeptCall.take", _kept_halved),
    "second microbatch lost": _at("cp_ring.megatron.gpt.loss_function", _second_lost),
}
ATTENTION |= PRODUCTION


# Faults of data, in what the iterators of a rank give.


def _items(change):
    def faulty(take, iterators):
        return [item and item | change(item) for item in take(iterators)]

    return _at("cp_ring.megatron.certificate.certify.take", faulty)


def _other_rows(of_rank):
    """A sampler that reads other rows on the second rank of a group."""
    return _items(lambda item: {n: item[n] + of_rank() for n in ("tokens", "labels")})


def _tp_rank():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()


DATA = {
    "labels shifted by the collate function": _items(
        lambda item: {"labels": item["labels"].roll(-1, 1)}
    ),
    "labels not shifted by the data set": _items(lambda item: {"labels": item["tokens"]}),
    "rows of another context-parallel rank": _other_rows(_rank),
    "rows of another stage": _other_rows(lambda: _stage(0)),
    "documents lost on the second rank": _at(
        "cp_ring.megatron.gpt.get_batch", _documents_lost_on_rank
    ),
}
DATA_OF_TP = {"rows of another tensor-parallel rank": _other_rows(_tp_rank)}
"""Of jobs whose tensor-parallel ranks read for themselves."""
ATTENTION |= DATA


# Faults of other layers, each where the job has them.


def _anew_on_each_rank(entries, *args):
    """The states of pieces that go on begin with 0, but their gradients travel."""
    return entries(*args) * 0


LAYERS = {
    "states run in the order of ranks": _parity("state in the order of another layout"),
    "states begin anew on each rank": _at(
        "cp_ring.recurrent.states.StatePassing._entries", _anew_on_each_rank
    ),
    "states run across documents": _parity("state across documents"),
    "states begin anew too late": _parity("state begins anew too late"),
}
FAULTS = (*ATTENTION, *LAYERS, *SPLITS, *LOSSES)
SUBTLE = (*OF_WEIGHTS, *OF_LONG_ROWS, *OF_BORDERS, *OF_ONE_LAYER, *OF_LENGTH)
"""Faults that show in fractions, in long rows, at a single border or in a single layer only."""


@contextlib.contextmanager
def planted(name, step=None):
    """Plants the fault `name` (none for ""); `step` is the forward step of the job, where it is a
    script's own.
    """
    if not name:
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, attribute, faulty in _places(name, step):
            if isinstance(owner, dict):
                stack.enter_context(
                    patch.dict(owner, {attribute: _instead(owner[attribute], faulty)})
                )
            else:
                stack.enter_context(
                    patch.object(owner, attribute, _instead(getattr(owner, attribute), faulty))
                )
        yield


def _places(name, step):
    if found := (ATTENTION | LAYERS | DATA_OF_TP).get(name):
        return list(found())
    if name in OF_MEANS:
        return [parity.FAULTS[name]()]
    from cp_ring.megatron import gpt
    from cp_ring.megatron.certificate.tiny_run import is_own

    if is_own(step):
        if name in OF_BORDERS:  # documents are split by themselves
            return [(gpt, "get_batch", _own_batch(OF_BORDERS[name]))]
        if name in SPLITS:
            return [(gpt, "on_this_cp_rank", _own_split(SPLITS[name]))]
        return [(gpt, "loss_function", _faulty_loss(LOSSES[name]))]
    script = step.__globals__
    if name in PACKED:
        return [(script, "get_batch_on_this_cp_rank", _packed_split(PACKED[name]))]
    if name in SPLITS:
        return [(script, "get_batch_on_this_cp_rank", _script_split(SPLITS[name]))]
    loss = "loss_func" if "loss_func" in script else "loss_function"
    return [(script, loss, _faulty_loss(LOSSES[name]))]


assert not set(parity.FAULTS) & set(SPLITS), "a fault has one meaning"
