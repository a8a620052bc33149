"""What cannot run is rejected before any process group exists: one line that names the flag, and
exit code 2.
"""

import ast
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from cp_ring import Options
from cp_ring.errors import ConfigError
from cp_ring.megatron import compat, rejection
from cp_ring.megatron.adapter import notes, planned
from cp_ring.megatron.adapter.documents import DocumentParams, Documents
from cp_ring.megatron.flags import (
    argument_parser,
    checks_attention,
    checks_documents,
    checks_job,
    codec_choice,
    comm_types,
    resolve,
)
from cp_ring.megatron.settings import configure
from tests.docs.troubleshooting import PAGE, line_of
from tests.megatron.launch import MODEL, TINY, TRAIN, launch
from tests.megatron.layers import core_attention
from tests.rings import refused

CP4 = ["--context-parallel-size", "4"]
DSA = "--experimental-attention-variant dsa"
PLAN = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
LATENT = "--context-parallel-size 2 --cp-ring-wire latent --multi-latent-attention"
BASE = [*TINY, "--train-iters", "1", "--cp-ring", "--cp-ring-cpu"]


@pytest.fixture
def parse(monkeypatch, applied):
    """Parses flags with Megatron's own patched parser, as rank 0 of 4, in a job of its own."""
    applied("arguments")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")

    def parse_flags(*flags):
        from megatron.training.arguments import parse_args

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags])
        return parse_args()

    return parse_flags


@pytest.fixture
def rejections_of(parse, capsys):
    """The lines with which flags are rejected."""

    def lines_of(*flags):
        with pytest.raises(SystemExit) as stop:
            parse(*flags)
        said = capsys.readouterr().err.splitlines()
        lines = [line for line in said if line.startswith("cp_ring")]
        assert stop.value.code == 2 and not torch.distributed.is_initialized()
        assert lines and all(line.startswith("cp_ring: error: ") for line in lines)
        return [line.removeprefix("cp_ring: error: ") for line in lines]

    return lines_of


CHECKS = (checks_attention, checks_documents, checks_job, codec_choice, comm_types, resolve)
OF_LAYERS = ("self attention", "--softmax-type", "fp8_dot_product", "attn_logit_softcapping")


def code():
    """Each node of the code of `CHECKS`, with its module."""
    for module in CHECKS:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            yield module, node


