"""`cp-ring plan JOB`: a job's configuration as options of `cp-ring plan`."""

from __future__ import annotations

from typing import Any

import typer

from cp_ring.comm.nodes import node_size
from cp_ring.errors import ConfigError
from cp_ring.megatron.comm_types import spec_of_layer
from cp_ring.plan.shapes import AUTO
from cp_ring.plan.sizes import AttentionSizes
from cp_ring.tools.job.config import JobConfig, load
from cp_ring.tools.slurm.placement import context_groups

RANKS_OF_A_NODE = 8
"""Ranks of a job on each node, of all its parallel dimensions together, where neither the job nor
an option says otherwise.
"""


def take(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Callback of JOB and of `--set`: once both are known, the job's options are the defaults of
    those that were not given.
    """
    given: dict[str, Any] = ctx.meta.setdefault(__name__, {})
    given[str(param.name)] = value
    if len(given) == 2:
        job, overrides = given["job"], given["set_"] or ()
        if job is not None:
            ctx.default_map = options_of(load(job, overrides))
        elif overrides:
            raise ConfigError(
                f"--set {overrides[0]} changes a job: name one, as in cp-ring plan quickstart "
                f"--set {overrides[0]}"
            )
    return value


def options_of(job: JobConfig) -> dict[str, Any]:
    """The parameters of `plan_command` for the first attention layer of a job.

    The mask is causal, with the window of the job: documents are in the data, not in the job.
    Raises `ConfigError` where the job has no sequence length, or its settings contradict each
    other.
    """
    given, settings, tp, cp = (
        job.megatron, job.cp_ring, job.parallel.tensor_model_parallel_size, job.parallel.context_parallel_size,
    )  # fmt: skip
    if not given.get("seq_length"):
        raise ConfigError("megatron.seq_length is missing: a plan needs the tokens of a sequence")
    sizes = AttentionSizes.from_megatron(given, tp)
    kinds = given.get("cp_comm_type") or "p2p"
    kind = kinds if isinstance(kinds, str) else kinds[0]
    spec = spec_of_layer(
        kind,
        settings.without_auto(),
        cp,
        given.get("hierarchical_context_parallel_sizes"),
    )
    group = context_groups(tp, cp, tp * cp)[0].tolist()
    options = {
        "cp": cp,
        "seq_length": given["seq_length"],
        "window": _left(given.get("window_size")),
        "layout": settings.layout,
        "route": settings.route,
        "schedule": spec.schedule,
        "slot_shards": spec.slot_shards or cp,
        "num_slots": settings.num_slots,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "dtype": sizes.dtype,
        "mla": ",".join(map(str, sizes.latent)) if sizes.latent else None,
        "wire": "plain" if settings.wire == AUTO else settings.wire,
        "head_parallel": AUTO if settings.heads == AUTO and kind == "p2p" else spec.ulysses,
        "ranks_per_node": settings.node_size or node_size(group, RANKS_OF_A_NODE),
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def _left(window: Any) -> int:
    """Keys before a query, from Megatron's `window_size`: a pair, or its text."""
    if not window:
        return -1
    pair = window.strip("()[] ").split(",") if isinstance(window, str) else window
    return int(pair[0])
