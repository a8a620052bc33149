"""Attacks by checkpoints: whoever can write to a folder of checkpoints wants code to run in the job
that reads it.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, inspection, manifest, process_state, unpickle
from tests.adversary import Try, attack, canary, gadgets


def attempt(
    name: str, read: Callable[[], Any], folder: Path | None = None, may_pass: bool = False
) -> Try:
    """Reads a planted checkpoint. cp_ring holds where it rejects it in one line, or finds a defect,
    and nothing happens.

    may_pass: the gadget may also load as plain data.
    """
    found: Any = None
    before = set(folder.rglob("*")) if folder else set()
    with canary.watched() as happened:
        try:
            found = read()
        except ConfigError as error:
            found = str(error)
        except Exception as error:
            return Try(name, f"an error that is not for users: {error!r:.200}")
    if folder:
        happened += [f"new file {path.name}" for path in set(folder.rglob("*")) - before]
    if happened:
        return Try(name, "; ".join(happened))
    if may_pass:
        return Try(name)
    if not isinstance(found, str) or not found:
        return Try(name, f"it was loaded as {found!r:.80}")
    return Try(name, "" if "\n" not in found else "more than one line")


def as_archive(data: bytes) -> Any:
    return unpickle.torch_load(io.BytesIO(data))


def index_in(folder: Path, data: bytes) -> Callable[[], str]:
    """Makes `folder` a checkpoint with this index; returns the early reader of indexes, as status
    and preflight use it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / ".metadata").write_bytes(data)
    return lambda: inspection.defect(folder)


def warm_up() -> None:
    """Loads one right archive and one right index, so that imports of their own do not count."""
    file = io.BytesIO()
    torch.save([torch.ones(2), np.arange(3)], file)
    as_archive(file.getvalue())
    unpickle.load_index(io.BytesIO(pickle.dumps([torch.float32, torch.Size([1])], 4)))


def _pickles(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for target, (module, name, args) in gadgets.targets(folder).items():
        if target == "partial":
            args = ()
        for way, protocol, data in gadgets.ways(module, name, args):
            yield f"{target} by {way}", protocol, data


@attack("a pickle in an archive")
def archives(folder: Path) -> Iterator[Try]:
    """Byte entries, common.pt and the files of old checkpoints are archives of torch.save."""
    warm_up()
    for name, _, data in _pickles(folder):
        yield attempt(name, lambda data=data: as_archive(gadgets.archive(data)), folder)


READERS: dict[str, Callable[[bytes], Any]] = {
    "archive": lambda data: as_archive(gadgets.archive(data)),
    "index": lambda data: _one_line(lambda: unpickle.load_index(io.BytesIO(data))),
    "extra state": lambda data: _one_line(
        lambda: unpickle.ExtraStateUnpickler(io.BytesIO(data)).read()
    ),
}


def _one_line(read: Callable[[], Any]) -> Any:
    """A pickle that is no pickle may end in any error: its callers take it for a damaged file."""
    try:
        return read()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"damaged: {type(error).__name__}") from None


@attack("every name of the lists")
def listed_names(folder: Path, every: int = 1) -> Iterator[Try]:
    """Each name that a pickle may find, used in each form. Some load as plain data; none changes
    the process.

    every: takes one try of so many.
    """
    warm_up()
    tries = [(name, data) for listed in gadgets.listed() for name, data in gadgets.forms(listed)][
        ::every
    ]
    for start in range(0, len(tries), 200):
        before = process_state.snapshot()
        for name, data in tries[start : start + 200]:
            for reader, read in READERS.items():
                yield attempt(
                    f"{name} in an {reader}", lambda data=data, read=read: read(data), may_pass=True
                )
        changed = process_state.first_change(before)
        yield Try(f"the process after {name}", f"{changed} was changed" if changed else "")


@attack("a pickle as the index")
def indexes(folder: Path) -> Iterator[Try]:
    warm_up()
    for name, _, data in _pickles(folder):
        read = index_in(folder / "iter_0000002", data)
        yield attempt(name, read, folder)


