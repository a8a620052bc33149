"""A short parity suite that each version of megatron-core with a training loop passes: `bash launch/test.sh --compat`.

With the installed version test_models.py and test_documents.py say more; there this runs only with `-m compat`.
"""

from __future__ import annotations

import pytest

from tests.megatron.launch import train
from tests.megatron.test_models import BASELINE, COMMON, SPLITS, difference, flags
from tests.parity.rows import ROWS

pytestmark = [pytest.mark.compat, pytest.mark.slow]

NAMES = (
    "causal",
    "window_on_alternate_layers",
    "sinks_and_window",
    "mla",
    "moe",
    "recompute_full",
    "packed_thd",
    "document_mask_balanced",
)
CHOSEN = {row.name: row for row in ROWS if row.name in NAMES}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Every model at context parallel size 2, and at 1: on one rank, or experts on two."""
    folder = tmp_path_factory.mktemp("versions")
    for name, row in CHOSEN.items():
        data = dict.fromkeys((name, f"{name}-cp1", f"{name}-fault"), row.data)
        ring = flags(row, SPLITS["cp2"], f"--cp-ring {row.ring}")
        train(row.experts, {f"{name}-cp1": flags(row, BASELINE, row.baseline)}, folder, COMMON, data=data)
        train(2, {name: ring, f"{name}-fault": ring}, folder, COMMON, {f"{name}-fault": row.fault}, data=data)
    return folder


def test_there_are_all_of_them():
    assert len(CHOSEN) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_and_a_fault_shows(traces, name):
    assert difference(traces, name, f"{name}-cp1") < CHOSEN[name].tolerance
    assert difference(traces, f"{name}-fault", f"{name}-cp1") > CHOSEN[name].tolerance
