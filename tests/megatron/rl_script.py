"""Megatron-LM's own train_rl.py, of the checkout that megatron.core comes from, on the CPU: rollouts
are drawn in place of generation, and what needs a GPU or a server is a stand-in.
"""

import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import megatron.core
import torch
from megatron.training import get_args

from cp_ring import Layout

CHECKOUT = Path(megatron.core.__file__).resolve().parents[2]
PROFILING = """
    RL_LOGGABLE_TIMER_NAMES initialize_rl_profiler log_iteration_profile shutdown_rl_profiler
"""
SERVERS = ["fastapi", "fastapi.responses", "openai", "uvicorn", "uvicorn.config"]
END = 254
TOKENIZER = SimpleNamespace(
    pad=0, eod=END, bos=None, vocab_size=255, library="null", detokenize=str
)


def partition(cu_seqlens, tokens, cp, rank):
    """TransformerEngine's split of packed documents, one by one."""
    layout = Layout.per_document_zigzag(cu_seqlens.unique().numpy(), cp)
    return torch.from_numpy(layout.positions(rank))


def draw_rollouts(model, inference_model, optimizer, prompts, samples):
    from megatron.rl import rl_utils
    from megatron.rl.agent.api import TokenRollout

    args = get_args()
    if inference_model is not None:
        rl_utils.swap_model_weights(model, inference_model, args.refit_method)
    draw = random.Random(args.curr_iteration)

    def rollout(prompt):
        length = draw.randint(8, args.seq_length // 3)
        return TokenRollout(
            trajectory=[[draw.randrange(1, 200) for _ in range(length - 1)] + [END]],
            generation_mask=[[place > 3 for place in range(length)]],
            logprobs=[[-5.0] * (length - 4)],
            reward=draw.random(),
            env_id="drawn",
            problem_id=str(prompt),
            completion_ids=[],
        )

    return [[rollout(prompt) for _ in range(samples)] for prompt in range(prompts)], {}


def main():
    sys.modules.update({name: MagicMock() for name in SERVERS})
    sys.path.insert(0, str(CHECKOUT))
    from megatron.core.models.gpt import GPTModel
    from megatron.rl import rl_profiling, rl_utils, sequence_packing_utils
    from megatron.training import training

    # it may have been imported without the stand-ins
    training.has_rl_utils, training.rl_utils = True, rl_utils
    vars(training).update({name: getattr(rl_profiling, name) for name in PROFILING.split()})
    packer, forward = sequence_packing_utils.SequencePacker, GPTModel.forward
    # the same rows at any context parallel size, to compare them
    sequence_packing_utils.SequencePacker = lambda *args, seq_length_multiple, **named: packer(
        *args, seq_length_multiple=8, **named
    )
    # only the wrapper for half precision knows it
    GPTModel.forward = lambda self, *args, fp32_output=None, **named: forward(self, *args, **named)
    rl_utils.HAVE_TEX, rl_utils.tex = True, SimpleNamespace(thd_get_partitioned_indices=partition)
    for module in (rl_utils, sequence_packing_utils):
        module.get_tokenizer = lambda: TOKENIZER
    rl_utils.get_environment_rollouts = draw_rollouts
    rl_utils.maybe_log_training_metrics = rl_utils.rl_inference_interface_shutdown = MagicMock()
    runpy.run_path(str(CHECKOUT / "train_rl.py"), run_name="__main__")


if __name__ == "__main__":
    main()
