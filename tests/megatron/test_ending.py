"""How a rank ends: what it tells the batch script, with which code, and the reason that Megatron
does not say.
"""

import argparse
import shutil

import pytest

from cp_ring.errors import PlanError
from cp_ring.megatron import compat, ending, progress, rejection


@pytest.fixture
def args(monkeypatch, tmp_path):
    """Megatron's arguments in force, of a job that has loaded step 40 and is in the 46th."""
    found = argparse.Namespace(
        iteration=40, curr_iteration=45, train_iters=50, skip_train=False, save=str(tmp_path)
    )
    monkeypatch.setattr(compat, "arguments", lambda: found)
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(ending.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return found


def told(folder):
    """What a job that has ended tells, None where it tells nothing."""
    with progress.told():
        pass
    file = folder / "progress"
    return file.read_text() if file.exists() else None


@pytest.mark.parametrize(
    "error, text",
    [
        (SystemExit(), "46 50\n"),
        (SystemExit(0), "46 50\n"),
        (SystemExit(2), "45 50\n"),
        (OSError(), "45 50\n"),
    ],
)
def test_the_steps_done_and_asked_for_are_told(args, tmp_path, error, text):
    with pytest.raises(type(error)), progress.told():
        raise error
    assert (tmp_path / "progress").read_text() == text
    assert not (tmp_path / "progress.part").exists()


def test_the_steps_of_a_job_that_has_nothing_left_to_do(args, tmp_path):
    del args.curr_iteration
    args.iteration = 50
    assert told(tmp_path) == "50 50\n"
    args.iteration, args.skip_train = 40, True  # evaluates alone
    assert told(tmp_path) == "40 40\n"


@pytest.mark.parametrize(
    "given, text",
    [
        ({"cp_ring_certify": "only", "train_iters": None}, "46 46\n"),
        ({"iterations_to_skip": [47, 48]}, "48 50\n"),
        ({"iterations_to_skip": [47, 48, 49, 50, 51]}, "50 50\n"),
        ({"curr_iteration": 50}, "50 50\n"),  # a job that was done before
    ],
)
def test_steps_that_megatron_does_not_count(args, tmp_path, given, text):
    vars(args).update(given)
    assert told(tmp_path) == text


def test_other_ranks_and_other_jobs_tell_nothing(args, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert told(tmp_path) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(compat, "arguments", lambda: None)  # rejected before they are parsed
    assert told(tmp_path) is None


@pytest.mark.parametrize("step, code", [(None, 2), (40, 2), (41, 1)])
def test_code_2_is_for_settings_that_are_wrong_before_any_step(args, step, code, capsys):
    args.curr_iteration = step
    if step is None:
        del args.curr_iteration
    with pytest.raises(SystemExit) as stop, rejection.rejecting(), ending.ending_soon("training"):
        raise PlanError("ranks differ")
    assert stop.value.code == code and capsys.readouterr().err == "cp_ring: error: ranks differ\n"


@pytest.mark.parametrize(
    "error", [ImportError("flaky"), AssertionError(), ValueError("no"), OSError(5, "I/O")]
)
def test_other_errors_before_the_first_step_are_failures(args, error):
    """A failed import, a load over a file system that is away for a moment: another try may do."""
    del args.curr_iteration
    with pytest.raises(type(error)), rejection.rejecting(), ending.ending_soon("training"):
        exec(
            compile("raise error", "checkpointing.py", "exec"),
            {"__name__": "megatron.x", "error": error},
        )


def test_a_full_disk_and_other_numbers_of_steps_are_named(args, capsys, monkeypatch):
    usage = shutil.disk_usage(args.save)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    with pytest.raises(SystemExit) as stop, ending.ending_soon("training"):
        raise RuntimeError("unexpected pos 704 vs 598")
    said = capsys.readouterr().err
    assert stop.value.code == 1 and "RuntimeError: unexpected pos" in said
    assert said.endswith(f"No space left on the disk of --save {args.save}: 4096 bytes are free\n")
    monkeypatch.undo()
    scheduler = "OptimizerParamScheduler: class input value 36 and checkpointvalue 24 do not match"
    with pytest.raises(SystemExit) as stop, ending.ending_soon("training"):
        raise AssertionError(scheduler)
    said = capsys.readouterr().err
    assert stop.value.code == 1 and f"{scheduler}: give --override-opt-param-scheduler" in said


def _of_a_loaded_optimizer(part):
    found = KeyError(f"{part} from model not in state dict: {['optimizer.state.exp_avg.b'] * 99}")
    return RuntimeError(f"Traceback (RANK 0) {'x' * 999} KeyError: {found}")


@pytest.mark.parametrize(
    "error, part, advised",
    [
        (_of_a_loaded_optimizer("optimizer.state.exp_avg.a"), "--no-load-optim\n", True),
        (_of_a_loaded_optimizer("optimizer.state.a"), 'error: "optimizer.state.a from', True),
        (_of_a_loaded_optimizer("decoder.a"), "--no-load-optim", False),
        (RuntimeError("ShardedTensor.flattened_range is not supported."), "-load-optim\n", True),
        (AssertionError("only supported by TEDotProductAttention!"), "give --cp-ring, or", True),
        (SystemExit(16), "exit code 16: a rerun of the step gives the same", True),
        (SystemExit(17), "exit code 17: a loss or gradient is wrong", True),
        (SystemExit(3), "exit code 3\n", True),
        (SystemExit("no"), "rank 0: no\n", True),
    ],
)
def test_what_megatron_means_is_said(args, capsys, error, part, advised):
    with pytest.raises((SystemExit, type(error))), ending.ending_soon("training"):
        raise error
    assert (part in capsys.readouterr().err) == advised


@pytest.mark.parametrize("save", [None, "folder"])
def test_a_loss_that_is_not_finite_is_named_where_its_step_cannot_be_saved(
    args, capsys, monkeypatch, save
):
    from megatron.core import rerun_state_machine as megatrons

    state = argparse.Namespace(state=megatrons.RerunState.WILL_RERUN_FROM_CHECKPOINT)
    monkeypatch.setattr(megatrons, "_GLOBAL_RERUN_STATE_MACHINE", state)
    args.save = save
    with pytest.raises((SystemExit, TypeError)), ending.ending_soon("training"):
        raise TypeError("expected str, bytes or os.PathLike object, not NoneType")
    said = "the loss or a gradient is not finite" in capsys.readouterr().err
    assert said == (save is None)


def test_the_first_rank_of_a_machine_prints_and_no_rank_waits(args, capsys, monkeypatch, tmp_path):
    for rank in (1, 0):
        (tmp_path / f"attempt_0/{rank}").mkdir(parents=True)
        file = tmp_path / f"attempt_0/{rank}/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(rejection.time, "sleep", lambda _: pytest.fail("waits"))
        with pytest.raises(SystemExit):
            rejection.reject("wrong")
        assert "wrong" in file.read_text()
        assert capsys.readouterr().err == ("cp_ring: error: wrong\n" if rank else "")
