"""`--mask KIND:VALUES` of `cp-ring plan`, as in `shared-prefix:4096,1024x8`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from cp_ring.errors import PlanError
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.tools.cli.options import parse_tokens

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
        raise PlanError(
            f"--mask {text} has no documents: leave out --documents and --documents-mean"
        )
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
