"""A layer whose configuration has context_parallel_size 1, in a job with more: plain attention of a
rank's own tokens.
"""

import pytest
import torch

from cp_ring.testing.oracle import dense, error
from tests.megatron.groups import program
from tests.megatron.layers import configuration

pytestmark = pytest.mark.xdist_group("pool")

N, BATCH, HEADS, GROUPS, D = 24, 2, 4, 2, 16
EDGES = (0, 5, 17, 48)


def layer_of(mask):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import build_module

    config = configuration(hidden_size=HEADS * D, num_query_groups=GROUPS)
    spec = get_gpt_layer_local_spec().submodules.self_attention
    spec.params = {"attn_mask_type": AttnMaskType[mask]}
    return build_module(spec, config=config, layer_number=1).core_attention


def errors(group, settings):
    """On a rank: of out and gradients, for batch rows and packed images, with a mask and without."""
    from megatron.core.packed_seq_params import PackedSeqParams

    edges, found = torch.tensor(EDGES, dtype=torch.int32), []
    with program(2, **settings):
        for mask in ("no_mask", "causal"):
            layer = layer_of(mask)
            for packed in (False, True):
                torch.manual_seed(10 * group.rank() + packed)  # images of its own
                shape = (EDGES[-1],) if packed else (N, BATCH)
                leaves = [
                    torch.randn(*shape, heads, D, requires_grad=True)
                    for heads in (HEADS, GROUPS, GROUPS)
                ]
                dout = torch.randn(*shape, HEADS * D)
                given = PackedSeqParams(
                    qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=31,
                    max_seqlen_kv=31,
                )  # fmt: skip
                out = layer(*leaves, None, packed_seq_params=given if packed else None)
                place = torch.arange(shape[0])
                image = torch.bucketize(place, edges[1:], right=True) if packed else 0 * place
                allowed = image[:, None] == image
                allowed &= (place[:, None] >= place) | (mask == "no_mask")
                exact = [x.detach().double().requires_grad_() for x in leaves]
                rows = [(x[:, None] if packed else x).transpose(0, 1) for x in exact]
                truth = dense(*rows, allowed)[0].transpose(0, 1).reshape(dout.shape)
                ours = [out, *torch.autograd.grad(out, leaves, dout)]
                theirs = [truth, *torch.autograd.grad(truth, exact, dout.double())]
                found += map(error, ours, theirs)
    return found


@pytest.mark.parametrize("settings", [{}, {"layout": "balanced", "schedule": "gather"}], ids=str)
def test_each_rank_attends_to_its_own_images(pool, settings):
    for found in pool.run(errors, 4, settings):
        assert len(found) == 16 and max(found) < 2e-6, found
