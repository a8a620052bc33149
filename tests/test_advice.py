"""What an error line of the function advises works when it is done: each line of ring 1 that says
give, pass, make, cut, pad, drop or leave has a case here that provokes it, and then follows it.
"""

import ast
import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask

import cp_ring
from cp_ring import Layout, Mask, Plan, ring_attention, roll, shard
from cp_ring.testing.local_ring import LocalRing
from tests.rings import said

ROOT = Path(cp_ring.__file__).parent
ELSEWHERE = {"megatron", "tools", "testing", "run.py", "pretrain_gpt.py", "patches", "observe"}
ADVICE = re.compile(r"\b(give|pass|make (?:it|one)|cut them|pad|drop one|leave)\b")
X = torch.ones(1, 16, 2, 8)
WHOLE = (X, X, X)


def words(node):
    """The text of a message, with {} for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(x, ast.FormattedValue) else words(x) for x in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return words(node.body) + words(node.orelse)
    return "{}"


def lines():
    """The texts of ring 1 that advise something, in errors and in what is put into them."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if ELSEWHERE & {*path.relative_to(ROOT).parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("ConfigError", "PlanError", "KernelError", "warn"):
                    found.append(" ".join(words(x) for x in node.args))
            elif isinstance(node, ast.Return | ast.Assign) and isinstance(
                node.value, ast.JoinedStr | ast.BinOp | ast.Constant
            ):
                text = words(node.value)
                found += [text] * text.startswith((": ", "; "))
    return [line for line in found if ADVICE.search(line)]


def on_two_ranks(case):
    return functools.wraps(case)(lambda: str(LocalRing(2).run(case)[0]))


def a_list_of_masks():
    masks = [Mask.causal(16), Mask.full(16)]
    line = said(Mask.union, masks)
    assert Mask.union(*masks).area() == 256
    return line


@on_two_ranks
def a_layout_that_follows_from_the_mask(group):
    mask = Mask.documents([0, 5, 16])
    line = said(shard, X, "balanced", group)
    layout = Layout.balanced(mask, 2)
    parts = [shard(x, layout, group) for x in WHOLE]
    ring_attention(*parts, group, mask=mask, layout=layout)
    return line


def a_layout_of_a_group():
    layout = Layout.zigzag(16, 2)
    line = said(shard, X, layout)
    LocalRing(2).run(lambda group: shard(X, layout, group=group))
    return line


def a_plan_of_a_group():
    plan = Plan.build(Mask.full(16), Layout.zigzag(16, 2))
    line = said(ring_attention, *WHOLE, plan=plan)
    LocalRing(2).run(
        lambda group: ring_attention(*shard(WHOLE, group=group), group=group, plan=plan)
    )
    return line


def what_is_no_plan():
    mask, layout = Mask.causal(16), Layout.zigzag(16, 1)
    for wrong, way in (
        (mask, {"mask": mask}),
        (layout, {"layout": layout}),
        (3, {"plan": Plan.build(mask, layout)}),
    ):
        line = said(ring_attention, *WHOLE, plan=wrong)
        assert f"pass {next(iter(way))}=" in line
        ring_attention(*WHOLE, **way)
    return line


def what_is_no_mask():
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    right = ring_attention(*WHOLE, causal=True)

    def mask_mod(b, h, q, k):
        return q >= k

    n, found = 16, []
    for mask in (
        mask_mod,
        create_block_mask(mask_mod, None, None, n, n, "cpu"),
        causal,
        causal.numpy(),
        causal[None, None],
        torch.zeros(n, n).masked_fill(~causal, float("-inf"))[None, None],
    ):
        line = said(ring_attention, *WHOLE, mask=mask)
        (way,) = re.findall(r": make one by (.*)$", line)
        made = eval(way, {"Mask": Mask, "mask": mask, "n": n})
        assert torch.equal(ring_attention(*WHOLE, mask=made), right), line
        found.append(line)
    return "\n".join(found)


