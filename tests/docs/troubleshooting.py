"""The rejected flags in docs/troubleshooting.md: what cp_ring says of each; `python -m
tests.docs.troubleshooting` writes them.
"""

import contextlib
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags import argument_parser, resolve
from cp_ring.megatron.flags.checks_job import HERE, JOB
from cp_ring.megatron.options import Options
from launch.budget import ROOT
from tests.megatron.launch import TINY

PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- made of what checks say -->\n", "<!-- the rest is written by hand -->\n"

EXAMPLES = {
    "Ranks": """
--context-parallel-size 0
--context-parallel-size 4 --cp-ring-heads 3
--context-parallel-size 4 --cp-ring-heads 2 --cp-comm-type a2a
--context-parallel-size 4 --cp-ring-heads 2 --cp-ring-schedule 0,1,2,2
--context-parallel-size 4 --cp-comm-type pigeon
--context-parallel-size 4 --cp-comm-type all_gather --cp-ring-schedule ring
--context-parallel-size 4 --cp-comm-type a2a+p2p
--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 2
--context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 3 --hidden-size 48
--context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 6 --hidden-size 96 --num-query-groups 3
""",
    "Attention": """
--attention-dropout 0.1
--attention-dropout 0.1 --use-checkpoint-args
--window-size=-2,0
--window-size 16,4
--window-size 16,0 --window-attn-skip-freq [1]
--window-size 16,0 --window-attn-skip-freq 0
--qk-clip
--hybrid-context-parallel
--cp-partition-mode contiguous
--experimental-attention-variant dsv4_hybrid
--mtp-hsm
--use-megatron-fsdp --megatron-fsdp-version 2
--batch-invariant-mode
--experimental-attention-variant dsa --cp-ring-layout balanced
--experimental-attention-variant dsa --context-parallel-size 2 --dsa-indexer-loss-coeff 0.01
--cuda-graph-impl transformer_engine
--cuda-graph-impl local --cp-ring-document-mask
--attention-output-gate --fine-grained-activation-offloading --offload-modules core_attn
""",
    "Documents and recurrent layers": """
--cp-ring-mask-kinds images --cp-ring-document-mask
--cp-ring-mask-kinds images --dataloader-inter-document-masking
--sft --dataloader-inter-document-masking
--context-parallel-size 2 --dataloader-inter-document-masking --iterations-to-skip 2
--reset-attention-mask
--overlap-moe-expert-parallel-comm --cp-ring-document-mask
--context-parallel-size 2 --micro-batch-size 2 --dataloader-inter-document-masking --moe-router-load-balancing-type seq_aux_loss
--context-parallel-size 2 --micro-batch-size 5 --dataloader-inter-document-masking --num-experts 4
--hybrid-layer-pattern G*- --context-parallel-size 4 --linear-num-key-heads 2 --cp-ring-recurrent heads
--hybrid-layer-pattern M*- --cp-ring-mask-kinds images
--hybrid-layer-pattern M*- --cp-ring-recurrent states --cuda-graph-impl local --cuda-graph-modules mamba
""",
    "The job": """
--no-cp-ring --cp-ring-loss-chunk 64
--cp-ring-beneath te
--no-cp-ring --cp-ring-beneath te --context-parallel-size 2 --dataloader-inter-document-masking
--cp-ring-loss-chunk 8 --defer-embedding-wgrad-compute
--cp-ring-balance-microbatches
--cp-ring-balance-microbatches --cp-ring-document-mask
--cp-ring-balance-microbatches --cp-ring-document-mask --calculate-per-token-loss --dataloader-type external
--cp-ring-balance-microbatches --cp-ring-document-mask --calculate-per-token-loss --decrease-batch-size-if-needed
--spec no.such.module layers
--cp-ring-document-mask --sft
--save /proc/x
--yaml-cfg job.yaml
--data-path /nowhere/corpus
--sft --data-path talks.jsonl --split 969,30,1
""",
    "Without CUDA": """
--distributed-backend nccl
--transformer-impl=transformer_engine
--gpu-sniff-test-interval 100
""",
    "What travels": """
--context-parallel-size 2 --cp-ring-wire latent
--context-parallel-size 2 --cp-ring-wire latent --multi-latent-attention --cp-ring-heads 2
--context-parallel-size 2 --cp-ring-wire latent --multi-latent-attention --use-torch-fsdp2
--context-parallel-size 2 --cp-ring-wire latent --multi-latent-attention --recompute-granularity selective
""",
}  # fmt: skip
ADVICE = {
    "hops for": "give that many hops, or `auto`",
    "does not exist": "give the path of a data set without its `.idx`",
}
"""What to type, for lines that do not end with it, by a part of the line."""

OF_OTHER_VERSIONS = {
    "--dynamic-context-parallel": {"dynamic_context_parallel": True},
    "--cp-partition-mode contiguous": {"cp_partition_mode": "contiguous"},
    "--experimental-attention-variant dsv4_hybrid": {
        "experimental_attention_variant": "dsv4_hybrid"
    },
    "--mtp-hsm": {"mtp_hsm": True},
    "--megatron-fsdp-version 2": {"megatron_fsdp_version": 2},
    "--cuda-graph-impl full_iteration": {"cuda_graph_impl": "full_iteration"},
}
"""Values that the parser of Megatron 0.19 does not take."""

GRAPHS = "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"


def line_of(flags, parser=None):
    """What cp_ring says of a tiny job with these flags, "" where it accepts them."""
    parser = parser or argument_parser.build_parser()
    ring = "--no-cp-ring" not in flags
    line = [*TINY, "--train-iters", "1", "--cp-ring-cpu", *["--cp-ring"] * ring]
    flags, later = flags.replace("--no-cp-ring", ""), {}
    for given, values in OF_OTHER_VERSIONS.items():
        if given in flags:
            flags, later = flags.replace(given, ""), later | values
    words = shlex.split(flags)
    args = parser.parse_args([*line, *words])
    vars(args).update(later)
    options = Options.from_args(args)
    try:
        resolve.reject_file([*line, *words])
        graphs = {name: vars(args)[name] for name in GRAPHS}  # as on a GPU
        vars(args).update(dict.fromkeys(GRAPHS))
        resolve.run_on_cpu(args, [word for word in words if word != "--cuda-graph-impl"])
        vars(args).update(graphs)
        resolve.check(args, options, (*JOB, *HERE))
    except ConfigError as error:
        return error.args[-1]
    return ""


def advised(line):
    """The line in code font, and what to type where the line does not end with it."""
    return f"- `{line}`" + next(
        (f": {type_}" for part, type_ in ADVICE.items() if part in line), ""
    )


def tables():
    parser, parts = argument_parser.build_parser(), []
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("talks.jsonl").write_text("{}\n" * 40)
        for topic, examples in EXAMPLES.items():
            lines = [advised(line_of(each, parser)) for each in examples.strip().split("\n")]
            parts += [f"### {topic}", "", *lines, ""]
    return "\n".join(["", *parts, ""])


def written():
    """The page as it must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written())