def test_each_line_of_a_check_has_an_example():
    """On the page, which is made of what checks say."""
    page, missing = PAGE.read_text(), []
    for module, node in code():
        said = node.value if isinstance(node, ast.Return) else getattr(node, "exc", None)
        if isinstance(said, ast.Call):
            said = said.args[0] if said.args else None
        texts = [
            part.value
            for part in ast.walk(said or ast.Constant(""))
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        longest = max(texts, key=len, default="")
        layer = any(word in longest for word in OF_LAYERS)
        if (
            " " in longest.strip()
            and len(longest) > 20
            and longest.strip() not in page
            and not layer
        ):
            missing.append((module.__name__, longest))
    # no flags of a CPU: the job is asked without TransformerEngine in a test of its own, and why
    # the fused embedding is off is no rejection
    assert not [
        (name, text)
        for name, text in missing
        if "transformer_impl" not in text
        and "position" not in text
        and "splits documents" not in text
    ]


@pytest.mark.parametrize(
    "flags",
    [
        "--experimental-attention-variant dsa --context-parallel-size 2",
        "--experimental-attention-variant dsa --cp-ring-wire latent",
        "--experimental-attention-variant dsa --context-parallel-size 2 --cp-ring-heads 2",
        "--experimental-attention-variant gated_delta_net",
        "--use-megatron-fsdp",
        "--profile --use-pytorch-profiler",
        "--cuda-graph-impl local",
        "--cuda-graph-impl local --cuda-graph-modules attn mlp --window-size 8,0",
        "--cuda-graph-impl local --cuda-graph-scope moe_router --cp-ring-document-mask",
        "--cuda-graph-impl transformer_engine --cuda-graph-scope mlp moe_router moe_preprocess",
        "--hybrid-layer-pattern G*- --context-parallel-size 4 --linear-num-key-heads 4",
    ],
)
def test_what_is_accepted(flags):
    assert not line_of(flags)


@pytest.mark.parametrize(
    "flags, part",
    [
        (f"{PLAN} --cp-ring-schedule 0,1,2,2", "4 hops for 2 ranks"),
        (
            "--context-parallel-size 4 --cp-comm-type all_gather --cp-ring-slot-shards 2",
            "a hop has 3 sources, but --cp-ring-slot-shards is 2",
        ),
        (
            "--context-parallel-size 2 --cp-ring-heads 2 --num-attention-heads 3 --hidden-size 48",
            "--cp-ring-heads 2 does not divide the 3 query heads",
        ),
        ("--dynamic-context-parallel", "does not support --dynamic-context-parallel"),
        (f"{DSA} --cp-ring-document-mask", "does not support --cp-ring-document-mask"),
        (f"{DSA} --cp-ring-wire int8", "does not support --cp-ring-wire int8"),
        (f"{LATENT} --fp8-format hybrid", "latent does not support --fp8-format: leave it out"),
        (f"{LATENT} --delay-wgrad-compute", "does not support --delay-wgrad-compute"),
        ("--hybrid-layer-pattern D- --cp-ring-layout balanced", "-layer-pattern D-: Megatron's"),
        ("--cuda-graph-impl transformer_engine", "transformer_engine, which puts attention"),
        ("--enable-cuda-graph --cp-ring-debug", "-graph with --cp-ring-debug, which puts attent"),
        ("--external-cuda-graph", "--external-cuda-graph, which puts attention"),
        ("--cuda-graph-impl local --cuda-graph-modules mlp --sft", "modules mlp with --sft, which"),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp",
            "transformer_engine --cuda-graph-modules attn mlp, which puts attention into a CUDA "
            "graph: replace it by --cuda-graph-impl local --cuda-graph-modules attn",
        ),
        ("--cuda-graph-impl full_iteration", "full_iteration, which puts attention"),
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            "modules full_iteration, which",
        ),
        *(
            (f"--cuda-graph-impl local {lost}", f"with {lost}, which puts attention into a CUDA")
            for lost in ("--cp-ring-document-mask", "--hybrid-layer-pattern M*-", "--qk-clip")
        ),
        ("--train-data-path 0.5 /nowhere/a 0.5 /nowhere/b", "/nowhere/a.idx does not exist"),
        ("--profile", "--profile without --use-pytorch-profiler needs CUDA"),
        *(
            (flag, f"{flag} needs CUDA, and --cp-ring-cpu")
            for flag in ("--log-straggler", "--record-memory-history", "--use-nccl-ub")
        ),
    ],
)
def test_what_is_rejected_by_the_lines_of_the_page(flags, part):
    """Flags that get a line of docs/troubleshooting.md, with other values."""
    assert part in line_of(flags)


def test_arguments_have_names_that_megatron_has():
    """A name that nobody has is None, and its check would never reject anything."""
    known = {action.dest for action in argument_parser.build_parser()._actions}
    of_programs = {"tp", "cp", "first", "shown", "program", "packed"}
    of_layers = {"fp8_dot_product_attention", "fp8_multi_head_attention", "attn_logit_softcapping"}
    of_other_versions = {"cache_mla_latents", "dynamic_context_parallel", "cp_partition_mode",
                         "mtp_hsm", "megatron_fsdp_version", "cuda_graph_scope"}  # fmt: skip
    read = set()
    for _, node in code():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "args", "asked", "layer"
        ):  # fmt: skip
            read.add(node.attr)
        asks = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "first",
            "shown",
        )
        if asks:
            read |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    assert read - known <= of_programs | of_layers | of_other_versions


