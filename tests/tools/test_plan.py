"""The `cp-ring plan` command and its picture."""

import numpy as np
import pytest
import torch

from cp_ring.comm.groups import choose_for
from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan import Capabilities, Layout, Mask, Plan, PlanSpec, lower
from cp_ring.plan.plan import plan as plan_of
from cp_ring.plan.sizes.device_rates import NAMED
from cp_ring.plan.time import Conditions
from cp_ring.tools import draw
from cp_ring.tools.lengths import packed_rows
from tests.rings import refused
from tests.tools.commands import printed, told

USUAL = "--seq-length 4096 --cp 4 "


def invoke(options):
    return printed(f"plan {options}")


def facts_of(options):
    return told(f"plan {options}")


def test_numbers_are_those_of_the_plan():
    facts = facts_of("--seq-length 64K --cp 8")
    plan = Plan.build(Mask.causal(65536), Layout.zigzag(65536, 8))
    report = plan.verify()
    assert facts["schedule"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert facts["work_per_rank"] == report.work_per_rank.tolist()
    assert facts["bytes_in_per_rank"] == (report.keys_in.sum(1) * 8 * 256 * 2).tolist()
    assert facts["kernel_calls_per_rank"] == [
        sum(len(lower(hop.tiles, Capabilities()).tiles) for hop in plan.rank_plan(rank).hops)
        for rank in range(8)
    ]
    assert facts["bytes_between_nodes"] == 0
    assert facts_of("--seq-length 64K --cp 8 --ranks-per-node 1")["bytes_between_nodes"] == sum(
        facts["bytes_in_per_rank"]
    )
    times = facts["predicted"]
    assert 0 < times["forward_s"] < times["both_s"] and 0.5 < times["share_of_one_call"] < 1
    text = " ".join(invoke("--seq-length 64K --cp 8").split())
    assert "remote sources of each hop: 2, 4, 1; at most 5 kernel calls of a rank" in text
    assert (
        "causal, 2,147,516,416 pairs; 65,536 tokens on 8 ranks, zigzag layout, direct route" in text
    )


def test_kernel_calls_of_many_ranks_are_not_counted():
    assert "kernel calls" not in invoke("--seq-length 4K --cp 512 --window 128")


def test_heads_inside_a_node_send_keys_once_to_each_other_node():
    line = "--seq-length 512K --cp 64 --kv-heads 8 --heads 64 --full"
    direct, heads = (
        facts_of(f"{line} {more}")["bytes_between_nodes"] for more in ("", "--head-parallel 8")
    )
    assert direct == 64 * 56 * (524288 // 64) * 2 * 8 * 128 * 2 == 8 * heads


def test_a_window_and_documents_of_a_file(tmp_path):
    assert sum(facts_of(f"{USUAL} --window 0")["work_per_rank"]) == 4096
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\ufeff1000 2000 1096")
    facts = facts_of(f"--lengths {lengths} --cp 4")
    assert facts["n"] == 4096
    assert sum(facts["work_per_rank"]) == sum(n * (n + 1) // 2 for n in (1000, 2000, 1096))


def test_packed_documents_are_compared_and_the_fastest_is_planned(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30000 1000 500 " + "100 " * 100)
    line = f"--lengths {lengths} --cp 16 --ranks-per-node 4"
    facts = facts_of(line)
    ways = [(each["layout"], each["head_parallel"]) for each in facts["compared"]]
    assert {name for name, _ in ways} == {"balanced", "zigzag"} and {1, 4} <= {u for _, u in ways}
    times = [each["both_s"] for each in facts["compared"]]
    assert times == sorted(times) and facts["predicted"]["both_s"] == times[0]
    assert (facts["layout"].split()[0], facts["head_parallel"]) == ways[0]
    assert not facts_of(f"{line} --layout zigzag")["compared"]
    output = invoke(line)
    assert f"--cp-ring-layout {ways[0][0]} --cp-ring-heads {ways[0][1]}" in output
    assert f"on 16 ranks ({16 // ways[0][1]} members" in " ".join(output.split())


def test_lengths_of_a_data_set_are_packed_into_rows(tmp_path):
    (tmp_path / "huge").write_text(f"1 {10**20}")
    assert "nor a file of whole numbers" in refused(
        PlanError, packed_rows, str(tmp_path / "huge"), 64
    )
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("500 " * 8 + "3000 1000 " * 20 + "9000")
    line = f"--seq-length 4096 --lengths {lengths} --cp 4"
    facts = facts_of(line)
    # 9,000 tokens are cut into 4,096, 4,096 and 808
    assert facts["packed"].startswith("49 documents in 24 rows of 4,096 tokens: ")
    assert (facts["n"], facts["rows"]) == (4096, 8)
    for each in facts["compared"]:
        masks = [Mask.documents(offsets) for offsets in packed_rows(str(lengths), 4096)[0]]
        made = [
            PlanSpec(each["layout"], ulysses=each["head_parallel"]).build(mask, 4) for mask in masks
        ]
        assert each["balance"] == max(plan.verify().balance for plan in made)
        both = [plan.time(Conditions(rates=NAMED["h100"])).both for plan in made]
        assert each["both_s"] == pytest.approx(np.mean(both))
    assert sum(facts["work_per_rank"]) == max(map(Mask.area, masks))
    output = " ".join(invoke(line).split())
    assert "4,096 tokens: " in output and "compared over 8 of these rows" in output


GPUS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA GB200": "b200",
    "NVIDIA RTX A1000": "h100",
}


def test_a_job_chooses_by_the_gpu_that_runs_it_as_the_command_does(monkeypatch, tmp_path, recwarn):
    """Heads of a causal mask, and the balanced layout of documents; hops are the same."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5000 1000 500 " * 8)
    documents = Mask.documents(packed_rows(str(lengths), None)[0][0])
    found = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, name in GPUS.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        for _ in range(2):
            choose_for(torch.device("cuda"))
        ways, lines = (PlanSpec("balanced"), PlanSpec("balanced", choice=Conditions())), []
        lines_of = "--seq-length 32K --cp 8", f"--lengths {lengths} --cp 16"
        for mask, spec, line in zip((Mask.causal(32768), documents), ways, lines_of, strict=True):
            made = plan_of(mask, int(line.split()[-1]), spec)
            line += f" --layout balanced --head-parallel {made.ulysses} --device {name}"
            facts, report = facts_of(line), made.verify()
            assert facts["schedule"] == list(made.schedule)
            assert facts["work_per_rank"] == report.work_per_rank.tolist()
            assert facts["predicted"]["both_s"] == made.time().both
            lines.append((made.schedule, made.ulysses, made.layout.digest))
        assert found.setdefault(name, lines) == lines
    assert len({hops for (hops, *_), _ in found.values()}) == 1, "memory follows from them"
    assert len({heads for _, (_, heads, _) in found.values()}) > 1
    assert len({layout for _, (*_, layout) in found.values()}) > 1
    [unknown] = recwarn
    assert "knows no rates of NVIDIA RTX A1000: it chooses" in str(unknown.message)


def test_a_job_has_the_sizes_of_its_layer():
    facts = facts_of("llama3-8b-128k")
    assert (facts["n"], facts["cp"]) == (131072, 4)
    other = facts_of("llama3-8b-128k --cp 8 --set cp_ring.heads=2 --seq-length 64K")
    assert (other["n"], other["head_parallel"]) == (65536, 2)
    assert (other["cp"], other["members"]) == (8, 4)
    assert facts_of("deepseek-style-mla-moe --set cp_ring.wire=latent")["wire"] == "latent"
    assert "--set a.b=1 changes a job: name one" in refused(
        ConfigError, invoke, f"{USUAL} --set a.b=1"
    )


def test_a_job_is_planned_as_its_ranks_plan_it():
    """On nodes of 8: with the exchange of heads, the codec and the flags that they would choose."""
    facts = facts_of("llama3-8b-128k --cp 16")
    alike = "llama3-8b-128k --set megatron.context_parallel_size=16 --ranks-per-node 8"
    assert facts["head_parallel"] == 4
    assert facts | {"proven_ms": 0} == facts_of(alike) | {"proven_ms": 0}
    assert facts_of(f"{alike} --head-parallel 1")["head_parallel"] == 1
    latent = facts_of("deepseek-style-mla-moe --cp 32 --lengths lognormal:60000")
    assert latent["wire"] == "latent"
    assert {each["head_parallel"] for each in latent["compared"]} == {1}


@pytest.mark.parametrize(
    "options, line",
    [
        ("--seq-length 64", "--cp: give the context-parallel ranks, or a JOB"),
        ("--cp 2", "--seq-length: give the number of tokens of the sequence"),
        ("--cp 2 --seq-length 0", "--seq-length 0: it must be at least 1"),
        ("--cp 2 --seq-length 1G", "a batch row of 1073741824 tokens: give --seq-length, at most"),
        (f"{USUAL} --layout spiral", "layout='spiral': unknown; known are zigzag"),
        (f"{USUAL} --route spiral", "route='spiral': unknown; known are direct"),
        (f"{USUAL} --head-parallel 3", "heads=3: it must divide the 4 context-parallel ranks"),
        (f"{USUAL} --device warp", "--device warp: known are a100"),
        (f"{USUAL} --lengths preset:sft", "--lengths preset:sft: neither lognormal:MEAN nor a"),
        (f"{USUAL} --lengths lognormal:x", "--lengths lognormal:x: give lognormal:MEAN"),
        (f"{USUAL} --lengths lognormal:{10**20}", "give lognormal:MEAN"),
        ("quickstart --set megatron.seq_length=null", "--seq-length: give the number of tokens"),
        ("quickstart --set megatron.foo=3", "quickstart: unrecognized arguments: megatron.foo 3"),
        (
            "quickstart --cp 3",
            "quickstart: Megatron rejects it: seq-length should be a multiple of 2 * context",
        ),
        (f"{USUAL} --draw plan.txt", "--draw plan.txt: cannot write: Format 'txt' is not"),
    ],
)
def test_bad_options_are_one_line(options, line):
    shown = refused((PlanError, ConfigError), invoke, options)
    assert line in shown and "\n" not in shown


@pytest.mark.parametrize("cp", [1, 4, 20])
def test_picture(tmp_path, cp):
    path = tmp_path / "plan.svg"
    assert f"wrote {path}" in invoke(f"--seq-length 4000 --cp {cp} --window 300 --draw {path}")
    text = path.read_text()
    assert "which rank computes which pairs" in text and "predicted at 600 TFLOP/s" in text
    assert ("rank 0" in text) == (cp <= draw.MAX_LEGEND)


def test_a_picture_without_an_ending_is_png(tmp_path):
    line = invoke(f"--seq-length 4000 --cp 4 --draw {tmp_path / 'plan'}").splitlines()[-1]
    assert line == f"wrote {tmp_path / 'plan.png'}" and (tmp_path / "plan.png").exists()


def test_recurrent_layers_tell_the_bytes_of_heads_and_of_states():
    line = "qwen3-next-style --set megatron.seq_length=131072"
    recurrent = facts_of(line)["recurrent"]["gated delta net"]
    # 52 maps of 8 ranks; 32 heads of a matrix for the state and one for its product, float32
    assert recurrent["states"] == 52 * 32 * 128 * 2 * 128 * 4 // 8
    assert recurrent["heads"] == 471_597_056
    assert "sends 449.8 MiB a rank in forward by heads, 26.0 by states" in invoke(line)
