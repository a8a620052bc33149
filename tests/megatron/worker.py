"""One rank of a test job: runs a training job and writes what each step did.

A job is {"name", "argv"}, where a first word that is no flag is a script for cp_ring.run; "fault"
and "data" may name one of tests.parity.faults and deliveries. The trace of a job goes to
FOLDER/name.RANK.jsonl: for each step its number, loss and gradient norm at full precision, a
checksum of each sequence that this rank read, how many hops it has executed and how many bytes of
keys and of gradients it has sent since the job began; for each validation pass its loss; and why
it was rejected, if it was.
"""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import sys

from tests.parity.deliveries import delivered
from tests.parity.faults import planted

rows = []


REJECTED = 2
STAND_INS = "tests.parity.recurrent"  # torch in place of CUDA kernels


class Rejected(Exception):
    """A job ended before it trained, with a message for its user."""


def observe(path, ledger):
    """Makes Megatron write a line to `path` after each training step and each validation pass."""
    import megatron.training.training as training

    from cp_ring.megatron import gpt

    training_log, evaluate, next_batch = training.training_log, training.evaluate, gpt._next_batch
    passes = itertools.count()

    def log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **named):
        grad_norm = rest[3]
        line = {
            "step": iteration,
            "loss": float(loss_dict["lm loss"]) if loss_dict else None,
            "grad_norm": float(grad_norm),
        }
        line |= {"rows": sorted(rows), "hops": ledger.hops, "sent": dict(ledger.bytes_by_kind)}
        write(path, line)
        rows.clear()
        return training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **named)

    def evaluate_and_tell(*args, **kwargs):
        answer = evaluate(*args, **kwargs)
        write(
            path,
            {
                "pass": next(passes),
                "validation": float(answer[0]["lm loss"]) if answer[0] else None,
            },
        )
        return answer

    def read(data_iterator):
        batch = next_batch(data_iterator)
        rows.extend(hashlib.sha1(row.numpy().tobytes()).hexdigest() for row in batch["tokens"])
        return batch

    training.training_log, training.evaluate, gpt._next_batch = log, evaluate_and_tell, read


def write(path, line):
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def reject(message, code=2):
    raise Rejected(message)


def import_stand_ins(argv):
    """Imports the stand-ins for CUDA kernels before the patches are applied, which wrap them."""
    from cp_ring.megatron.compat import functions_uncompiled

    if STAND_INS in argv:
        with functions_uncompiled():
            importlib.import_module(STAND_INS)


def run(job, folder):
    """Trains as the job's flags say."""
    from cp_ring import pretrain_gpt
    from cp_ring import run as scripts
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.megatron import rejection
    from cp_ring.observe.counters import record
    from cp_ring.patches.install import install

    by_script = not job["argv"][0].startswith("-")
    if by_script:  # whose folder replaces the first place of sys.path, also in processes of a save
        sys.path.insert(0, "")
    if "--cp-ring" in job["argv"] and "--cp-ring-certify" not in job["argv"]:
        job["argv"].append("--no-cp-ring-certify")  # which tests of its own have
    sys.argv = ["cp_ring.run" if by_script else "pretrain_gpt", *job["argv"]]
    path = folder / f"{job['name']}.{os.environ['RANK']}.jsonl"
    path.unlink(missing_ok=True)
    rejection.reject = reject
    try:
        import_stand_ins(job["argv"])
        install(sys.argv[1:])
        with record() as ledger, delivered(job["data"]), planted(job["fault"]):
            observe(path, ledger)
            scripts.main() if by_script else pretrain_gpt.main()
    except (Rejected, ConfigError, KernelError, PlanError) as error:
        write(path, {"rejected": str(error)})
        sys.exit(REJECTED)


def rank(rank, ranks, port, job, folder, log, work=run):
    """Is rank `rank` of `ranks`, whose store the launcher holds at `port`; both output streams go
    to `log`.
    """
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a job
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # where another test has built a model
    os.environ |= place(rank, ranks, port)
    output_to(log)
    work(job, folder)


def place(rank, ranks, port):
    """The environment variables by which a rank finds the others."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    numbers |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONWARNINGS": "ignore",
    }


def output_to(log):
    """Both output streams of this process go to `log` from now on."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
