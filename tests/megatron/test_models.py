"""Windows, sinks, MLA, MoE: each model at several context-parallel sizes against itself at one, and faults that must show."""

from __future__ import annotations

import shlex

import pytest

from tests.megatron.launch import trace, train
from tests.parity.rows import COLUMNS, COMMON, ROWS, Column, Row

MODELS = (
    "window_on_alternate_layers",
    "learnable_sinks",
    "off_by_one",
    "sinks_and_window",
    "mla",
    "moe",
    "one_key_head",
    "qk_layernorm",
)
CHOSEN = {row.name: row for row in ROWS if row.name in MODELS}
SPLITS = {column.name: column for column in COLUMNS if column.name in ("cp2", "cp4", "tp2cp2")}
BASELINE = Column("baseline", cp=1)


def flags(row: Row, column: Column, attention: str) -> list[str]:
    sizes = {
        "--num-layers": row.layers,
        "--seq-length": row.sequence,
        "--context-parallel-size": column.cp,
        "--tensor-model-parallel-size": column.tp,
        "--expert-model-parallel-size": row.experts,
    }
    return [
        *(word for name, size in sizes.items() for word in (name, str(size))),
        *shlex.split(row.flags),
        *shlex.split(attention),
    ]


def served(row: Row, split: Column) -> bool:
    """Megatron trains experts with tensor parallelism under sequence parallelism only, which local norms do not know."""
    return row.experts == 1 or split.tp == 1


def baseline_of(row: Row, split: Column) -> str:
    """The job at context parallel size 1 to compare with: some weights are drawn per tensor or expert parallel rank."""
    if row.experts > 1:
        return f"{row.name}-ep2"
    return f"{row.name}-tp2" if row.name == "mla" and split.tp == 2 else row.name


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Losses and gradient norms of all models and splits: three launches."""
    folder = tmp_path_factory.mktemp("models")
    train(1, {name: flags(row, BASELINE, row.baseline) for name, row in CHOSEN.items() if row.experts == 1}, folder, COMMON)
    jobs = {
        "moe-ep2": flags(CHOSEN["moe"], BASELINE, CHOSEN["moe"].baseline),
        "mla-tp2": flags(CHOSEN["mla"], Column("tp2", cp=1, tp=2), CHOSEN["mla"].baseline),
    }
    for name, row in CHOSEN.items():
        jobs[f"{name}-cp2"] = jobs[f"{name}-fault"] = flags(row, SPLITS["cp2"], f"--cp-ring {row.ring}")
    train(2, jobs, folder, COMMON, {f"{name}-fault": row.fault for name, row in CHOSEN.items()})
    jobs = {
        f"{name}-{split}": flags(row, SPLITS[split], f"--cp-ring {row.ring}")
        for split in ("cp4", "tp2cp2")
        for name, row in CHOSEN.items()
        if served(row, SPLITS[split])
    }
    train(4, jobs, folder, COMMON)
    return folder


def difference(folder, name: str, baseline: str) -> float:
    """Largest relative difference of a loss or a gradient norm over the steps."""
    found, wanted = trace(folder, name), trace(folder, baseline)
    assert sorted(found) == sorted(wanted) == [1, 2, 3]
    pairs = [(found[step][key], wanted[step][key]) for step in wanted for key in ("loss", "grad_norm")]
    return max(abs(x - y) / abs(y) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for name, row in CHOSEN.items() for split in SPLITS if served(row, SPLITS[split])]
)
def test_equals_one_rank(traces, name, split):
    row = CHOSEN[name]
    assert difference(traces, f"{name}-{split}", baseline_of(row, SPLITS[split])) < row.tolerance


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_fault_shows(traces, name):
    row = CHOSEN[name]
    assert difference(traces, f"{name}-fault", baseline_of(row, SPLITS["cp2"])) > row.tolerance
