"""A job of a second or two beside what its ranks need to start."""

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

TINY = {
    "megatron": {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "position_embedding_type": "rope",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "micro_batch_size": 1,
        "global_batch_size": 2,
        "train_iters": 6,
        "lr": 1.0e-3,
        "lr_decay_style": "constant",
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 63,
        "dataloader_type": "single",
        "num_workers": 0,
        "eval_iters": 0,
        "eval_interval": 1000,
        "save_interval": 4,
        "ckpt_format": "torch_dist",
        "dist_ckpt_optim_fully_reshardable": True,
        "use_distributed_optimizer": True,
        "log_interval": 1,
        "context_parallel_size": 4,
    },
    "cp_ring": {"enabled": True},
    "launch": {"device": "cpu"},
}


def data_that_fails(folder):
    """Settings of data whose tokens the model does not have, read by workers of the data loader:
    ranks raise in the first step.
    """
    tokens = IndexedDatasetBuilder(f"{folder}/tokens.bin", dtype=DType.optimal_dtype(1000))
    for _ in range(20):
        tokens.add_document(np.full(200, 500), [200])
    tokens.finalize(f"{folder}/tokens.idx")
    return {
        "megatron.train_data_path": f"{folder}/tokens",
        "megatron.tokenizer_type": "NullTokenizer",
        "megatron.vocab_size": 63,
        "megatron.num_workers": 2,
        "megatron.eval_iters": 0,
    }
