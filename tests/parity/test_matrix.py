"""The parity matrix: a part of it in CI, with a fault of each kind that must show; all of it by
`python -m tests.parity [--planted]`.
"""

import pytest

from tests.megatron.launch import Outcome
from tests.parity import matrix
from tests.parity.matrix import Cell, Verdict
from tests.parity.models import MODELS, SPLITS

# What README.md and docs/support.md promise, a kind of promise to a group, and each split with some
# model.
HEADLINE = {
    "dense": {"causal": "a2a"},
    "windows": {"window_on_alternate_layers_balanced": "cp2"},
    "sinks": {"sinks_and_window": "cp2"},
    "packed": {"packed_thd": "a2a+p2p", "inter_document_balanced": "pp2cp2"},
    "fine-tuning": {"sft_dealt": "dp2cp2", "sft_script": "cp2"},
    "latents": {"mla_latent_wire": "cp2"},
    "experts": {"moe_sequence_parallel": "tp2cp2"},
    "predictions": {"mtp_uneven_loss_mask_mean": "cp2"},
    "masks": {"shared_prefix": "cp2", "images": "cp2"},
    "recurrent": {"qwen3_next_states": "cp2", "mamba_states_document_mask_balanced": "cp2"},
    "sparse": {"sparse_gathered": "cp2"},
    "positions": {
        "mrope_images_packed_thd": "cp2",
        "mrope_images_virtual_pipeline": "pp2cp2",
    },
    "recomputation": {"recompute_full_with_keep": "cp2"},
    "chunks of the loss": {"loss_chunk_mtp": "cp2"},
    "one ring over all ranks": {"one_ring": "cp4"},
    "wire": {"wire_int8": "cp2"},
    "resuming": {"resumed": "tp2cp2"},
    "bf16": {"bf16": "cp2"},
}  # fmt: skip
PLANTED = ("windows", "packed", "recurrent")
"""The groups of which the fault of the first model must show, on two ranks."""


def named(model, *splits, planted=False):
    found = matrix.cells([model], splits, planted)
    assert len(found) == len(splits), f"{model} does not run under each of {splits}"
    return found


def check(cells, folder):
    wrong = [
        verdict.as_dict() for verdict in matrix.run(cells, folder).values() if not verdict.expected
    ]
    assert not wrong, wrong


@pytest.mark.ci
@pytest.mark.parametrize("kind", HEADLINE)
def test_models_train_as_without_context_parallelism_and_a_planted_fault_shows(tmp_path, kind):
    models = HEADLINE[kind]
    right = [cell for name, splits in models.items() for cell in named(name, *splits.split())]
    planted = named(next(iter(models)), "cp2", planted=True) if kind in PLANTED else []
    check([*right, *planted], tmp_path)


def verdict(model, split="tp2cp2", planted=False, **found):
    return Verdict(
        Cell(model, next(each for each in SPLITS if each.name == split), planted), **found
    )


def test_every_model_has_another_name_and_a_fault():
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.fault for model in MODELS)


def test_a_cell_fails_with_the_job_that_draws_its_weights():
    cell = named("causal", "pp2cp2")[0]
    outcomes = {job.name: Outcome() for job in cell.jobs()}
    outcomes[cell.jobs()[0].name].code = 1
    assert matrix.verdict(cell, outcomes).failed.startswith("causal-start: exit code 1")