CP2 = ["--context-parallel-size", "2"]


@pytest.mark.slow
def test_a_script_of_checkouts_that_cannot_run_ends_in_one_line(megatron_lm):
    (script,) = megatron_lm.rglob("pretrain_t5.py")
    command = ["-m", "cp_ring.run", str(script), *BASE, *CP2]
    done = launch(2, command, python_path=str(megatron_lm))
    lines = [line for line in done.stdout.splitlines() if line.startswith("cp_ring: error: ")]
    assert len(lines) == 1, done.stdout
    begin = (
        "cp_ring: error: --cp-ring supports the attention mask types causal and no_mask, not arb"
    )
    assert lines[0].startswith(begin)
    assert done.stdout.index(lines[0]) < done.stdout.index("Traceback")  # torch's launcher's


def test_all_reasons_at_once(rejections_of):
    """Each in a line, whatever else is wrong."""
    wrong = [
        "--attention-dropout",
        "0.1",
        "--cp-ring-balance-microbatches",
        "--batch-invariant-mode",
    ]
    lines = rejections_of(*BASE, *CP4, *wrong)
    assert len(lines) == 3 and all(any(word in line for line in lines) for word in wrong[::2])


@pytest.mark.parametrize(
    "settings, arguments, message",
    [
        ({}, {"attention_type": "cross"}, "supports self attention; layer 1 is cross attention"),
        ({}, {"cp_comm_type": "pigeon"}, "--cp-comm-type pigeon is unknown: give p2p"),
        ({}, {"attn_mask_type": "arbitrary"}, "mask types causal and no_mask, not arbitrary"),
        ({}, {"num_splits": 2}, "does not know these core attention arguments: num_splits"),
        (
            {"softmax_type": "sigmoid"},
            {},
            "--softmax-type vanilla, off-by-one, learnable, not sigmoid",
        ),
        ({"fp8_dot_product_attention": True}, {}, "does not support fp8_dot_product_attention"),
        ({"attn_logit_softcapping": 50.0}, {}, "does not support attn_logit_softcapping"),
        (
            {"fp8_multi_head_attention": True},
            {},
            "does not support fp8_dot_product_attention and fp8_multi_head_attention",
        ),
        ({"window_size": (3, 1)}, {}, "a causal layer sees nothing after its own position"),
    ],
)
def test_layers(one_rank, settings, arguments, message):
    core_attention()
    assert message in refused(ConfigError, core_attention, None, settings, **arguments)


