"""What cannot run is rejected before any process group exists: one line that names the flag, and
exit code 2.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cp_ring import Layout, Mask, Options, patches, run
from cp_ring.errors import ConfigError
from cp_ring.megatron import compat, rejection, settings
from cp_ring.megatron.flags import (
    argument_parser,
    attention_rules,
    comm_types,
    implementations,
    rules,
    validate,
)
from cp_ring.megatron.flags.rule import Job, problem
from cp_ring.tools import job as config
from tests.megatron.launch import DATA, FULL, MODEL, TINY, TRAIN, fork, launch

CP4 = ["--context-parallel-size", "4"]
SCOPE = "--cuda-graph-scope"  # another name of --cuda-graph-modules
BASE = [*TINY, "--train-iters", "1", "--cp-ring", "--cp-ring-cpu"]


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Parses flags with Megatron's own patched parser, as rank 0 of 4, in a job of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    patches.get("arguments").apply()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    before, layers = settings.current(), settings.layer_windows()

    def parse_flags(*flags):
        from megatron.training.arguments import parse_args

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags])
        return parse_args()

    yield parse_flags
    settings.configure(before, layers=layers)
    patches.get("arguments").revert()


EXAMPLES = [
    (rule, example)
    for part in rules.TABLE.values()
    for rule in part
    for example in filter(None, rule.example.split(" / "))
]


def rejections_of(parse, capsys, *flags):
    """The lines with which the flags are rejected."""
    new = "--dataloader-inter-document-masking"
    if new in flags and new not in argument_parser.build_parser()._option_string_actions:
        pytest.skip("this Megatron has no such flag")
    with pytest.raises(SystemExit) as stop:
        parse(*flags)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("cp_ring")]
    assert stop.value.code == 2 and not torch.distributed.is_initialized()
    assert lines and all(line.startswith("cp_ring: error: ") for line in lines)
    return [line.removeprefix("cp_ring: error: ") for line in lines]


def rejection_of(parse, capsys, *flags):
    """The one line with which the flags are rejected."""
    (line,) = rejections_of(parse, capsys, *flags)
    return line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from megatron.core.models.T5 import T5Model\nfrom pretrain_gpt import loss", "T5"),
        ("def build():\n    import megatron.core.models.bert.bert_model", "BERT"),
        ("from megatron.core.models.T5 import a\nfrom megatron.core.models.bert import b",
         "T5 and BERT"),
        ("from megatron.core.models.gpt import GPTModel\nimport megatron.core.models.T5", ""),
        ("from . import models\nfrom megatron.core import models", ""),
        ("not Python", ""),
    ],
)  # fmt: skip
def test_a_script_of_models_without_causal_self_attention(tmp_path, monkeypatch, text, found):
    script = tmp_path / "train.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # without any flag
    line = f"{script} builds {found} models, which have padding masks or cross attention"
    for enabled in (True, False):
        job = Job(argparse.Namespace(script=script), Options.make(enabled=enabled))
        assert problem(job, rules.SCRIPT).startswith(line) is bool(found and enabled)
        rejecting = pytest.raises(ConfigError, match=re.escape(line))
        with rejecting if found and enabled else contextlib.nullcontext():
            run._check_batches(script, Options.make(enabled=enabled))


CP2 = ["--context-parallel-size", "2"]
# of a checkout: flags, and how the line begins
SCRIPTS = {
    "t5": ("", "{script} builds T5 models, which have padding masks"),
    "bert": ("", "{script} builds BERT models, which have padding masks"),
    "hybrid": ("--hybrid-layer-pattern M*-*", "--hybrid-layer-pattern M*-*: its layers need Trans"),
    "vlm": ("--cp-ring-certify off", "rank 0: AssertionError: Only ckpt-format torch is supported"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_such_scripts_of_checkouts_end_in_one_line(megatron_lm, tmp_path, name):
    if not megatron_lm:
        pytest.skip("--megatron-lm names no checkout")
    for checkout in map(Path, megatron_lm):
        (script,) = checkout.rglob(f"pretrain_{name}.py")
        flags, expected = SCRIPTS[name]
        command = [str(script), *BASE, *CP2, *flags.split()]
        done = launch(2, ["-m", "cp_ring.run", *command], python_path=str(checkout))
        lines = [line for line in done.stdout.splitlines() if line.startswith("cp_ring: error: ")]
        assert len(lines) == 1, done.stdout
        assert lines[0].startswith(f"cp_ring: error: {expected.format(script=script)}")
        assert done.stdout.index(lines[0]) < done.stdout.index("Traceback")  # torch's launcher's


def test_a_variant_of_attention_that_is_not_known():
    args = {"experimental_attention_variant": "dsv4_hybrid", "num_layers": 2}
    line = problem(Job(argparse.Namespace(**args)), validate.attention_rules.ATTENTION)
    assert line.startswith(
        "--cp-ring does not support --experimental-attention-variant dsv4_hybrid: leave it out"
    )


def test_sparse_attention_takes_packed_documents_alone():
    args = {"experimental_attention_variant": "dsa", "num_layers": 2, "cp_comm_type": "all_gather"}
    args |= {"context_parallel_size": 2, "seq_length": 64, "sft": True}
    for own in ({}, {"document_mask": True}, {"mask_kinds": "documents"}):
        job = Job(argparse.Namespace(**args), Options.make(enabled=True, **own))
        line = problem(job, validate.attention_rules.ATTENTION)
        assert ("sparse attention does not support" in line) is bool(own), line


@pytest.mark.parametrize(
    ("more", "own", "found"),
    [
        ({}, {}, ""),
        ({"cp_comm_type": ["p2p", "all_gather"]}, {}, ""),
        ({}, {"wire": "int8"}, "does not support --cp-ring-wire int8"),
        ({}, {"wire": "latent"}, ""),
        ({}, {"heads": 2}, ""),
        ({"dsa_kernel_backend": "cudnn"}, {}, ""),
    ],
)
def test_sparse_attention_is_split_as_megatron_splits_it(more, own, found):
    args = {"experimental_attention_variant": "dsa", "num_layers": 2, "context_parallel_size": 2}
    job = Job(argparse.Namespace(**args | more), Options.make(enabled=True, **own))
    line = problem(job, validate.attention_rules.ATTENTION)
    assert found in line if found else not line, line


@pytest.mark.parametrize(
    ("installed", "spec", "letters", "found"),
    [
        ((), None, "M*-", "TransformerEngine"),
        (("transformer_engine",), None, "M*-", "mamba-ssm"),
        (("transformer_engine",), ["megatron.core.x", "spec"], "G*", "flash-linear-attention"),
        (("transformer_engine", "mamba_ssm", "fla"), None, "MG*-", ""),
        (("transformer_engine",), None, "*-", ""),
        ((), ["own.specs", "spec"], "M*-", ""),
        ((), None, "", ""),
    ],
)
def test_layers_of_packages_that_are_not_installed(monkeypatch, installed, spec, letters, found):
    there = dict.fromkeys(installed, "a spec")
    monkeypatch.setattr(implementations.importlib.util, "find_spec", there.get)
    job = Job(argparse.Namespace(hybrid_layer_pattern=letters, spec=spec))
    line = f"--hybrid-layer-pattern {letters}: its layers need {found}, which is not installed"
    assert problem(job, rules.INSTALLED).startswith(line) is bool(found)


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_each_rule(parse, capsys, rule, example):
    """Its examples are rejected with its line; each flag that it names is one of Megatron's or of
    cp_ring's, and is shown.
    """
    on_a_gpu = {"--transformer-impl"} & set(example.split())
    ring = [] if "--no-cp-ring" in example else ["--cp-ring"]
    flags = [word for word in example.split() if word != "--no-cp-ring"]
    lines = rejections_of(
        parse,
        capsys,
        *TINY,
        "--train-iters",
        "1",
        *ring,
        *["--cp-ring-cpu"] * (not on_a_gpu),
        *flags,
    )
    text = f"{rule.text}: {rule.way_out}" if rule.way_out else rule.text
    parts = re.split(r"\{(.+?)\}", text)
    values = (f"{part} \\S.*" if part[0] == "-" else ".+" for part in parts[1::2])
    wanted = itertools.chain(
        *itertools.zip_longest(map(re.escape, parts[::2]), values, fillvalue="")
    )
    pattern = "".join(wanted)
    assert any(re.fullmatch(pattern, line) and "None" not in line for line in lines)
    known = argument_parser.build_parser()._option_string_actions
    assert {flag for flag in parts[1::2] if flag[0] == "-"} <= set(known)


LATENT = {"cp_ring_wire": "latent"}
WITHOUT_EXAMPLE = [
    ("transformer_impl: transformer_engine", {"transformer_impl": "transformer_engine"}),
    ("--cp-ring does not support {--cp-partition-mode}", {"cp_partition_mode": "contiguous"}),
    ("--cp-ring does not support {--experimental-at", {"experimental_attention_variant": "new"}),
    ("--cp-ring does not support {found}", {"mtp_hsm": True}),
    ("--cp-ring does not support {--megatron-fsdp-version}",
     {"use_megatron_fsdp": True, "megatron_fsdp_version": 2}),
    ("{--cp-ring-wire} needs --multi-latent-attention", LATENT),
    ("{--cp-ring-wire} does not support --cp-ring-heads", LATENT),
    ("{--cp-ring-wire} does not support {found}", LATENT | {"fp8": "hybrid"}),
    ("{--cp-ring-wire} does not support --recompute-granularity",
     LATENT | {"recompute_granularity": "selective"}),
    ("section megatron lacks {found}", {"num_layers": 2}),
    ("--train-iters must be at least 1, or --train-samples", {}),
    ("--lr is missing", {}),
    ("packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, for which",
     {}),
    ("packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which needs",
     {}),
    ("packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which does "
     "not support {--moe", {"moe_aux_loss_coeff": 0.01}),
    ("packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which "
     "models with", {"is_hybrid_model": True}),
    ("{pattern}: its layers need {found}", {"hybrid_layer_pattern": "M*"}),
    ("{script} builds {found} models", {"cp_ring": True, "script": Path("pretrain_bert.py")}),
    ("--cp-ring-document-mask needs cp_ring.pretrain_gpt",
     {"cp_ring_document_mask": True, "script": "a.py"}),
    ("{--cp-ring-layout} needs cp_ring.pretrain_gpt",
     {"cp_ring": True, "cp_ring_layout": "balanced", "script": "a.py"}),
    ("--cp-ring-certify only", {"cp_ring_certify": "only"}),
    ("--cp-ring-balance-microbatches (", {"cp_ring_balance_microbatches": True}),
    ("enable(seq_length=", {"seq_length": 6, "context_parallel_size": 4}),
]  # fmt: skip
"""Rules that no command line alone breaks: how the line begins, and arguments that it rejects."""


@pytest.mark.parametrize(
    "rule",
    [r for part in rules.TABLE.values() for r in part if not r.example],
    ids=lambda r: r.text,
)
def test_each_rule_without_an_example(rule, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("pretrain_bert.py").write_text("from megatron.core.models.bert.bert_model import X\n")
    monkeypatch.setattr(implementations, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(implementations, "lacking", lambda letters, spec: letters and "mamba_ssm")
    given = [arguments for text, arguments in WITHOUT_EXAMPLE if rule.text.startswith(text)]
    assert given
    for arguments in given:
        job = Job(argparse.Namespace(**arguments), Options.from_args(argparse.Namespace(**arguments)),
                  ulysses=2)  # fmt: skip
        (line,) = rule.lines(job)
        assert "None" not in line and "{" not in line
        # and a job of nothing but what is asked for is not rejected by chance
        assert not rule.way_out or line.endswith(rule.way_out.format_map(job))


def test_rules_read_arguments_that_megatron_has():
    """A name that nobody has is None, and its rule would never reject anything."""
    known = argument_parser.build_parser()
    names = (
        {action.dest for action in known._actions}
        | {flag.removeprefix("--").replace("-", "_") for flag in known._option_string_actions}
        | set(dir(Job))
        | {"args", "own", "argv", "ulysses", "found"}
    )
    of_programs = {"members", "exchange", "hops", "heads_of_rank", "key_heads_of_rank", "positions_by_group",
                   "other_layers", "program", "packed", "script", "is_hybrid_model", "build"}  # fmt: skip
    of_other_versions = {"enable_cuda_graph", "hybrid_override_pattern", "cache_mla_latents",
                         "dynamic_context_parallel", "cp_partition_mode", "mtp_hsm",
                         "megatron_fsdp_version"}  # fmt: skip
    assert read_by_rules() - names <= of_programs | of_other_versions


def read_by_rules():
    """The names that rules, and functions with a parameter `job`, read of a job."""
    read = set()
    for part in rules.TABLE.values():
        for each in part:
            fields = re.findall(r"\{([\w-]+)", each.text + each.way_out)
            words = re.split(r"[ |%]|[<>=][^ |]+", each.when) if isinstance(each.when, str) else []
            read |= {name.lstrip("!") for name in [*fields, *words]}
    for module in (rules, attention_rules, comm_types, validate):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            holds = isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "job.holds",
                "job.value",
            )
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("job", "self.job"):
                read.add(node.attr)
            elif holds and node.args and isinstance(node.args[0], ast.Constant):
                words = re.split(r"[ |%]|[<>=][^ |]+", node.args[0].value)
                read |= {word.lstrip("!") for word in words}
    return {name.removeprefix("--").replace("-", "_") for name in read if name}


def test_the_supported_versions_are_those_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"megatron-core[training]{compat.SUPPORTED}"' in text


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--context-parallel-size", "4", "--seq-length", "60"],
         "--seq-length 60 is not divisible by 2 x --context-parallel-size 4 = 8: change either"),
        (["--micro-batch-size", "3", "--global-batch-size", "6"],
         "--global-batch-size 6 is not divisible by --micro-batch-size 3 x 4 data-parallel ranks "
         "= 12: change either"),
        (["--cp-ring-kernel", "magic"], "--cp-ring-kernel 'magic'"),
        (["--cp-ring-layout", "spiral"], "--cp-ring-layout 'spiral'"),
        (["--cp-ring-route", "carrier-pigeon"], "--cp-ring-route 'carrier-pigeon'"),
        (["--cp-ring-num-slots", "1"], "--cp-ring-num-slots '1'"),
        (["--cp-ring-loss-chunk", "-1"], "--cp-ring-loss-chunk '-1'"),
        (["--cp-ring-heads", "0"], "--cp-ring-heads '0'"),
        (["--cp-ring-recompute", "never"], "--cp-ring-recompute 'never'"),
        (["--cp-ring-mask-kinds", "stripes"],
            "--cp-ring-mask-kinds 'stripes': stripes is no kind of mask; known are shared"),
        (["--cp-ring-pack", "loosely"],
            "--cp-ring-pack 'loosely': input should be 'first-fit', 'in-order' or 'fill'"),
        ([*CP4, "--cp-ring-heads", "2", "--cp-ring-schedule", "0,1,2,2"],
            "--cp-ring-schedule 0,1,2,2: 4 hops for 2 ranks"),
        ([*CP4, "--cp-ring-heads", "auto", "--cp-comm-type", "a2a"],
            "--cp-comm-type a2a and --cp-ring-heads auto are mutually exclusive"),
        ([*CP4, "--cp-ring-heads", "auto"], "--cp-ring-heads auto does not support Megatron jobs"),
        (["--cp-ring-heads", "most"], "--cp-ring-heads 'most': "),
        ([*CP4, "--cp-ring-heads", "3"],
            "--cp-ring-heads 3 does not divide the 4 context-parallel"),
    ],
)  # fmt: skip
def test_flags(parse, capsys, flags, line):
    assert rejection_of(parse, capsys, *BASE, *flags).startswith(line)


def test_all_reasons_at_once(parse, capsys):
    """Each in a line, whatever else is wrong."""
    wrong = ["--lr", "-1", "--seq-length", "60"]
    assert rejections_of(parse, capsys, *BASE, *CP4, *wrong) == [
        "--lr -1.0 must be at least 0",
        "--seq-length 60 is not divisible by 2 x --context-parallel-size 4 = 8: change either",
    ]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "num_query_groups=3",
            "megatron.num_attention_heads 8 is not divisible by megatron.num_query_groups 3",
        ),
        (
            "num_attention_heads=9",
            "megatron.num_attention_heads 9 is not divisible by megatron.tensor_model_parallel_size 2",
        ),
        (
            "micro_batch_size=3",
            "megatron.global_batch_size 2 is not divisible by megatron.micro_batch_size 3 x 1 "
            "data-parallel ranks = 3",
        ),
        ("save_interval=0", "megatron.save_interval 0 must be at least 1"),
    ],
)
def test_sizes_of_a_job_before_a_rank_starts(override, named):
    data = [
        "mock_data=true",
        "tokenizer_type=NullTokenizer",
        "vocab_size=255",
        "global_batch_size=2",
    ]
    model = [
        "num_attention_heads=8",
        "group_query_attention=true",
        "num_query_groups=2",
        "hidden_size=144",
        "micro_batch_size=1",
    ]
    ranks = [
        f"megatron.{name}=2" for name in ("tensor_model_parallel_size", "context_parallel_size")
    ]
    job = config.load(
        "quickstart", [*ranks, *(f"megatron.{setting}" for setting in [*data, *model, override])]
    )
    with pytest.raises(ConfigError) as rejected:
        config.megatron_flags(job, None, "cpu")
    lines = rejected.value.args
    assert all(line.startswith("quickstart: ") and "\n" not in line for line in lines)
    assert any(named in line for line in lines)


CONFIG = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}


def core_attention(settings=None, **arguments):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.adapter.attention import RingDotProductAttention

    config = TransformerConfig(**CONFIG, use_cpu_initialization=True)
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    wanted = {
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
    } | arguments
    return RingDotProductAttention(config, **wanted)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, {"attention_type": "cross"}, "supports self attention; layer 1 is cross attention"),
        ({}, {"cp_comm_type": "pigeon"}, "--cp-comm-type pigeon: known are p2p"),
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
    with pytest.raises(ConfigError, match=message):
        core_attention(settings, **arguments)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
@pytest.mark.parametrize(
    ("inputs", "message"),
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
    with pytest.raises(ConfigError, match=message):
        attention(q, q, q, **inputs)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
def test_double_backward(one_rank):
    q = torch.randn(8, 1, 4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(core_attention()(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--recompute-granularity", "selective"],
            "selective of core_attn frees no memory with ring attention",
        ),
        (["--recompute-activations"], "selective of core_attn frees no memory with ring attention"),
        (["--recompute-granularity", "selective", "--recompute-modules", "layernorm"], ""),
        # 128 tokens, 4 heads of 16 in float32 and an lse for each.
        (
            [*FULL],
            f"keeps out and lse of attention, {128 * 4 * (16 * 4 + 4) / 2**20:.3g} MiB per layer "
            "and microbatch",
        ),
        (
            [*FULL, "--context-parallel-size", "2", "--tensor-model-parallel-size", "2", "--bf16"],
            f", {64 * 2 * (16 * 2 + 4) / 2**20:.3g} MiB",
        ),
        ([*FULL, "--cp-ring-recompute", "replay"], ""),
    ],
)
def test_what_is_said_of_recomputation(applied, parse, capsys, monkeypatch, flags, said):
    applied("cpu_runtime")
    from megatron.training.arguments import validate_args

    monkeypatch.setattr(rejection, "_noted", set())
    validate_args(parse(*BASE, *flags))
    spoken = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("cp_ring: ") and "recompu" in line
    ]
    assert len(spoken) == bool(said) and all(said in line for line in spoken)


@pytest.mark.parametrize("flags", [[], ["--transformer-impl", "transformer_engine"]])
def test_layers_of_a_package_that_is_not_there(parse, capsys, monkeypatch, flags):
    monkeypatch.setattr(implementations, "has_transformer_engine", lambda: False)
    line = [*TINY, "--train-iters", "1", "--cp-ring", *flags]
    with pytest.raises(SystemExit) as stop:
        parse(*line)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert (
        error.startswith("cp_ring: error: transformer_impl: transformer_engine")
        and '".[te]"' in error
    )
    for accepted in (["--transformer-impl", "local"], ["--spec", "json", "loads"]):
        assert parse(*TINY, "--train-iters", "1", "--cp-ring", *accepted)
    monkeypatch.setattr(implementations, "has_transformer_engine", lambda: True)
    assert parse(*line).transformer_impl == "transformer_engine"


def test_whether_transformer_engine_is_there(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not implementations.has_transformer_engine()
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(
        "raise OSError('it must not be imported')"
    )
    importlib.invalidate_caches()
    assert implementations.has_transformer_engine()


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


def test_an_empty_data_set(parse, capsys, tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"corpus{suffix}").touch()
    with pytest.raises(SystemExit):
        parse(
            *MODEL,
            *TRAIN,
            "--cp-ring",
            "--train-iters",
            "1",
            "--data-path",
            str(tmp_path / "corpus"),
        )
    assert (
        f"--data-path {tmp_path}/corpus: {tmp_path}/corpus.idx is empty" in capsys.readouterr().err
    )


def test_another_choice_of_kernel_is_not_dropped_in_silence(parse, capsys, monkeypatch):
    monkeypatch.setattr(rejection, "_noted", set())
    parse(*BASE, "--attention-backend", "auto")
    assert "--attention-backend" not in capsys.readouterr().out
    parse(*BASE, "--attention-backend", "flash")
    assert (
        "cp_ring: --attention-backend flash has no effect on ring attention: --cp-ring-kernel"
        in capsys.readouterr().out
    )


def test_good_flags_pass_and_come_into_force(parse):
    args = parse(*BASE, "--context-parallel-size", "4", "--cp-ring-num-slots", "3")
    assert args.cp_ring_num_slots == "3" and settings.current().num_slots == 3
    assert not args.create_attention_mask_in_dataloader


@pytest.mark.parametrize(
    "flags",
    [
        ["--cuda-graph-impl", "local", SCOPE, "moe_router"],
        ["--cuda-graph-impl", "transformer_engine", SCOPE, "mlp", "moe_router", "moe_preprocess"],
        ["--cuda-graph-impl", "local", SCOPE, "mlp", "mamba", "--hybrid-layer-pattern", "M*-"],
    ],
)
def test_graphs_without_attention(parse, flags):
    job = Job(parse(*BASE, *flags))
    assert job.graphs and not job.graphs_of_attention


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"dynamic_context_parallel": True}, "--cp-ring does not support a context-parallel size"),
        ({"cp_partition_mode": "contiguous"}, "--cp-ring does not support --cp-partition-mode con"),
        ({"cp_partition_mode": "zigzag"}, ""),
        ({"experimental_attention_variant": "kda"}, "--cp-ring does not support --experimental-a"),
        ({"experimental_attention_variant": "gdn"}, ""),
        ({"mtp_hsm": True}, "--cp-ring does not support --mtp-hsm: leave it out"),
        ({"use_megatron_fsdp": True, "megatron_fsdp_version": 2},
            "--cp-ring does not support --megatron-fsdp-version 2: give 1"),
        ({"use_megatron_fsdp": True, "megatron_fsdp_version": 1}, ""),
    ],
)  # fmt: skip
def test_flags_of_later_versions(values, line):
    found = problem(Job(SimpleNamespace(**values)), rules.ATTENTION)
    assert found.startswith(line) and bool(found) == bool(line)


@pytest.mark.parametrize("version", ["0.18.1", "0.21.0", "0.21.0rc1", None])
def test_megatron_versions_outside_the_range(monkeypatch, version):
    monkeypatch.setattr(compat, "megatron_version", lambda: version)
    with pytest.raises(ConfigError, match=r"--cp-ring needs megatron-core>=0\.18\.2,<0\.21"):
        compat.check_version()


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_megatron_versions_inside_the_range(monkeypatch, version):
    monkeypatch.setattr(compat, "megatron_version", lambda: version)
    assert compat.check_version() == version


LATE = """
import os, signal
if os.environ.get("RANK") == "{late}":
    signal.pause()
