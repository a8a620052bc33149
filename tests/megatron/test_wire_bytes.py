"""The bytes that a training step of multi-latent attention sends are those of the plan, with every
codec.
"""

import pytest

from tests.megatron import wire_bytes


@pytest.mark.ci
def test_counted_bytes_are_those_of_the_plan(tmp_path):
    counted = wire_bytes.counted(tmp_path, heads=4, tokens=128)
    assert counted == {wire: wire_bytes.planned(wire, 4, 128) for wire in wire_bytes.CODECS}