@pytest.mark.parametrize(
    "inputs, message",
    [
        (
            {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
            "the batch holds an attention mask",
        ),
        ({"attention_bias": torch.ones(1, 4, 8, 8)}, "does not support an attention bias"),
        ({"attn_mask_type": "arbitrary"}, "mask types causal and no_mask, not arbitrary"),
        ({"attn_mask_type": "padding_causal"}, "causal and no_mask, not padding_causal"),
        ({"alibi_slopes": torch.ones(4)}, "does not know these inputs: alibi_slopes"),
    ],
)
def test_inputs(one_rank, inputs, message):
    attention = core_attention()
    q = torch.randn(8, 1, 4, 8)
    assert attention(q, q, q).shape == (8, 1, 32)
    assert message in refused(ConfigError, attention, q, q, q, **inputs)


@pytest.mark.parametrize(
    "options, whole_rows, flag",
    [
        ({"document_mask": True}, False, "--cp-ring-document-mask"),
        ({"mask_kinds": "images"}, False, "--cp-ring-mask-kinds"),
        ({}, True, "--dataloader-inter-document-masking or --sft"),
    ],
)
def test_documents_that_a_pipeline_stage_has_lost(one_rank, options, whole_rows, flag):
    """A layer without packed_seq_params would attend to whole batch rows."""
    configure(Options.make(enabled=True, **options), whole_rows=whole_rows)
    attention, q = core_attention(), torch.randn(8, 1, 4, 8)
    line = refused(ConfigError, attention, q, q, q)
    assert line.startswith(f"{flag}: layer 1 got a microbatch without")


def test_documents_in_a_graph_that_would_repeat_them(one_rank, monkeypatch):
    """Of a program, whose flags do not say that its batches have documents."""
    attention, q = core_attention(), torch.randn(8, 1, 4, 8)
    packed = DocumentParams.carry(Documents.in_rows(np.array([0, 3, 8]), 1, 1))
    assert attention(q, q, q).shape == attention(q, q, q, packed_seq_params=packed).shape
    monkeypatch.setattr(planned, "capturing", lambda device: True)
    attention(q, q, q)
    assert "layer 1: a CUDA graph would repeat the documents" in refused(
        ConfigError, attention, q, q, q, packed_seq_params=packed
    )


def test_double_backward(one_rank):
    q = torch.randn(8, 1, 4, 8, requires_grad=True)
    total = core_attention()(q, q, q).square().sum()
    assert "no second derivative" in refused(
        ConfigError, torch.autograd.grad, total, q, create_graph=True
    )


@pytest.mark.parametrize("flags", [[], ["--transformer-impl", "transformer_engine"]])
def test_layers_of_a_package_that_is_not_there(parse, rejections_of, monkeypatch, flags):
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: False)
    line = [*TINY, "--train-iters", "1", "--cp-ring", *flags]
    (error,) = rejections_of(*line)
    assert error.startswith("transformer_impl: transformer_engine") and '".[te]"' in error
    for accepted in (["--transformer-impl", "local"], ["--spec", "json", "loads"]):
        assert parse(*TINY, "--train-iters", "1", "--cp-ring", *accepted)
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    assert parse(*line).transformer_impl == "transformer_engine"


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="--cp-ring-cpu is inert where CUDA is present"
)
def test_the_cpu_runtime_needs_one_flag(parse):
    args = parse(*BASE)
    assert (args.distributed_backend, args.transformer_impl, args.use_cpu_initialization) == (
        "gloo",
        "local",
        True,
    )
    assert not args.masked_softmax_fusion and not args.gradient_accumulation_fusion
    assert not args.gradient_reduce_div_fusion  # gloo has no such reduction


def test_graphs_without_cuda(rejections_of):
    (line,) = rejections_of(*BASE, "--cuda-graph-impl", "local")
    assert line.endswith("local needs CUDA, and --cp-ring-cpu runs without it: give none")
    (line,) = rejections_of(*BASE, "--enable-cuda-graph")
    assert line.endswith("graph needs CUDA, and --cp-ring-cpu runs without it: leave it out")


def test_a_file_that_replaces_the_flags(rejections_of, tmp_path):
    (line,) = rejections_of(*BASE, f"--yaml-cfg={tmp_path}/job.yaml")
    assert line.endswith(
        "--yaml-cfg replaces all flags, those of cp_ring too: give its values as flags"
    )


def test_an_empty_data_set(rejections_of, tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"corpus{suffix}").touch()
    corpus = f"{tmp_path}/corpus"
    flags = [*MODEL, *TRAIN, "--cp-ring", "--train-iters", "1", "--data-path", corpus]
    lines = rejections_of(*flags)
    assert any(f"--data-path {corpus}: {corpus}.idx is empty" in line for line in lines)


def test_nothing_to_load_is_one_line(parse, capsys, tmp_path):
    parse(*BASE, "--load", str(tmp_path / "typo"))
    said = capsys.readouterr().out
    assert f"cp_ring: --load {tmp_path}/typo has no checkpoint: training begins at" in said
    (tmp_path / "iter_0000002").mkdir()
    parse(*BASE, "--load", str(tmp_path))
    assert "has no checkpoint" not in capsys.readouterr().out


