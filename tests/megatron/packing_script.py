"""A training script as users have them, for packed documents: Megatron alone, nothing of cp_ring.

With --reset-attention-mask the batches hold dense masks; with --dataloader-inter-document-masking
or --sft they are packed (thd), and split over context-parallel ranks as Megatron's own
pretrain_gpt.py does it.
"""

from functools import partial

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from tests.megatron.small_script import loss_function

KEYS = "tokens labels loss_mask position_ids attention_mask cu_seqlens cu_seqlens_padded max_seqlen"
KEYS = [*KEYS.split(), "local_cp_size", "hybrid_cp_group"]


def datasets(num_samples):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=0.005,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else GPTDataset, num_samples, lambda: True, config
    ).build()


datasets.is_distributed = True


def whole_batch(data_iterator):
    """The batch, which tensor-parallel rank 0 reads and sends to the others."""
    args, rank = get_args(), parallel_state.get_tensor_model_parallel_rank()
    read = {name: x.cuda() for name, x in next(data_iterator).items()} if rank == 0 else {}
    batch = get_batch_on_this_tp_rank(
        dict.fromkeys(KEYS) | read if rank == 0 else {},
        has_cu_seqlens=args.sft or args.dataloader_inter_document_masking,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=1,  # every stage has all tensors
    )
    return flatten_batch_for_packed_sequences(batch)


def forward_step(data_iterator, model):
    batch = whole_batch(data_iterator)
    packed, sft = batch.get("cu_seqlens") is not None, get_args().sft
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=packed and not sft
    )
    params = None
    if packed:
        offsets, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            tokens_per_sample=get_args().seq_length,
        )
    inputs = batch["tokens"], batch["position_ids"], batch.get("attention_mask")
    output = model(
        *inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], packed_seq_params=params
    )
    return output, partial(loss_function, batch["loss_mask"])


def main():
    arguments = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
