"""Costs, the picture, and the `cp-ring plan` command."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cp_ring import kernels
from cp_ring.errors import PlanError
from cp_ring.plan import Capabilities, Layout, Mask, Plan, lower
from cp_ring.plan.costs.cost import between_nodes, cost
from cp_ring.plan.costs.simulate import Span, spans
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.lower import KERNELS
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import NAMED, NETWORK_BYTES_PER_SECOND
from cp_ring.tools.cli import app, main
from cp_ring.tools.cli.drawing import Look, color, draw, idle_times, tokens_of, zoomed
from cp_ring.tools.cli.plan_options import capabilities_of

USUAL = "--seq-length 4096 --cp 4 "


def invoke(options: str):
    """The result of `cp-ring plan`; raises what it raises."""
    result = CliRunner().invoke(app, ["plan", *shlex.split(options)])
    if result.exception:
        raise result.exception
    return result.stdout


def facts_of(options: str) -> dict:
    return json.loads(invoke(f"{options} --json"))


def shown(options: str) -> str:
    return " ".join(invoke(options).split())


def test_cost_by_hand() -> None:
    plan = Plan.build(Mask.full(8), Layout.contiguous(8, 2))
    costs = cost(
        plan.verify(),
        AttentionSizes(heads=4, kv_heads=2, head_dim=16, value_dim=8, dtype="fp32"),
        num_slots=2,
    )
    # 16 pairs a hop, 4 heads, a multiply and an add for each element of q and v.
    assert costs.forward_flops.tolist() == [[2 * 16 * 4 * 24] * 2] * 2
    assert costs.backward_flops.tolist() == [[2 * 16 * 4 * (3 * 16 + 2 * 8)] * 2] * 2
    assert costs.bytes_in.tolist() == [[0, 4 * 2 * 24 * 4]] * 2
    assert costs.memory["both: key and value slots"] == 2 * 4 * 2 * 24 * 4
    assert costs.memory["kept: lse"] == 4 * 4 * 4


def test_converts_layouts(tmp_path: Path) -> None:
    picture = tmp_path / "conversion.svg"
    sizes = "--heads 4 --kv-heads 2 --head-dim 16 --ranks-per-node 2"
    facts = facts_of(f"{USUAL} --convert zigzag:contiguous {sizes} --draw {picture}")
    # Chunks of 512 tokens: ranks have 0 7, 1 6, 2 5, 3 4 before, and 0 1, 2 3, 4 5, 6 7 after.
    moved = [512 * count * facts["bytes_per_token"] for count in (1, 2, 1, 2)]
    assert facts["bytes_per_token"] == 4 * 16 * 2 and facts["share_of_tokens_that_travel"] == 0.75
    assert facts["bytes_out_per_rank"] == facts["bytes_in_per_rank"] == moved
    assert facts["messages_out_per_rank"] == [1, 2, 1, 2]
    # chunks 7 and 6, 2 and 3
    assert facts["bytes_between_nodes"] == 512 * facts["bytes_per_token"] * 4
    assert facts["tokens_after_per_rank"] == [1024] * 4 and picture.stat().st_size
    text = shown(f"{USUAL} --convert contiguous:balanced --documents-mean 300")
    assert "contiguous to balanced: 4,096 tokens" in text and "of the tokens travel" in text


def test_recurrent_layers_are_beside_attention(tmp_path: Path) -> None:
    picture = tmp_path / "chain.svg"
    asked = f"{USUAL} --recurrent gdn:layers=3,linear_num_key_heads=8,linear_num_value_heads=8"
    (found,) = facts_of(f"{asked} --panel states --draw {picture}")["recurrent"]
    states, heads = found["ways"]["states"], found["ways"]["heads"]
    # 6 borders; a state of 8 heads of 128 x 128; 3 tokens of q, k and v before each segment
    halo = 6 * 3 * (3 * 8 * 128) * 2
    assert found["passing"] == min(found["passing_seconds"], key=found["passing_seconds"].get)
    assert found["passing"] == "gather" and len(found["passing_seconds"]) == 3
    assert found["borders"] == 6 and found["state_bytes"] == 8 * 128 * 128 * 4
    # small states travel at once, each with its A, to those that need it: 15, and their gradients
    assert states["bytes"] == 2 * (15 * 2 * found["state_bytes"] + halo)
    # q, k, v, the gate, both gates of the rule, and what comes back, three quarters of all tokens
    assert heads["bytes"] == 2 * 4096 * 3 // 4 * (5 * 8 * 128 + 2 * 8) * 2
    assert found["layers"] == 3 and found["balance"] == pytest.approx(1)
    assert "6 states pass, 6 after one another" in picture.read_text()
    assert "3 gdn layers beside 1 of attention: balance" in shown(f"{asked} --documents-mean 300")


def test_states_fork_at_branches(tmp_path: Path) -> None:
    picture = tmp_path / "chain.svg"
    asked = f"{USUAL} --mask shared-prefix:1024,256x12 --layout contiguous"
    drawn = f"{asked} --panel states --draw {picture} --recurrent"
    gdn, mamba = facts_of(f"{drawn} gdn+mamba")["recurrent"]
    # the prompt is the first rank's tokens: its state goes to three ranks
    assert gdn["borders"] == 3 and gdn["balance"] == mamba["balance"]
    assert "3 states pass, 1 after one another" in picture.read_text()
    # one kind of recurrent layers is less work beside attention than two
    (alone,) = facts_of(f"{drawn} gdn")["recurrent"]
    assert 1 < gdn["balance"] < alone["balance"]


def test_a_job_has_its_recurrent_layers() -> None:
    (found,) = facts_of("qwen3-next-style --seq-length 16K")["recurrent"]
    assert (found["kind"], found["layers"], found["attention_layers"]) == ("gdn", 18, 6)
    assert found["state_bytes"] == 32 * 128 * 128 * 4 and set(found["ways"]) == {"states", "heads"}


def test_sparse_attention_moves_the_latents_of_all_tokens_that_queries_see(tmp_path: Path) -> None:
    asked = f"{USUAL} --mla 512,64,128,128 --sparse"
    found = facts_of(f"{asked} 2048,128")["sparse"]
    arriving = 3 * 4096 * 3 // 4  # tokens of zigzag on 4 ranks
    assert found["indexer"] == arriving * (128 * 2 + 4) and found["latents"] == arriving * 576 * 2
    assert found["share"] > 0.99 and found["selected"] > found["latents"]
    text = shown(f"{asked} 2048,128")
    assert "with requests" in text and "more: all travel" in text
    assert "less, not built" in shown(f"{asked} 1,128 --cp 64")
    known = Path("configs/deepseek-style-mla-moe.yaml").read_text()
    more = (
        "experimental_attention_variant: dsa\n  dsa_indexer_topk: 2048\n  dsa_indexer_head_dim: 128"
    )
    job = tmp_path / "sparse.yaml"
    job.write_text(known.replace("megatron:\n", f"megatron:\n  {more}\n", 1))
    assert facts_of(str(job))["sparse"]["share"] > 0.99


def test_bytes_between_nodes() -> None:
    plan = Plan.build(Mask.full(64), Layout.contiguous(64, 8))
    assert between_nodes(plan.ring, 8) == 0.0
    assert between_nodes(plan.ring, 4) == pytest.approx(4 / 7)
    assert between_nodes(
        Plan.build(Mask.full(64), Layout.contiguous(64, 8), "ring").ring, 4
    ) == pytest.approx(2 / 8)


def test_timeline_overlaps_and_keeps_order() -> None:
    for schedule, hops in (("ring", 4), ((0, 1, 2, 2), 3), ("gather", 2)):
        plan = Plan.build(Mask.causal(4096), Layout.zigzag(4096, 4), schedule=schedule)
        report = plan.verify()
        costs = cost(report, AttentionSizes())
        compute, transfers = spans(plan.ring, report, AttentionSizes())
        assert len(compute) == 4 * hops and len(transfers) == 12
        assert all(span.start > arrival.end * (1 - 1e-9) for span in compute for arrival in transfers
                   if (arrival.rank, arrival.hop) == (span.rank, span.hop))  # fmt: skip
        moved = sum(span.end - span.start for span in transfers) * NETWORK_BYTES_PER_SECOND
        assert moved == pytest.approx(costs.bytes_in.sum())


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_draws(tmp_path: Path, name: str) -> None:
    draw(
        Plan.build(Mask.documents([0, 100, 250, 256]), Layout.zigzag(256, 4), "ring"),
        str(tmp_path / name),
    )
    data = (tmp_path / name).read_bytes()
    assert len(data) > 10_000 and (data.startswith(b"\x89PNG") or b"<svg" in data[:1000])


def test_draws_only_what_it_can(tmp_path: Path) -> None:
    plan = Plan.build(Mask.causal(8), Layout.zigzag(8, 2))
    with pytest.raises(PlanError, match=r"must end in \.png, \.svg or \.pdf"):
        draw(plan, "plan.gif")
    with pytest.raises(PlanError, match="cannot write"):
        draw(plan, str(tmp_path / "none" / "plan.png"))


def test_json_has_its_keys() -> None:
    facts = facts_of(f"{USUAL} --window 512")
    assert {"tokens_per_rank", "work_per_rank", "bytes_in_per_rank", "share_of_full_ring", "balance",
        "moving_hops",
        "build_ms",
            "verify_ms"} <= set(facts)  # fmt: skip
    assert facts["tokens_per_rank"] == [1024] * 4
    assert sum(facts["work_per_rank"]) == Mask.causal(4096, (512, 0)).area()
    assert facts["bytes_in_per_rank"] == facts["bytes_out_per_rank"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("gemma-style-window --set parallel.context_parallel_size=4", {"cp": 4, "n": 131072,
            "head_parallel": 1}),
        ("quickstart --cp 8 --set megatron.cp_comm_type=a2a+p2p --set "
         "megatron.hierarchical_context_parallel_sizes=[4,2] --set "
         "parallel.context_parallel_size=8", {"n": 2048, "head_parallel": 4, "cp": 2}),
        ("quickstart --seq-length 4096 --set megatron.cp_comm_type=all_gather --set "
         "parallel.context_parallel_size=4",
         {"n": 4096, "schedule": [0, 1, 1, 1]}),
        ("deepseek-style-mla-moe --layout contiguous --set cp_ring.route=ring", {"route": "ring",
            "layout":
            "contiguous"}),
    ],
)  # fmt: skip
def test_the_plan_of_a_job(options: str, expected: dict) -> None:
    facts = facts_of(options)
    assert {name: facts[name] for name in expected} == expected
    assert len(facts["shapes"]) > 3


def test_bytes_between_nodes_by_shape() -> None:
    """Relays, and heads exchanged among a node's ranks, send keys to each other node once; direct
    once to each rank there.
    """
    line = "--seq-length 524288 --cp 64 --ranks-per-node 8 --kv-heads 8 --heads 64"
    moved = facts_of(f"{line} --full")["bytes_between_nodes"]
    assert moved["direct"] == 64 * 56 * (524288 // 64) * 2 * 8 * 128 * 2
    assert moved["relay"] * 8 == moved["direct"] == moved["heads 8"] * 8
    assert moved["ring"] == 8 * 63 * (524288 // 64) * 2 * 8 * 128 * 2
    members = facts_of(f"{line} --head-parallel 8")
    assert members["cp"] == members["head_parallel"] == 8 and members["share_between_nodes"] == 1.0


def test_schedule_and_kernel_calls() -> None:
    """With several sources a hop, 7 remote sources take few kernel calls, on every rank."""

    def facts(options: str = "") -> dict[str, list[int]]:
        return facts_of(f"--seq-length 65536 --cp 8 {options}")

    auto = facts()
    assert auto["schedule"] == [0, 1, 1, 2, 2, 2, 2, 3] and max(auto["kernel_calls_per_rank"]) <= 5
    network = facts("--ranks-per-node 1")
    assert (
        network["schedule"] == [0, 1, 1, 2, 2, 2, 2, 3]
        and max(network["kernel_calls_per_rank"]) <= 5
    )
    assert facts("--schedule ring")["kernel_calls_per_rank"] == [8] * 8
    for options, schedule in (
        ("--schedule gather --slot-shards 7", [0, *[1] * 7]),
        ("--schedule 0,1,2,2,3,3,4,4", [0, 1, 2, 2, 3, 3, 4, 4]),
        ("--slot-shards 1", [*range(8)]),
        ("--route ring", [*range(8)]),
    ):
        assert facts(options)["schedule"] == schedule
    plan = Plan.build(Mask.causal(65536), Layout.zigzag(65536, 8), node_size=8)
    counted = [
        sum(len(lower(hop.tiles, Capabilities()).tiles) for hop in plan.rank_plan(rank).hops)
        for rank in range(8)
    ]
    assert auto["kernel_calls_per_rank"] == counted
    sources = "remote sources of each hop: 2, 4, 1; at most 5 kernel calls of a rank in forward"
    assert sources in shown("--seq-length 64K --cp 8")


def test_one_name_for_one_thing_and_short_help(tmp_path: Path) -> None:
    """--documents is --lengths, and rates have names as in tune."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1000 2000 500")
    one, other = (facts_of(f"{USUAL} {name} {lengths}") for name in ("--lengths", "--documents"))
    assert one["bytes_between_nodes"] == other["bytes_between_nodes"]
    slow, fast = (
        facts_of(USUAL + words)["predicted"]["both_s"] for words in ("", f"--rates {[*NAMED][-1]}")
    )
    assert slow != fast
    text = invoke("--help")
    assert "<bool>" not in text and "[required]" not in text and "[[" not in text


