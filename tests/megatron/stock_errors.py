"""Known errors of Megatron that cp_ring leaves alone, shown without context parallelism:
`python -m tests.megatron.stock_errors`.

Each runs two tiny jobs on CPU ranks that should have the same losses and gradient norms. They have
Megatron's own attention, but for that of multi-latent attention, which needs a GPU.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.megatron.launch import attempt
from tests.parity.models import COMMON, LATENT, MAMBA, MEGATRON_FSDP, REFERENCE, UNTIED

SIZES = "--num-layers {layers} --seq-length 64 --train-iters 3 --cp-ring-cpu"


@dataclass(frozen=True)
class StockError:
    """The flags of both jobs beside `SIZES`, and their ranks; FOLDER in them is an empty one."""

    what: str
    right: str
    wrong: str
    ranks: tuple[int, int] = (2, 2)
    layers: int = 2


ERRORS = (
    StockError(
        "gradients of multi-latent attention depend on the tensor-parallel size",
        f"{LATENT} {REFERENCE}",
        f"{LATENT} {REFERENCE} --tensor-model-parallel-size 2",
        ranks=(1, 2),
    ),
    StockError(
        "--use-torch-fsdp2 with --calculate-per-token-loss does not divide gradients by the tokens",
        UNTIED,
        f"{UNTIED} --use-torch-fsdp2 --calculate-per-token-loss",
    ),
    StockError(
        "--use-torch-fsdp2 does not train all weights of Mamba layers",
        MAMBA,
        f"{MAMBA} --use-torch-fsdp2",
        layers=4,
    ),
    StockError(
        "--use-torch-fsdp2 cannot save with torch 2.13",
        f"{UNTIED} --save FOLDER --save-interval 1",
        f"{UNTIED} --use-torch-fsdp2 --save FOLDER --save-interval 1",
    ),
    StockError(
        "--use-megatron-fsdp counts a step of Adam where there is nothing to load",
        f"{UNTIED} --bf16 {MEGATRON_FSDP} optim_grads_params",
        f"{UNTIED} --bf16 {MEGATRON_FSDP} optim_grads_params --load FOLDER",
    ),
)


def main() -> None:
    """Prints the losses and gradient norms of both jobs of each error."""
    for number, error in enumerate(ERRORS):
        print(f"\n{error.what}")
        for job, ranks in zip((error.right, error.wrong), error.ranks, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                flags = f"{SIZES.format(layers=error.layers)} {job.replace('FOLDER', folder)}"
                done = attempt(ranks, f"job{number}", flags.split(), Path(folder), COMMON)
            print(f"  {' '.join(job.split()[-4:])}: exit code {done.code}")
            print(f"    losses         {done.losses}\n    gradient norms {done.grad_norms}")


if __name__ == "__main__":
    main()