@attack("a pickle as an extra state")
def extra_states(folder: Path) -> Iterator[Try]:
    """TransformerEngine unpickles a tensor of the checkpoint; a storage in it is in torch's legacy
    format.
    """
    warm_up()
    for name, protocol, data in _pickles(folder):
        yield attempt(
            name, lambda data=data: unpickle.ExtraStateUnpickler(io.BytesIO(data)).read(), folder
        )
        if protocol == 2:
            inner = gadgets.name("torch.storage", "_load_from_bytes") + gadgets.value(
                (gadgets.legacy(data),)
            )
            nested = b"\x80\x02" + inner + b"R."
            read = lambda nested=nested: unpickle.ExtraStateUnpickler(io.BytesIO(nested)).read()  # noqa: E731
            yield attempt(f"{name} in a storage", read, folder)


@attack("a file in torch's legacy format")
def legacy_files(folder: Path) -> Iterator[Try]:
    """The legacy loader wrote a file of the attacker's name and text for a persistent id of a
    module.
    """
    warm_up()
    for name, protocol, data in _pickles(folder):
        if protocol == 2:
            yield attempt(name, lambda data=data: as_archive(gadgets.legacy(data)), folder)
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    yield attempt("a right file", lambda: as_archive(file.getvalue()), folder)
    for kind in (
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.REGTYPE,
    ):
        data = gadgets.tar(kind)
        yield attempt(
            f"a tar with members of type {kind.decode()}",
            lambda data=data: as_archive(data),
            folder,
        )


@attack("extension codes")
def extension_codes(folder: Path) -> Iterator[Try]:
    """A number that stands for a name which the process has registered."""
    warm_up()
    copyreg.add_extension(gadgets.CANARY, "trip", 0xCA)
    try:
        for opcode in (b"\x82\xca", b"\x83\xca\x00", b"\x84\xca\x00\x00\x00"):
            data = b"\x80\x02" + opcode + b")R."
            yield attempt(
                f"{opcode!r} in an archive",
                lambda data=data: as_archive(gadgets.archive(data)),
                folder,
            )
            yield attempt(
                f"{opcode!r} in an index", index_in(folder / "iter_0000002", data), folder
            )
    finally:
        copyreg.remove_extension(gadgets.CANARY, "trip", 0xCA)