def test_many_ranks_are_planned_without_their_calls() -> None:
    options = "--seq-length 64K --cp 1025 --window 64 --layout contiguous"
    facts = facts_of(options)
    assert facts["balance"] and facts["shapes"] == [] and facts["kernel_calls_per_rank"] is None
    assert "too many ranks to count kernel calls" in shown(options)


def test_table_and_picture(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1000 2000\n500\n")
    for options in (
        f"--documents {lengths} --layout balanced --draw {tmp_path}/plan.png",
        "--documents-mean 300 --route ring --seed 3 --prefix 20",
        "--full --layout contiguous --window 64",
        "--layout per_document_zigzag",
    ):
        text = invoke(USUAL + options)
        assert "balance" in text and "MiB in" in text
    assert (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ("", "causal; 4,096 tokens on 4 ranks, zigzag layout, direct route"),
        ("--window 1K", "causal, window 1024; 4,096 tokens"),
        ("--full", "full; 4,096 tokens"),
        ("--full --window 64", "full, window 64 on both sides; 4,096 tokens"),
        ("--documents-mean 1k --seed 3", "documents: 4, mean 1024 tokens; 4,096 tokens"),
        ("--prefix 20", "prefix: 20 tokens; 4,096 tokens"),
    ],
)
def test_table_names_the_mask_in_words(options: str, title: str) -> None:
    assert title in shown(USUAL + options)