def rows_with_masks_of_their_own():
    allowed = np.stack([np.tri(16, dtype=bool), np.ones((16, 16), bool)])
    two = [torch.cat([x, x]) for x in WHOLE]
    line = said(ring_attention, *two, mask=allowed)
    mask = Mask.batch([Mask.from_dense(rows) for rows in allowed])
    layout = Layout.batch([Layout.zigzag(16, 1)] * 2)
    ring_attention(*two, mask=mask, layout=layout)
    return line


@on_two_ranks
def a_length_that_is_unknown(group):
    odd = torch.ones(1, 7, 2, 8)
    line = said(ring_attention, odd, odd, odd, group)
    ring_attention(odd, odd, odd, group, layout=Layout.contiguous(14, 2))
    ring_attention(*[torch.ones(1, 8, 2, 8)] * 3, group)
    return line


def two_answers_to_one_question():
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    line = said(ring_attention, *WHOLE, plan=plan, causal=True)
    ring_attention(*WHOLE, plan=plan)
    ring_attention(*WHOLE, causal=True)
    return line


def a_mask_and_its_words():
    mask = Mask.causal(16)
    line = said(ring_attention, *WHOLE, mask=mask, causal=True)
    ring_attention(*WHOLE, mask=mask)
    ring_attention(*WHOLE, causal=True)
    return line


@on_two_ranks
def tokens_that_a_name_cannot_cut(group):
    x = torch.ones(1, 15, 2, 8)
    line = said(shard, x, "contiguous", group)
    (way,) = re.findall(r"pass layout=(.*\)), here", line)
    part = shard(x, eval(way), group)
    ring_attention(part, part, part, group, layout=eval(way))
    return line


def parents_of_branches():
    line = said(Mask.tree, [-1], [4, 4])
    Mask.tree([-1, 0], [4, 4])
    return line


def slices_and_their_types():
    line = said(Mask.from_ranges, [(0, 4)], [(0, 4), (4, 8)])
    Mask.from_ranges([(0, 4), (4, 8)], [(0, 4), (4, 8)], "causal")
    return line


def a_mask_of_many_pieces():
    allowed = np.arange(64)[:, None] * 7919 % 3 == np.arange(64) % 3
    line = said(Mask.from_dense, allowed, max_pieces=8)
    Mask.from_dense(allowed, max_pieces=64 * 64)
    Mask.from_dense(np.tri(64, dtype=bool), max_pieces=8)
    return line


def a_function_that_reads_b_and_h():
    def mask_mod(b, h, q, k):
        return torch.arange(16)[b] <= q - k

    line = said(Mask.from_mask_mod, mask_mod, 16)
    Mask.from_mask_mod(lambda b, h, q, k: mask_mod(0 * q, 0 * q, q, k), 16)
    return line


def a_block_mask_as_a_function():
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, "cpu")
    line = said(Mask.from_mask_mod, block_mask, 16)
    Mask.from_mask_mod(block_mask.mask_mod, 16)
    return line


def what_is_no_group():
    mask, layout = Mask.causal(16), Layout.zigzag(16, 1)
    for wrong in (mask, layout, Plan.build(mask, layout)):
        line = said(ring_attention, *WHOLE, wrong)
        (name,) = re.findall(r"; pass it as (\w+)=$", line)
        ring_attention(*WHOLE, **{name: wrong})
    return line


LATENTS = cp_ring.LatentKeys(
    torch.ones(1, 16, 4), torch.ones(1, 16, 2), torch.ones(2 * 14, 4), 2, key_dim=6
)


def values_that_are_missing():
    line = said(ring_attention, X, X)
    ring_attention(X, LATENTS)
    return line


def values_beside_latents():
    line = said(ring_attention, X, LATENTS, X)
    ring_attention(X, LATENTS)
    return line


def positions_of_other_tokens():
    line = said(Mask.from_pieces, 8, [], positions=[0, 1])
    Mask.from_pieces(8, [], positions=range(8))
    return line


def what_is_no_plain_tensor():
    sparse = X.to_sparse()
    line = said(roll, sparse, 1)
    roll(sparse.to_dense(), 1)
    return line


