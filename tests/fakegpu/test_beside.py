"""What one attention layer asks of CUDA and NCCL is what `docs/benchmarks/beside.json` has, where
TransformerEngine's own context parallelism stands beside it.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.fakegpu.beside import compare
from tests.fakegpu.build import HERE
from tests.gpu.beside import CONTESTANTS, TE

FILE = HERE.parents[1] / "docs" / "benchmarks" / "beside.json"
COUNTS = ("launches", "kinds", "memcpys", "waits", "allocations", "events", "groups", "messages",
          "received", "MiB")  # fmt: skip


def counted(rows, case, ranks):
    """By contestant. Peak memory is in MiB: what was before adds some bytes."""
    return {
        row["contestant"]: {
            name: (row | {"MiB": row["allocated"] // 2**20})[name] for name in COUNTS
        }
        for row in rows
        if (row["case"], row["cp"]) == (case, ranks) and "rejected" not in row
    }


@pytest.fixture(scope="module")
def recorded():
    return json.loads(Path(FILE).read_text())


def test_counts_of_two_ranks_are_those_of_the_table(gpus, recorded):
    """Those of kernels that come with torch."""
    found = counted(compare(gpus, 2, "causal", names=["cp_ring flash_aten"]), "causal", 2)
    assert found["cp_ring flash_aten"] == counted(recorded, "causal", 2)["cp_ring flash_aten"]


@pytest.mark.slow
def test_counts_of_two_ranks_beside_transformer_engine(with_te, recorded):
    rows = compare(with_te, 2, "causal", names=list(CONTESTANTS))
    assert counted(rows, "causal", 2) == counted(recorded, "causal", 2)


def test_the_table_has_cp_ring_ahead(recorded):
    """Of TransformerEngine's ring: half the work on streams, no waits, fewer received bytes."""
    for case, ranks in product(("causal", "documents", "mla"), (2, 4, 8)):
        rows = counted(recorded, case, ranks)
        ours, theirs = rows["cp_ring"], rows["TransformerEngine p2p"]
        assert 2 * (ours["launches"] + ours["memcpys"]) <= theirs["launches"] + theirs["memcpys"]
        assert ours["received"] <= 0.75 * theirs["received"]
        assert not ours["waits"] and not ours["allocations"]
        assert ours["MiB"] <= theirs["MiB"] or (case, ranks) == ("mla", 8)


def test_beneath_transformer_engine_the_ring_asks_for_what_it_asks_alone(recorded):
    """Of packed documents, which it then splits one by one, it reads the offsets once a step."""
    for case, ranks in product(("causal", "window", "mla"), (2, 4, 8)):
        rows = counted(recorded, case, ranks)
        beneath, alone = rows[f"cp_ring beneath {TE}"], rows["cp_ring"]
        assert abs(beneath.pop("MiB") - alone.pop("MiB")) < 2 and beneath == alone
        assert case != "window" or f"{TE} p2p" not in rows
    for ranks in (2, 4, 8):
        assert counted(recorded, "documents", ranks)[f"cp_ring beneath {TE}"]["waits"] == 2
