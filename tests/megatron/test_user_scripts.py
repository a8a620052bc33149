"""Ring attention by layer specification, and Megatron-LM's own pretrain_gpt.py where a checkout of
it is given.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import megatron.core
import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from cp_ring.errors import ConfigError
from tests.certificate.checkouts import EXPERTS_ON_TP, version_of
from tests.megatron import documents as corpora
from tests.megatron.launch import TINY, attempt, launch
from tests.parity.models import EXPERTS, LATENT, QWEN, REFERENCE, SPARSE
from tests.rings import refused

FLAGS = [
    *TINY,
    *shlex.split("--train-iters 5 --log-interval 1 --eval-iters 1 --eval-interval 3 --cp-ring-cpu"),
]
SCRIPT, UNREAD = "pretrain_gpt.py", "dataloader_inter_document_masking"
CP = "--context-parallel-size"
BY_SPEC = ["--spec", "cp_ring.megatron.specs", "gpt_local"]


def losses(flags, ranks, checkout, folder, usual=FLAGS, script=SCRIPT):
    """Those of the script's five steps and of validation, or why it is rejected."""
    assert checkout in Path(megatron.core.__file__).parents, "not first on PYTHONPATH"
    job = [str(checkout / script), *flags]
    done = attempt(ranks, "job", job, Path(mkdtemp(dir=folder)), usual)
    assert done.rejected or not done.code, done.output
    return done.rejected or done.losses + done.validation


RING, ON_TP = ["--cp-ring"], ["--tensor-model-parallel-size", "2", CP, "2"]
# flags; of the baseline, of the job under test; whether tensor-parallel ranks draw the same weights
MODELS = {
    "small": ("", "", "", True),
    "moe": (f"{EXPERTS} {EXPERTS_ON_TP}", "", "", True),
    "mtp": ("--mtp-num-layers 2", "", "", True),
    # stock gradients of latents depend on the tensor-parallel size
    "mla": (LATENT, REFERENCE, "", False),
    "documents": (
        "--eod-mask-loss",
        "--reset-attention-mask --reset-position-ids",
        "--dataloader-inter-document-masking",
        True,
    ),
    "qwen3_next": (QWEN, REFERENCE, "", False),
    # with relu, scores near 0 are many, and rounding would decide between some
    "sparse": (
        f"{SPARSE} --no-dsa-indexer-scoring-relu --calculate-per-token-loss",
        "",
        "",
        False,
    ),
}


LATER = ("documents", "sparse")


def usual_flags(model, folder):
    """Multi-latent attention has no groups of heads; documents end within batch rows."""
    flags = " ".join(FLAGS)
    if model in ("mla", "sparse"):
        flags = flags.replace("--group-query-attention --num-query-groups 2", "")
    if model == "documents":
        flags = flags.replace("--mock-data", f"--data-path {corpora.write(folder / model)}")
    return flags.split()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_pretrain_gpt_of_megatron_lm(megatron_lm, tmp_path, model):
    """Training and validation losses on 1, 2 and 4 ranks are those of one rank without ring
    attention.
    """
    common, baseline, own, on_tp = MODELS[model]
    flags, usual = common.split(), usual_flags(model, tmp_path)
    if model in LATER and Version(version_of(megatron_lm)) < Version("0.19"):
        pytest.skip("no such flags")
    run = functools.partial(losses, checkout=megatron_lm, folder=tmp_path, usual=usual)
    stock = run([*flags, *baseline.split()], 1)
    assert stock[0] - stock[4] > 1e-3
    jobs = [([*RING, CP, str(ranks)], ranks) for ranks in (1, 2, 4)]
    jobs += [([*RING, *ON_TP], 4)] * on_tp
    if model == "small":  # Megatron's branch dev takes nothing else for local layers
        gathers = hasattr(TransformerConfig, "fallback_to_eager_attn")
        jobs.append(([*BY_SPEC, CP, "2", *["--cp-comm-type", "all_gather"] * gathers], 2))
    read = model != "documents" or UNREAD in (megatron_lm / SCRIPT).read_text()
    for ring, ranks in jobs:
        found = run([*flags, *ring, *own.split()], ranks)
        if read:
            assert found == pytest.approx(stock, rel=1e-6), ring
        else:
            assert "of Megatron's branch dev loses the documents of its rows" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["--num-layers-per-virtual-pipeline-stage 1", "--micro-batch-size 2"]
)
def test_stages_without_rows_of_megatron_lm(megatron_lm, tmp_path, more):
    """Where the script itself fails, and cp_ring's own entry trains."""
    text = (megatron_lm / SCRIPT).read_text()
    if text.count(UNREAD) != 3:
        pytest.skip("a script that does not read the flag, or builds rows for all stages")
    flags = shlex.split(
        f"--num-layers 4 --pipeline-model-parallel-size 2 {more} --{UNREAD.replace('_', '-')}"
    )
    usual, script = usual_flags("documents", tmp_path), str(megatron_lm / SCRIPT)
    stock = attempt(2, "stock", [script, *flags], tmp_path, usual)
    assert stock.code not in (0, 2) and not stock.losses, stock.output
    found = losses([*flags, *RING], 2, megatron_lm, tmp_path, usual)
    assert "does not give each pipeline stage its packed rows: run cp_ring.pretrain_gpt" in found
    own = attempt(2, "own", [*flags, *RING], tmp_path, usual)
    assert len(own.losses) == 5, own.output


