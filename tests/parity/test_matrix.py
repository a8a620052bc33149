"""The parity matrix: a part of it in every test run, all of it with `-m slow`, and a fault in each row that must show."""

from __future__ import annotations

import pytest

from tests.parity import __main__ as command
from tests.parity import matrix
from tests.parity.matrix import Cell, Verdict
from tests.parity.rows import COLUMNS, ROWS, Row

PART = {
    "cp2": "mla",
    "cp4": "window_on_alternate_layers,mtp_uneven_loss_mask,packed_thd,uneven_loss_mask",
    "tp2cp2": "learnable_sinks,one_key_head,moe,moe_sequence_parallel",
    "pp2cp2": "hybrid_model,document_mask_balanced",
    "dp2cp2": "moe",
}
PLANTED = ("mla", "learnable_sinks", "packed_thd", "uneven_loss_mask")


def named(names: str, column: str, planted: bool = False) -> list[Cell]:
    return matrix.cells(names.split(","), [column], planted)


def check(cells: list[Cell], folder) -> None:
    wrong = [verdict.as_dict() for verdict in matrix.run(cells, folder).values() if not verdict.expected]
    assert not wrong, wrong


def test_a_part_trains_as_without_context_parallelism_and_planted_faults_show(tmp_path):
    planted = named(",".join(PLANTED), "cp2", planted=True)
    check([cell for column, names in PART.items() for cell in named(names, column)] + planted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in ROWS])
def test_the_whole_matrix(tmp_path, row):
    check(matrix.cells([row]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_planted_fault_shows_in_every_row(tmp_path, row):
    check(named(row.name, row.columns[0] if row.columns else "cp2", planted=True), tmp_path)


def verdict(row: Row, column: str = "tp2cp2", planted: bool = False, **found) -> Verdict:
    return Verdict(Cell(row, next(each for each in COLUMNS if each.name == column), planted), **found)


PLAIN = Row("plain", "", "")
REFUSED = Row("refused", "", "", refused={"tp2cp2": "needs --sequence-parallel"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (verdict(PLAIN, loss_error=1e-6, grad_norm_error=9e-6), True),
        (verdict(PLAIN, loss_error=1e-6, grad_norm_error=2e-5), False),
        (verdict(PLAIN, loss_error=float("nan"), grad_norm_error=0.0), False),
        (verdict(PLAIN, planted=True, loss_error=1e-6, grad_norm_error=9e-6), False),
        (verdict(PLAIN, planted=True, loss_error=1e-1, grad_norm_error=0.0), True),
        (verdict(PLAIN, refused="give --something"), False),
        (verdict(PLAIN, failed="crashed"), False),
        (verdict(PLAIN, planted=True, failed="crashed"), False),
        (verdict(REFUSED, refused="--experts needs --sequence-parallel"), True),
        (verdict(REFUSED, refused="--experts cannot be"), False),
        (verdict(REFUSED, loss_error=0.0, grad_norm_error=0.0), False),
        (verdict(REFUSED, "cp2", loss_error=0.0, grad_norm_error=0.0), True),
    ],
)
def test_a_cell_is_wrong_unless_it_is_what_its_row_says(given, expected):
    assert given.expected is expected


def test_the_table_shows_errors_refusals_and_what_is_wrong():
    verdicts = [
        verdict(PLAIN, "cp2", loss_error=1e-7, grad_norm_error=3e-7),
        verdict(PLAIN, loss_error=1e-3, grad_norm_error=0.0),
        verdict(REFUSED, refused="needs --sequence-parallel"),
    ]
    lines = command.markdown_table(verdicts).splitlines()
    assert lines[0] == "| model | cp2 | tp2cp2 |"
    assert lines[2:] == [
        "| plain | 3.0e-07 | 1.0e-03 WRONG |",
        "| refused |  | refused (1) |",
        "",
        "(1) needs --sequence-parallel",
    ]


def test_every_row_has_another_name_and_a_fault():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.fault for row in ROWS)
