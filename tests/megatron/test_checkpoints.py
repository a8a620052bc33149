"""Checkpoints: published whole or not at all, verified before they are loaded, as many as asked
for, and none runs code.
"""

import argparse
import collections
import enum
import errno
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.checkpoints import (
    allowed,
    folders,
    gates,
    inspection,
    last_good,
    manifest,
    process_state,
    saving,
    unpickle,
)
from cp_ring.megatron.rejection import rejecting
from cp_ring.options import Options
from tests.adversary import gadgets
from tests.megatron.launch import trace, train

RING = shlex.split("--cp-ring --cp-ring-cpu --context-parallel-size 2 --train-iters 12")
SAVE = ["--save-interval", "2", "--exit-interval", "8"]
ASYNC = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]

# many use the pool of ranks, and nearly all what `jobs` has saved
pytestmark = pytest.mark.xdist_group("pool")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One launch: an undisturbed job, jobs that save at once and in the background, and one that
    resumes from the latter.
    """
    folder = tmp_path_factory.mktemp("jobs")
    plain, late = str(folder / "plain"), str(folder / "late")
    train(
        2,
        {
            "straight": RING,
            "saved": [*RING, *SAVE, "--save", plain, "--cp-ring-keep-checkpoints", "3"],
            "saved_late": [*RING, *SAVE, *ASYNC, "--save", late],
            "resumed": [*RING, "--load", late],
            "unwritable": [*RING, *SAVE, "--save", "/proc/cp_ring"],
        },
        folder,
        codes={"unwritable": 1},
    )
    return folder


@pytest.fixture
def checkpoint(jobs, tmp_path):
    """A copy of what the job `saved` has left: iterations 4, 6 and 8."""
    return Path(shutil.copytree(jobs / "plain", tmp_path / "saves"))


def test_keeps_as_many_as_asked_each_with_its_manifest(jobs):
    assert sorted(os.listdir(jobs / "plain")) == [
        "iter_0000004",
        "iter_0000006",
        "iter_0000008",
        folders.TRACKER,
    ]
    assert (jobs / "plain" / folders.TRACKER).read_text() == "8"
    for number in (4, 6, 8):
        folder = folders.folder_of(jobs / "plain", number)
        written = {path.name for path in folder.iterdir() if path.is_file()}
        assert set(manifest.read(folder)) == written - {manifest.NAME}
        assert manifest.defect(folder) == "" and inspection.structure_defect(folder) == ""


def test_what_is_saved_in_the_background_is_the_state_at_the_save(jobs):
    assert folders.published(jobs / "late") == [2, 4, 6, 8]
    assert manifest.defect(folders.folder_of(jobs / "late", 8)) == ""
    straight, resumed = trace(jobs, "straight"), trace(jobs, "resumed")
    assert list(resumed) == [9, 10, 11, 12]
    for step, line in resumed.items():
        assert line["loss"] == pytest.approx(straight[step]["loss"], rel=1e-6), step


def test_where_nothing_can_be_saved_training_goes_on_and_says_so(jobs):
    assert [line["loss"] for line in trace(jobs, "unwritable").values()] == [
        line["loss"] for step, line in trace(jobs, "straight").items() if step <= 8
    ]
    log = (jobs / "unwritable.log").read_text()
    # Not by line: another rank may write at the same time.
    warned = re.findall(
        r"cp_ring: warning: the checkpoint of iteration (\d+) was not saved: [^;]*/proc/cp_ring",
        log,
    )
    assert warned == ["2", "4", "6", "8"]
    assert "cp_ring: error: the last checkpoint of this run was not saved" in log


# What is loaded.


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def edit_manifest(load, before, after):
    path = load / "iter_0000008" / manifest.NAME
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def swap_manifests(load):
    (load / "iter_0000008" / manifest.NAME).write_bytes(
        (load / "iter_0000006" / manifest.NAME).read_bytes()
    )


DAMAGES = {
    "flipped bit in a shard": lambda load: flip(load / "iter_0000008" / "__1_0.distcp"),
    "flipped bit in the index": lambda load: flip(load / "iter_0000008" / ".metadata"),
    "cut shard": lambda load: cut(load / "iter_0000008" / "__0_0.distcp"),
    "cut index": lambda load: cut(load / "iter_0000008" / ".metadata"),
    "no shard": lambda load: (load / "iter_0000008" / "__1_0.distcp").unlink(),
    "no metadata.json": lambda load: (load / "iter_0000008" / "metadata.json").unlink(),
    "empty manifest": lambda load: (load / "iter_0000008" / manifest.NAME).write_text(""),
    "cut manifest": lambda load: cut(load / "iter_0000008" / manifest.NAME),
    "another's manifest": swap_manifests,
    "no folder": lambda load: shutil.rmtree(load / "iter_0000008"),
    "named pipe for a shard": lambda load: pipe(load / "iter_0000008" / "__1_0.distcp"),
    "named pipe for the index": lambda load: pipe(load / "iter_0000008" / ".metadata"),
    "named pipe for the manifest": lambda load: pipe(load / "iter_0000008" / manifest.NAME),
    "another named pipe": lambda load: os.mkfifo(load / "iter_0000008" / "common.pt"),
    "a device for a shard": lambda load: device(load / "iter_0000008" / "__1_0.distcp"),
    "nested manifest": lambda load: (load / "iter_0000008" / manifest.NAME).write_text(
        '{"files":' * 9999 + "}" * 9999
    ),
    "manifest with a size that is text": lambda load: edit_manifest(
        load, '"size": ', '"size": "1", "length": '
    ),
    "manifest with a name twice": lambda load: edit_manifest(
        load, '"files": {', '"files": {}, "files": {'
    ),
    "manifest with a path": lambda load: edit_manifest(load, '"__0_0', '"../__0_0'),
    "empty folder": lambda load: (
        shutil.rmtree(load / "iter_0000008"),
        (load / "iter_0000008").mkdir(),
    ),
    "tracker ahead of any folder": lambda load: (load / folders.TRACKER).write_text("99"),
    "long tracker": lambda load: (load / folders.TRACKER).write_text("8" * 5000),
    "tracker of 60 digits": lambda load: (load / folders.TRACKER).write_text("8" * 60),
    "named pipe for the tracker": lambda load: pipe(load / folders.TRACKER),
    "empty tracker": lambda load: (load / folders.TRACKER).write_text(""),
    "binary tracker": lambda load: (load / folders.TRACKER).write_bytes(b"\xff\x00"),
    "no tracker": lambda load: (load / folders.TRACKER).unlink(),
}
STILL_8 = [
    damage for damage in DAMAGES if damage.endswith("tracker") or damage.startswith("tracker")
]


def decide(group, load, **values):
    """The iteration that this rank would load, or the rejection."""
    from cp_ring.megatron.checkpoints import loading

    args = argparse.Namespace(load=str(load), save=None, **({"ckpt_step": None} | values))
    try:
        loading.agree_on_iteration(args)
    except ConfigError as error:
        return str(error)
    return args.ckpt_step or folders.tracked(Path(load))


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_fall_back_to_the_last_good_checkpoint(pool, checkpoint, damage):
    assert pool.run(decide, 4, checkpoint) == [8] * 4
    DAMAGES[damage](checkpoint)
    wanted = 8 if damage in STILL_8 else 6
    assert pool.run(decide, 4, checkpoint) == [wanted] * 4
    # the status command looks at sizes only
    if "flipped" not in damage and "another" not in damage:
        assert last_good(checkpoint) == wanted


def put_another_checkpoints_shard(folder):
    aside = folder.parent / "aside"
    shutil.copyfile(folders.folder_of(folder.parent, 6) / "__1_0.distcp", aside)
    os.replace(aside, folder / "__1_0.distcp")


CHANGES = {
    "__1_0.distcp": put_another_checkpoints_shard,
    "__0_0.distcp": lambda folder: flip(folder / "__0_0.distcp"),
    "__0_1.distcp": lambda folder: (folder / "__0_1.distcp").write_bytes(b"new"),
    ".metadata": lambda folder: (folder / ".metadata").unlink(),
    "": lambda folder: None,
}


def load_while(group, changed, load):
    """What this rank says where one rank changes a file of the newest checkpoint after all have
    verified it.
    """
    from cp_ring.megatron.checkpoints import loading

    folder, before = loading.agree_on_iteration(
        argparse.Namespace(load=str(load), save=None, ckpt_step=None)
    )
    try:
        with loading.as_verified(folder, before):
            if group.rank() == 1:
                CHANGES[changed](folder)
            torch.distributed.barrier()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("changed", [name for name in CHANGES if name])
def test_what_changes_between_its_verification_and_the_end_of_loading_is_rejected(
    pool, checkpoint, changed
):
    told = pool.run(load_while, 4, changed, checkpoint)
    place = folders.folder_of(checkpoint, 8) / changed
    why = f"{place} was replaced or changed while it was loaded"
    assert set(told) == {f"the checkpoint is not what was verified: {why}: start the job again"}
    assert pool.run(load_while, 4, "", checkpoint)[0] == ""


def test_what_fails_to_load_because_it_was_changed_says_so(checkpoint):
    from cp_ring.megatron.checkpoints.loading import as_verified

    folder = folders.folder_of(checkpoint, 8)
    before = manifest.stamps(folder)
    with pytest.raises(ConfigError, match="not what was verified"), as_verified(folder, before):
        cut(folder / "__0_0.distcp")
        raise RuntimeError("PytorchStreamReader failed")
    with pytest.raises(RuntimeError, match="Pytorch"), as_verified(folder, manifest.stamps(folder)):
        raise RuntimeError("PytorchStreamReader failed")


def test_falls_back_more_than_once_but_never_for_a_step_that_was_asked_for(pool, checkpoint):
    flip(checkpoint / "iter_0000008" / "__1_0.distcp")
    flip(checkpoint / "iter_0000006" / "__0_0.distcp")
    assert pool.run(decide, 4, checkpoint) == [4] * 4
    (rejection,) = set(pool.run(decide, 4, checkpoint, ckpt_step=8))
    assert (
        rejection.startswith("--ckpt-step 8: the checkpoint is half written or damaged: ")
        and "__1_0.distcp" in rejection
    )
    flip(checkpoint / "iter_0000004" / "__1_0.distcp")
    (rejection,) = set(pool.run(decide, 4, checkpoint))
    assert rejection.startswith(f"--load {checkpoint}: no checkpoint in it is whole (")


def test_a_checkpoint_without_a_manifest_is_loaded_unverified(pool, checkpoint, monkeypatch):
    for number in (6, 8):
        (folders.folder_of(checkpoint, number) / manifest.NAME).unlink()
    assert pool.run(decide, 4, checkpoint) == [8] * 4
    assert last_good(checkpoint) == 8
    # unverified and named by nothing: it may be half written
    (checkpoint / folders.TRACKER).unlink()
    assert pool.run(decide, 4, checkpoint) == [4] * 4


def test_a_broken_tracker_does_not_end_the_process(checkpoint):
    from cp_ring.megatron.checkpoints.loading import tracker_reader

    args = argparse.Namespace(load=str(checkpoint), ckpt_step=None)
    (checkpoint / folders.TRACKER).write_text("")
    inspection.choose(args)
    assert tracker_reader(None)(str(checkpoint / folders.TRACKER)) == (8, False)


# What is published.


def test_an_interrupted_replacement_is_undone_and_leftovers_go(checkpoint):
    eight = folders.folder_of(checkpoint, 8)
    eight.rename(eight.with_name(".old.iter_0000008.abc"))
    (checkpoint / ".saving.iter_0000008.abc.1").mkdir()
    folders.sweep(checkpoint, {"def"})  # of another job
    assert folders.published(checkpoint) == [4, 6] and len(list(checkpoint.glob(".*"))) == 2
    folders.sweep(checkpoint, {"abc"})
    assert folders.published(checkpoint) == [4, 6, 8] and not list(checkpoint.glob(".*"))


def test_the_tracker_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    tracker = tmp_path / folders.TRACKER
    tracker.write_text("10")
    opener, seen = saving.Opener(open), []

    def killed(*args):
        seen.append(tracker.read_text())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(saving, "_report", lambda iteration, why: seen.append(why))
    with opener(str(tracker), "w") as file:
        file.write("20")
    assert (
        seen == ["10", "the tracker was not replaced: [Errno 28] No space left on device"]
        and tracker.read_text() == "10"
    )
    monkeypatch.undo()
    with opener(str(tracker), "w") as file:
        file.write("20")
    assert tracker.read_text() == "20"


def test_only_older_checkpoints_with_a_manifest_are_removed(tmp_path):
    for number in (1, 2, 3, 4, 9):
        folders.folder_of(tmp_path, number).mkdir()
        if number != 2:
            manifest.write(
                folders.folder_of(tmp_path, number), {"a": {"size": 0, "crc32": "00000000"}}
            )
    folders.prune(tmp_path, 4, 0, "abc")
    assert folders.published(tmp_path) == [1, 2, 3, 4, 9]
    folders.prune(tmp_path, 4, 2, "abc")
    assert folders.published(tmp_path) == [2, 3, 4, 9]
    folders.prune(tmp_path, 4, 1, "abc")
    assert folders.published(tmp_path) == [2, 4, 9]


def test_too_little_space_is_seen_before_anything_is_written(checkpoint, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=1000))
    with pytest.raises(OSError, match=r"0\.0 MiB free, and the last checkpoint took"):
        folders.prepare(checkpoint / ".saving.x", folders.folder_of(checkpoint, 10), {"abc"})


def test_a_save_removes_what_is_left_of_interrupted_ones_but_none_that_still_runs(tmp_path):
    running, left, next_one = (
        folders.unfinished(folders.folder_of(tmp_path, number), "abc") for number in (2, 4, 6)
    )
    for folder in (running, left):
        folders.prepare(folder, folders.folder_of(tmp_path, 2), {"abc"}, writing={running})
    folders.prepare(next_one, folders.folder_of(tmp_path, 6), {"abc"}, writing={running})
    assert sorted(tmp_path.iterdir()) == sorted([running, next_one])


# No code of a checkpoint is run.


class Evil:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.fixture
def restricting():
    for name in ("cpu_runtime", "restricted_unpickling"):
        patches.get(name).apply()
    yield
    for name in ("restricted_unpickling", "cpu_runtime"):
        patches.get(name).revert()
    settings.configure(Options.make(enabled=True))


def plant(folder, key, value):
    """Replaces the byte entry whose name begins with `key` by a torch.save of `value`."""
    index = unpickle.load_index((folder / ".metadata").open("rb"))
    entry = next(entry for entry in index.storage_data if entry.fqn.startswith(key))
    info, data = index.storage_data[entry], io.BytesIO()
    torch.save(value, data)
    shard = folder / info.relative_path
    info.offset, info.length = shard.stat().st_size, len(data.getvalue())
    shard.write_bytes(shard.read_bytes() + data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def load_entry(folder, key):
    """Reads a byte entry as Megatron's load does."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

    reader = FileSystemReader(folder)
    name = next(name for name in reader.read_metadata().state_dict_metadata if name.startswith(key))
    state = {name: io.BytesIO()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with rejecting(), gates.restricted():
        torch.distributed.checkpoint.load(
            state, storage_reader=reader, planner=planner, no_dist=True
        )
    return state[name]


def rejected(capsys, load, named="posix.system"):
    """Runs `load`, which must end the process or raise with one line that names what was found."""
    with pytest.raises((SystemExit, ConfigError)) as stop:
        load()
    line = capsys.readouterr().err if isinstance(stop.value, SystemExit) else str(stop.value)
    assert not isinstance(stop.value, SystemExit) or stop.value.code == 2
    assert (
        named in line
        and "--cp-ring-trust-checkpoint" in line
        and len(line.strip().splitlines()) == 1
    )


@pytest.mark.parametrize(
    "place",
    ["index", "common entry", "random states", "common.pt", "legacy common.pt", "nested storage"],
)
def test_a_planted_pickle_is_rejected_and_never_run(
    restricting, checkpoint, tmp_path, capsys, place
):
    folder, written, value = (
        folders.folder_of(checkpoint, 8),
        tmp_path / "written",
        Evil(tmp_path / "written"),
    )
    entry = {
        "common entry": "common_state",
        "random states": "rng_state",
        "nested storage": "rng_state",
    }.get(place)
    if place == "index":
        (folder / ".metadata").write_bytes(pickle.dumps(value))
    elif place == "nested storage":
        inner = io.BytesIO()
        torch.save(value, inner)
        plant(folder, entry, Storage(inner.getvalue()))
    elif entry:
        plant(folder, entry, [{"args": value}])
    else:
        torch.save(
            {"args": value},
            folder / "common.pt",
            _use_new_zipfile_serialization=place == "common.pt",
        )
    (folder / manifest.NAME).unlink()
    steps = {
        "index": lambda: inspection.defect(folder),
        "random states": lambda: load_entry(folder, "rng_state"),
        "nested storage": lambda: load_entry(folder, "rng_state"),
    }
    named = {
        "legacy common.pt": "no zip archive of torch.save",
        "nested storage": "load_from_bytes",
    }.get(place, "posix.system")
    rejected(capsys, steps.get(place, lambda: inspection._saved_args(folder)), named)
    assert not written.exists()


class Storage:
    """Pickles to a call of torch's own loader of nested storages, which would load anything."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


def test_what_is_trusted_is_loaded_as_torch_does(restricting, checkpoint, tmp_path):
    folder, written = folders.folder_of(checkpoint, 8), tmp_path / "written"
    plant(folder, "rng_state", [Evil(written)])
    settings.configure(Options.make(enabled=True, trust_checkpoint=True))
    load_entry(folder, "rng_state")
    assert written.exists()


def test_outside_of_loading_torch_load_is_as_it_was(restricting, tmp_path):
    path, written = tmp_path / "file.pt", tmp_path / "written"
    torch.save(Evil(written), path)
    torch.load(path, weights_only=False)
    assert written.exists()


def test_a_real_checkpoint_passes(restricting, jobs):
    folder = folders.folder_of(jobs / "plain", 8)
    args = inspection._saved_args(folder)
    assert (args.num_layers, args.params_dtype, args.context_parallel_size) == (2, torch.float32, 2)
    assert isinstance(args.attention_backend, enum.Enum)
    ((state,),) = load_entry(folder, "rng_state")
    assert state["np_rng_state"][0] == "MT19937" and state["torch_rng_state"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "__import__"),
        ("os", "system"),
        ("argparse", "Namespace.__init__.__globals__"),
        ("torch", "hub.load"),
        ("torch", "load"),
        ("torch", "ops"),
        ("functools", "partial"),
        ("megatron.core.enums", "enum"),
        ("megatron.core.safe_globals", "numpy"),
        ("cp_ring.run", "main"),
    ],
)
def test_names_outside_the_list_are_rejected(module, name):
    def short(text):
        return b"\x8c" + struct.pack("B", len(text)) + text.encode()

    data = b"\x80\x04" + short(module) + short(name) + b"\x93."
    with pytest.raises(allowed.Rejected, match=f"a pickle of {module}.{name}"):
        unpickle.load_index(io.BytesIO(data))
    with pytest.raises(allowed.Rejected, match=f"a pickle of {module}.{name}"):
        unpickle.torch_load(archive(b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."))


def archive(pickled):
    """What torch.save writes, with other bytes for its pickle."""
    file = io.BytesIO()
    with torch.serialization._open_zipfile_writer(file) as writer:
        writer.write_record("data.pkl", pickled, len(pickled))
        writer.write_record("byteorder", b"little", 6)
    return io.BytesIO(file.getvalue())


class Forged:
    """Pickles to a call of `function`, whose result then gets `state`."""

    def __init__(self, function, args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


try:
    from numpy._core.numeric import _frombuffer
except ImportError:  # numpy 1
    from numpy.core.numeric import _frombuffer


def dtype(code, *state):
    return Forged(np.dtype, (code, False, True), (3, *state) if state else None)


def record(code, flags):
    """A data type of 8 bytes that says it is a record of `code`."""
    return dtype("V8", "|", None, ("a",), {"a": (dtype(code), 0)}, 8, 1, flags)


ADDRESS = b"A" * 8
EMPTY = np.zeros(1).__reduce__()[:2]
RETYPE, KILLED = torch._tensor._rebuild_from_type_v2, (signal.Signals, (9,))
FORGERIES = {
    "addresses": Forged(np.ndarray, ((1,), dtype("O8"), ADDRESS)),
    "addresses, data type by name": Forged(np.ndarray, ((1,), "O", ADDRESS)),
    "record of an object": Forged(_frombuffer, (ADDRESS, record("O8", 0), (1,), "C")),
    "record": Forged(_frombuffer, (ADDRESS, record("i8", 0), (1,), "C")),
    "record of no state": Forged(np.dtype, ("i4,i4",)),
    "record by lists": Forged(np.dtype, ([("a", "i4")],)),
    "integers that count references": Forged(*EMPTY, (1, (1,), dtype("i8", "<", None, None, None, -1, -1, 63), False, ADDRESS)),
    "size of a data type": dtype("V8", "|", None, None, None, 1 << 40, 1, 0),
    "array that is filled twice": pickle.dumps(np.arange(3), 2)[:-1] + b"Nb.",
    "state of a class": b"\x80\x02cargparse\nNamespace\n}X\x07\x00\x00\x00plantedK\x01sb.",
    "new enumeration": Forged(enum.Enum, ("Planted", {"a": 1})),
    "enumeration with a second argument": Forged(signal.Signals, (9, {"a": 1})),
    "state of an enumeration": Forged(*KILLED, {"planted": 1}),
    "state by torch": Forged(RETYPE, (*KILLED, signal.Signals, {"planted": 1})),
    "member renamed by torch": b"\x80\x02"
    + gadgets.renaming(gadgets.name("signal", "Signals"), 9, {"_name_": "SIGTERM", "planted": 1})
    + b".",
    "class as a value that is called": b"\x80\x02" + gadgets.name("types", "SimpleNamespace") +
    b")R}X\x01\x00\x00\x00a"
    + gadgets.name("signal", "Signals") + b"sbN\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pickle_that_forges_memory_or_changes_the_process_is_rejected(name):
    planted = FORGERIES[name]
    with pytest.raises(allowed.Rejected, match="--cp-ring-trust-checkpoint"):
        unpickle.torch_load(
            archive(planted if isinstance(planted, bytes) else pickle.dumps(planted, 2))
        )
    assert (
        signal.Signals(9).name == "SIGKILL"
        and not hasattr(signal.Signals(9), "planted")
        and not hasattr(argparse.Namespace, "planted")
    )


def test_a_load_that_changes_an_enumeration_ends_in_one_line():
    from megatron.core.transformer.enums import AttnMaskType

    changed = r"has changed megatron\.core\.transformer\.enums\.AttnMaskType\.causal\._name_ "
    before = AttnMaskType.causal._name_
    try:
        with pytest.raises(allowed.Rejected, match=changed), gates.restricted():
            AttnMaskType.causal._name_ = "no_mask"
    finally:
        AttnMaskType.causal._name_ = before
    with gates.restricted():
        pass


@pytest.mark.parametrize(
    "change", ["method", "default of a field", "default of an argument", "function"]
)
def test_the_state_of_the_process_holds_what_attention_is_made_of(monkeypatch, change):
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    before = process_state.snapshot()
    assert process_state.first_change(before) == ""
    if change == "method":
        monkeypatch.setattr(DotProductAttention, "forward", lambda self: None)
    elif change == "default of a field":
        monkeypatch.setattr(transformer_config.TransformerConfig, "attention_dropout", 0.5)
    elif change == "default of an argument":
        monkeypatch.setattr(DotProductAttention.forward, "__defaults__", (None,) * 9)
    else:
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda x: x)
    assert process_state.first_change(before)
    monkeypatch.undo()
    assert process_state.first_change(before) == ""


def test_tensors_with_attributes_pass_and_ones_beyond_their_storage_do_not():
    weight, tensor = torch.nn.Parameter(torch.rand(4, 2).bfloat16()), torch.rand(3)
    weight.partition_dim, tensor.shared = 0, [True]
    loaded = through(
        {
            "weight": weight,
            "tensor": tensor,
            "view": tensor[1:],
            "complex": torch.ones(2, dtype=torch.cfloat).conj(),
        }
    )
    assert loaded["weight"].partition_dim == 0 and type(loaded["weight"]) is torch.nn.Parameter
    assert (
        loaded["tensor"].shared == [True]
        and torch.equal(loaded["view"], tensor[1:])
        and loaded["complex"].is_conj()
    )
    rebuild, (storage, *_) = tensor.detach().clone().__reduce_ex__(2)
    for offset, size, stride in [
        (0, (4,), (1,)),
        (1, (3,), (1,)),
        (0, (2, 2), (2, 1)),
        (1 << 61, (1,), (1,)),
        (-1, (1,), (1,)),
    ]:
        with pytest.raises(allowed.Rejected):
            through(
                Forged(rebuild, (storage, offset, size, stride, False, collections.OrderedDict()))
            )
    with pytest.raises(allowed.Rejected, match="to a tensor"):
        through(
            Forged(
                RETYPE,
                (
                    rebuild,
                    torch.Tensor,
                    (storage, 0, (3,), (1,), False, collections.OrderedDict()),
                    {"shape": 1},
                ),
            )
        )


def through(value):
    """`value` as torch.save writes it and the gate loads it."""
    file = io.BytesIO()
    torch.save(value, file)
    return unpickle.torch_load(io.BytesIO(file.getvalue()))


def test_states_and_arrays_pass_as_they_are():
    arrays = [
        np.arange(6).astype(code).reshape(2, 3) for code in ("u1", "<i4", ">i4", "f2", "c16", "?")
    ]
    arrays += [
        np.array(["a", "bcd"]),
        np.array([b"a", b"bc"]),
        np.array(True),
        np.zeros((0, 3)),
        np.asfortranarray(arrays[1]),
    ]
    plain = [
        random.getstate(),
        1 + 2j,
        b"bytes",
        range(3),
        Path("a"),
        argparse.Namespace(a=torch.bfloat16),
        signal.Signals(9),
    ]
    states = np.random.get_state()
    loaded = through([plain, arrays, np.float32(1.5), states])
    assert loaded[0] == plain and loaded[2] == np.float32(1.5) and isinstance(loaded[2], np.float32)
    for ours, array in zip([*loaded[1], loaded[3][1]], [*arrays, states[1]], strict=True):
        wanted = pickle.loads(pickle.dumps(array, 2))
        assert (ours.dtype, ours.shape, ours.strides) == (
            wanted.dtype,
            wanted.shape,
            wanted.strides,
        )
        assert np.array_equal(ours, wanted)
    np.random.set_state(loaded[3])
    again = pickle.loads(pickle.dumps(loaded[1][0]))
    assert type(again) is np.ndarray and np.array_equal(again, arrays[0])


def test_states_of_torch_pass():
    state = {
        "rng": torch.get_rng_state(),
        "weight": torch.nn.Parameter(torch.randn(3)),
        "half": torch.ones(2).bfloat16(),
    }
    loaded = through(state)
    assert all(
        torch.equal(loaded[name], tensor) and type(loaded[name]) is type(tensor)
        for name, tensor in state.items()
    )
    shared = through([state["rng"], state["rng"][:4]])
    shared[0][0] += 1
    assert shared[0][0] == shared[1][0]


@pytest.mark.parametrize("protocol", [4, 5])
def test_extra_states_of_fp8_pass(restricting, protocol):
    """As TransformerEngine pickles them: tensors whose storages are in torch's legacy format."""
    state = {
        "scale": torch.rand(3),
        "history": torch.rand(2, 3),
        "extra_fp8_variables": {"num_gemms": 1, "margin": 0.5},
    }
    data = pickle.dumps(state, protocol)
    with gates.restricted():
        loaded = gates.PickleOfExtraState().loads(data)
        again = pickle.loads(data)  # by torch.storage._load_from_bytes itself
    for found in (loaded, again):
        assert torch.equal(found["scale"], state["scale"]) and torch.equal(
            found["history"], state["history"]
        )
    assert loaded["extra_fp8_variables"] == state["extra_fp8_variables"]
    evil = pickle.dumps(Forged(os.system, ("true",)), protocol)
    with gates.restricted(), pytest.raises(allowed.Rejected, match=r"posix\.system"):
        gates.PickleOfExtraState().loads(evil)


def test_a_users_own_type_passes_once_it_is_declared_safe():
    with pytest.raises(allowed.Rejected, match="Colour"):
        through(Colour.RED)
    with torch.serialization.safe_globals([Colour]):
        before = torch.serialization.get_safe_globals()
        assert through(Colour.RED) is Colour.RED
        assert set(torch.serialization.get_safe_globals()) == set(before)


class Colour(enum.Enum):
    RED = 1


def test_the_manifest_names_what_is_wrong(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    manifest.write(tmp_path, {"a": manifest.describe(tmp_path / "a")})
    assert json.loads((tmp_path / manifest.NAME).read_text())["files"]["a"] == {
        "size": 3,
        "crc32": "352441c2",
    }
    assert manifest.defect(tmp_path) == ""
    (tmp_path / "a").write_bytes(b"abd")
    assert (
        manifest.defect(tmp_path)
        == f"{tmp_path / 'a'} is not what was written: its checksum is another"
    )
    assert (
        manifest.defect(tmp_path, checksums=False) == "" and manifest.defect(tmp_path, (1, 2)) == ""
    )
