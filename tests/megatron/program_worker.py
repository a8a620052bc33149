"""One of four ranks of a program on megatron.core alone, whose attention `enable` replaced: `program_worker.py FOLDER`.

Rank 0 writes what they find to FOLDER/found.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    """What a rank does once the process group exists."""
    import megatron.core
    from megatron.core import parallel_state

    import cp_ring.megatron
    from docs.examples import megatron_core as example

    if megatron.core.__version__.startswith("0.16."):
        from tests.megatron.core_worker import believe_in_no_transformer_engine

        believe_in_no_transformer_engine()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        cp_2 = example.main(2)
    found: dict[str, Any] = {"version": megatron.core.__version__, "cp 2": cp_2, "printed": text.getvalue()}
    config = configuration(2)
    found["wrong split"] = rejection(lambda: cp_ring.megatron.certify(config, example.build, wrong_split(example)))
    found["wrong settings"] = rejection(lambda: example.build(configuration(2, window_size=(5, 3))))
    model = example.build(config)
    found["attention"] = type(model.decoder.layers[0].self_attention.core_attention).__name__
    found |= checkpoints(model, example.build(config), folder / "checkpoints")
    parallel_state.destroy_model_parallel()
    found["cp 1"] = example.main(1)
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def configuration(cp: int, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0, context_parallel_size=cp,
        calculate_per_token_loss=True, use_cpu_initialization=True, masked_softmax_fusion=False, **more,
    )  # fmt: skip


def wrong_split(example: Any) -> Callable[..., Any]:
    """The forward step of the example with labels that are split by rows of another order."""

    def step(iterator: Any, model: Any) -> Any:
        batch = dict(next(iterator))
        if model.config.context_parallel_size > 1:
            batch["labels"] = batch["labels"].flip(1)
        return example.forward_step(iter([batch]), model)

    return step


def rejection(call: Callable[[], Any]) -> str:
    from cp_ring.errors import ConfigError

    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def checkpoints(model: Any, other: Any, folder: Path) -> dict[str, Any]:
    """Saves a model, loads it into another, and damages what was saved."""
    import cp_ring.megatron

    for parameter in other.parameters():
        parameter.data.zero_()
    cp_ring.megatron.save_checkpoint(model.sharded_state_dict(), folder, 10)
    state, iteration = cp_ring.megatron.load_checkpoint(other.sharded_state_dict(), folder)
    other.load_state_dict(state)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = iteration == 10 and all(torch.equal(a, b) for a, b in pairs)
    dist.barrier()  # other ranks may still read
    if dist.get_rank() == 0:
        part = next((folder / "iter_0000010").glob("*.distcp"))
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    dist.barrier()
    damaged = rejection(lambda: cp_ring.megatron.load_checkpoint(other.sharded_state_dict(), folder))
    return {"loaded": same, "damaged": damaged, "files": sorted(path.name for path in folder.iterdir())}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
