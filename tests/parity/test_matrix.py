"""The parity matrix: a part of it in every test run, all of it with `-m slow`, and a fault in each
model that must show.
"""

from __future__ import annotations

import pytest

from tests.parity import __main__ as command
from tests.parity import matrix
from tests.parity.matrix import Cell, Verdict
from tests.parity.models import MODELS, SPLITS, Model

PART = {
    "cp4": "sparse_index_share,mtp_uneven_loss_mask,mtp_uneven_loss_mask_mean,qwen3_next_states_two_heads",
    "a2a+p2p": "packed_thd,mrope_images_packed_thd",
    "tp2cp2": "moe_sequence_parallel,mla,fsdp2_mamba",
    "pp2cp2": "mla_latent_wire,dropout_mtp",
}
PLANTED = ("packed_thd",)


def named(names: str, split: str, planted: bool = False) -> list[Cell]:
    return matrix.cells(names.split(","), [split], planted)


def check(cells: list[Cell], folder) -> None:
    wrong = [
        verdict.as_dict() for verdict in matrix.run(cells, folder).values() if not verdict.expected
    ]
    assert not wrong, wrong


@pytest.mark.ci
def test_a_part_trains_as_without_context_parallelism_and_planted_faults_show(tmp_path):
    planted = named(",".join(PLANTED), "cp2", planted=True)
    check(
        [cell for split, names in PART.items() for cell in named(names, split)] + planted, tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [model.name for model in MODELS])
def test_the_whole_matrix(tmp_path, model):
    check(matrix.cells([model]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_planted_fault_shows_in_every_model(tmp_path, model):
    check(named(model.name, model.splits[0] if model.splits else "cp2", planted=True), tmp_path)


def verdict(model: Model, split: str = "tp2cp2", planted: bool = False, **found) -> Verdict:
    return Verdict(
        Cell(model, next(each for each in SPLITS if each.name == split), planted), **found
    )


PLAIN = Model("plain", "", "")
REJECTED = Model("rejected", "", "", rejected={"tp2cp2": "needs --sequence-parallel"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (verdict(PLAIN, loss_error=1e-6, grad_norm_error=9e-6), True),
        (verdict(PLAIN, loss_error=1e-6, grad_norm_error=2e-5), False),
        (verdict(PLAIN, loss_error=float("nan"), grad_norm_error=0.0), False),
        (verdict(PLAIN, planted=True, loss_error=1e-6, grad_norm_error=9e-6), False),
        (verdict(PLAIN, planted=True, loss_error=1e-1, grad_norm_error=0.0), True),
        (verdict(PLAIN, rejected="give --something"), False),
        (verdict(PLAIN, failed="crashed"), False),
        (verdict(PLAIN, planted=True, failed="crashed"), False),
        (verdict(REJECTED, rejected="--experts needs --sequence-parallel"), True),
        (verdict(REJECTED, rejected="--experts cannot be"), False),
        (verdict(REJECTED, loss_error=0.0, grad_norm_error=0.0), False),
        (verdict(REJECTED, "cp2", loss_error=0.0, grad_norm_error=0.0), True),
    ],
)
def test_a_cell_is_wrong_unless_it_is_what_its_model_says(given, expected):
    assert given.expected is expected


def test_the_table_shows_errors_rejections_and_what_is_wrong():
    verdicts = [
        verdict(PLAIN, "cp2", loss_error=1e-7, grad_norm_error=3e-7),
        verdict(PLAIN, loss_error=1e-3, grad_norm_error=0.0),
        verdict(REJECTED, rejected="needs --sequence-parallel"),
    ]
    lines = command.markdown_table(verdicts).splitlines()
    assert lines[0] == "| model | cp2 | tp2cp2 |"
    assert lines[2:] == [
        "| plain | 3.0e-07 | 1.0e-03 WRONG |",
        "| rejected |  | rejected (1) |",
        "",
        "(1) needs --sequence-parallel",
    ]


def test_every_model_has_another_name_and_a_fault():
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.fault for model in MODELS)