VLM = """
    --img-h 28 --img-w 28 --patch-dim 14 --ckpt-format torch --calculate-per-token-loss
    --dataloader-seq-length 64
"""


@pytest.mark.slow
def test_pretrain_vlm_of_megatron_lm(megatron_lm, tmp_path):
    """Images before text: the losses of two ranks, that share the text, are those of one rank of
    stock Megatron.
    """
    run = functools.partial(losses, checkout=megatron_lm, folder=tmp_path, script="pretrain_vlm.py")
    stock, found = run(VLM.split(), 1), run([*VLM.split(), *RING, CP, "2"], 2)
    assert found == pytest.approx(stock, rel=1e-6)


HOOK = Path(__file__).parents[2] / "docs" / "upstream" / "core_attention.diff"


@pytest.mark.slow
def test_a_hook_for_core_attention_of_megatron_lm(megatron_lm, tmp_path):
    """With the diff of docs/upstream.md the ring trains by Megatron's own flag."""
    if Version(version_of(megatron_lm)) < Version("0.20.dev0"):
        pytest.skip("the diff is for main")
    shutil.copytree(megatron_lm / "megatron", tmp_path / "megatron")
    for script in megatron_lm.glob("*.py"):
        shutil.copy(script, tmp_path)
    subprocess.run(["git", "apply", str(HOOK)], cwd=tmp_path, check=True)
    path = f"{tmp_path}:{HOOK.parents[2]}"
    (own,) = tmp_path.rglob("test_core_attention_provider.py")
    tested = [sys.executable, "-m", "pytest", "-c", "/dev/null", str(own)]
    subprocess.run(tested, env={**os.environ, "PYTHONPATH": path}, check=True)
    ring = ["--core-attention", "cp_ring.megatron.adapter.attention:RingDotProductAttention"]
    job = ["-m", "cp_ring.run", str(tmp_path / SCRIPT), *FLAGS, "--calculate-per-token-loss"]
    found = [
        [
            float(loss)
            for loss in re.findall(
                r"lm loss: (\S+)", launch(cp, [*job, *more, CP, str(cp)], python_path=path).stdout
            )
        ]
        for cp, more in ((1, []), (1, ring), (2, ring))
    ]
    assert len(found[0]) == 5
    assert found[1] == pytest.approx(found[0], rel=1e-6) == found[2]


