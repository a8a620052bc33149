"""`cp_ring.pretrain_gpt` obeys each flag that Megatron's `pretrain_gpt.py` reads, or rejects it."""

import ast
import inspect
import sys

import pytest

from cp_ring import pretrain_gpt
from cp_ring.errors import ConfigError
from cp_ring.megatron.rejection import Rejected
from tests.megatron import documents
from tests.megatron.launch import TINY, attempt

# `args.*` of pretrain_gpt.py of core_v0.18.2, core_v0.19.0, main and dev of 2026-11; the checkout
# lane compares it with a checkout
READ = """
    allow_ambiguous_pad_tokens check_for_nan_in_loss_and_grad check_for_spiky_loss
    context_parallel_size create_attention_mask_in_dataloader data_cache_path data_parallel_size
    dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_inter_document_masking
    dynamic_context_parallel eod_mask_loss fim_data fim_eod_token fim_fragment_rate
    fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample
    fim_spm_rate fim_suffix_token full_validation hybrid_context_parallel
    logits_load_decode_threads logits_load_dir logits_load_ignore_errors
    logits_load_kd_loss_alpha logits_load_msc_prefetch_depth logits_load_prefetch_factor
    micro_batch_size mid_level_dataset_surplus mmap_bin_files mock_data modelopt_enabled
    multiple_validation_sets num_dataset_builder_threads object_storage_cache_path
    overlap_moe_expert_parallel_comm per_dataset_sequences_path pipeline_model_parallel_size
    reset_attention_mask reset_position_ids seed seq_length sequence_packing_scheduler
    sequence_parallel sft sft_mock_dataset_config_json split tensor_model_parallel_size
    untie_embeddings_and_output_weights use_varlen_dataset varlen_mock_dataset_config_json
    varlen_sbhd_validation
"""
# Megatron's loop itself has them; a flag of ModelOpt is in no parser but that of the script; masks
# of s x s tokens are never made
ELSEWHERE = {
    "micro_batch_size", "overlap_moe_expert_parallel_comm", "pipeline_model_parallel_size",
    "untie_embeddings_and_output_weights", "modelopt_enabled", "create_attention_mask_in_dataloader",
}  # fmt: skip


def rejected(name):
    return ("--" + name.replace("_", "-")).startswith(pretrain_gpt._OF_SCRIPT)


def names_of(source):
    """The attributes of `args` that a source reads, and those that it asks `getattr` for."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "get_args()"):
            found.add(node.attr)
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
        if asks and ast.unparse(node.args[0]) in ("args", "get_args()"):
            found |= {part.value for part in node.args[1:2] if isinstance(part, ast.Constant)}
    return found


def test_each_flag_is_read_or_rejected():
    from cp_ring.megatron import gpt

    same_name = {*inspect.signature(gpt.GPTDatasetConfig).parameters}
    read = names_of(inspect.getsource(gpt)) | same_name | ELSEWHERE
    assert [name for name in READ.split() if not rejected(name) and name not in read] == []
    assert [name for name in ELSEWHERE if rejected(name)] == []


@pytest.mark.parametrize("name", [name for name in READ.split() if rejected(name)])
def test_a_flag_that_only_the_script_reads_is_one_line(monkeypatch, capsys, name):
    flag = "--" + name.replace("_", "-")
    line = f"cp_ring: error: cp_ring.pretrain_gpt does not read {flag}=1: leave it"
    assert line_of_entry(monkeypatch, capsys, f"{flag}=1").startswith(line)


@pytest.mark.parametrize("kind", ["hybrid", "dynamic"])
def test_a_rule_names_the_way_out_of_groups(monkeypatch, capsys, kind):
    def install(argv):
        raise ConfigError("the line of a rule")

    monkeypatch.setattr(pretrain_gpt, "install", install)
    flags = "--cp-ring", f"--{kind}-context-parallel"
    assert line_of_entry(monkeypatch, capsys, *flags) == "cp_ring: error: the line of a rule"


def line_of_entry(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags])
    with pytest.raises(Rejected):
        pretrain_gpt.main()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_the_list_of_flags_is_that_of_checkouts(megatron_lm):
    names = names_of((megatron_lm / "pretrain_gpt.py").read_text())
    assert names <= {*READ.split()}, names - {*READ.split()}


@pytest.mark.ci
@pytest.mark.parametrize(
    "given, line",
    [
        (
            "--split 100,0,0 --eval-iters 1 --data-path",
            "--split 100,0,0 leaves no validation data: give --eval-iters 0",
        ),
        ("--split 100,0,0 --eval-iters 0 --data-path", ""),
        (
            "--eval-iters 1 --train-data-path",
            "--train-data-path alone gives no validation data: give --eval-iters 0",
        ),
        (
            "--split 100,0,0 --full-validation --data-path",
            "--split 100,0,0 leaves no validation data: leave out --full-validation",
        ),
        (
            "--split 90,5,5 --dataloader-type external --data-path",
            "a script of your own: give single or cyclic",
        ),
    ],
)
def test_validation_needs_data(tmp_path, given, line):
    data = documents.write(str(tmp_path / "docs"), documents=40)
    flags = f"--train-iters 2 --cp-ring-cpu {given} {data}"
    data_of_tiny = {"--mock-data", "--split", TINY[TINY.index("--split") + 1]}
    tiny = [word for word in TINY if word not in data_of_tiny]
    done = attempt(1, "job", flags.split(), tmp_path, tiny)
    assert line in done.rejected and len(done.losses) == (0 if line else 2), done


@pytest.mark.ci
def test_further_predictions_on_a_stage_of_their_own(tmp_path):
    flags = "--cp-ring-cpu --train-iters 3 --pipeline-model-parallel-size 2 --mtp-num-layers 1"
    layout = "--pipeline-model-parallel-layout", "Et|t|m|L"
    done = attempt(2, "job", [*flags.split(), *layout], tmp_path)
    # those of Megatron's own script
    assert done.losses == pytest.approx([5.561675, 5.437706, 5.322669], rel=1e-4), done
