"""Each line of README.md and docs/ that promises much names in `claims.json` the tests that show
it, or none where it says what a word means or what others do; numbers of README.md are compared
with what they count.
"""

import json
import re

from tests.docs.test_snippets import ROOT
from tests.plan.test_proof import FAULTS

STRONG = re.compile(
    r"\b(proven|proves?|exact(ly)?|flat|never|always|every|only|none wrong|no GPU|same bits)\b",
    re.IGNORECASE,
)
ERRORS = ("out", "dq", "dk", "dv")
GENERATED = {"reference.md", "troubleshooting.md"}
CLAIMS = json.loads((ROOT / "tests" / "docs" / "claims.json").read_text())


def promises():
    """The lines of each page that promise much, without code."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name not in GENERATED:
            text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
            yield page.name, [line for line in text.splitlines() if STRONG.search(line)]


def test_each_promise_names_its_tests():
    found = dict(promises())
    for page, lines in found.items():
        known = CLAIMS.get(page, {})
        for line in lines:
            assert any(said in line for said in known), f"{page}: no test is named for: {line}"
        for said in known:
            assert any(said in line for line in lines), f"{page} does not say: {said}"
    assert {*CLAIMS} <= {*found}


def test_the_named_tests_exist():
    names = {name for page in CLAIMS.values() for tests in page.values() for name in tests}
    for name in names:
        path, _, function = name.partition("::")
        tests = re.findall(
            r"^(?:def )?(test_\w+)(?:\(| = )", (ROOT / path).read_text(), re.MULTILINE
        )
        assert function in tests, name


def test_numbers_of_the_readme():
    text = (ROOT / "README.md").read_text()
    assert f"{len(FAULTS)} faults planted in the planner" in text
    rows = json.loads((ROOT / "docs" / "benchmarks" / "accuracy.json").read_text())["rows"]
    ratios = [row[name] for row in rows if row["dtype"] == "float32" for name in ERRORS]
    assert f"the float32 error is at most {max(ratios):.2f} times that of one rank" in text
    heads, parts = 128, (128 + 64, 128)  # DeepSeek-V3: a head's key and value
    assert f"the latent of DeepSeek-V3 is {round(heads * sum(parts) / (512 + 64))} times" in text


def test_what_no_gpu_has_run_is_said():
    """Until results of a GPU are committed, the first screen says that there are none."""
    results = [*(ROOT / "docs" / "benchmarks").glob("gpu*.json")]
    assert bool(results) != ("No GPU has run this code yet" in (ROOT / "README.md").read_text())
