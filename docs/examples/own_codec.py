"""A codec of your own, selected by its name. Run: python docs/examples/own_codec.py"""

import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, Plan, ring_attention, shard, unshard
from cp_ring.comm.codecs import Decoding, register
from cp_ring.plan.sizes.attention_sizes import Wire
from cp_ring.testing.local_ring import LocalRing


class Half(Decoding):
    """Keys and values travel in bfloat16, whatever the dtype of the inputs."""

    def encode(self):
        """What travels of this rank's own tokens."""
        return self._k.bfloat16(), self._v.bfloat16()

    def decode(self, coded, k, v):
        """Writes the keys and values of received tokens."""
        k.copy_(coded[0])
        v.copy_(coded[1])


# now wire="half" and --cp-ring-wire half name it; error: of out and gradients, beside plain
register(Half, Wire("half", key_element=2, error=0.004))


def main(cp=4):
    n = 512
    plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))

    def attend(group):
        parts = shard((q, k, v), group=group)
        return unshard(ring_attention(*parts, group, plan=plan, wire="half"), group=group)

    whole = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    for out in LocalRing(cp).run(attend):
        error = (out - whole).norm() / whole.norm()
        assert 1e-5 < error < 0.004, error


if __name__ == "__main__":
    main()
