"""What `cp-ring plan` makes of its options: the mask, as of `--mask shared-prefix:4096,1024x8`, the
layout, and a job's configuration in place of options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.layout import LAYOUTS, Layout, NamedLayout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.plan.routes import AUTO
from cp_ring.tools import attention_plan
from cp_ring.tools import lengths as samples
from cp_ring.tools.cli.option_models import parse_tokens
from cp_ring.tools.cli.plan_recurrent import text_of_job
from cp_ring.tools.job import JobConfig, as_keys, load

# needs the documents' offsets; the layouts of LAYOUTS get only the mask
PER_DOCUMENT = "per_document_zigzag"
MAX_TOKENS = 1 << 30  # the proof marks each token with a byte

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
        return Mask.images(length, _spans(values), offsets)
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


def document_offsets(n: int | None, mean: float, seed: int) -> Ints | None:
    """Offsets of random documents, int64 [documents + 1]; None for one sequence."""
    if n is None:
        if mean:
            raise PlanError("--documents-mean needs --seq-length, the tokens of the stream")
        return None
    if not 1 <= n <= MAX_TOKENS:
        raise PlanError(f"--seq-length {n}: it must be at least 1 and at most {MAX_TOKENS}")
    return samples.exponential(n, mean, seed) if mean else None


def plain_mask(n: int | None, offsets: Ints | None, window: int, full: bool, prefix: int) -> Mask:
    """The mask of one sequence or of documents without --mask."""
    if n is None:
        raise PlanError(
            "--seq-length: give the tokens of the sequence, or a --mask whose parts have lengths"
        )
    if prefix:
        lengths = prefix if offsets is None else (offsets[1:] - offsets[:-1]).clip(max=prefix)
        return Mask.prefix(n, lengths, offsets, (window, -1 if full else 0))
    if offsets is None:
        return Mask.full(n, (window, window)) if full else Mask.causal(n, (window, 0))
    return Mask.documents(offsets, causal=not full, window=(window, window if full else 0), n=n)


def weighs(name: str) -> bool:
    """Whether a layout has chunks of different work, whose number can be chosen."""
    return name in LAYOUTS and NamedLayout.named(name).weighs


def make_layout(
    name: str,
    mask: Mask,
    offsets: Ints | None,
    cp: int,
    chunks_per_rank: int | None,
) -> Layout:
    """The layout of a name. Raises `PlanError` that names the option."""
    if name not in (*LAYOUTS, PER_DOCUMENT):
        raise PlanError(f"--layout {name!r}: known are {', '.join((*LAYOUTS, PER_DOCUMENT))}")
    if chunks_per_rank is not None:
        if not weighs(name):
            raise PlanError(
                f"--chunks-per-rank {chunks_per_rank} is for --layout balanced, not {name}"
            )
        return Layout.balanced(mask, cp, chunks_per_rank)
    if name == PER_DOCUMENT:
        return Layout.per_document_zigzag([0, mask.n] if offsets is None else offsets, cp)
    return LAYOUTS[name](mask, cp)


RANKS_OF_A_NODE = 8
"""Ranks of a job on each node, of all its parallel dimensions together, where neither the job nor
an option says otherwise.
"""


def take(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Callback of JOB and of `--set`: once both are known, the job's options are the defaults of
    those that were not given.
    """
    values: dict[str, Any] = ctx.meta.setdefault(__name__, {})
    values[str(param.name)] = value
    if len(values) == 2:
        job, overrides = values["job"], values["set_"] or ()
        if job is not None:
            loaded = load(job, overrides)
            try:
                ctx.default_map = options_of(loaded)
            except (TypeError, ValueError) as error:
                text = str(error).replace("invalid literal for int() with base 10", "no number")
                raise ConfigError(f"{loaded.source}: {as_keys(text)}") from None
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
    megatron, settings, cp = job.megatron, job.cp_ring, job.parallel.context_parallel_size
    n, window = megatron.get("seq_length"), megatron.get("window_size") or (-1, 0)
    if not n:
        raise ConfigError("megatron.seq_length is missing: a plan needs the tokens of a sequence")
    if isinstance(n, int) and settings.enabled and n % (2 * cp):
        raise ConfigError(f"megatron.seq_length {n} does not divide by 2 x {cp} ranks = {2 * cp}")
    if isinstance(window, str):
        window = window.strip("()[] ").split(",")
    sizes = attention_plan.sizes_of(job)
    spec, kind = attention_plan.first_layer(job, settings.without_auto())
    sparse = None
    if megatron.get("experimental_attention_variant") == "dsa":
        sparse = f"{megatron['dsa_indexer_topk']},{megatron['dsa_indexer_head_dim']}"
    options = {
        "cp": cp,
        "seq_length": n,
        "window": int(window[0]),
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
        "recurrent": text_of_job(megatron, job.parallel.tensor_model_parallel_size),
        "sparse": sparse,
        "ranks_per_node": attention_plan.node_size_of(job, settings, RANKS_OF_A_NODE),
    }
    return {name: str(value) for name, value in options.items() if value is not None}
