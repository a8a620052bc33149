"""What whole calls of `ring_attention`, forward and backward, ask of CUDA and NCCL, by torch's own
code on fake GPUs: waits, copies, memory, the order of streams, graphs and messages.

Each assertion finds faults that are planted for it.
"""

from collections import Counter
from functools import cache
from itertools import groupby

import pytest

from cp_ring.plan import Mask, PlanSpec
from cp_ring.plan.lower import ASSUMED
from cp_ring.plan.plan import plan
from cp_ring.plan.sizes.device_rates import use
from tests.fakegpu.kernel_calls import DEVICES
from tests.fakegpu.replay import hangs, in_flight_together, mismatches
from tests.kernels.planned_updates import rank_updates

RANKS = 4
FLASH = {"causal": True, "kernel": "flash_aten"}
FEW = {
    "causal": FLASH,
    "packed": FLASH | {"cu_seqlens": [0, 100, 300, 301, 700, 1024]},
    "heads": FLASH | {"heads": 2, "sizes": (8, 4, 64, 64)},  # two groups of heads a rank
}
ALL = FEW | {
    "full": {"kernel": "flash_aten"},
    "one source a hop": FLASH | {"schedule": "ring"},
    "gather": FLASH | {"schedule": "gather"},
    "ring": FLASH | {"route": "ring"},
    "window": FLASH | {"window_size": (100, 0), "layout": "contiguous"},
    "sink": FLASH | {"sink": True},
    "sizes": FLASH | {"sizes": (4, 4, 192, 128), "wire_dtype": "float32"},
    "all heads": FLASH | {"heads": 4},
    "shared heads": FLASH | {"heads": 2, "sizes": (4, 1, 64, 64)},
    "int8": FLASH | {"wire": "int8"},
    "fp8": FLASH | {"wire": "fp8"},
    "deterministic": FLASH | {"deterministic": True},
    "latent": FLASH | {"latent": 128, "sizes": (4, 4, 128, 128)},
}
CASES = {80: FEW, 90: ALL, 100: FEW}


def slow_steps(log, case):
    """What a step must not do, once there was one like it. The first one leaves tables amid the
    memory that it gives back, so the second may need more of it.
    """
    waits = [
        x for step in (1, 2) for found in (log.syncs, log.copies) for x in found(f"{case} {step}")
    ]
    return [str(event) for event in (*waits, *log.allocations(f"{case} 2"))]


def races(log, case=""):
    return [race for race in log.races if race.count(f" in {case}") == 2]


def capture_faults(log, case=""):
    return [fault for fault in log.capture_faults if f", in {case}" in fault]


PLANS = {
    "causal": (Mask.causal, "auto"),
    "full": (Mask.full, "auto"),
    "one source a hop": (Mask.causal, "ring"),
    "gather": (Mask.causal, "gather"),
}
"""The cases of `ALL` whose kernel calls have one tile each: mask and schedule."""

COUNTED = {
    "flash_fwd_kernel": "forward",
    "flash_fwd_splitkv_kernel": "forward",
    "dq_dk_dv": "backward",
    "_merge": "merge",
    "_add": "sum",
    "direct_copy": "lse",
}
OF_THE_OPERATOR = ("splitkv_combine", "dot_do_o", "convert_dq", "reduce_kernel")
"""What torch launches besides in its operators for forward and backward."""


def launches(log, part):
    """Launches by what they are; what has no name here, by its own."""
    names = [x.name for x in log.kernels(part)]
    own = [x for x in names if not any(known in x for known in OF_THE_OPERATOR)]
    return Counter(next((y for x, y in COUNTED.items() if x in name), name) for name in own)


def rank_plans(case, sm):
    mask, schedule = PLANS[case]
    use(DEVICES[sm].lower())
    made = plan(mask(256 * RANKS), RANKS, PlanSpec(schedule=schedule))
    return [made.rank_plan(rank) for rank in range(RANKS)]


