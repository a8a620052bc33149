"""Signals that ask a job to stop: warnings are kept before torch is loaded, and once a step is done
all are obeyed by Megatron's own --exit-signal-handler.
"""

import contextlib
import signal
import threading
import time

import psutil
import pytest

from cp_ring import patches
from cp_ring.megatron import signals
from tests.rank_pool import python

EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands down that it is ignored
sys.argv = ["pretrain_gpt", *{flags}]
import cp_ring.pretrain_gpt as entry

def install(argv):
    assert "torch" not in sys.modules
    os.kill(os.getpid(), signal.{signal})
    raise SystemExit(0 if entry.signals.received() is signal.{signal} else 3)

entry.install = install
entry.main()
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("asked", [True, False])
def test_before_the_first_step_a_signal_ends_the_job_and_a_warning_is_kept(name, asked):
    flags = ["--exit-signal-handler"] if asked else []
    done = python("-c", EARLY.format(flags=flags, signal=name))
    kept = asked and name == "SIGUSR1"
    assert done.returncode == (0 if kept else -getattr(signal, name))


def test_children_and_the_end_of_the_process_are_safe_too():
    """A spawned child has no handler, and Python takes its own down before it ends."""
    code = """
import atexit, os, signal, subprocess, sys
from cp_ring.megatron import signals

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGUSR1)

os.setpgid(0, 0)
signals.keep_warnings(["--exit-signal-handler"])
signals.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(1)"], stdout=subprocess.PIPE)
child.stdout.readline()
os.killpg(0, signal.SIGUSR1)
assert signals.received() is signal.SIGUSR1
code = child.wait()
sys.last = Last()
sys.exit(code)
"""
    assert python("-c", code).returncode == 0


CHILDREN = """
import multiprocessing, os, signal, subprocess, sys
from cp_ring import patches

def answer(pipe):
    while True:
        pipe.send(pipe.recv())

def own(context):
    class Own(context.Process):
        def run(self):
            answer(*self._args)
    return Own

def started(method, kind):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = kinds[kind](context)(args=(there,), daemon=True)
    child.start()
    there.close()
    for name in ("USR1", "TERM", "INT"):
        subprocess.run(["kill", f"-{name}", str(child.pid)], check=True)
    here.send("still there")
    assert here.recv() == "still there"
    child.pipe = here  # which the child reads until the end
    return child

kinds = {
    "target": lambda context: lambda **named: context.Process(target=answer, **named),
    "run": own,
}

def main():
    patches.get("exit_signal").apply()
    for method, kind in [("fork", "target"), ("spawn", "target"), ("forkserver", "target"), ("fork", "run")]:
        child = started(method, kind)
        os.kill(child.pid, signal.SIGSTOP)  # so that the first signal is pending
        subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
        child.terminate()
        child.join()
    children = [started(method, "target") for method in ("fork", "spawn", "forkserver")]
    print(*[child.pid for child in children], flush=True)
    END

if __name__ == "__main__":
    main()
"""


def often(name, rare):
    """A parametrization of which one case is a slow test."""
    kept = "os.kill(os.getpid(), signal.SIGKILL)" if name == "end" else "PersistentAsyncCaller"
    return pytest.mark.parametrize(name, [kept, pytest.param(rare, marks=pytest.mark.slow)])


@often("end", "sys.exit()")
def test_a_child_outlives_all_but_its_parent_whoever_starts_it(end, tmp_path):
    """Slurm and torchrun send signals to the children of a rank too: to data loader workers, and to
    the writers of --async-save, whichever strategy starts them.
    """
    done = run(tmp_path, CHILDREN.replace("END", end))
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    children = [*map(int, done.stdout.split())]
    assert len(children) == 3
    for child in children:
        ended(child)


def run(folder, text):
    """Runs a script of its own process, which others may be started from."""
    script = folder / "script.py"
    script.write_text(text)
    return python(str(script))


def ended(pid):
    """Waits until the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


WRITER = '''
import os, signal, subprocess, sys, time
from cp_ring import patches
from cp_ring.megatron import signals

SEND = """
import os, signal, time
while True:
    os.killpg({group}, signal.SIGUSR1)
    os.killpg({group}, signal.SIGTERM)
    time.sleep(0.01)
"""

def main():
    os.setpgid(0, 0)
    signals.keep_warnings(["--exit-signal-handler"])
    patches.get("exit_signal").apply()
    signals.listen()
    code = SEND.format(group=os.getpid())
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([sys.executable, "-c", code], process_group=0, **quiet)
    while signals.received() is None:
        pass
    # THEN

if __name__ == "__main__":
    main()
'''


QUEUE = """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async.get_write_results_queue()
    queue.put("written")
    assert queue.get() == "written"
    print(queue._manager._process.pid, flush=True)
    """

SAVE = """
    import torch
    from megatron.core.dist_checkpointing.strategies import async_utils

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
    torch.cuda.device_count = lambda: 1
    caller = async_utils.{caller}()
    if hasattr(caller, "_get_process"):
        caller.process = caller._get_process(0, "fork")
    caller.schedule_async_call(async_utils.AsyncRequest(write, (), []))
    caller.close()
    torch.distributed.destroy_process_group()

def write():
    time.sleep(1)
    print("written", flush=True)
"""


@often("caller", "TemporalAsyncCaller")
def test_an_asynchronous_save_is_written_whatever_signals_come(caller, tmp_path):
    done = run(tmp_path, WRITER.replace("# THEN", SAVE.format(caller=caller)))
    assert done.returncode == 0 and done.stdout.endswith("written\n"), done.stderr


@often("end", "return")
def test_the_checkpoint_writer_starts_and_works_whatever_signals_come(end, tmp_path):
    """torchrun sends its SIGTERM to the process group of each rank, Slurm to every process: also to
    the server of the queue through which Megatron's writer answers, which the first save spawns.
    """
    done = run(tmp_path, WRITER.replace("# THEN", QUEUE + end))
    assert done.returncode == (0 if end == "return" else -signal.SIGKILL), done.stderr
    ended(int(done.stdout))


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_ends_the_process(tmp_path, second):
    """torchrun passes on the first Ctrl-C as SIGINT and, at the second one, sends SIGTERM."""
    code = f"""
import os, signal
from cp_ring.megatron import signals

signals.listen()
os.kill(os.getpid(), signal.SIGINT)
assert signals.received() is signal.SIGINT
print("still here", flush=True)
os.kill(os.getpid(), signal.{second})
print("still here", flush=True)
"""
    done = run(tmp_path, code)
    assert done.stdout == "still here\n" and done.returncode == -getattr(signal, second), (
        done.stderr
    )


@pytest.fixture
def handlers():
    saved = {number: signal.getsignal(number) for number in (*signals.ASKING, signal.SIGUSR2)}
    yield
    signals._received.clear()
    signal.sigtimedwait(signals.ASKING, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKING)
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_megatron_obeys_each_signal_and_early_warnings(handlers, number, capsys):
    from megatron.training import global_vars

    signals.keep_warnings(["--exit-signal-handler"])
    patch = patches.get("exit_signal")
    patch.apply()
    try:
        handler = global_vars.DistributedSignalHandler(signal.SIGUSR2).__enter__()
        if number != signal.SIGUSR1:  # the others end the job before its first step
            assert not any(handler.signals_received())
        # to this thread: the others of a process of tests do not block the warning
        signal.pthread_kill(threading.get_ident(), number)
        assert all(handler.signals_received())
        assert f"cp_ring: {number.name}: saving, then ending" in capsys.readouterr().out
    finally:
        patch.revert()
