"""Bytes that ring attention sends in a step of multi-latent attention on 4 ranks, by codec, as the
transport counts them.

`python -m tests.megatron.wire_bytes [--heads 32] [--seq-length 1024]` trains two steps with each
codec and prints a table. All sizes of the model but its layers and its width are a quarter of DeepSeek-V3's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cp_ring import Layout, Mask, Plan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes, LatentSizes
from tests.megatron.launch import _lines, train

CODECS = ("plain", "latent", "int8", "fp8")
CP, LAYERS = 4, 2
SIZES = LatentSizes(latent=128, rope=16, nope=32, value=32)


class Sent(NamedTuple):
    """Bytes that all ranks together send in a step: keys in forward and backward, and gradients."""

    keys: int
    gradients: int


def flags(heads: int, tokens: int) -> list[str]:
    """Flags of the model and of its training, without the codec."""
    return f"""
        --cp-ring-cpu --num-layers {LAYERS} --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads {heads}
        --multi-latent-attention --q-lora-rank 64 --kv-lora-rank {SIZES.latent} --qk-head-dim {SIZES.nope}
        --qk-pos-emb-head-dim {SIZES.rope} --v-head-dim {SIZES.value} --qk-layernorm --position-embedding-type rope
        --rope-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --mock-data --split 90,5,5
        --dataloader-type single --num-workers 0 --lr 1e-3 --train-iters 2 --micro-batch-size 1 --global-batch-size 1
        --eval-iters 0 --eval-interval 10 --seq-length {tokens} --max-position-embeddings {tokens}
        --cp-ring --context-parallel-size {CP}
    """.split()


def counted(folder: Path, heads: int, tokens: int) -> dict[str, Sent]:
    """What the transports of all ranks counted in the second step, by codec."""
    train(CP, {wire: ["--cp-ring-wire", wire] for wire in CODECS}, folder, flags(heads, tokens))
    return {wire: _sent(folder, wire) for wire in CODECS}


def _sent(folder: Path, name: str) -> Sent:
    steps = [
        [line["sent"] for line in _lines(folder, name) if line.get("step") == step]
        for step in (1, 2)
    ]
    return Sent(
        *(
            sum(last[kind] for last in steps[1]) - sum(first[kind] for first in steps[0])
            for kind in ("keys", "gradients")
        )
    )


def planned(wire: str, heads: int, tokens: int) -> Sent:
    """What the plan says, of all layers."""
    report = Plan.build(Mask.causal(tokens), Layout.zigzag(tokens, CP)).verify()
    sizes = AttentionSizes(
        heads, heads, SIZES.nope + SIZES.rope, SIZES.value, "fp32", wire=wire, latent=SIZES
    )
    keys, gradients = sizes.on_wire()
    return Sent(
        LAYERS * 2 * keys * int(report.keys_in.sum()),
        LAYERS * gradients * int(report.grads_in.sum()),
    )


def main(
    heads: Annotated[int, typer.Option(min=1)] = 32,
    seq_length: Annotated[int, typer.Option(min=8)] = 1024,
) -> None:
    """Print the bytes that a step sends, by codec."""
    with tempfile.TemporaryDirectory() as folder:
        found = counted(Path(folder), heads, seq_length)
    print(
        "| codec | keys and values, MB | gradients, MB | together, MB | of plain "
        "|\n|---|---|---|---|---|"
    )
    for wire, sent in found.items():
        assert sent == planned(wire, heads, seq_length), (sent, planned(wire, heads, seq_length))
        megabytes = " | ".join(f"{size / 1e6:.2f}" for size in (*sent, sum(sent)))
        print(f"| `{wire}` | {megabytes} | {sum(sent) / sum(found['plain']):.1%} |")


if __name__ == "__main__":
    typer.run(main)
