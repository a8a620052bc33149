"""One of two ranks that train Megatron's LLaVAModel for one step: `rank(number, 2, port, folder)`.

Two batch rows, each with an image of its own before its text: as rows with CLIP's encoder, and with
SigLIP's and padding, for which Megatron packs them (thd). FOLDER/RANK.json gets the summed loss and gradients' errors at context
parallel size 2 against 1, without and with a fault.
"""

import copy
import json
import os
import shlex

import torch
import torch.distributed as dist

from tests.parity.faults import planted

ROWS, IMAGE = 2, 16  # tokens of an image
FAULTS = {(64, "clip"): "mask widened", (62, "siglip"): "boundary shifted by one"}


def rank(number, ranks, port, folder):
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from cp_ring.patches.install import install

    install(shlex.split("--cp-ring --cp-ring-cpu"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    found = {}
    for (tokens, encoder), fault in FAULTS.items():
        whole = step(tokens, encoder, 1)
        found[tokens] = [difference(step(tokens, encoder, 2, name), whole) for name in ("", fault)]
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()


def difference(ours, theirs):
    return max(float((x - y).norm() / (y.norm() + 1e-3)) for x, y in zip(ours, theirs, strict=True))


def step(tokens, encoder, cp, fault=""):
    """The summed loss and all gradients of batch rows of `tokens`."""
    from megatron.core import parallel_state
    from megatron.core.models.multimodal.context_parallel import get_packed_seq_params
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from cp_ring.megatron.data import documents

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    padding = -tokens % (2 * cp) if cp > 1 else 0
    text = tokens - IMAGE
    ids = torch.randint(0, 128, (ROWS, text + 1))
    labels, mask = ids.roll(-1, 1), torch.ones(ROWS, text + 1)
    ids[:, 0], mask[:, 0] = -200, 0
    places = torch.arange(text + 1).expand(ROWS, -1)
    images = torch.randn(ROWS, 3, 28, 28)
    batch = [torch.nn.functional.pad(x, (0, padding)) for x in (ids, places, labels, mask)]
    packed = None
    if cp > 1:
        packed = get_packed_seq_params(batch[0], torch.tensor(IMAGE - 1), padding, cp)
        if packed.qkv_format == "thd":
            batch = [x.reshape(1, -1) for x in batch]
    documents._of_offsets.cache_clear()  # the plans that equal documents had without the fault
    with planted(fault):
        model = build(encoder, cp, bool(padding))
        ids, places, labels, mask = batch
        losses, mask = model(images, ids, places, None, labels, mask, packed_seq_params=packed)
        loss = (losses * mask).sum()
        loss.backward()
    results = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    if cp > 1:
        for result in results:
            dist.all_reduce(result)
    parallel_state.destroy_model_parallel()
    return results


def build(kind, cp, padded):
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import get_submodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        context_parallel_size=cp, attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.1,
        masked_softmax_fusion=False,
    )  # fmt: skip
    encoder = copy.deepcopy(config)
    encoder.context_parallel_size, encoder.vision_model_type = 1, kind
    projection = copy.deepcopy(encoder)
    spec = decoder_model_with_local_default_spec()
    if padded:
        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding_causal
    return LLaVAModel(
        config, spec, 128, 128, encoder, get_vit_layer_with_local_spec(), kind == "clip", projection,
        copy.deepcopy(get_submodules(spec.submodules.mlp)), img_h=28, img_w=28, patch_dim=7,
        language_position_embedding_type="rope",
    )  # fmt: skip
