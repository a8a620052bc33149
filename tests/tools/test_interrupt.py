"""A real job on two ranks that Ctrl-C ends: it saves, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import yaml

from tests.megatron.launch import environment
from tests.rank_pool import LIMIT_S
from tests.tools.slurm.job import TINY


@pytest.mark.ci
def test_ctrl_c(tmp_path):
    path, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(run_dir)}}))
    settings = (
        "megatron.context_parallel_size=2",
        "megatron.num_workers=2",
        "megatron.train_iters=100000",
        "cp_ring.certify=false",
    )
    line = [sys.executable, "-m", "cp_ring.tools", "train", str(path)]
    line += [word for one in settings for word in ("--set", one)]
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as run:  # fmt: skip
        shown = []
        reader = threading.Thread(target=lambda: shown.extend(run.stdout))
        reader.start()
        end = time.monotonic() + LIMIT_S
        while run.poll() is None and not any("step 3/" in text for text in shown):
            assert time.monotonic() < end
            time.sleep(0.05)
        processes = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        run.wait(timeout=LIMIT_S)
        reader.join()
    text = "".join(shown)
    assert run.returncode == 128 + signal.SIGINT, text
    step = int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert step >= 3 and "Traceback" not in text
    assert "; Ctrl-C saves and ends, a second one ends without saving" in text
    assert re.search(
        rf"cp_ring: step {step}: .*; the same command goes on from there", text.splitlines()[-1]
    )
    running = [process for process in processes if process.is_running()]
    assert not [each for each in running if each.status() != psutil.STATUS_ZOMBIE]
