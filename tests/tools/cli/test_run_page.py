"""`cp-ring status --html` and `--watch`: the page of a run, and its state in the terminal."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.cli import app, job_commands, run_page
from cp_ring.tools.slurm.status import status
from tests import browser

TIMING = {
    "step": 2, "attention_ms": 12.0, "exposed_ms": 3.0, "exposed_share": 0.25, "balance_planned": 1.0,
    "balance_timed": 1.1,
    "plans_ms": 0.0, "wire_gb_s": {"inside nodes": 9.5},
    "hops": [{"direction": "forward", "hop": 1, "compute_ms": 2.0, "wait_ms": 1.0}],
    "slowest_rank": {"rank": 3, "host": "n<1>", "slower": 1.2, "share": 0.9},
    "slowest_link": {"sender": 0, "receiver": 1, "hosts": ["a", "b"], "slower": 4.0, "share": 1.0,
    "waited": 0.1},
}  # fmt: skip

CERTIFIED = {
    "about": {"versions": {"torch": "2.13.0"}, "date": "2026-11-24", "not_covered": []}, "seconds": 1.5,
    "probes": [{"name": "mask", "layer": "layer 1", "mask": "causal", "error": 2e-7, "bound": 1e-5,
    "passed": True, "where": ""}],
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    job = {"megatron": {"seq_length": 512, "train_iters": 4, "num_attention_heads": 4}, "parallel": {
        "context_parallel_size": 4},
           "cp_ring": {"enabled": True}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    for step in (1, 2, 3, 2, 3, 4):
        extra = {"timing": TIMING} if step == 3 else {}
        progress.append(
            str(tmp_path),
            step,
            {"lm loss": 5.0 - step, "tokens per second": 100.0, "memory": 2**30, **extra},
        )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / run_page.CERTIFICATE).write_text(json.dumps(CERTIFIED))
    progress.finish(str(tmp_path), 4)
    return tmp_path


class Parts(HTMLParser):
    """The sections of a page, and everything that it would load."""

    def __init__(self, text):
        super().__init__()
        self.sections, self.loaded, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.sections += [found["id"]] if tag == "section" else []
        self.ids += [found["id"]] if "id" in found else []
        self.loaded += [
            found[name]
            for name in ("src", "href", "xlink:href")
            if not (found.get(name) or "#").startswith("#")
        ]


def test_page(run_dir, tmp_path):
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["status", str(run_dir), "--html", str(out)])
    assert result.exit_code == 0, result.exception
    text = out.read_text()
    parts = Parts(text)
    assert parts.sections == [
        "state",
        "curves",
        "where-the-time-goes",
        "plan",
        "certificate-and-versions",
    ]
    assert parts.loaded == [] and "@import" not in text and len(parts.ids) == len(set(parts.ids))
    assert text.count("<svg") == 2, "curves and plan"
    for words in (
        "DONE",
        ">loss<",
        ">tokens/s<",
        "memory of a rank, GiB",
        "n&lt;1&gt;",
        "+20%",
        "0 -&gt; 1: 4.0 x",
        "2.13.0",
        "1 of 1 probes passed",
        "<td>2.0e-07</td><td>1.0e-05</td><td>passed</td>",
        "<h2>Where the time goes</h2>",
        "rank 3",
    ):
        assert words in text, words
    assert not re.search(r"n<1>", text)


LOOK = """
const panel = (section) => {
  const box = section.getBoundingClientRect();
  const pictures = [...section.querySelectorAll('svg')].map((svg) => svg.getBoundingClientRect());
  return {
    id: section.id, title: section.querySelector('h2').innerText, width: box.width, height: box.height,
    seen: section.innerText.length, pictures: pictures.map((each) => [each.width, each.height]),
    words: [...section.querySelectorAll('svg text')].filter((text) => text.getBoundingClientRect().width > 0).length,
  };
};
tell([...document.querySelectorAll('section')].map(panel));
"""


@pytest.mark.slow
def test_a_real_browser_shows_each_panel(run_dir, tmp_path):
    (tmp_path / "site").mkdir()
    run_page.write(run_dir, tmp_path / "site" / "index.html")
    seen = browser.visit(tmp_path / "site", LOOK, {}, tmp_path / "page.png")
    assert set(seen.asked) <= {"/", "/look.js", "/hold.png", "/favicon.ico"}, (
        "the page needs nothing else"
    )
    panels = {panel["id"]: panel for panel in seen.found}
    assert list(panels) == [
        "state",
        "curves",
        "where-the-time-goes",
        "plan",
        "certificate-and-versions",
    ]
    for panel in panels.values():
        assert (
            panel["title"] and panel["width"] > 500 and panel["height"] > 50 and panel["seen"] > 20
        ), panel
    for name in ("curves", "plan"):
        ((width, height),) = panels[name]["pictures"]
        assert width > 500 and height > 200 and panels[name]["words"] > 10, (
            "pictures are drawn, and their text is text"
        )
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_run_of_a_script(run_dir, tmp_path):
    """Without the job.yaml of `cp-ring train`: the first step leaves Megatron's arguments."""
    args = {"save": "ckpt", "train_iters": 6, "seq_length": 512, "num_attention_heads": 4,
            "context_parallel_size": 4, "cp_ring_run_dir": "x", "cp_ring": True,
            "model_type": object()}  # fmt: skip
    progress.begin_script(run_dir, args)
    assert (
        "train_iters" in (run_dir / "job.yaml").read_text() and status(run_dir)["state"] == "DONE"
    )
    (run_dir / "job.yaml").unlink()
    for wanted in (5, 6):  # another start, with other flags
        progress.begin_script(run_dir, args | {"train_iters": wanted})
        found = status(run_dir)
        assert (found["state"], found["train_iters"]) == ("started by a script", wanted)
    assert found["save"] == str(Path.cwd() / "ckpt")
    progress.finish(str(run_dir), 4)
    page = run_page.page(run_dir)
    assert page.count("<svg") == 2 and "no picture" not in page
    watched = CliRunner().invoke(app, ["watch", str(run_dir)])
    assert watched.exit_code == 0 and "4 of 6" in watched.output, watched.exception