def test_masks_of_several_intervals(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text('{"parents": [-1, 0, 0], "lengths": [64, 32, 16]}')
    for options, expected in (
        ("shared-prefix:4096,1024x8", Mask.shared_prefix([(4096, [1024] * 8)])),
        (
            "shared-prefix:1k,512x2,100+2k,1k --seq-length 8K",
            Mask.shared_prefix([(1024, [512, 512, 100]), (2048, [1024])], 8192),
        ),
        (
            "shared-prefix:512,256x2 --window 100",
            Mask.shared_prefix([(512, [256] * 2)], window=(100, 0)),
        ),
        (
            "images:100-356,1000-1256 --seq-length 2K",
            Mask.images(2048, [(100, 356), (1000, 1256)]),
        ),
        ("global:0-16 --seq-length 2K --window 64", Mask.with_global(2048, [(0, 16)], (64, 0))),
        (f"tree:{tree}", Mask.tree([-1, 0, 0], [64, 32, 16])),
        ("block-causal:256 --seq-length 2K", Mask.block_causal(2048, 256)),
        ("block-diffusion:256 --seq-length 2K", Mask.block_diffusion(2048, 256)),
    ):
        facts = facts_of(f"--cp 4 --layout balanced --mask {options}")
        described = facts["n"], facts["mask"], sum(facts["work_per_rank"])
        assert described == (expected.n, expected.name, expected.area()), options
    picture = tmp_path / "tree.png"
    text = shown(f"--cp 2 --mask tree:{tree} --draw {picture}")
    assert picture.exists() and "tree: 3 branches of 1 root" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mask stripes:3", "--mask 'stripes:3': known are shared-prefix:PROMPT,RESPONSE"),
        ("--mask images", "--mask 'images': known are"),
        ("--mask images:0-4", "--mask images:0-4: give --seq-length"),
        (
            "--mask images:4 --seq-length 64",
            "--mask images:4: write it as START-END,...",
        ),
        (
            "--mask images:4-9,7-12 --seq-length 64",
            "--mask images:4-9,7-12: spans 4..9 and 7..12 overlap",
        ),
        ("--mask shared-prefix:4,x", "--mask shared-prefix:4,x: write it as PROMPT,RESPONSE"),
        (
            "--mask shared-prefix:40,8 --seq-length 16",
            "the branches have 48 tokens, the stream 16",
        ),
        (
            "--mask tree:/does/not/exist.json",
            "--mask tree:/does/not/exist.json: cannot read it: No such file",
        ),
        ("--mask block-diffusion:4 --seq-length 63", "has no two equal halves"),
        (
            "--mask shared-prefix:4,2 --full",
            "is a mask by itself: leave out --full and --prefix",
        ),
        (
            "--mask global:0-4 --seq-length 64 --documents-mean 9",
            "has no documents: leave out --lengths",
        ),
        ("--documents-mean 9", "--documents-mean needs --seq-length"),
        ("", "--seq-length: give the tokens of the sequence, or a --mask"),
    ],
)
def test_bad_masks_are_one_line(options: str, message: str) -> None:
    check_one_line(f"--cp 4 {options}", message)


