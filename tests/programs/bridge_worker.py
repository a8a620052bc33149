"""Megatron Bridge as it is installed from the package index, on CPU ranks: one of its recipes, for
the weights of a tiny model of Hugging Face.

Run by torchrun with the folder of Bridge on PYTHONPATH: MODEL WORK FOLDER RING STAGES, where MODEL
is qwen3 or gpt_oss, WORK is pretrain or packed, RING is 0 for stock attention, 1 for the ring, te
for the ring beneath TransformerEngine, and STAGES are pipeline stages. FOLDER gets the weights, and
what was found as outcome.json.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import cp_ring.megatron
from cp_ring import patches
from tests.programs import stand_ins

SEQUENCE, STEPS, VOCAB = 64, 3, 256


def tiny(model, folder):
    """The weights and the tokenizer of a small model of Hugging Face, and conversations for it."""
    import tokenizers
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "initializer_range": 0.3, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(1)
    if model == "qwen3":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
        made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **more))
    made.save_pretrained(folder)
    words = {str(i): i for i in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<end>", "bos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    random, lines = torch.Generator().manual_seed(2), []
    for length in torch.randint(3, 24, (40,), generator=random).tolist():
        text = [str(x) for x in torch.randint(VOCAB - 1, (length,), generator=random).tolist()]
        lines.append(json.dumps({"input": " ".join(text[:2]), "output": " ".join(text[2:])}))
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "training.jsonl").write_text("\n".join(lines) + "\n")


def recipe(model, work, weights, same):
    """Bridge's own recipe, for these weights. `same` gets whether the model, exported again, has
    the bits of the weights.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.gpt_oss.h100 import gpt_oss
    from megatron.bridge.recipes.qwen.h100 import qwen3

    made = {
        ("qwen3", "pretrain"): qwen3.qwen3_600m_pretrain_1gpu_h100_bf16_config,
        ("qwen3", "packed"): qwen3.qwen3_600m_sft_1gpu_h100_bf16_config,
        ("gpt_oss", "pretrain"): gpt_oss.gpt_oss_20b_pretrain_16gpu_h100_bf16_config,
        ("gpt_oss", "packed"): gpt_oss.gpt_oss_20b_sft_8gpu_h100_bf16_config,
    }[model, work]
    from_hub, bridge = AutoBridge.from_hf_pretrained, AutoBridge.from_hf_pretrained(weights)
    AutoBridge.from_hf_pretrained = lambda *_, **__: bridge
    try:
        cfg = made()
    finally:
        AutoBridge.from_hf_pretrained = from_hub

    def load(models):
        from safetensors.torch import load_file

        bridge.load_hf_weights(models)
        stored = load_file(weights / "model.safetensors")
        found = dict(bridge.export_hf_weights(models, show_progress=False))
        same.append(stored.keys() <= found.keys())
        same.extend(torch.equal(found.get(name), x) for name, x in stored.items())
        return models

    cfg.model.perform_initialization = False
    cfg.model.register_pre_wrap_hook(load)
    return cfg


def on_the_cpu(cfg, cp, pp):
    """Small steps of the recipe in float32, without what needs CUDA or the network."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    model = cfg.model
    for name in (
        "moe_grouped_gemm", "moe_permute_fusion", "gradient_accumulation_fusion", "bf16",
        "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion",
        "cross_entropy_loss_fusion", "apply_rope_fusion", "persist_layer_norm",
        "sequence_parallel",
    ):  # fmt: skip
        setattr(model, name, False)
    model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
    model.params_dtype = model.pipeline_dtype = torch.float32
    model.autocast_dtype, cfg.mixed_precision = None, None
    model.use_cpu_initialization, model.seq_length = True, SEQUENCE
    model.tensor_model_parallel_size, model.pipeline_model_parallel_size = 1, pp
    model.expert_model_parallel_size, model.context_parallel_size = 1, cp
    model.cp_comm_type, model.calculate_per_token_loss = None, True
    cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = False
    cfg.ddp.average_in_collective = False
    cfg.dataset.seq_length, cfg.dataset.num_workers = SEQUENCE, 0
    cfg.dist.distributed_backend = "gloo"
    cfg.train.train_iters, cfg.train.global_batch_size = STEPS, 4
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None
    cfg.scheduler.lr_warmup_iters, cfg.optimizer.lr = 0, 1e-3
    cfg.checkpoint.save = cfg.checkpoint.load = None
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None


def with_data(cfg, work, weights):
    """Bridge's test data, or its packing of the conversations, each padded to 4 tokens."""
    if work == "pretrain":
        cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", VOCAB - 1
        cfg.tokenizer.tokenizer_model, cfg.train.micro_batch_size = None, 2
        return
    cfg.tokenizer.tokenizer_model, cfg.train.micro_batch_size = str(weights), 1
    data = cfg.dataset
    data.hf_dataset = data.hf_validation_proportion = data.hf_output_root = None
    data.dataset_root, data.do_validation, data.do_test = weights / "data", False, False
    data.offline_packing_specs.packed_sequence_size = SEQUENCE
    data.offline_packing_specs.pad_seq_to_mult = 4
    data.offline_packing_specs.num_tokenizer_workers = 1


def main():
    model, work, folder, ring, stages = sys.argv[1:]
    stand_ins.install()
    packed, pp = work == "packed", int(stages)
    from tests.programs import beneath  # imports Megatron

    cp = int(os.environ["WORLD_SIZE"]) // pp
    sizes = {"seq_length": SEQUENCE, "micro_batch_size": 1 if packed else 2, "packed": packed}
    if ring == "1":
        cp_ring.megatron.enable(cpu=True, **sizes)
    for name in ("cpu_runtime", "dataset_helpers"):  # where `enable` has not applied them
        patches.get(name).apply()
    if ring == "te":
        beneath.install()
    from megatron.bridge.training import eval, setup, train
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import layers

    weights, same = Path(folder), []
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tiny(model, weights)
    dist.barrier()
    cfg = recipe(model, work, weights, same)
    on_the_cpu(cfg, cp, pp)
    with_data(cfg, work, weights)
    steps = []
    outcome = {"steps": steps, "same": same, "beneath": beneath.CALLS}

    def build(config):
        config._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return config.provide(pre_process=True, post_process=True)

    def in_bridges_words(state, iterator, model):
        """Bridge's forward step of a microbatch of the certificate."""
        batch = dict(next(iterator))
        for name in ("cu_seqlens", "max_seqlen") if "cu_seqlens" in batch else ():
            batch[f"{name}_q"] = batch[f"{name}_kv"] = batch.pop(name)
        return forward_step(state, iter([batch]), model)

    class Watch(Callback):
        """Makes the certificate with Bridge's forward step, and keeps losses and norms."""

        def on_train_start(self, context):
            if ring != "0" and cp > 1:
                step = partial(in_bridges_words, context.state)
                more = sizes if ring == "te" else {}
                found = cp_ring.megatron.certify(cfg.model, build, step, **more)
                outcome["not covered"] = found.not_covered
                outcome["probes"] = sorted({probe.name for probe in found.probes})

        def on_train_step_end(self, context):
            if context.loss_dict:  # the last stage has it
                loss = float(context.loss_dict["lm loss"].flatten()[0])
                steps.append([loss, float(context.grad_norm)])

    # Of one tensor-parallel rank. Megatron adds biases of experts to it in place, which autograd
    # rejects for what a function returns as it was given.
    layers.reduce_from_tensor_model_parallel_region = lambda given, **_: given
    for module in (train, eval):  # nothing is distilled
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    pretrain(cfg, forward_step, callbacks=[Watch()])
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(folder, "outcome.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
