"""The cases of other libraries' tests: a sample; all of them by `python -m tests.peers`."""

from dataclasses import replace

import pytest

from tests.peers import attend, tables
from tests.peers.__main__ import PEERS, table


@pytest.mark.parametrize("name", PEERS)
def test_a_sample_passes(name):
    line, failures = table(name, 31)
    assert not failures, (line, failures)


def test_the_tables_have_their_numbers_of_cases():
    cases = {name: list(make()) for name, make in PEERS.items()}
    assert {name: len(found) for name, found in cases.items()} == {
        "TransformerEngine": 420,
        "torch": 58,
        "MagiAttention": 184,
        "ring-flash-attention": 36,
        "ring-attention-pytorch": 39,
        "long-context-attention": 50,
        "Ulysses and FPDT": 40,
        "attention-gym": 60,
    }
    for name, found in cases.items():
        assert len({case.name for case in found}) == len(found), name
    # cross attention, biases, softcaps, ALiBi, masks by head, DTensors and other libraries' kernels
    assert sum(bool(case.rejected) for found in cases.values() for case in found) == 73


def test_a_rejection_does_not_end_the_processes(pool):
    (case,) = (case for case in tables.torch_context_parallel() if case.way == "DTensor")
    for _ in range(2):
        assert case.rejected in attend.run(case, pool)[1]


def test_a_wrong_mask_shows():
    """The oracle shares no code with masks: one pair less is far above the limit."""
    case = next(iter(tables.magi_attention()))
    allowed = case.allowed.copy()
    assert attend.run(case)[0] < 1
    allowed[..., 5, 7] ^= True
    assert attend.run(replace(case, allowed=allowed))[0] > 100
