"""A user's script whose model and batches are not those of a GPT model: layers with cross
attention, texts by two names.
"""

from functools import partial

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from tests.megatron.small_script import datasets, get_args, loss_function


def build(pre_process=True, post_process=True, config=None, **ignored):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config,
        decoder_model_with_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
    )


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(
        batch["text_enc"], batch["text_dec"], batch["enc_dec_mask"], labels=batch["labels"]
    )
    return output, partial(loss_function, batch["loss_mask"])


if __name__ == "__main__":
    container = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step, build)