class Forged:
    """Pickles to a call of `function`, whose result then gets `state`."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def _numpy_forgeries() -> Iterator[tuple[str, Any]]:
    """Arrays whose bytes would be taken for the addresses of Python objects, and data types that
    lie about themselves.
    """
    address, (start, args) = b"A" * 8, np.zeros(1).__reduce__()[:2]
    for code in ("O", "O8", "V8", "i4,i4", "(2,)i4", "M8[s]", "u1,O"):
        yield f"numpy.ndarray of {code}", Forged(np.ndarray, ((1,), code, address))
        yield f"data type {code}", Forged(np.dtype, (code, False, True))
        yield (
            f"array of {code}",
            Forged(start, args, (1, (1,), Forged(np.dtype, (code, False, True)), False, address)),
        )
    for state in [
        (3, "<", None, None, None, -1, -1, 63),
        (3, "<", None, ("a",), {"a": ("O", 0)}, 8, 1, 0),
        (3, "x"),
        1,
        None,
    ]:
        kind = Forged(np.dtype, ("i8", False, True), state if state is not None else ())
        yield f"state {state} of a data type", Forged(start, args, (1, (1,), kind, False, address))
    for shape in [(2,), (-1,), (1 << 62, 4), ("1",), 1, None, (True,)]:
        kind = Forged(np.dtype, ("i8", False, True), (3, "<", None, None, None, -1, -1, 0))
        yield f"shape {shape} for 8 bytes", Forged(start, args, (1, shape, kind, False, address))


@attack("forged arrays and tensors")
def forged_arrays(folder: Path) -> Iterator[Try]:
    warm_up()
    for name, thing in _numpy_forgeries():
        data = pickle.dumps(thing, 2)
        yield attempt(name, lambda data=data: as_archive(gadgets.archive(data)), folder)
    for rebuild in (
        "_rebuild_tensor_v2",
        "_rebuild_parameter",
        "_rebuild_qtensor",
        "_rebuild_device_tensor_from_numpy",
    ):
        data = (
            b"\x80\x02" + gadgets.name("torch._utils", rebuild) + gadgets.value((1, 2, 3)) + b"R."
        )
        yield attempt(rebuild, lambda data=data: as_archive(gadgets.archive(data)), folder)
    for module, name in [
        ("torch.storage", "_load_from_bytes"),
        ("megatron.core.safe_globals", "safe_load_from_bytes"),
    ]:
        inner = gadgets.legacy(b"\x80\x02" + gadgets.name(gadgets.CANARY, "trip") + b")R.")
        data = b"\x80\x02" + gadgets.name(module, name) + gadgets.value((inner,)) + b"R."
        yield attempt(
            f"{module}.{name}", lambda data=data: as_archive(gadgets.archive(data)), folder
        )


@attack("archives that two readers see differently, TorchScript")
def archives_of_two_faces(folder: Path) -> Iterator[Try]:
    warm_up()
    plain = b"\x80\x02}."
    script = {
        "archive/data.pkl": plain,
        "archive/constants.pkl": b"\x80\x02).",
        "archive/version": b"3\n",
    }
    yield attempt(
        "TorchScript",
        lambda: as_archive(gadgets.archive(plain, {"constants.pkl": b"\x80\x02)."})),
        folder,
    )
    shown = {"archive/data.pkl": plain, "archive/version": b"3\n"}
    data = gadgets.two_directories(shown, script)
    yield attempt("two central directories", lambda: as_archive(data), folder)
    bad = b"\x80\x02" + gadgets.name(gadgets.CANARY, "trip") + b")R."
    hidden = {"archive/data.pkl": bad, "archive/version": b"3\n", "archive/byteorder": b"little"}
    yield attempt(
        "a hidden pickle", lambda: as_archive(gadgets.two_directories(shown, hidden)), folder
    )
    for number in range(0, 200, 10):
        cut = gadgets.archive(plain)[: -number or None]
        yield attempt(
            f"an archive without its last {number} bytes",
            lambda cut=cut: as_archive(cut),
            folder,
            may_pass=not number,
        )


@attack("links, pipes and devices in the folder")
def links(folder: Path) -> Iterator[Try]:
    """Links in a folder of checkpoints lead neither a write nor a removal elsewhere; nothing blocks
    a reader.
    """
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    saves = folder / "saves"
    saves.mkdir()
    right = pickle.dumps(_index("__0_0.distcp"), 4)
    for victim in (".metadata", "metadata.json", "__0_0.distcp", manifest.NAME, folders.TRACKER):
        for kind in ("pipe", "device", "loop"):
            read = index_in(saves / "iter_0000002", right)
            (saves / "iter_0000002" / "__0_0.distcp").write_bytes(bytes(8))
            path = (saves if victim == folders.TRACKER else saves / "iter_0000002") / victim
            path.unlink(missing_ok=True)
            _make_special(path, kind)
            look = (
                (lambda: f"last good: {folders.last_good(saves)}")
                if victim == folders.TRACKER
                else read
            )
            yield attempt(f"a {kind} as {victim}", look)
            path.unlink()
    for name in ("../outside/kept", str(outside / "kept"), "..", ""):
        read = index_in(saves / "iter_0000002", pickle.dumps(_index(name), 4))
        yield attempt(f"an index that names {name[-20:]!r}", read, folder)
    for prefix in (".saving", ".old", ".removed"):
        link = saves / f"{prefix}.iter_0000004.ab"
        link.symlink_to(outside)
        folders.sweep(saves, {"ab"})
        kept = (outside / "kept").exists()
        yield Try(f"a link as {prefix}", "" if kept else "the target was removed")
        link.unlink(missing_ok=True)


def _make_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


def _index(name: str) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    return Metadata(
        state_dict_metadata={}, storage_data={MetadataIndex("a"): _StorageInfo(name, 0, 8)}
    )