def check_one_line(options: str, message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *shlex.split(options)])
    assert isinstance(result.exception, PlanError) and message in str(result.exception)
    assert not result.stdout and "\n" not in str(result.exception)


TOKENS = {"64K": 65536, "128k": 131072, "1M": 1 << 20, "1.5k": 1536, "10_000": 10000}


@pytest.mark.parametrize(("text", "tokens"), TOKENS.items())
def test_tokens_with_a_unit(text: str, tokens: int) -> None:
    facts = facts_of(f"--seq-length {text} --cp 2 --window 1K")
    assert facts["n"] == tokens
    assert sum(facts["work_per_rank"]) == Mask.causal(tokens, (1024, 0)).area()


@pytest.mark.parametrize("option", ["--seq-length", "--window", "--prefix", "--documents-mean"])
@pytest.mark.parametrize("text", ["64Q", "K", "1.3", "1,000", "1.0001K"])
def test_bad_tokens_are_one_line_that_names_the_option(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (option, text) == ("--documents-mean", "1.3"):
        return  # a mean need not be whole
    monkeypatch.setattr(
        sys, "argv", ["cp-ring", "plan", "--seq-length", "4096", "--cp", "4", option, text]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    expected = (
        f"cp_ring: error: Invalid value for '{option}': '{text}' is not a number of tokens such as "
        "65536, 64K or 1M\n"
    )
    assert capsys.readouterr().err == expected


def test_help_names_every_option_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    text = invoke("--help")
    assert max(map(len, text.splitlines())) <= 80
    options = set(text.replace("│", " ").split())
    assert {
        "--seq-length",
        "--chunks-per-rank",
        "--documents-mean",
        "--ranks-per-node",
        "--num-slots",
    } <= options
    assert all(f"─ {panel} ─" in text for panel in ("Mask", "Layout and route", "Sizes", "Output"))


def test_registered_layouts_and_routes_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def striped(mask: Mask, cp: int) -> Layout:
        edges = np.arange(mask.n + 1)
        return Layout(mask.n, cp, edges, edges[:-1] % cp, "striped")

    monkeypatch.setitem(LAYOUTS, "striped", striped)
    monkeypatch.setitem(ROUTES, "mine", ROUTES["direct"])
    facts = facts_of("--seq-length 256 --cp 4 --layout striped --route mine")
    chosen = facts["layout"], facts["route"], facts["tokens_per_rank"]
    assert chosen == ("striped", "mine", [64] * 4)
    plan = Plan.build(Mask.causal(256), striped(Mask.causal(256), 4), "mine")
    plan.verify(rank_plans=True)
    assert repr(Plan.build_rank_plan(plan.mask, plan.layout, 3, route="mine")) == repr(
        plan.rank_plan(3)
    )
    check_one_line(f"{USUAL} --layout spiral", "striped")
    check_one_line(f"{USUAL} --route scenic", "mine")


def test_drawing_without_matplotlib_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.backends.backend_agg'] = "
        "None;sys.argv = ['cp-ring', 'plan', '--seq-length', '64', '--cp', '2', '--draw', "
        "'plan.png'];from cp_ring.tools.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert (
        done.stderr == "cp_ring: error: drawing a plan needs matplotlib: pip install matplotlib\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sparse 2048,128", "--sparse 2048,128: it must be TOPK,SIZE, as 2048,128, beside --mla"),
        ("--mla 512,64,128,128 --sparse 0,128", "--sparse 0,128: it must be TOPK,SIZE"),
        ("--recurrent rwkv", "--recurrent rwkv: write it as gdn or mamba"),
        ("--recurrent gdn:layers=x", "--recurrent gdn:layers=x: write it as"),
        ("--recurrent gdn:mamba_head_dim=8", "gdn layers have no mamba_head_dim"),
        ("--recurrent gdn --full", "--recurrent: a state runs along the sequence"),
        ("--recurrent gdn --mask images:8-16", "--mask, but for shared-prefix and tree"),
        ("--panel states --draw x.png", "--panel states needs --recurrent"),
        (
            "--convert zigzag",
            "--convert 'zigzag': give two layouts, BEFORE:AFTER, as in zigzag:contiguous",
        ),
        ("--convert zigzag:diagonal", "'diagonal': known are"),
        (
            "--convert zigzag:contiguous --layout balanced",
            "names both layouts: leave out --layout",
        ),
        ("--layout spiral", "--layout 'spiral': known are zigzag"),
        ("--route scenic", "--route 'scenic': known are auto, direct, ring"),
        (
            "--schedule spiral",
            "--schedule 'spiral': known are auto, ring, gather, or the hop of each ring distance",
        ),
        ("--schedule 0,1,2", "--schedule 0,1,2: 3 hops for 4 ranks"),
        ("--schedule 0,1,2,1", "--schedule 0,1,2,1: it decreases from hop 2 to hop 1"),
        ("--schedule 0,2,2,2", "--schedule 0,2,2,2: it leaves out hop 1"),
        (
            "--schedule gather --slot-shards 2",
            "--schedule gather: a hop has 3 sources, but --slot-shards is 2: raise --slot-shards "
            "to 3",
        ),
        (
            "--head-parallel 3",
            "--head-parallel=3: it must divide the 4 context-parallel ranks",
        ),
        (
            "--head-parallel 4 --heads 6 --kv-heads 2",
            "heads=4: it must divide the 6 query heads",
        ),
        (
            "--route relay --ranks-per-node 2 --schedule gather",
            "--schedule gather: the route relay has a schedule",
        ),
        ("--slot-shards 0", "--slot-shards 0: it must be at least 1"),
        ("--window -2", "window (-2, 0)"),
        ("--documents /does/not/exist", "--lengths /does/not/exist: cannot read"),
        ("--rates h100", "--rates h100: no such file, nor one of"),
        ("--cp 0", "--cp 0: give the context-parallel ranks"),
        ("--documents x --documents-mean 5", "exclude one another"),
        ("--kv-heads 5", "5 key/value heads do not divide 32 heads"),
        ("--dtype int8", "--dtype 'int8'"),
        ("--num-slots 1 --schedule ring", "num_slots is 1"),
        ("--seq-length 0", "--seq-length 0"),
        (
            "--seq-length 1000000000000",
            "--seq-length 1000000000000: it must be at least 1 and at most",
        ),
        ("--documents-mean nan", "documents of nan tokens"),
        ("--documents-mean inf", "documents of inf tokens"),
        ("--chunks-per-rank 3", "--chunks-per-rank 3 is for --layout balanced, not zigzag"),
        ("--draw plan.gif", "must end in .png"),
        ("--draw x.png --panel up", "--panel 'up': it must be left, right, both or states"),
        ("--draw x.png --width 0", "--width 0: it must be a number of inches"),
        ("--wire zip", "--wire 'zip': known are plain, int8, fp8, latent"),
        ("--wire latent", "--wire latent needs --mla LATENT,ROPE,NOPE,VALUE"),
        ("--mla 512,64", "--mla 512,64: it must be 4 numbers"),
        (
            "--mla 8,8,8,8 --wire latent --head-parallel 2",
            "--wire latent does not support --head-parallel 2",
        ),
    ],
)
def test_bad_input_is_one_line(options: str, message: str) -> None:
    check_one_line(f"{USUAL} {options}", message)


