"""The pairwise table: its rows cover every pair that the documents support, and a few of them train
here.
"""

import itertools

import pytest

from tests.pairwise import __main__ as command
from tests.pairwise import table
from tests.pairwise.covering import cover
from tests.parity.matrix import Verdict


def test_every_pair_that_is_allowed_is_in_a_row():
    factors = {"a": ("1", "2", "3"), "b": ("1", "2"), "c": ("1", "2"), "d": ("1", "2", "3")}

    def allowed(row):
        return not (row.get("a") == "3" and row.get("b") == "2") and not (
            row.get("b") == "1" and row.get("d") == "3"
        )

    rows, missing = cover(factors, allowed, 20, 5, [{"a": "3"}])
    assert (
        rows[0]["a"] == "3"
        and len({tuple(row.values()) for row in rows}) == 20
        and all(map(allowed, rows))
    )
    pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
        if allowed({a: x, b: y})
    }
    assert missing == pairs - {
        (a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(factors, 2)
    }
    assert missing == {("a", "3", "d", "3")}  # with neither value of b


def test_the_table_is_the_same_each_time_and_has_a_row_for_each_rule():
    rows = table.rows(200, 1)
    assert rows == table.rows(200, 1) and len(rows) == 200
    lines = [line for _, line in rows if line]
    assert lines == [rule.line for rule in table.RULES if rule.line]
    assert all(table.allowed(row) is not bool(line) for row, line in rows)


@pytest.mark.parametrize(
    ("found", "line", "expected"),
    [
        ({"loss_error": 9e-7, "grad_norm_error": 9e-7}, "", True),
        ({"loss_error": 2e-6, "grad_norm_error": 0.0}, "", False),
        ({"rejected": "--a does not go with --b"}, "", False),
        ({"rejected": "--a does not go with --b"}, "not go", True),
        ({"rejected": "--a does not go\nwith --b"}, "not go", False),
        ({"loss_error": 0.0, "grad_norm_error": 0.0}, "not go", False),
        ({"failed": "exit code 1"}, "", False),
    ],
)
def test_what_counts_as_right(tmp_path, found, line, expected):
    row, _ = table.rows(200, 1)[-1]
    exact = {factor: values[0] for factor, values in table.FACTORS.items()} | {
        "model": row["model"]
    }
    assert command.right(Verdict(table.Case.of(0, exact, tmp_path).cell, **found), line) is expected


@pytest.mark.slow
def test_a_few_rows(tmp_path):
    """One that is rejected by Megatron, one that a rule rejects, one that trains and one that
    resumes at another size.
    """
    rows = table.rows(200, 1)
    trains = next(
        number for number, (row, line) in enumerate(rows) if not line and row["resume"] == "no"
    )
    resumes = next(
        number for number, (row, line) in enumerate(rows) if not line and row["resume"] == "cp4"
    )
    for number in (0, 9, trains, resumes):
        row, line = rows[number]
        verdict, numbers = command.run(table.Case.of(number, row, tmp_path), tmp_path)
        assert command.right(verdict, line), (row, verdict, numbers)