"""


@pytest.mark.ci
@pytest.mark.parametrize("late", [0, 1])
def test_rejected_once_by_a_launched_job(tmp_path, late):
    """Whichever rank comes first prints the line, and the summary of torch's launcher has it; the
    other one never gets there.
    """
    (tmp_path / "sitecustomize.py").write_text(LATE.format(late=late))
    flags = [
        *MODEL,
        *DATA,
        *TRAIN,
        "--train-iters",
        "1",
        "--cp-ring",
        "--cp-ring-cpu",
        "--context-parallel-size",
        "2",
    ]
    done = launch(
        2,
        ["-m", "cp_ring.pretrain_gpt", *flags, "--window-size", "16,4"],
        python_path=str(tmp_path),
    )
    assert done.returncode != 0
    assert done.stdout.count("cp_ring: error: ") == 1, done.stdout
    assert "exitcode  : 2" in done.stdout
    assert done.stdout.count("give 16,0") == 2, done.stdout  # the line, and the summary


def rejected_rank(rank, ranks, port, started_by, log):
    """A rank of a job that every rank rejects with a line of its own."""
    folder = log.parent
    place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if started_by == "torchrun":
        place |= {
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_ERROR_FILE": folder / f"{rank}.json",
        }
    elif started_by == "train.sbatch":
        place |= {"TORCHELASTIC_ERROR_FILE": folder / "error.json"}
    os.environ |= {name: str(value) for name, value in place.items()}
    tempfile.tempdir = str(folder)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if started_by == "a process group":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
    with rejection.rejecting():
        raise ConfigError(f"rank {rank} cannot run this")


@pytest.mark.parametrize("started_by", ["torchrun", "train.sbatch", "hand", "a process group"])
def test_one_line_for_each_job(tmp_path, started_by):
    """The launcher kills all ranks as soon as one has ended, twice: what an earlier job has left
    silences no later one.
    """
    log = tmp_path / "log"
    for jobs in (1, 2):
        assert fork(6, (started_by, log), target=rejected_rank) == 2
        (*_, line) = lines = log.read_text().splitlines()
        assert len(lines) == jobs and re.fullmatch(
            r"cp_ring: error: rank \d cannot run this", line
        ), lines
        told = [
            json.loads(path.read_text())["message"]["message"] for path in tmp_path.glob("*.json")
        ]
        assert told == ([line.removeprefix("cp_ring: error: ")] if "t" in started_by[:2] else [])
        for path in (*tmp_path.glob("*.json"), *tmp_path.glob("store")):  # of one start each
            path.unlink()


def test_a_single_process_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stop, rejection.rejecting():
        raise ConfigError("no")
    assert (
        stop.value.code == 2
        and capsys.readouterr().err == "cp_ring: error: no\n"
        and not list(tmp_path.iterdir())
    )


def test_a_package_of_the_name_of_apex_has_no_norm(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    if implementations.has_apex_norm("LayerNorm"):
        pytest.skip("Apex is installed")
    sizes = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "transformer_impl": "local",
    }
    found = problem(Job(SimpleNamespace(**sizes, normalization="LayerNorm")), rules.SIZES)
    assert found.startswith("--sequence-parallel with --transformer-impl local")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cp-ring-mask-kinds", "images", "--multi-latent-attention"],
            "with --multi-latent-attention has different positions",
        ),
        (
            ["--cp-ring-mask-kinds", "images", "--micro-batch-size", "2"],
            "--cp-ring-mask-kinds with --micro-batch-size 2 has",
        ),
        (
            ["--cp-ring-layout", "balanced", "--cp-ring-document-mask", "--micro-batch-size", "2"],
            "--cp-ring-layout balanced with --micro-batch-size 2 has different positions in each "
            "microbatch and batch row",
        ),
        (
            ["--dataloader-inter-document-masking", "--context-parallel-size", "2"],
            "--dataloader-inter-document-masking splits documents all together",
        ),
        (
            ["--sft", "--position-embedding-type", "mrope", "--mrope-section", "2", "3", "3"],
            "mrope_section with packed documents",
        ),
    ],
)
def test_the_fused_rotary_embedding_is_off_where_a_token_has_several_positions(
    parse, capsys, flags, message
):
    args = parse(*BASE, "--global-batch-size", "8", *flags)  # the CPU has no fused one
    rejection._noted.clear()
    for _ in range(2):  # Megatron parses a command line more than once
        args.apply_rope_fusion = True
        validate.check_attention(Job(args))
        assert args.apply_rope_fusion is False
    printed = capsys.readouterr().out
    assert printed.count("is switched off (--no-rope-fusion)") == 1
    assert message in printed


def test_the_fused_rotary_embedding_stays_where_tokens_have_one_position(parse):
    args = parse(*BASE, "--cp-ring-layout", "balanced", "--cp-ring-document-mask")
    args.apply_rope_fusion = True
    validate.check_attention(Job(args))
    assert args.apply_rope_fusion is True


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ([], (((-1, -1), 2),)),
        (["--window-size", "11,0"], (((11, 0), 2),)),
        (["--window-size", "11,0", "--window-attn-skip-freq", "2"], (((11, 0), 1), ((-1, -1), 1))),
        (
            ["--window-size", "11,0", "--window-attn-skip-freq", "[0,1]"],
            (((11, 0), 1), ((-1, -1), 1)),
        ),
        (["--hybrid-layer-pattern", "*-*-*"], (((-1, -1), 3),)),
    ],
)
def test_a_balanced_layout_knows_the_windows_of_all_layers(parse, flags, windows):
    from cp_ring.megatron.plans import make_layout

    parse(*BASE, "--cp-ring-layout", "balanced", *flags)
    assert settings.layer_windows() == windows
    layout = make_layout("balanced", 128, 4)
    expected = Layout.balanced(
        [(Mask.causal(128, window), layers) for window, layers in windows], 4
    )
    assert (layout.owner == expected.owner).all() and (layout.edges == expected.edges).all()


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
    assert said(ConfigError("ours")) == "ours" and "AssertionError in" in said(AssertionError())


SLIPS = {
    # assertions of Megatron's that have no text
    "--save checkpoints": "assert args.save_interval is not None (save_interval None)",
    "--weight-decay-incr-style linear": "assert args.start_weight_decay is not None",
    "--ckpt-convert-format torch": "assert args.ckpt_convert_save is not None",
    "--save here --save-interval 2 --save-retain-interval 3": "assert args.save_retain_interval % ",
    "!--micro-batch-size": "assert args.micro_batch_size is not None (micro_batch_size None)",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 2 --train-samples 9 !--train-iters": "expected sample-",
    # what argparse says
    "--micro-batch-sise 1": "did you mean --micro-batch-size in place of --micro-batch-sise?",
    "--context-paralel-size 2": "did you mean --context-parallel-size in place of",
    "--num-layers two": "argument --num-layers: 'two' is not a whole number",
    "--lr fast": "argument --lr: 'fast' is not a number",
    "--position-embedding-type ropee": "argument --position-embedding-type: invalid choice: 'ropee'",
    "--hidden-size": "argument --hidden-size: expected one argument",
    "--cp-ring-layuot zigzag": "did you mean --cp-ring-layout in place of --cp-ring-layuot?",
    "--cp-ring-verbose": "--cp-ring-verbose left cp_ring",
    # what cp_ring says
    "--cp-ring-layout zigzagg": "--cp-ring-layout 'zigzagg'",
    "--cp-ring-kernel magic": "--cp-ring-kernel 'magic'",
    "--cp-ring-heads 3": "--cp-ring-heads 3",
    "--seq-length 130": "--seq-length 130",
    "--data-path /nowhere !--mock-data": "--data-path /nowhere: /nowhere.idx does not exist",
    "--save /proc/version/here": "--save /proc/version/here: /proc/version is a file",
    # what Megatron says
    "--num-query-groups 3": "--num-query-groups 3",
    "--pipeline-model-parallel-size 3": "world size (4) is not divisible by",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_flags_is_one_line_that_says_what_to_change(parse, capsys, slip):
    from megatron.training.arguments import validate_args

    flags = [*BASE, "--context-parallel-size", "2"]
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


def test_an_assertion_while_the_job_is_set_up_quotes_its_source():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = SimpleNamespace(param_groups=[])
    numbers = dict.fromkeys(
        ("init_lr", "lr_warmup_steps", "start_wd", "end_wd", "wd_incr_steps"), 0
    )
    named = {"max_lr": 1.0, "min_lr": 2.0, "lr_decay_steps": 4, "lr_decay_style": "linear"}
    with pytest.raises(AssertionError) as failed:
        OptimizerParamScheduler(optimizer, **numbers, **named, wd_incr_style="constant")
    line = rejection._objection(failed.value)
    assert line.startswith("Megatron rejects this job: assert ") and "min_lr 2.0" in line


@pytest.mark.parametrize("ends", [False, True])
def test_a_job_that_was_told_to_load_and_starts_anew_says_so(parse, capsys, tmp_path, ends):
    from megatron.training.arguments import validate_args

    flags = [*BASE, "--load", str(tmp_path), *["--exit-on-missing-checkpoint"] * ends]
    validate_args(parse(*flags), {})
    what = "--exit-on-missing-checkpoint ends the job" if ends else "training starts anew"
    line = f"cp_ring: --load {tmp_path}: there is no checkpoint: {what}"
    assert capsys.readouterr().out.count(line) == 1
