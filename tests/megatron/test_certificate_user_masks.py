"""The rules by which the certificate judges declared masks, against cp_ring's masks pair by pair."""

import numpy as np
import pytest
import torch

from cp_ring.megatron.certificate.batch import sample
from cp_ring.megatron.certificate.dense_oracle import allowed_pairs, declared_rule
from cp_ring.megatron.options import MASK_KINDS


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_rules_and_masks_agree(kind, window):
    for seed in range(8):
        mask, place = sample(kind, 64, seed), torch.arange(64)
        rule, seen = declared_rule(mask), mask & (window[0], -1) if window[0] >= 0 else mask
        assert np.array_equal(
            allowed_pairs([rule], place[None], place[None], window)[0].numpy(), seen.dense()
        )
        assert rule.positions.tolist() == mask.positions.tolist()
        assert rule.last.tolist() == mask.last.tolist()
        assert kind == "any" or mask.name.replace("_", "-") == kind