def planned_launches(part):
    """Those that the plan of a rank and the documentation promise, and no others."""
    updates = rank_updates(part, ASSUMED)
    keys = sum(not x.whole for of_hop in updates.keys.values() for x in of_hop)
    queries = [(int(tiles.q0[0]), int(tiles.q1[0])) for tiles in updates.grids[1]]
    return Counter(
        forward=len(updates.grids[0]),
        backward=len(updates.grids[1]),
        merge=sum(not x.whole for x in updates.out),
        sum=sum(not x.whole for x in updates.dq) + keys,
        # a part of lse, for calls one after another that have the same queries
        lse=sum(x != (0, part.num_tokens) for x, _ in groupby(queries)),
    )


@pytest.fixture(scope="module")
def clean(gpus):
    """The logs of `CASES` on GPUs of a compute capability."""
    program = "tests.fakegpu.programs:rings"
    return cache(lambda sm: gpus.run(program, RANKS, sm, cases=CASES[sm], captured=True))


capabilities = pytest.mark.parametrize(
    "sm", [90, pytest.param(100, marks=pytest.mark.ci), pytest.param(80, marks=pytest.mark.slow)]
)


@capabilities
def test_a_step_neither_waits_nor_copies_nor_allocates(clean, sm):
    for log in clean(sm):
        for case in CASES[sm]:
            assert not slow_steps(log, case)
            kernels = [log.kernels(f"{case} {step}") for step in (1, 2)]
            assert kernels[0] == kernels[1] and any("flash_bwd" in x.name for x in kernels[0])


@capabilities
def test_streams_wait_for_each_other_before_they_read_or_reuse_memory(clean, sm):
    for log in clean(sm):
        assert not races(log) and not log.unknown()


@capabilities
def test_groups_of_messages_complete_whoever_comes_first(clean, sm):
    logs = clean(sm)
    assert not hangs(logs) and not mismatches(logs)
    assert not any(map(in_flight_together, logs))
    for case in CASES[sm]:
        assert any(group.part == f"{case} 2" for group in logs[0].groups)


def before_own_keys(log, part):
    """Messages that are issued before the first attention of forward, or of backward."""
    kinds = [
        next((x for x in ("flash_fwd", "flash_bwd") if x in " ".join(event.words)), event.kind)
        for event in log.of(part, "launch", "nccl")
    ]
    backward = kinds[len(kinds) - kinds[::-1].index("flash_fwd") :]
    return [
        of_pass[: of_pass.index(name)].count("nccl")
        for of_pass, name in ((kinds, "flash_fwd"), (backward, "flash_bwd"))
    ]


@capabilities
def test_attention_to_own_keys_is_launched_before_the_first_messages(clean, sm):
    """Else it would start behind them where all streams have one queue."""
    for log in clean(sm):
        for case in PLANS.keys() & CASES[sm]:
            assert before_own_keys(log, f"{case} 2") == [0, 0]


@capabilities
def test_gradients_of_a_hop_leave_together_with_keys_of_a_later_one(clean, sm):
    """Else each pair of groups would go one after the other before the kernels behind them."""
    if sm == 90:
        for log, part in zip(clean(sm), rank_plans("one source a hop", sm), strict=True):
            groups = [x for x in log.groups if x.part == "one source a hop 2"]
            keys = sum(bool(hop.receives or hop.sends) for hop in part.hops)
            # of forward and backward; the last two sets of gradients have no keys beside them
            assert keys == 3 and len(groups) == keys + keys + 2


@capabilities
def test_a_step_launches_what_its_plan_says(clean, sm):
    for case in PLANS.keys() & CASES[sm]:
        parts = rank_plans(case, sm)
        for log, part in zip(clean(sm), parts, strict=True):
            found, stages = launches(log, f"{case} 2"), len(part.backward)
            assert found == planned_launches(part)
            assert found["merge"] <= len(part.hops) - 1
            assert found["sum"] <= 2 * stages and found["lse"] <= stages + 1
    if sm == 90:
        expected = {"forward": 4, "merge": 1, "backward": 5, "sum": 7, "lse": 2}
        assert launches(clean(sm)[0], "one source a hop 2") == expected


@capabilities
def test_plans_are_chosen_by_the_rates_of_the_gpu(clean, sm):
    for log in clean(sm):
        assert [x.words for x in log.of(None, "rates")] == [(DEVICES[sm].lower(),)]


