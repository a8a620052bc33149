"""Run on two ranks: a GPT layer of Megatron with ring attention by its specification alone. Of
cp_ring it imports the adapter.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.attention import RingConfig, RingDotProductAttention
from cp_ring.sharding import shard

TOKENS, WIDTH = 64, 32


def layer(cp, **settings):
    """A layer whose weights depend on nothing but the seed."""
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        context_parallel_size=cp,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=RingDotProductAttention, params={"ring": RingConfig(**settings)}
    )
    return build_module(spec, config=config, layer_number=1)


def step(model, x, wanted):
    """The weights after one step of the sum of squares over all ranks."""
    out = model(x, attention_mask=None)[0]
    ((out - wanted) ** 2).sum().backward()
    for weight in model.parameters():
        if x.shape[0] < TOKENS:
            dist.all_reduce(weight.grad)
        weight.data -= 1e-3 * weight.grad
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


dist.init_process_group("gloo")
rank, cp = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel(context_parallel_size=cp)
whole = torch.randn(2, TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(5))
chunks = whole.chunk(2 * cp, dim=1)
part = torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)
before = torch.cat([weight.detach().flatten() for weight in layer(1).parameters()])
one, ring = step(layer(1), *whole), step(layer(cp, schedule="ring", num_slots=3), *part)
assert (one - before).norm() > 0.1, "nothing was trained"
torch.testing.assert_close(ring, one, rtol=1e-5, atol=1e-6)
shard(whole[0], "contiguous", parallel_state.get_context_parallel_group(), dim=0)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    layer(cp)(part[0], attention_mask=None)
assert any("but layer 1 has Layout.zigzag" in str(each.message) for each in warned), warned
for values, line in (
    ({"layout": "contiguous"}, "its RingConfig has the layout contiguous, but rotary embeddings"),
    ({"layout": "zigzug"}, "layout must be 'zigzag', "),
    ({"hop_timeout": -1}, "hop_timeout must be a number of seconds, or 0"),
):
    try:
        layer(cp, **values)
    except ConfigError as error:
        assert line in str(error), error
    else:
        raise AssertionError(f"{values} was accepted")
ours = {name for name in sys.modules if name.startswith(("cp_ring.megatron", "cp_ring.patches"))}
if dist.get_rank() == 0:
    print("ring 2:", *sorted(x for x in ours if not x.startswith("cp_ring.megatron.adapter.")))
