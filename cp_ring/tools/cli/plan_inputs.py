"""What `cp-ring plan` reads: `--mask KIND:VALUES`, as in `shared-prefix:4096,1024x8`, and a job's
configuration in place of options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from cp_ring.comm.nodes import node_size
from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.flags.comm_types import spec_of_layer
from cp_ring.plan.costs.shapes import AUTO
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.cli.option_models import parse_tokens
from cp_ring.tools.cli.plan_recurrent import text_of_job
from cp_ring.tools.job.command_line import as_keys
from cp_ring.tools.job.job_config import JobConfig, load
from cp_ring.tools.slurm.placement import context_groups

FORMS = {
    "shared-prefix": "PROMPT,RESPONSE[xCOUNT],...[+PROMPT,...]",
    "images": "START-END,...",
    "global": "START-END,...",
    "tree": "FILE.json",
    "block-causal": "BLOCK",
    "block-diffusion": "BLOCK",
}
"""What follows the colon of each kind of mask."""


def make_mask(text: str, n: int | None, window: int, offsets: Ints | None) -> Mask:
    """The mask that `text` describes, for a stream of `n` tokens or as long as its parts are;
    `window` keys back, -1 for all.

    offsets: packed documents, int64 [documents + 1], for `images`. Raises `PlanError` that names
    the option.
    """
    kind, _, values = text.partition(":")
    if kind not in FORMS or not values:
        known = ", ".join(f"{kind}:{form}" for kind, form in FORMS.items())
        raise PlanError(f"--mask {text!r}: known are {known}")
    if n is None and kind not in ("shared-prefix", "tree"):
        raise PlanError(f"--mask {text}: give --seq-length, the tokens of the stream")
    if offsets is not None and kind != "images":
        raise PlanError(f"--mask {text} has no documents: leave out --lengths and --documents-mean")
    try:
        mask = _mask(kind, values, n, window, offsets)
        return mask & (window, -1) if window >= 0 and kind != "global" else mask
    except (ValueError, KeyError, OSError, TypeError, typer.BadParameter) as error:
        raise PlanError(f"--mask {text}: {_reason(error, FORMS[kind])}") from None


def _mask(kind: str, values: str, n: int | None, window: int, offsets: Ints | None) -> Mask:
    if kind == "shared-prefix":
        return Mask.shared_prefix([_group(group) for group in values.split("+")], n)
    if kind == "tree":
        tree = json.loads(Path(values).read_text())
        return Mask.tree(tree["parents"], tree["lengths"], n)
    length = n or 0
    if kind == "images":
        return Mask.images(length, _spans(values), None if offsets is None else offsets)
    if kind == "global":
        return Mask.with_global(length, _spans(values), (window, 0))
    return (Mask.block_causal if kind == "block-causal" else Mask.block_diffusion)(
        length, parse_tokens(values)
    )


def _group(text: str) -> tuple[int, list[int]]:
    """`4096,1024x8,512` is a prompt of 4,096 tokens, 8 responses of 1,024 and one of 512."""
    prompt, *responses = text.split(",")
    lengths: list[int] = []
    for response in responses:
        length, _, count = response.partition("x")
        lengths += [parse_tokens(length)] * (int(count) if count else 1)
    return parse_tokens(prompt), lengths


def _spans(text: str) -> list[tuple[int, int]]:
    """`0-16,4096-4112`: the tokens 0 to 15 and 4,096 to 4,111."""
    edges = [span.split("-") for span in text.split(",")]
    return [(parse_tokens(start), parse_tokens(end)) for start, end in edges]


def _reason(error: Exception, form: str) -> str:
    if isinstance(error, PlanError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot read it: {error.strerror}"
    if isinstance(error, KeyError | json.JSONDecodeError):
        return 'the file must hold {"parents": [...], "lengths": [...]}'
    return f"write it as {form}"


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
            loaded = load(job, overrides)
            try:
                ctx.default_map = options_of(loaded)
            except (TypeError, ValueError) as error:
                said = str(error).replace("invalid literal for int() with base 10", "no number")
                raise ConfigError(f"{loaded.source}: {as_keys(said)}") from None
        elif overrides:
            raise ConfigError(
                f"--set {overrides[0]} changes a job: name one, as in cp-ring plan quickstart "
                f"--set {overrides[0]}"
            )
    return value


def options_of(job: JobConfig) -> dict[str, Any]:
    """The options of `cp-ring plan` for the first attention layer of a job.

    The mask is causal, with the window of the job: documents are in the data, not in the job.
    Raises `ConfigError` where the job has no sequence length, or its settings contradict each
    other.
    """
    given, settings, tp, cp = (
        job.megatron,
        job.cp_ring,
        job.parallel.tensor_model_parallel_size,
        job.parallel.context_parallel_size,
    )
    if not given.get("seq_length"):
        raise ConfigError("megatron.seq_length is missing: a plan needs the tokens of a sequence")
    n = given["seq_length"]
    if isinstance(n, int) and settings.enabled and n % (2 * cp):
        raise ConfigError(f"megatron.seq_length {n} does not divide by 2 x {cp} ranks = {2 * cp}")
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
        "compute_streams": settings.compute_streams,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "dtype": sizes.dtype,
        "mla": ",".join(map(str, sizes.latent)) if sizes.latent else None,
        "wire": "plain" if settings.wire == AUTO else settings.wire,
        "head_parallel": AUTO if settings.heads == AUTO and kind == "p2p" else spec.ulysses,
        "recurrent": text_of_job(given, tp),
        "sparse": _sparse(given),
        "ranks_per_node": settings.node_size or node_size(group, RANKS_OF_A_NODE),
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def _sparse(given: Mapping[str, Any]) -> str | None:
    """`--sparse` of a job's section megatron; None without sparse attention."""
    if given.get("experimental_attention_variant") != "dsa":
        return None
    return f"{given['dsa_indexer_topk']},{given['dsa_indexer_head_dim']}"


def _left(window: Any) -> int:
    """Keys before a query, from Megatron's `window_size`: a pair, or its text."""
    if not window:
        return -1
    pair = window.strip("()[] ").split(",") if isinstance(window, str) else window
    return int(pair[0])
