"""The comparison of splits: padding, schedules, bytes and times, against values by hand and against
plans.
"""

import json
import shlex
from itertools import chain

import numpy as np
import pytest
from typer.testing import CliRunner

from cp_ring import Layout, Mask, Plan
from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs import splits as module
from cp_ring.plan.costs.cost import blocked_pairs
from cp_ring.plan.costs.splits import Layer, compare, padded, smallest_group
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.tools import lengths
from cp_ring.tools.cli import app, main
from tests.plan import samples

LONG_TAIL = np.array([100, 9000, 40, 700, 3000, 64, 1500, 2000, 130, 850, 16, 2984])


def by_name(lengths, cp, **options):
    layer = Layer(**{"ranks_per_node": 2, **options})
    return {split.name: split for split in compare(lengths, cp, layer)}


def test_padding_by_hand():
    assert padded(np.array([1, 8, 9, 16]), 4).tolist() == [8, 8, 16, 16]
    assert padded(np.array([1, 9]), 1).tolist() == [1, 9]
    assert (
        smallest_group(np.array([100] * 8), 8) == 1 and smallest_group(np.array([300, 500]), 8) == 8
    )
    assert smallest_group(np.array([250, *[50] * 11]), 8) == 4
    splits = by_name(LONG_TAIL, 4)
    assert splits["padded thd, cp 4"].padding == sum(-length % 8 for length in LONG_TAIL.tolist())
    assert splits["balanced"].padding == splits["zigzag"].padding == 0


def test_a_single_document_is_the_same_for_all_that_need_no_group():
    """One document without blocks, links and calls: every split has the same ideal time."""
    lengths = np.array([4096])
    free = {"rates": Rates(inside=1e30, between=1e30, call=1e-30, memory=1e30), "block": 1}
    splits = by_name(lengths, 4, **free)
    layer = Layer(**free)
    ideal = (
        (4096 * 4097 / 2 * layer.sizes.pair_flops[0] + 4096 * layer.token_flops)
        / 4
        / layer.rates.flops
    )
    for name in (
        "padded thd, cp 4",
        "per-document zigzag",
        "zigzag",
        "balanced",
        "balanced, relay",
        "balanced, heads 2",
    ):
        assert splits[name].forward == pytest.approx(ideal, rel=1e-3), name
        assert splits[name].backward == pytest.approx(ideal * 2.5, rel=0.25), name


def test_blocks_are_what_kernels_compute():
    mask = Mask.documents([0, 200, 456, 512])
    plan = Plan.build(mask, Layout.contiguous(512, 1))
    # documents of 2, 2 and 1 blocks
    assert blocked_pairs(plan.ring, 128)[0, 0] == (3 + 3 + 1) * 128**2
    assert blocked_pairs(plan.ring, 1).sum() == mask.area()
    windowed = Plan.build(Mask.causal(1024, (128, 0)), Layout.zigzag(1024, 2))
    dense = Mask.causal(1024, (128, 0)).dense()
    assert (
        blocked_pairs(windowed.ring, 1).sum()
        == dense.sum()
        <= blocked_pairs(windowed.ring, 64).sum()
        <= 1024 * (128 + 3 * 64)
    )


def test_bytes_are_those_of_the_plan():
    mask = Mask.documents(np.cumsum([0, *LONG_TAIL]))
    plan = Plan.build(mask, Layout.zigzag(mask.n, 4))
    split = by_name(LONG_TAIL, 4)["zigzag"]
    moved = plan.verify().keys_in.sum(1).max() * Layer().key_bytes
    assert split.bytes_in == moved
    split = by_name(np.array([4096]), 4)["per-document zigzag"]
    # the first rank's late chunk reads all others
    assert split.bytes_in == 3 * 1024 * Layer().key_bytes
    whole = (
        Plan.build(Mask.causal(4096), Layout.zigzag(4096, 4)).verify().keys_in.sum(1).max()
        * Layer().key_bytes
    )
    assert split.bytes_in == whole


def test_a_hybrid_schedule_is_costed_as_given():
    lengths = np.array([4096, 512, 512, 256])
    groups = [[[0], [0], [1], [2]], [[3], [3], [3], [3]]]
    layer = Layer(ranks_per_node=4, rates=Rates(call=1e-30), block=1)
    split = module._hybrid(lengths, groups, 4, layer)
    long, last = (
        module._ring_seconds(module._Ring.of(np.array([n]), ranks, 1), layer)
        for n, ranks in ((4096, 2), (256, 4))
    )
    assert split.forward == pytest.approx(long[0] + last[0]) and split.backward == pytest.approx(
        long[1] + last[1]
    )
    assert split.padding == 0 and split.between_nodes == 0


