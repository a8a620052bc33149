"""`cp_ring.megatron.enable`: ring attention for programs that build their models themselves, without Megatron's command line."""

from __future__ import annotations

from typing import Any

from cp_ring import patches
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.megatron import program
from cp_ring.megatron.compat import check_version
from cp_ring.megatron.settings import configure
from cp_ring.plan.shapes import AUTO

_FLAGS_ALONE = {
    "run_dir": "steps.jsonl is written by Megatron's own training loop",
    "balance_microbatches": "batch rows are dealt out by Megatron's own data loaders",
}


def enable(
    config: ContextParallelConfig | None = None,
    *,
    seq_length: int = 0,
    micro_batch_size: int = 1,
    packed: bool = False,
    **settings: Any,
) -> ContextParallelConfig:
    """Ring attention in every attention layer of the models that this process builds from now on.

    Call it once on every rank, before the first model is built. It is for programs on megatron.core that have no command line of
    Megatron: a training loop of your own, Megatron Bridge, NeMo, verl. Afterwards `GPTModel`, `HybridModel` and layer
    specifications build ring attention where they would build Megatron's or TransformerEngine's; recomputed layers run the ring
    once; each configuration is checked before its model is built; and the certificate is made before the first model is.

    Args:
        config: the settings; or give them as keywords, with the names of `ContextParallelConfig`: `layout="balanced"`.
        seq_length: tokens of a batch row, for checks, for `route="auto"` and `heads="auto"`, and for the certificate's probes at
            this length; 0 if unknown.
        micro_batch_size: batch rows of a microbatch, for the certificate.
        packed: whether microbatches hold packed documents (`PackedSeqParams` with thd), which the certificate then probes.

    Returns:
        The settings in force.

    Raises:
        ConfigError: for a bad setting, one that needs Megatron's own training loop, or a Megatron that is not supported.
    """
    if config is not None and settings:
        raise ConfigError("cp_ring.megatron.enable takes a ContextParallelConfig or settings by name, not both")
    given = config.model_dump() if config is not None else settings
    used = ContextParallelConfig.make(**(given | {"enabled": True}))
    for name, why in _FLAGS_ALONE.items():
        if getattr(used, name):
            raise ConfigError(f"{used.flag(name)} ({name}=) needs a job of flags: {why}")
    for name in ("route", "heads"):
        if getattr(used, name) == AUTO and not seq_length:
            raise ConfigError(f"{used.flag(name)} auto ({name}='auto') needs seq_length=, for which the shape is chosen")
    check_version(core_alone=True)
    for name in _wanted(used, packed):
        patches.get(name).apply()
    configure(used, whole_rows=False)
    program.begin(program.Program(seq_length, micro_batch_size, packed))
    return used


def _wanted(config: ContextParallelConfig, packed: bool) -> list[str]:
    """The patches that need no command line, in the order in which they are applied."""
    by_batch = config.document_mask or bool(config.kinds)
    wanted = {
        "cpu_runtime": config.cpu,
        "core_attention": True,
        "latent_gradients": True,
        "recompute": config.recompute == "keep",
        "rotary_layout": config.layout != "zigzag" or bool(config.kinds),
        "recurrent_layers": config.layout != "zigzag" or by_batch or packed,
        "document_mask": by_batch,
        "loss_bias": True,
        "loss_chunks": config.loss_chunk > 0,
        "optimizer_step": True,
        "restricted_unpickling": True,
        "model_checks": True,
    }
    return [name for name, needed in wanted.items() if needed]