@capabilities
def test_captures_of_graphs_join_all_streams(clean, sm):
    for log in clean(sm):
        assert not capture_faults(log)
        for case in CASES[sm]:
            assert log.kernels(f"{case} capture") and log.of(f"{case} capture", "nccl")


@capabilities
def test_nothing_of_the_libraries_that_was_called_is_a_stub(clean, sm):
    assert not set().union(*(log.stubs() for log in clean(sm)))


def test_a_slot_is_used_again_when_its_hop_has_been_computed(gpus):
    """Of six ranks, which have more hops than slots."""
    right = ALL["one source a hop"]
    cases = {"right": right, "slots": right | {"num_slots": 3}}
    logs = gpus.run("tests.fakegpu.programs:rings", 6, 90, cases=cases)
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log)
        assert not any(slow_steps(log, case) for case in cases)


def test_tables_on_the_device_are_read_after_their_copy_on_any_stream(gpus):
    program, case = "tests.fakegpu.programs:on_two_streams", ALL["packed"]
    for fault in ("", "tables read at once"):
        logs = gpus.run(program, RANKS, 90, case=case, planted=fault)
        # what Triton's functions read counts as written, by both calls
        early = [race for log in logs for race in log.races if "_to_copy" in race]
        assert bool(early) == bool(fault), early


# Of TransformerEngine with cuDNN 9.20; other kernels run them.
LACKS = {80: ("packed", "sizes", "deterministic"), 90: ("deterministic",)}


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_transformer_engine(with_te, sm):
    """Its own library and extension, with plans of the real cuDNN for each device."""
    lacks = LACKS.get(sm, ())
    cases = {
        name: {"sizes": (4, 2, 128, 128), "tokens": 512} | case | {"kernel": "transformer_engine"}
        for name, case in ALL.items()
        if name not in ("all heads", *lacks)
    }
    logs = with_te.run("tests.fakegpu.programs:rings", 2, sm, cases=cases, steps=3)
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown() and not log.stubs()
        for case in cases:
            assert not slow_steps(log, case)
        assert [x for x in log.kernels("causal 2") if x.name.startswith("cudnn")]


def of_each(finds):
    return lambda logs, case: all(finds(log, case) for log in logs)


slow, racing, in_a_capture = map(of_each, (slow_steps, races, capture_faults))
FINDS = {
    "lost wait for keys": racing,
    "lost wait for gradients": racing,
    "early reuse of a slot": racing,
    "sync in a hop": slow,
    "value in a hop": slow,
    "copy in a hop": slow,
    "memory in a hop": slow,
    "values before keys": lambda logs, case: bool(mismatches(logs, case)),
    "launch in a hop": lambda logs, case: all(
        launches(log, f"{case} 2") != planned_launches(part)
        for log, part in zip(logs, rank_plans("one source a hop", 90), strict=True)
    ),
    "sends before receives": lambda logs, case: bool(hangs(logs, case)),
    "early free in a hop": racing,
    "fork in a hop": racing,
    "two communicators": lambda logs, case: all(in_flight_together(log, case) for log in logs),
}
# The others torch rejects by itself, or they are none in a graph.
CAPTURED = ("lost wait for gradients", "sync in a hop", "value in a hop", "fork in a hop")


@pytest.fixture(scope="module")
def planted(gpus):
    """The logs of calls with one planted fault each, one after another; and of captures of such."""

    def run(captured):
        options = ALL["one source a hop"] | ALL["sizes"]
        cases = dict.fromkeys(CAPTURED if captured else FINDS, options)
        if not captured:
            cases["two communicators"] = ALL["heads"]
            cases["launch in a hop"] = ALL["one source a hop"]
        program = "tests.fakegpu.programs:rings"
        return gpus.run(program, RANKS, 90, cases=cases, planted=True, captured=captured)

    return cache(run)


@pytest.mark.ci
@pytest.mark.parametrize("plant", FINDS)
def test_a_planted_fault_is_found(planted, plant):
    assert FINDS[plant](planted(False), plant)


@pytest.mark.ci
@pytest.mark.parametrize("plant", CAPTURED)
def test_a_planted_fault_is_found_in_a_capture(planted, plant):
    assert in_a_capture(planted(True), plant)
