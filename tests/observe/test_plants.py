"""Planted slow ranks and slow links of real ranks, with real messages over real wires, are named as
what they are.
"""

import pytest

from tests.observe.plants import Plant, Setting, try_plant

# Ranks compute by the clock, and slowly: what else the machine does is little beside it. The
# throttled wire needs as long for the keys and values of a rank as all of them compute in a forward
# pass.
SETTING = Setting(tokens=64, calls=2, pair_s=1.5e-5)
RATE = SETTING.shard_bytes / 0.15


@pytest.mark.slow  # and alone: other tests beside it are as slow as what is planted
@pytest.mark.parametrize(
    "plant",
    [Plant(0, slower=2.0), Plant(2, slower=1.6), Plant(0, 3, rate=RATE), Plant(2, 1, rate=RATE)],
)
def test_a_plant_is_named(pool, mesh, plant):
    lines, records = try_plant(pool, mesh, SETTING, plant)
    assert plant.named_by(lines), lines
    waits = {(hop["direction"], hop["hop"]): hop["wait_ms"] for hop in records[-1]["hops"]}
    assert max(waits.values()) > 0, "others wait for what is slow, at some hop"
