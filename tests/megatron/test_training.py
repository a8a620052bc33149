"""Training with ring attention is training with stock attention: the same losses, gradient norms,
and resumes at any cp.
"""

import argparse
import shutil

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import inspection, manifest
from tests.megatron.launch import FULL, trace, train

CPU = ["--cp-ring-cpu"]
RING = [*CPU, "--cp-ring"]
FIVE = ["--train-iters", "5"]
# whose own checkpoint format resumes at the same dp x cp only
BUCKETED = "--use-distributed-optimizer"
ZERO1 = [BUCKETED, "--dist-ckpt-optim-fully-reshardable"]
TWELVE = ["--train-iters", "12"]
UNTIL_8 = [*TWELVE, "--exit-interval", "8", "--save-interval", "8"]


def sizes(tp=1, pp=1, cp=1):
    return [
        *("--tensor-model-parallel-size", str(tp)),
        *("--pipeline-model-parallel-size", str(pp)),
        *("--context-parallel-size", str(cp)),
    ]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The jobs of the default run, in three launches."""
    folder = tmp_path_factory.mktemp("traces")
    plain, sharded = (str(folder / name) for name in ("cp2", "dp2cp2"))
    train(
        2,
        {
            "cp2": RING + FIVE + sizes(cp=2),
            "cp2_by_spec": [
                *CPU,
                *FIVE,
                *sizes(cp=2),
                "--spec",
                "cp_ring.megatron.specs",
                "gpt_local",
            ],
            "cp2_recomputed": RING + FIVE + sizes(cp=2) + FULL,
            "straight": RING + TWELVE + sizes(cp=2),
            "cp2_until_8": [*RING, *UNTIL_8, *sizes(cp=2), "--save", plain],
        },
        folder,
    )
    train(
        4,
        {
            "cp4": RING + FIVE + sizes(cp=4),
            "dp2cp2": RING + FIVE + ZERO1 + sizes(cp=2),
            "cp4_from_cp2": [*RING, *TWELVE, *sizes(cp=4), "--load", plain],
            "dp2cp2_until_8": [*RING, *UNTIL_8, *ZERO1, *sizes(cp=2), "--save", sharded],
            "cp4_from_dp2cp2": [*RING, *TWELVE, *ZERO1, *sizes(cp=4), "--load", sharded],
        },
        folder,
    )
    train(
        1,
        {
            "stock": CPU + FIVE,
            "cp1_from_cp2": [*RING, *TWELVE, "--load", plain],
        },
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def more_traces(traces):
    """The other jobs, beside those of `traces`."""
    plain, sharded, bucketed = (str(traces / name) for name in ("cp2", "dp2cp2", "bucketed"))
    train(
        2,
        {
            "cp2_contiguous": [*RING, *FIVE, *sizes(cp=2), "--cp-ring-layout", "contiguous"],
            "cp2_from_cp2": [*RING, *TWELVE, *sizes(cp=2), "--load", plain],
        },
        traces,
    )
    train(
        4,
        {
            "cp4_one_source": [*RING, *FIVE, *sizes(cp=4), "--cp-ring-schedule", "ring"],
            "cp4_two_hops": [*RING, *FIVE, *sizes(cp=4), "--cp-ring-schedule", "0,1,2,2"],
            "cp4_few_shards": [*RING, *FIVE, *sizes(cp=4), "--cp-ring-slot-shards", "1"],
            "tp2cp2": RING + FIVE + sizes(tp=2, cp=2),
            "pp2": CPU + FIVE + sizes(pp=2),
            "pp2cp2": RING + FIVE + sizes(pp=2, cp=2),
            "bucketed_until_8": [*RING, *UNTIL_8, BUCKETED, *sizes(cp=2), "--save", bucketed],
            "dp2cp2_from_bucketed": [*RING, *TWELVE, BUCKETED, *sizes(cp=2), "--load", bucketed],
        },
        traces,
    )
    train(1, {"cp1_from_dp2cp2": [*RING, *TWELVE, *ZERO1, "--load", sharded]}, traces)
    return traces


def agree(ours, theirs, steps, tolerance):
    for step in steps:
        assert ours[step]["rows"] == theirs[step]["rows"], step
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=tolerance), step
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=tolerance), (
            step
        )


@pytest.mark.parametrize(
    ("job", "baseline"),
    [
        ("cp2", "stock"),
        ("cp2_by_spec", "stock"),
        ("cp2_recomputed", "stock"),
        ("cp4", "stock"),
        ("dp2cp2", "stock"),
    ],
)
def test_trains_as_stock_attention_does(traces, job, baseline):
    ours, stock = trace(traces, job), trace(traces, baseline)
    assert list(ours) == list(stock) == [1, 2, 3, 4, 5]
    assert stock[1]["loss"] - stock[5]["loss"] > 0.1  # the model has moved, so that gradients count
    agree(ours, stock, range(1, 6), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["cp2_contiguous", "cp4_one_source", "cp4_two_hops", "tp2cp2", "pp2cp2"]
)
def test_more_train_as_stock_attention_does(more_traces, job):
    test_trains_as_stock_attention_does(more_traces, job, "pp2" if job == "pp2cp2" else "stock")


@pytest.mark.slow
def test_the_schedule_changes_no_loss(more_traces):
    """With one shard a slot, auto has one source a hop: the same bits."""
    one_source, few, *others = (
        trace(more_traces, job)
        for job in ("cp4_one_source", "cp4_few_shards", "cp4_two_hops", "cp4")
    )
    assert [few[step]["loss"] for step in range(1, 6)] == [
        one_source[step]["loss"] for step in range(1, 6)
    ]
    for other in others:
        agree(other, one_source, range(1, 6), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["cp2_from_cp2", "cp1_from_dp2cp2", "dp2cp2_from_bucketed"])
def test_more_resume_at_any_cp_with_the_same_tokens(more_traces, job):
    test_resumes_at_any_cp_with_the_same_tokens(more_traces, job)


@pytest.mark.parametrize("job", ["cp4_from_cp2", "cp1_from_cp2", "cp4_from_dp2cp2"])
def test_resumes_at_any_cp_with_the_same_tokens(traces, job):
    resumed, straight = trace(traces, job), trace(traces, "straight")
    assert list(resumed) == list(range(9, 13))
    agree(resumed, straight, range(9, 13), 1e-4)


def test_a_saved_checkpoint_is_whole_until_it_is_cut(traces, tmp_path):
    checkpoint = traces / "dp2cp2" / "iter_0000008"
    assert inspection.defect(checkpoint) == ""
    copy = shutil.copytree(checkpoint, tmp_path / "iter_0000008")
    shard = sorted(copy.glob("*.distcp"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert inspection.defect(copy).startswith(f"{shard} holds ")


def test_a_saved_checkpoint_of_another_model_is_rejected(traces):
    shape = vars(inspection._saved_args(traces / "dp2cp2" / "iter_0000008"))
    assert (shape["num_layers"], shape["hidden_size"], shape["num_query_groups"]) == (2, 64, 2)
    args = argparse.Namespace(**(shape | {"load": str(traces / "dp2cp2"), "ckpt_step": None}))
    inspection.check_model(args)
    args.num_query_groups = 4
    with pytest.raises(
        ConfigError,
        match=r"--num-query-groups: the checkpoint of iteration 8 in .* has num_query_groups 2",
    ):
        inspection.check_model(args)


@pytest.mark.slow
def test_checkpoints_of_fsdp2_resume_at_other_sizes(tmp_path):
    ring = ["--cp-ring", "--cp-ring-cpu", "--use-torch-fsdp2", "--context-parallel-size"]
    rest = [
        "--train-iters",
        "4",
        "--override-opt_param-scheduler",
        "--load",
        str(tmp_path / "saved"),
    ]
    train(4, {"whole": [*ring, "2", "--train-iters", "4"]}, tmp_path)
    train(
        4,
        {
            "half": [
                *ring,
                "2",
                "--train-iters",
                "2",
                "--save",
                str(tmp_path / "saved"),
                "--save-interval",
                "2",
            ]
        },
        tmp_path,
    )
    train(4, {"same": [*ring, "2", *rest], "cp4": [*ring, "4", *rest]}, tmp_path)
    train(2, {"cp1": [*ring, "1", *rest]}, tmp_path)
    wanted = trace(tmp_path, "whole")
    for name in ("same", "cp4", "cp1"):
        found = trace(tmp_path, name)
        assert sorted(found) == [3, 4]
        for number, step in found.items():
            for value in ("loss", "grad_norm"):
                assert step[value] == pytest.approx(wanted[number][value], rel=1e-6)


MEGATRON_FSDP = [
    *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"),
    *("--data-parallel-sharding-strategy", "optim_grads_params"),
]


@pytest.mark.slow
def test_checkpoints_of_megatron_fsdp_resume_at_other_sizes(tmp_path):
    ring = ["--cp-ring", "--cp-ring-cpu", "--bf16", *MEGATRON_FSDP, "--context-parallel-size"]
    saved = tmp_path / "saved"
    half = [
        "--train-iters",
        "4",
        "--exit-interval",
        "2",
        "--save",
        str(saved),
        "--save-interval",
        "2",
        "--load",
        str(saved),
    ]
    rest = ["--train-iters", "4", "--load", str(saved)]
    train(
        2,
        {
            "whole": [*ring, "2", "--train-iters", "4"],
            "half": [*ring, "2", *half],
            "same": [*ring, "2", *rest],
        },
        tmp_path,
    )
    train(4, {"dp2": [*ring, "2", *rest]}, tmp_path)
    train(1, {"cp1": [*ring, "1", *rest]}, tmp_path)
    wanted = trace(tmp_path, "whole")
    # The first start has nothing to load, and trains as without --load.
    assert all(trace(tmp_path, "half")[number] == wanted[number] for number in (1, 2))
    # other sizes add bf16 gradients in another order
    for name, tolerance in (("same", 0), ("dp2", 1e-4), ("cp1", 1e-4)):
        found = trace(tmp_path, name)
        assert sorted(found) == [3, 4]
        for number, step in found.items():
            for value in ("loss", "grad_norm"):
                assert step[value] == pytest.approx(wanted[number][value], rel=tolerance, abs=0)
    checkpoint = saved / "iter_0000002"
    assert inspection.defect(checkpoint) == "" and not list(saved.glob(".*saving*"))
    shard = sorted(checkpoint.glob("*.distcp"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert (
        manifest.defect(checkpoint) == f"{shard} is not what was written: its checksum is another"
    )
    (checkpoint / manifest.NAME).unlink()
    shard.write_bytes(b"?")
    assert inspection.defect(checkpoint).startswith(f"{shard} holds 1 of ")