def test_another_choice_of_kernel_is_not_dropped_in_silence(parse, capsys, monkeypatch):
    parse(*BASE, "--attention-backend", "auto")
    assert "--attention-backend" not in capsys.readouterr().out
    parse(*BASE, "--attention-backend", "flash")
    assert (
        "cp_ring: --attention-backend flash has no effect on ring attention: --cp-ring-kernel"
        in capsys.readouterr().out
    )


LATE = """
import os, signal
if os.environ.get("RANK") == "{late}":
    signal.pause()
"""


@pytest.mark.ci
@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rejected_once_by_a_launched_job(tmp_path, late):
    """Whichever rank comes first prints the line, and the summary of torch's launcher has it; the
    other one never gets there.
    """
    (tmp_path / "sitecustomize.py").write_text(LATE.format(late=late))
    command = ["-m", "cp_ring.pretrain_gpt", *BASE, *CP2, "--window-size", "16,4"]
    done = launch(2, command, python_path=str(tmp_path))
    assert done.returncode != 0
    assert done.stdout.count("cp_ring: error: ") == 1, done.stdout
    assert "exitcode  : 2" in done.stdout
    assert done.stdout.count("give 16,0") == 2, done.stdout  # the line, and the summary


@pytest.mark.parametrize(
    "flags",
    [
        "--cp-ring-mask-kinds images --multi-latent-attention",
        "--cp-ring-mask-kinds images --micro-batch-size 2",
        "--cp-ring-layout balanced --cp-ring-document-mask --micro-batch-size 2",
        "--dataloader-inter-document-masking --context-parallel-size 2",
        "--sft --position-embedding-type mrope --mrope-section 2 3 3",
    ],
)
def test_the_fused_rotary_embedding_is_off_where_a_token_has_several_positions(
    parse, capsys, flags
):
    args = parse(*BASE, "--global-batch-size", "8", *flags.split())  # the CPU has no fused one
    notes._noted.clear()
    for _ in range(2):  # Megatron parses a command line more than once
        args.apply_rope_fusion = True
        resolve.check_attention(args, Options.from_args(args))
        assert args.apply_rope_fusion is False
    assert capsys.readouterr().out.count("is switched off (--no-rope-fusion)") == 1


def test_megatrons_own_objections_are_one_line_and_ours_stay_as_they_are():
    def said(error):
        with (
            pytest.raises(ConfigError) as stop,
            rejection.megatrons_rejections(),
        ):
            raise error
        return str(stop.value)

    assert (
        said(AssertionError("--a is not\n   for --b"))
        == "Megatron rejects these flags: --a is not for --b"
    )
    assert said(ConfigError("ours")) == "ours" and "raise error (" in said(AssertionError())


@pytest.mark.parametrize("sft", [True, False])
def test_a_split_without_documents_is_rejected(parse, rejections_of, tmp_path, sft):
    """Megatron's data sets divide by zero after training, or count epochs of nothing for ever."""
    if sft:
        (tmp_path / "talks.jsonl").write_text("{}\n" * 40)
        data = ["--sft", "--data-path", str(tmp_path / "talks.jsonl")]
    else:
        builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"))
        for _ in range(40):
            builder.add_document([1, 2, 3], [3])
        builder.finalize(str(tmp_path / "data.idx"))
        (tmp_path / "data").mkdir()  # of Megatron's cache
        data = ["--data-path", str(tmp_path / "data")]
    flags = [*(x for x in BASE if x != "--mock-data"), *CP2, *data]
    (line,) = rejections_of(*flags, "--split", "969,30,1")
    assert line.startswith("--split 969,30,1 leaves test none of the 40 documents of --data-path")
    assert line.endswith("give --split 100,0,0 and --eval-iters 0, or more documents")
    for right in (["--split", "100,0,0"], ["--split", "80,10,10"]):
        parse(*flags, *right)
    path, elsewhere = flags.pop(), "s3://bucket/data"
    (of_blend,) = rejections_of(*flags, "1", elsewhere, "2", path, "--split", "969,30,1")
    assert of_blend == line
    parse(*flags, elsewhere)