def test_restarts_are_seen_in_the_steps(run_dir):
    steps = progress.read(run_dir)
    assert run_page.restarts(run_dir, steps) == [steps[3]["time"]]


def test_a_page_of_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"megatron": {"seq_length": 512}}))
    text = run_page.page(tmp_path)
    for words in ("no step is logged yet", "no step was sampled", "no hops", "no certificate"):
        assert words in text


@pytest.mark.parametrize(
    "words",
    ["status {run} --html", "plan --cp 2 --seq-length 64 --draw", "tune quickstart --gpus 8 --write",
     "tune quickstart --gpus 8 --draw", "trace {run}/job.yaml --draw"],
)  # fmt: skip
def test_where_a_file_cannot_be_written_nothing_is_done(run_dir, tmp_path, monkeypatch, words):
    work = pytest.fail  # which none of these may begin
    for name in ("run_page.page", "plan_command._make_mask", "tune_command.tune"):
        monkeypatch.setattr(f"cp_ring.tools.cli.{name}", work)
    for name, reason in {
        "none/x.png": "No such file or directory",
        "checkpoints": "Is a dir",
    }.items():
        line = [*words.format(run=run_dir).split(), str(tmp_path / name)]
        with pytest.raises(ConfigError, match=f"^{line[-2]} .*: cannot write: {reason}"):
            CliRunner().invoke(app, line, catch_exceptions=False)


def test_watch_ends_when_the_run_is_done(run_dir):
    result = CliRunner().invoke(app, ["status", str(run_dir), "--watch"])
    assert result.exit_code == 0, result.exception
    console = Console(record=True, width=120)
    console.print(job_commands.state_and_steps(status(run_dir), progress.read(run_dir)))
    shown = console.export_text()
    assert (
        "step 4 | loss 1.0000 | 100 tokens/s" in shown
        and "25.0% of attention is waiting, slowest rank 3" in shown
    )


@pytest.mark.parametrize(
    "timing",
    [{}, {"slowest_rank": {}}, {"slowest_rank": {"rank": 1}}, {"hops": [{}]}, {"hops": 3}, {
        "slowest_link": [1]},
     {"exposed_share": "x"}, {"wire_gb_s": None}],
    ids=str,
)  # fmt: skip
def test_malformed_files_are_said_on_the_page(run_dir, timing):
    progress.append(str(run_dir), 5, {"lm loss": 1.0, "timing": timing, "memory": "much"})
    (run_dir / "checkpoints" / run_page.CERTIFICATE).write_text("[1, 2]")
    text = run_page.page(run_dir)
    assert "cannot be read: " in text and Parts(text).sections[0] == "state"
