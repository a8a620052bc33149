"""A short parity suite that each version of megatron-core with a training loop passes:
`bash launch/test.sh --compat`.

With the installed version tests.parity says more; there this runs only with `-m compat`.
"""

from __future__ import annotations

import pytest

from tests.parity import matrix

pytestmark = [pytest.mark.compat, pytest.mark.slow]

NAMES = [
    "causal",
    "window_on_alternate_layers",
    "sinks_and_window",
    "mla",
    "mla_latent_wire",
    "moe",
    "mtp",
    "recompute_full",
    "packed_thd",
    "document_mask_balanced",
    "mamba_states_document_mask_balanced",
    "qwen3_next_states",
]


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted"])
def test_two_ranks_are_one_and_a_fault_shows(tmp_path, planted):
    verdicts = matrix.run(matrix.cells(NAMES, ["cp2"], planted), tmp_path)
    assert len(verdicts) == len(NAMES)
    assert not [verdict.as_dict() for verdict in verdicts.values() if not verdict.expected]
