"""Wrong inputs end in one good line and leave nothing behind; all of them by
`python -m tests.inputs`.
"""

from pathlib import Path

import pytest

from tests.inputs import Case, calls, cases, commands, sample

KINDS = dict.fromkeys(case.kind for case in cases("calls"))


@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind):
    tried = [(case, calls.attempt(case)) for case in cases("calls") if case.kind == kind]
    assert tried and not [(case.text, problem) for case, problem in tried if problem]


def test_some_commands():
    tried = [(case, commands.attempt(case)) for case in sample("commands", 30)]
    assert len(tried) > 20 and not [(case.text, problem) for case, problem in tried if problem]


@pytest.mark.ci
def test_all_commands():
    tried = [(case, commands.attempt(case)) for case in cases("commands")]
    assert not [(case.text, problem) for case, problem in tried if problem]


def test_there_are_many():
    assert len(cases("calls")) > 400 and len(cases("commands")) > 400


def test_what_is_silent_or_says_something_else_is_seen():
    right = cases("calls")[0]
    for text in ("q + 1", "q.nothing", "shard(q, dim=7)", "1 / 0"):
        assert calls.attempt(right._replace(text=text))
    assert not calls.attempt(right)


def test_a_command_that_goes_on_or_leaves_something_is_seen(monkeypatch):
    right = Case("files", "cp-ring train nosuch.yaml", ["no such file"])
    assert not commands.attempt(right)
    assert "exit code 0" in commands.attempt(right._replace(text="cp-ring flags"))
    assert "lacks" in commands.attempt(right._replace(words=["another word"]))
    ran = commands.run
    monkeypatch.setattr(commands, "run", lambda line: (Path("new").touch(), ran(line))[1])
    assert "left ['new']" in commands.attempt(right)
