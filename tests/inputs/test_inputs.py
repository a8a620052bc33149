"""Wrong inputs end in one good line; all of them by `python -m tests.inputs`."""

import pytest

from tests.inputs import calls, cases

KINDS = dict.fromkeys(case.kind for case in cases("calls"))


@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind):
    tried = [(case, calls.attempt(case)) for case in cases("calls") if case.kind == kind]
    assert tried and not [(case.text, problem) for case, problem in tried if problem]


def test_what_is_silent_or_says_something_else_is_seen():
    right = cases("calls")[0]
    for text in ("q + 1", "q.nothing", "shard(q, dim=7)", "1 / 0"):
        assert calls.attempt(right._replace(text=text))
    assert not calls.attempt(right)