def test_a_plan_without_memory_is_one_line(monkeypatch) -> None:
    def full(*_, **__):
        raise MemoryError("Unable to allocate 1 PiB")

    monkeypatch.setattr(PlanSpec, "build", full)
    error = "--seq-length 4096 --cp 4: the plan does not fit into memory: Unable to allocate 1 PiB"
    check_one_line(USUAL, error)


def test_wires_of_multi_latent_attention() -> None:
    """The proportions of DeepSeek-V3: 512 + 64 numbers a token in place of 128 heads of 128 + 64
    and 128.
    """
    options = "--seq-length 131072 --cp 8 --heads 128 --mla 512,64,128,128 --wire"
    plain, latent, int8 = (facts_of(f"{options} {wire}") for wire in ("plain", "latent", "int8"))
    for name in ("bytes_in_per_rank", "bytes_out_per_rank", "gradient_bytes_in_per_rank"):
        assert all(70 * x <= y for x, y in zip(latent[name], plain[name], strict=True))
    assert max(int8["bytes_in_per_rank"]) < 0.52 * max(plain["bytes_in_per_rank"])
    waits = latent["predicted_exposed_seconds"]
    assert waits["plain"] == plain["predicted_exposed_seconds"]["plain"]
    assert 0 <= waits["latent"]["forward"] < 0.1 * waits["plain"]["forward"]
    assert (
        latent["memory"]["both: key and value slots"] * 70
        < plain["memory"]["both: key and value slots"]
    )
    assert (
        latent["memory"]["both: a hop's keys and values, decoded"]
        == plain["memory"]["both: key and value slots"] // 2
    )


