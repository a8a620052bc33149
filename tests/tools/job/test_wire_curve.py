"""Training with quantized keys ends as training with plain keys does. Takes minutes on idle cores."""

import pytest

from tests.tools.job import wire_curve


@pytest.mark.slow
def test_quantized_keys_train_as_plain_ones_do(tmp_path):
    plain, *others = (
        wire_curve.losses(tmp_path, name, 300, 300, 512)[300] for name in ("plain", "int8", "fp8")
    )
    assert plain < 4.5, "it has learned"
    assert max(others) <= plain * (1 + wire_curve.LIMIT)