def in_a_job(group):
    """Without a group, and with a mesh of two dimensions."""
    x = [torch.ones(1, 16, 2, 8)] * 3
    absent = said(ring_attention, *x)
    ring_attention(*x, group=dist.group.WORLD)
    ring_attention(*x, group=cp_ring.ALONE)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "cp"))
    two = said(ring_attention, *x, mesh)
    (way,) = re.findall(r"one of them, as (.*)$", two)
    ring_attention(*x, eval(way, {"mesh": mesh}))
    return [absent, two]


CASES = {
    "make it, as in Layout.balanced": a_layout_that_follows_from_the_mask,
    "layout is for {} ranks, but the group has {}: pass": a_layout_of_a_group,
    "the plan is for {} ranks: pass their": a_plan_of_a_group,
    "not a Plan: pass {}": what_is_no_plan,
    ": make one by Mask.from_mask_mod(mask.mask_mod, n)": what_is_no_mask,
    ": make one by Mask.from_mask_mod(mask, n)": what_is_no_mask,
    ": make one by Mask.from_dense(": what_is_no_mask,
    "so the length of the sequence is unknown: pad": a_length_that_is_unknown,
    "and plan are both given": two_answers_to_one_question,
    "and mask are both given": a_mask_and_its_words,
    "tokens cannot be cut evenly over": tokens_that_a_name_cannot_cut,
    "parents for {} branches: give": parents_of_branches,
    "q_ranges, {} k_ranges and {} types: give": slices_and_their_types,
    "more than max_pieces={}": a_mask_of_many_pieces,
    "a list of masks: give them one by one": a_list_of_masks,
    "mask_mod failed with {}": a_function_that_reads_b_and_h,
    ": give its mask_mod": a_block_mask_as_a_function,
    "; pass it as {}=": what_is_no_group,
    "pass the part of this rank that the layout says": what_is_no_plain_tensor,
    "leave it out only with LatentKeys": values_that_are_missing,
    "which have the values too: leave it out": values_beside_latents,
    "positions of shape {} hold {} to {}: give": positions_of_other_tokens,
    "give them one by one, as in Mask.union(a, b)": a_list_of_masks,
}
ON_FOUR_RANKS = {
    "group is not given, but this job has": 0,
    "group is a DeviceMesh with {} dimensions": 1,
}
# What others follow: tests of transformers, of CUDA graphs, and `rows_with_masks_of_their_own` below
OF_OTHERS = (
    "attention did not get the keywords of shard_batch",
    "has a head that may pool a row",
    "counts positions from its padding token",
    "leaves no validation data: give --eval-iters 0",
    "shard_batch shifts labels",
    "attention_mask has no effect after shard_batch",
    "attention_mask numbers documents",
    "logits_to_keep would keep tokens of each rank's part",
    "RingTrainer does not support",
    "create_graph=True: attention and shards have no second derivative",
    "give a dict with input_ids",
    "give input_ids, a tensor",
    "pad at the end",
    "give packed documents as one batch row",
    "before it is wrapped",
    "a CUDA graph cannot begin with it: make it once",
    "batch rows with masks of their own are Mask.batch",
)
WITHOUT_A_WAY = (
    "give a language model",
    "has a schedule of its own, leave schedule out",
    "make it with backend {}",  # NCCL, for tensors on CUDA
)


@pytest.mark.parametrize(
    "case",
    list(dict.fromkeys([*CASES.values(), rows_with_masks_of_their_own])),
    ids=lambda case: case.__name__,
)
def test_the_advice_of_a_line_works(case):
    line = case()
    keys = [key for key, of in CASES.items() if of is case]
    for key in keys:
        pattern = re.escape(key.strip()).replace(r"\{\}", ".*")
        assert re.search(pattern, line), (key, line)


def test_the_advice_of_lines_in_a_job_works(pool):
    for found in pool.run(in_a_job, 4):
        for key, number in ON_FOUR_RANKS.items():
            assert re.search(re.escape(key).replace(r"\{\}", ".*"), found[number])


def test_each_line_that_advises_has_a_case():
    known = [*CASES, *ON_FOUR_RANKS, *OF_OTHERS, *WITHOUT_A_WAY]
    found = lines()
    assert len(found) > 20
    for line in found:
        assert any(key in line for key in known), f"tests/test_advice.py has no case for: {line}"