GRPO = """
    --train-iters 3 --cp-ring --cp-ring-cpu --perform-rl-step --grpo-prompts-per-step 4
    --grpo-group-size 2 --grpo-iterations 1 --no-create-attention-mask-in-dataloader
    --transformer-impl local --no-load-optim --no-load-rng --cp-ring-certify on
"""


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_train_rl_of_megatron_lm(megatron_lm, tmp_path, packed):
    """Reinforcement learning from drawn rollouts, packed and one by one: losses and gradients are
    those of one rank.
    """
    module = megatron_lm / "megatron" / "rl" / "rl_utils.py"
    if not module.exists() or "_scatter_for_context_parallel" not in module.read_text():
        pytest.skip("a script without context parallelism")
    bins = "--rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin 8"
    job = [str(Path(__file__).parent / "rl_script.py"), *shlex.split(GRPO + bins * packed)]

    found = []
    for cp in (1, 2, 4):
        done = attempt(cp, "job", [*job, CP, str(cp)], Path(mkdtemp(dir=tmp_path)))
        assert len(done.losses) == 3 and all(norm > 0.1 for norm in done.grad_norms), done.output
        found.append(done.losses + done.grad_norms)
        assert found[-1] == pytest.approx(found[0], rel=1e-5, abs=1e-7), cp


SHAPES = [
    ["--cp-comm-type", "a2a"],
    shlex.split("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    ["--cp-comm-type", "all_gather"],
    ["--cp-comm-type", "p2p", "a2a"],  # by layer
]


@pytest.mark.slow
def test_shapes_of_pretrain_gpt_of_megatron_lm(megatron_lm, tmp_path):
    """Megatron's own flags for the shape of context parallelism, on 4 ranks: the losses of one rank
    of stock Megatron.
    """
    stock = losses([], 1, megatron_lm, tmp_path)
    for flags in SHAPES:
        found = losses(["--cp-ring", CP, "4", *flags], 4, megatron_lm, tmp_path)
        assert found == pytest.approx(stock, rel=1e-6), flags


def arguments(**values):
    usual = {
        "num_experts": None,
        "moe_grouped_gemm": False,
        "qk_layernorm": False,
        "multi_latent_attention": False,
    }
    return SimpleNamespace(
        **usual | {"qk_l2_norm": False, "normalization": "RMSNorm", "moe_layer_freq": 1} | values
    )


def test_a_specification_by_flags(monkeypatch):
    import megatron.training
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec

    from cp_ring.megatron.adapter.attention import RingDotProductAttention
    from cp_ring.megatron.specs import gpt_local

    def parts(**values):
        monkeypatch.setattr(megatron.training, "get_args", lambda: arguments(**values))
        attention = gpt_local.submodules.self_attention
        assert attention.submodules.core_attention is RingDotProductAttention
        mlp = gpt_local.submodules.mlp
        return attention, getattr(mlp, "module", mlp)

    assert isinstance(gpt_local, ModuleSpec)
    attention, _ = parts()
    assert attention.submodules.q_layernorm is IdentityOp
    attention, _ = parts(qk_layernorm=True)
    assert attention.submodules.q_layernorm is not IdentityOp
    assert issubclass(parts(multi_latent_attention=True)[0].module, MLASelfAttention)
    assert parts(num_experts=4)[1] is not MLP
    assert parts(num_experts=4, moe_layer_freq=[1, 1])[1] is not MLP
    alike = "makes every layer alike, of softmax attention, whatever"
    out = "says: leave --spec out and give --cp-ring"
    alone = "does not support"
    for values, line in (
        ({"num_experts": 4, "moe_layer_freq": [0, 1]}, f"{alike} --moe-layer-freq {out}"),
        (
            {"experimental_attention_variant": "dsa"},
            f"{alike} --experimental-attention-variant {out}",
        ),
        (
            {"heterogeneous_layers_config_path": "x.json"},
            f"{alike} --heterogeneous-layers-config-path {out}",
        ),
        (
            {"context_parallel_size": 2, "dataloader_inter_document_masking": True},
            f"{alone} --dataloader-inter-document-masking: give --cp-ring",
        ),
        (
            {"context_parallel_size": 2, "mtp_num_layers": 1, "transformer_impl": "local"},
            f"{alone} --mtp-num-layers: give --cp-ring",
        ),
    ):
        told = refused(ConfigError, parts, **values)
        assert told.startswith("--spec cp_ring.megatron.specs ") and line in told
    parts(context_parallel_size=2, mtp_num_layers=1, transformer_impl="local", cp_ring=True)
