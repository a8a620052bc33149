"""Programs without Megatron's command line: `cp_ring.megatron.enable` and what belongs to it, on
megatron.core alone.

`bash launch/test.sh --compat` runs this with each supported version of megatron-core.
"""

import json
from dataclasses import replace

import pytest
import torch

import cp_ring.megatron
from cp_ring import Options, patches
from cp_ring.errors import ConfigError
from cp_ring.megatron import compat, program, settings
from cp_ring.megatron.adapter.config import in_force
from tests.megatron import program_worker
from tests.megatron.launch import fork
from tests.megatron.layers import configuration
from tests.rings import refused

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)


@no_cuda
@pytest.mark.compat
@pytest.mark.ci
def test_a_training_loop_of_its_own_trains_as_without_context_parallelism(tmp_path):
    """docs/examples/megatron_core.py at cp 2 x dp 2 and at dp 4; a wrong split."""
    failed = fork(4, (tmp_path,), target=program_worker.rank)
    assert not failed, (tmp_path / "log").read_text()[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    # what follows is the git revision of the folder around it
    release, _, _ = compat.megatron_version().partition("+")
    assert found["version"].partition("+")[0] == release
    assert (
        found["cp 2"] == pytest.approx(found["cp 1"], rel=1e-5)
        and found["cp 1"][0] - found["cp 1"][2] > 0.1
    )
    assert "tiny model under causal" in found["printed"] and "not covered" not in found["printed"]
    assert found["wrong split"].startswith(
        "--cp-ring-certify: microbatch of 2x128 tokens, causal: label wrong in 128 tokens"
    )
    assert found["wrong labels"].startswith(
        "--cp-ring-certify: microbatch of 2x128 tokens, causal: next token as label wrong in"
    )
    gap = "the program's own microbatches (certify takes one as microbatch=)"
    assert found["packed"] == ["tiny model under packed", gap]
    # a configuration of weights that are loaded leaves those of the tiny model to chance, and one
    # in use has functions of its own model
    assert found["initialized"] and all(found["initialized"])
    wrong = ("wrong packed", "documents dropped", "no gradients")
    probes = ("--cp-ring-certify: tiny model, ", "--cp-ring-certify: microbatch of")
    assert all(found[name].startswith(probes) for name in wrong), found
    assert "give the model cp_ring.megatron.split_batch(batch)" in found["whole rows"]
    assert found["other layout"].startswith(
        "layer 1: cp_ring.megatron.enable was called again after its model was built"
    )


@pytest.fixture
def enabled():
    """Calls `enable`; afterwards patches are as they were."""
    applied = set(patches.applied())
    yield cp_ring.megatron.enable
    for name in reversed(patches.patches_by_name()):
        if name not in applied:
            patches.get(name).revert()


def build(**more):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = configuration(use_cpu_initialization=False, **more)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=64)


def test_models_are_checked_and_examined_when_they_are_built(one_rank, enabled, capfd):
    used = enabled(Options.make(route="ring"), seq_length=64, packed=True)
    assert used.enabled and settings.current() == used
    assert "certify: give sizes to enable" in refused(
        ConfigError, cp_ring.megatron.certify, None, None, None, packed=True
    )
    assert "a causal layer sees nothing after its own position" in refused(
        ConfigError, build, window_size=(5, 3)
    )
    assert "certificate" not in capfd.readouterr().out
    state = torch.get_rng_state()
    # as frameworks do that shard parameters before they exist
    with torch.device("meta"), torch.no_grad():
        model = build(window_size=(7, 0), window_attn_skip_freq=2)
    assert model.decoder.layers[0].self_attention.core_attention.window == (7, 0)
    assert in_force().windows == (((7, 0), 1), ((-1, -1), 1))
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "certificate: " in line]
    assert "layer 1 (window 7) under packed" in line and "layer 2 (no window) under causal" in line
    missing = "the loss of a program that does not call cp_ring.megatron.certify"
    assert line.startswith(f"cp_ring: certificate: not covered: {missing}; ")
    assert torch.equal(torch.get_rng_state(), state)
    build(window_size=(7, 0), window_attn_skip_freq=2)
    assert "certificate" not in capfd.readouterr().out
    build()
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "certificate" in line]
    assert line.startswith("cp_ring: certificate: not covered: GPTModel, whose attention differs")
    settings.configure(replace(settings.current(), certify="strict"))
    assert "strict: not covered: GPTModel, whose attention differs" in refused(
        ConfigError, build, num_attention_heads=2
    )


@no_cuda
def test_the_fused_rotary_embedding_is_switched_off_where_it_cannot_have_the_positions(
    enabled, capfd
):
    enabled(layout="balanced", document_mask=True, seq_length=64, micro_batch_size=2)
    config = configuration()
    config.apply_rope_fusion = True  # which needs TransformerEngine when it is made
    program.accept_model(config)
    assert config.apply_rope_fusion is False
    assert "is switched off (--no-rope-fusion)" in capfd.readouterr().out


def test_settings_that_cannot_work_are_rejected_in_one_line(enabled):
    assert "takes Options or settings by name, not both" in refused(
        ConfigError, enabled, Options.make(), route="ring"
    )
    assert "no setting 'rout'" in refused(ConfigError, enabled, rout="ring")
    assert "--cp-ring-certify only (certify=) needs a job of" in refused(
        ConfigError, enabled, certify="only"
    )
    assert "transformer_engine.use_ring in place of enable" in refused(
        ConfigError, enabled, beneath="te"
    )
    with pytest.raises(AttributeError, match="has no attribute 'enabel'"):
        cp_ring.megatron.enabel  # noqa: B018
    assert not patches.applied()