def test_a_window_is_costed_for_the_kernel_that_is_assumed() -> None:
    """Native windows take one call where lower and upper triangles take a hundred."""
    line = "--seq-length 65536 --cp 8 --window 128"
    native, lowered = (facts_of(line + more) for more in ("", " --kernel cudnn"))
    assert native["kernel"] == "flash" and max(native["kernel_calls_per_rank"]) <= 4
    assert lowered["kernel"] == "cudnn" and min(lowered["kernel_calls_per_rank"]) > 100
    assert native["predicted"]["efficiency_both"] > 5 * lowered["predicted"]["efficiency_both"]
    assert "with the kernel flash, which is assumed (--kernel)" in shown(line)


def test_kernels_of_plans_are_those_of_the_registry(monkeypatch) -> None:
    assert list(KERNELS) == list(kernels.REGISTRY)
    for name in ("cpu", "reference", "cudnn", "flash_aten", "efficient"):
        assert (
            capabilities_of(name)
            == importlib.import_module(kernels.REGISTRY[name]).KERNEL.capabilities
        ), name
    module = types.ModuleType("mine")
    module.KERNEL = types.SimpleNamespace(capabilities=Capabilities(narrow_bands=8))
    monkeypatch.setitem(sys.modules, "mine", module)
    monkeypatch.setitem(kernels.REGISTRY, "mine", "mine")
    assert capabilities_of("mine") == Capabilities(narrow_bands=8)
    known = f"--kernel 'swift': known are {', '.join(kernels.REGISTRY)}"
    check_one_line(f"{USUAL} --kernel swift", known)


