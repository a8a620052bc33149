"""Every Python block of README.md and docs/ runs as it stands, and so does every `cp-ring plan`
line of a bash block.

The Python blocks of a page run in order and share their names. A comment `<!-- not run: reason -->`
on the line before a block leaves it out.
"""

import re
import shlex
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from cp_ring.tools.cli import app
from launch.budget import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.*?) -->\n+)?```(?P<language>python|bash)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FIRST = (ROOT / "docs" / "examples" / "ring_attention.py").read_text()


def blocks(language):
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text()):
            if found["language"] == language:
                yield page, found


def to_run():
    """(page, code) of every Python block that runs here: not what is marked, and not what
    `test_examples.py` runs.
    """
    for page, found in blocks("python"):
        if (
            found["reason"] is None
            and not found["code"].startswith("--8<--")
            and found["code"] != FIRST
        ):
            yield page, found["code"]


@pytest.mark.parametrize(
    "page", list(dict.fromkeys(page for page, _ in to_run())), ids=lambda page: page.name
)
def test_python_blocks(page, tmp_path, monkeypatch, registries):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": f"snippet_of_{page.stem}"}
    for code in (code for where, code in to_run() if where == page):
        line = page.read_text()[: page.read_text().index(code)].count("\n")
        # errors name the line of the page
        exec(compile("\n" * line + code, str(page), "exec"), names)


def plan_lines():
    for page, found in blocks("bash"):
        for line in found["code"].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["cp-ring", "plan"] and found["reason"] is None:
                yield pytest.param(words[1:], id=f"{page.name}: {shlex.join(words[2:])}")


@pytest.mark.parametrize("words", list(plan_lines()))
def test_plan_lines(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for flag, name in pairwise(words):
        if flag == "--draw":
            assert (tmp_path / name).stat().st_size > 1000


def test_the_readme_shows_the_first_example():
    """README.md's program is the file that `test_examples.py` starts by torchrun."""
    (code,) = [found["code"] for page, found in blocks("python") if page.name == "README.md"]
    assert code == FIRST


def test_few_blocks_are_left_out():
    found = [
        (page.name, block["reason"])
        for language in ("python", "bash")
        for page, block in blocks(language)
    ]
    # those of programs.md are lines for other programs
    left_out = [(page, reason) for page, reason in found if reason and page != "programs.md"]
    assert len(left_out) <= 4, left_out