SLIPS = {
    # assertions of Megatron's that have no text
    "--save checkpoints": "assert args.save_interval is not None",
    "--weight-decay-incr-style linear": "assert args.start_weight_decay is not None",
    "--ckpt-convert-format torch": "assert args.ckpt_convert_save is not None",
    "--save here --save-interval 2 --save-retain-interval 3": "assert args.save_retain_interval % ",
    "!--micro-batch-size": "assert args.micro_batch_size is not None",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 2 --train-samples 9 !--train-iters": "expected sample-",
    # what argparse says
    "--micro-batch-sise 1": "did you mean --micro-batch-size in place of --micro-batch-sise?",
    "--context-paralel-size 2": "did you mean --context-parallel-size in place of",
    "--num-layers two": "argument --num-layers: 'two' is not a whole number",
    "--lr fast": "argument --lr: 'fast' is not a number",
    "--position-embedding-type ropee": "argument --position-embedding-type: invalid choice: 'ropee'",
    "--hidden-size": "argument --hidden-size: expected one argument",
    "--cp-ring-layuot zigzag": "did you mean --cp-ring-layout in place of --cp-ring-layuot?",
    # what cp_ring says
    "--cp-ring-layout zigzagg": "--cp-ring-layout 'zigzagg'",
    "--cp-ring-kernel magic": "--cp-ring-kernel 'magic'",
    "--cp-ring-heads 3": "--cp-ring-heads 3",
    "--data-path /nowhere !--mock-data": "--data-path /nowhere: /nowhere.idx does not exist",
    # what Megatron says
    "--seq-length 130": "seq-length should be a multiple of 2 * context-parallel-size",
    "--hidden-size 66": "assert args.hidden_size % args.num_attention_heads == 0",
    "--tensor-model-parallel-size 0": "integer modulo by zero",
    "--hierarchical-context-parallel-sizes 2 4": "prod(args.hierarchical_context_parallel_sizes)",
    "--pipeline-model-parallel-size 3": "world size (4) is not divisible by",
    "--context-parallel-size 3": "(total_model_size=3): start a multiple of tensor x pipeline x",
    "--save checkpoints --load x": "is not None (/",
    "--save /proc/saves --save-interval 2": "--save /proc/saves cannot be written (No such file or",
    "--save /etc/hostname --save-interval 2": "--save /etc/hostname cannot be written (Not a dir",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_flags_is_one_line_that_says_what_to_change(parse, capsys, slip):
    from megatron.training.arguments import validate_args

    flags = [*BASE, *CP2]
    for word in slip.split():
        if word.startswith("!"):
            place = flags.index(word[1:])
            del flags[place : place + (1 if word == "!--mock-data" else 2)]
    flags += [word for word in slip.split() if not word.startswith("!")]
    with pytest.raises(SystemExit) as stop:
        validate_args(parse(*flags), {})
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stop.value.code == 2 and len(said) == 1, said
    assert said[0].startswith("cp_ring: error: ") and SLIPS[slip] in said[0], said


def test_a_tiny_model_that_megatron_cannot_build_is_rejected(monkeypatch):
    """Without --cp-ring: Megatron's own context parallelism, where TransformerEngine is missing."""
    from cp_ring.megatron.certificate import tiny_model

    def build(*_):
        raise AssertionError("only supported by TEDotProductAttention!")

    configure(Options())
    monkeypatch.setattr(tiny_model, "tiny_args", lambda *_: (None, None))
    for name in ("group_of_this_rank", "arguments_in_force"):
        monkeypatch.setattr(tiny_model, name, lambda *_: nullcontext())
    monkeypatch.setattr(tiny_model, "one_stage", lambda *_: {})
    monkeypatch.setattr(tiny_model, "build", build)
    assert "TEDotProductAttention!: give --cp-ring, or" in refused(
        ConfigError, tiny_model.core_classes, SimpleNamespace(params_dtype=None), None, []
    )
