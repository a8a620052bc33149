"""The site builds without a warning, loads nothing from the network, and its troubleshooting quotes
lines that exist.
"""

import ast
import logging
import re

import pytest

from cp_ring.megatron.options import SETTINGS, Options
from launch.budget import ROOT
from tests.docs import reference
from tests.docs.troubleshooting import BEGIN, END, PAGE, written

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
BLOCKS = re.MULTILINE | re.DOTALL
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?://|https?:)|<link[^>]*\brel=["']?stylesheet[^>]*\bhref=["']?(?://|https?:)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a broken link, a page without a place in the menu, or another warning fails."""
    commands = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    heard = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        commands.build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert not heard
    return folder


def test_every_page_is_built(site):
    for page in (ROOT / "docs").glob("*.md"):
        name = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert (site / name).is_file(), page.name


def test_pages_load_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        assert not LOADED.search(page.read_text()), page.relative_to(site)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site(page):
    path = ROOT / page
    for link in LINK.findall(path.read_text()):
        assert (path.parent / link).exists(), link


def test_readme_and_docs_are_short():
    def words(*pages):
        return sum(len(page.read_text().split()) for page in pages)

    assert words(ROOT / "README.md") <= 950
    assert words(*(ROOT / "docs").glob("*.md")) <= 25_000


def sentences():
    """Every string in the source, f-strings with {} for their values; neighbors that Python joins
    are joined here too.
    """
    for folder in ("cp_ring", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "{}"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def documented_lines():
    """The error lines of docs/troubleshooting.md that are written by hand: cells in code font, in
    which ... stands for values.
    """
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return re.findall(r"^\| `(.+?)` \|", before + rest.partition(END)[2], re.MULTILINE)


def test_rejected_settings_are_those_of_the_table():
    assert PAGE.read_text() == written(), "run python -m tests.docs.troubleshooting"


def test_the_reference_is_that_of_the_code():
    assert reference.PAGE.read_text() == reference.written(), "run python -m tests.docs.reference"


def test_code_blocks_fit():
    """Those that a reader types or copies; what a program prints wraps."""
    for page in (ROOT / "docs").glob("*.md"):
        for block in re.findall(r"^```(?:python|bash|yaml)\n(.*?)^```", page.read_text(), BLOCKS):
            for line in block.splitlines():
                assert len(line) <= 85, (page, line)


def test_documented_errors_exist_in_the_code():
    source = list(sentences())
    missing = []
    for line in documented_lines():
        parts = [part.strip() for part in line.split("...") if part.strip()]
        if not any(all(part in sentence for part in parts) for sentence in source):
            missing.append(line)
    assert not missing
    assert len(documented_lines()) >= 10


def test_every_flag_is_documented():
    """All on the reference, and the most used ones, none of another name, on the Megatron page."""
    every = reference.PAGE.read_text()
    assert all(f"| `{name}` |" in every for name in SETTINGS)
    page = (ROOT / "docs" / "megatron.md").read_text()
    used = set(re.findall(r"^\| `(--cp-ring[a-z-]*)` \|", page, re.MULTILINE))
    assert len(used) >= 10 and used <= {Options.flag(name) for name in SETTINGS}
