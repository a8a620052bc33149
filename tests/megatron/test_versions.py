"""A short parity suite that each version of megatron-core with a training loop passes:
`bash launch/test.sh --compat`.

With the installed version tests.parity says more; there this runs only with `-m compat`.
"""

import pytest

from tests.parity import matrix
from tests.parity.models import MODELS

pytestmark = [pytest.mark.compat, pytest.mark.slow]

OLD = """causal sinks_and_window mla_latent_wire moe mtp recompute_full packed_thd
    document_mask_balanced mamba_document_mask_balanced qwen3_next"""
IN_DEVELOPMENT = ("delta_product", "kimi")
NAMES = OLD.split() + [
    f"{model.name}{more}"
    for model in MODELS
    for more in ("", "_states_document_mask_balanced")
    if model.name in IN_DEVELOPMENT and model.available
]
CELLS = [*matrix.cells(NAMES, ["cp2"]), *matrix.cells(["causal"], ["cp2"], planted=True)]


def test_two_ranks_are_one_and_a_fault_shows(tmp_path):
    verdicts = matrix.run(CELLS, tmp_path)
    assert len(verdicts) == len(NAMES) + 1
    assert not [verdict.as_dict() for verdict in verdicts.values() if not verdict.expected]
