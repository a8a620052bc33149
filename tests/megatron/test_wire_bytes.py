"""The bytes that a training step of multi-latent attention sends are those of the plan, with every
codec.
"""

import pytest

from tests.megatron import wire_bytes


@pytest.mark.ci
def test_counted_bytes_are_those_of_the_plan(tmp_path):
    counted = wire_bytes.counted(tmp_path, heads=4, tokens=128)
    assert counted == {wire: wire_bytes.planned(wire, 4, 128) for wire in wire_bytes.CODECS}


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
def test_those_of_sparse_attention_too(tmp_path, cp, again):
    """With recomputation fewer than Megatron gathers."""
    counted = wire_bytes.counted_sparse(tmp_path, 4, 128, cp, again)
    assert counted == wire_bytes.planned_sparse(4, 128, cp, again)
    assert (sum(counted) < sum(wire_bytes.gathered_sparse(128, cp, again))) is again