def test_megatrons_own_scheduler_makes_the_groups():
    from cp_ring.megatron.hybrid_schedule import hybrid_groups

    lengths = padded(LONG_TAIL, 4)
    groups = hybrid_groups(lengths, 4, -(-int(lengths.sum()) // 4))
    worked = [sorted({i for mine in group for i in mine}) for group in groups]
    assert sorted(chain(*worked)) == list(range(len(lengths))), "every document is in one group"
    ranks = sum(1 in mine for group in groups for mine in group)
    assert ranks >= 2, "the long document is spread"
    assert module._hybrid(LONG_TAIL, groups, 4, Layer()).balance >= 1
    with pytest.raises(ConfigError, match="hybrid scheduler fails for these lengths"):
        hybrid_groups(np.array([1 << 20]), 4, 8)


@pytest.mark.parametrize("name", lengths.PRESETS)
def test_presets_are_as_long_as_published(name):
    drawn = lengths.lengths(f"preset:{name}", 1 << 24, 1)
    assert drawn.sum() == 1 << 24 and drawn.min() >= 1
    assert (drawn == lengths.lengths(f"preset:{name}", 1 << 24, 1)).all()
    expected = {"web": 428, "code": 21000, "sft": 3600}[name]
    assert drawn.mean() == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("preset:poems", "--lengths preset:poems: known presets are web, code, sft"),
        ("lognormal:many", "--lengths lognormal:many: give lognormal:MEAN or"),
        (
            "lognormal:0.5,1",
            "--lengths lognormal:0.5,1: the mean must be at least 1 and finite, sigma 0 to 5",
        ),
        ("lognormal:100,9", "sigma 0 to 5"),
        ("/nowhere/lengths.txt", "--lengths /nowhere/lengths.txt: cannot read it"),
        ("100 x7 20", "length 2 is 'x7', not a whole number"),
        ("100 20.5", "length 2 is '20.5', not a whole number"),
        ("100 -3", "length 2 is '-3', not a whole number"),
        ("100 0 20", "document 2 is empty: leave it out"),
        (" ", "there is no document"),
        ("3000 3000", "2 lengths that sum to 6000, for 4096 tokens"),
    ],
)
def test_bad_lengths_are_one_line(tmp_path, capsys, monkeypatch, text, line):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    given = text if ":" in text or "/" in text else str(file)
    monkeypatch.setattr(
        "sys.argv",
        ["cp-ring", "plan", "--cp", "4", "--seq-length", "4096", "--lengths", given, "--compare"],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_command(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text(" ".join(map(str, LONG_TAIL)))
    found = CliRunner().invoke(
        app,
        [
            "plan",
            "--cp",
            "4",
            "--lengths",
            str(file),
            "--compare",
            "--json",
            "--ranks-per-node",
            "2",
        ],
    )
    facts = json.loads(found.stdout.splitlines()[-1])
    names = [split["name"] for split in facts["splits"]]
    assert {
        "padded thd, cp 4",
        "hybrid",
        "per-document zigzag",
        "zigzag",
        "balanced",
        "balanced, relay",
    } <= set(names)
    assert (
        min(split["ratio"] for split in facts["splits"]) == 1 and facts["tokens"] == LONG_TAIL.sum()
    )
    shown = CliRunner().invoke(
        app, shlex.split("plan --cp 4 --seq-length 64K --lengths preset:sft --compare")
    )
    assert shown.exit_code == 0 and "Published: LongAlign" in " ".join(shown.stdout.split())
    plain = CliRunner().invoke(
        app, ["plan", "--cp", "4", "--lengths", str(file), "--layout", "balanced", "--json"]
    )
    assert (
        json.loads(plain.stdout)["n"] == LONG_TAIL.sum()
        and json.loads(plain.stdout)["balance"] < 1.1
    )


@pytest.mark.parametrize(("options", "line"), [
    (["--compare"], "--compare needs --lengths"),
    (["--lengths", "lognormal:100", "--documents-mean", "5"], "exclude one another"),
])  # fmt: skip
def test_bad_options_are_one_line(capsys, monkeypatch, options, line):
    monkeypatch.setattr(
        "sys.argv", ["cp-ring", "plan", "--cp", "4", "--seq-length", "4096", *options]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err


def test_weighed_tokens_move_fewer_keys():
    from cp_ring.plan.balance import tokens_moved

    mask = Mask.documents(samples.log_normal(65536, 1000, 2))
    plain, weighed = Layout.balanced(mask, 8), Layout.balanced(mask, 8, token_work=20000)
    assert tokens_moved([(mask, 1)], weighed) < tokens_moved([(mask, 1)], plain)
    assert (weighed.tokens_per_rank == 8192).all() and np.array_equal(
        Layout.balanced(mask, 8, token_work=0).owner, plain.owner
    )
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"token_work .* must be at least 0, and finite"):
            Layout.balanced(mask, 8, token_work=bad)
