"""A training script as users have them: Megatron alone, nothing of cp_ring."""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import argument_utils, get_args, pretrain
from megatron.training.arguments import parse_and_validate_args


def datasets(num_samples):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True


def loss_function(loss_mask, output):
    mask = loss_mask.reshape(-1)
    loss = torch.sum(output.reshape(-1) * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    batch = {name: value.cuda() for name, value in next(data_iterator).items()}
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    output = model(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"]
    )
    return output, partial(loss_function, batch["loss_mask"])


def main():
    arguments = parse_and_validate_args()
    described = argument_utils.gpt_config_from_args(arguments)
    container = argument_utils.pretrain_cfg_container_from_args(arguments, described)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