def test_the_verdict_comes_first() -> None:
    text = shown(USUAL)
    assert text.startswith("proven for 4 ranks: a layer takes ")
    assert "of the speed of one kernel call" in text


@pytest.mark.parametrize(("cp", "panel"), [(4, "left"), (4, "right"), (4, "both"), (24, "both")])
def test_text_of_pictures_stays_text(tmp_path: Path, cp: int, panel: str) -> None:
    path, n = tmp_path / "plan.svg", cp * 64
    plan = Plan.build(Mask.causal(n, window=(100, 0)), Layout.zigzag(n, cp))
    draw(plan, str(path), Look(panel=panel, width=8))
    text = path.read_text()
    assert ("query position" in text) == (panel != "right") and ("idle time" in text) == (
        panel != "left"
    )
    assert "causal, window 100" in text and "32 heads, 8 for keys and values, of 128, bf16" in text
    assert ("TFLOP/s a rank" in text) == (panel != "left"), "rates of the prediction"
    assert ("rank 3" in text) == (cp == 4), "scales of colors instead of a legend"
    assert ("hop (number)" in text) == (cp == 4 and panel != "right")
    assert (">hop<" in text) == (cp == 24)


def test_a_color_tells_one_thing_of_many_ranks() -> None:
    assert color(3, 0, 64, 17) == color(3, 16, 64, 17) != color(4, 0, 64, 17)
    assert color(3, 0, 8, 3) != color(3, 2, 8, 3)
    for cp in (8, 64):  # on white
        assert all(0.3 * r + 0.59 * g + 0.11 * b < 0.8 for r, g, b in
                   (color(rank, 0, cp, 2) for rank in range(cp)))  # fmt: skip


def test_ticks_are_in_the_largest_unit() -> None:
    sizes = (100, 1024, 1 << 17, 1 << 20, 5 << 18)
    assert [tokens_of(size) for size in sizes] == ["100", "1K", "128K", "1M", "1.25M"]


def test_many_documents_are_drawn_again_larger(tmp_path: Path) -> None:
    many = Mask.documents([0, *range(10, 400, 13), 400])
    assert (
        zoomed(many) == (192, 244)
        and zoomed(Mask.documents([0, 100, 250, 400])) is None
        and zoomed(Mask.causal(400)) is None
    )
    draw(
        Plan.build(many, Layout.zigzag(400, 4)),
        str(tmp_path / "plan.svg"),
        Look(panel="left", width=8),
    )
    assert "tokens 192 to 244" in (tmp_path / "plan.svg").read_text()


def test_idle_time() -> None:
    idle, busy = idle_times([Span(0, 0, 0.0, 1.0), Span(0, 1, 2.0, 4.0), Span(1, 0, 0.0, 3.0)], 2)
    assert sorted(idle) == [(0, 1.0, 2.0), (1, 3.0, 4.0)] and busy == 0.75
