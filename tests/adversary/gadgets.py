"""Generates pickles that call something when a careless reader loads them, from targets, ways to
call and ways to write.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CANARY = "tests.adversary.canary"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def value(thing: Any) -> bytes:
    """The opcodes that push plain data, without header and end."""
    return pickle.dumps(thing, 2)[2:-1]


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def targets(folder: Path) -> dict[str, tuple[str, str, tuple[Any, ...]]]:
    """What a gadget wants to call: module, name, arguments. Each leaves a mark in `folder` or in
    the canary, and does no harm.
    """
    mark = str(folder / "mark")
    return {
        "canary": (CANARY, "trip", ()),
        "class of the canary": (CANARY, "Trip", ()),
        "os.system": ("os", "system", (f"touch {mark}",)),
        "posix.system": ("posix", "system", (f"touch {mark}",)),
        "subprocess": ("subprocess", "Popen", (["touch", mark],)),
        "exec": ("builtins", "exec", (f"open({mark!r}, 'w')",)),
        "eval": ("builtins", "eval", (f"open({mark!r}, 'w')",)),
        "open": ("builtins", "open", (mark, "w")),
        "io.open": ("io", "open", (mark, "w")),
        "import": ("builtins", "__import__", ("antigravity_is_not_there",)),
        "import_module": ("importlib", "import_module", ("this",)),
        "getattr": ("builtins", "getattr", ("", "join")),
        "run_path": ("runpy", "run_path", (mark,)),
        "copy": ("shutil", "copyfile", ("/dev/null", mark)),
        "touch": ("pathlib", "Path.touch", (mark,)),
        "partial": ("functools", "partial", (print, mark)),
        "methodcaller": ("operator", "methodcaller", ("touch",)),
        "torch.load": ("torch", "load", (mark,)),
        "torch.jit.load": ("torch.jit", "load", (mark,)),
        "torch.save": ("torch", "save", ([], mark)),
        "torch.hub": ("torch.hub", "load", (mark, "model")),
        "numpy.load": ("numpy", "load", (mark,)),
        "numpy.memmap": ("numpy", "memmap", (mark, "u1", "w+")),
        "enum": ("enum", "Enum", ("Planted", {"member": 1})),
        "enum through Megatron": (
            "megatron.core.rerun_state_machine",
            "Enum",
            ("Planted", {"member": 1}),
        ),
        "function of Megatron": ("megatron.core.utils", "get_attr_wrapped_model", ("", "join")),
        "dataclass": ("dataclasses", "make_dataclass", ("Planted", ["member"])),
        "type": ("builtins", "type", ("Planted", (), {})),
    }


def ways(module: str, attribute: str, args: tuple[Any, ...]) -> Iterator[tuple[str, int, bytes]]:
    """The ways to call a target by opcodes: name, protocol, pickle."""
    given, found = value(args), name(module, attribute)
    spread = b"(" + b"".join(map(value, args))
    bodies = {
        "reduce": (2, found + given + b"R"),
        "reduce by names on the stack": (4, stack_name(module, attribute) + given + b"R"),
        "newobj": (2, found + given + b"\x81"),
        "newobj_ex": (4, found + given + b"}\x92"),
        "inst": (2, spread + b"i" + f"{module}\n{attribute}\n".encode()),
        "obj": (2, b"(" + found + spread[1:] + b"o"),
        "state of a name": (2, found + value({"planted": 1}) + b"b"),
        "slots of a name": (2, found + value((None, {"planted": 1})) + b"b"),
        "persistent id": (
            2,
            value("module")
            + found
            + given
            + b"R"
            + value("a.py")
            + value("text")
            + b"\x86\x86\x86Q",
        ),
        "partial": (2, name("functools", "partial") + b"(" + found + b"tR)R"),
        "reconstructor": (
            2,
            name("copyreg", "_reconstructor") + b"(" + found + name("builtins", "object") + b"NtR",
        ),
        "hook of a tensor type": (
            2,
            name("torch._tensor", "_rebuild_from_type_v2") + b"(" + found + found + given + b"}tR",
        ),
        "wrapped tensor": (
            2,
            name("torch._utils", "_rebuild_wrapper_subclass") + b"(" + found + given + b"tR",
        ),
        "key of a mapping": (2, b"}" + found + given + b"RNs"),
    }
    for way, (protocol, body) in bodies.items():
        yield way, protocol, b"\x80" + bytes([protocol]) + body + b"."


REBUILD = name("torch._tensor", "_rebuild_from_type_v2")
_NAMESPACE = name("types", "SimpleNamespace")


def listed() -> list[str]:
    """Every name that torch's list for `weights_only`, what packages declare safe, or cp_ring's own
    tables have.
    """
    from cp_ring.megatron.checkpoints import unpickle

    ours = [*unpickle.ExtraStateUnpickler.entries, *unpickle._ArchiveUnpickler.entries]
    tables = (unpickle._INDEX, unpickle._MEGATRON, unpickle._FP8)
    ours += [
        f"{module}.{one}"
        for table in tables
        for module, names in table.items()
        for one in names.split()
    ]
    declared = [
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}"
        for one in _declared()
    ]
    return sorted(
        {*torch._weights_only_unpickler._get_allowed_globals(), *declared, *ours, *_ENUMERATIONS}
    )


_ENUMERATIONS = [
    f"megatron.core.transformer.enums.{one}" for one in ("AttnMaskType", "AttnBackend", "LayerType")
]


def _declared() -> list[Any]:
    import megatron.core.safe_globals

    return [*megatron.core.safe_globals.SAFE_GLOBALS, *torch.serialization.get_safe_globals()]


def renaming(kind: bytes, member: Any, state: Any) -> bytes:
    """A call that gives `state` to what `kind` returns for `member`, by torch's function for
    tensors with attributes.

    The inner call makes a namespace whose method `as_subclass` is `kind`; the outer one calls that
    method and sets attributes.
    """
    inner = b"(" + _NAMESPACE * 2 + b")}" + text("as_subclass") + kind + b"st"
    return REBUILD + b"(" + REBUILD + value(member) + inner + value(state) + b"tR"


def forms(listed_name: str) -> Iterator[tuple[str, bytes]]:
    """What a pickle can do with one name: calls with arguments of many shapes, nested, dotted, and
    with states.
    """
    module, _, attribute = listed_name.rpartition(".")
    found, planted = name(module, attribute), value({"planted": 1})
    shapes = [
        (),
        (1,),
        (-1,),
        (1 << 62,),
        ("a",),
        (b"a" * 8,),
        ([],),
        ({"a": 1},),
        ((),),
        (None,) * 3,
        (1, 2, 3, 4, 5, 6, 7),
        ("O8",),
    ]
    made = {f"called with {shape!r}": found + value(shape) + b"R" for shape in shapes}
    made |= {f"made of {shape!r}": found + value(shape) + b"\x81" for shape in shapes[:5]}
    made |= {
        "called with itself": found + found + b"\x85R",
        "called with a namespace": found + _NAMESPACE + b")R\x85R",
    }
    for how, result in {
        "name": found,
        "result": found + b")R",
        "object": found + b")\x81",
        "member": found + value((1,)) + b"R",
    }.items():
        made[f"state of a {how}"] = result + planted + b"b"
        made[f"slots of a {how}"] = result + value((None, {"planted": 1})) + b"b"
        made[f"class of a {how}"] = result + value({"__class__": 1}) + b"b"
        made[f"item of a {how}"] = result + value("planted") + value(1) + b"s"
        made[f"item at the end of a {how}"] = result + value(1) + b"a"
        made[f"two states of a {how}"] = result + value({}) + b"b" + planted + b"b"
    for member in (0, 1, 2, 9, "a"):
        made[f"renamed {member!r}"] = renaming(found, member, {"_name_": "no_mask", "planted": 1})
    made["rebuilt"] = REBUILD + b"(" + found + found + b")" + planted + b"tR"
    made["rebuilt as a tensor"] = (
        REBUILD + b"(" + found + name("torch", "Tensor") + value((1,)) + planted + b"tR"
    )
    made["parameter"] = (
        name("torch._utils", "_rebuild_parameter_with_state")
        + b"("
        + found
        + b")R\x89N"
        + planted
        + b"tR"
    )
    made["hook"] = (
        name("torch._utils", "_rebuild_parameter")
        + b"("
        + found
        + b")R\x89"
        + b"}"
        + found
        + found
        + b"stR"
    )
    made["key"] = b"}" + found + b")RNs"
    for inside in (
        "__init__.__globals__",
        "__class__",
        "__dict__",
        "__subclasses__",
        "__func__",
        "_member_map_",
        "mro",
    ):
        made[f"dotted {inside}"] = stack_name(module, f"{attribute}.{inside}") + b")R"
        made[f"state of dotted {inside}"] = (
            stack_name(module, f"{attribute}.{inside}") + planted + b"b"
        )
    for way, body in made.items():
        yield (
            f"{listed_name} {way}",
            b"\x80" + (b"\x04" if b"\x93" in body else b"\x02") + body + b".",
        )


def archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A zip archive as torch.save writes it, with `pickled` for its pickle."""
    file = io.BytesIO()
    with torch.serialization._open_zipfile_writer(file) as writer:
        for record, data in (
            {"data.pkl": pickled, "byteorder": b"little"} | (records or {})
        ).items():
            writer.write_record(record, data, len(data))
    return file.getvalue()


def legacy(pickled: bytes) -> bytes:
    """A file in the format that torch.save wrote before zip archives."""
    head = (
        torch.serialization.MAGIC_NUMBER,
        torch.serialization.PROTOCOL_VERSION,
        {"little_endian": True},
    )
    return b"".join(pickle.dumps(part, 2) for part in head) + pickled + pickle.dumps([], 2)


def tar(kind: bytes) -> bytes:
    """A file in the format before `legacy`, a tar archive, with members of `kind`: a reader of a
    named pipe waits for ever.
    """
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive_file:
        for member in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(member)
            info.type, info.linkname = kind, "/dev/zero"
            archive_file.addfile(info)
    return file.getvalue()


def _stored(records: dict[str, bytes]) -> tuple[bytes, bytes]:
    """The files and the central directory of a plain zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive_file:
        for record, data in records.items():
            archive_file.writestr(record, data)
        start = archive_file.start_dir
    data = file.getvalue()
    start = struct.unpack("<I", data[-6:-2])[0]
    return data[:start], data[start:-22]


def two_directories(shown: dict[str, bytes], hidden: dict[str, bytes]) -> bytes:
    """A zip archive that Python's zipfile reads as `shown`, and torch, which trusts the recorded
    offset, as `hidden`.
    """
    files, directory = _stored(hidden)
    others, second = _stored(shown)
    room = len(directory) - len(second)
    assert room >= 0
    comment = struct.unpack("<H", second[32:34])[0]
    assert comment == 0
    last = second.rindex(b"PK\x01\x02")
    second = second[: last + 32] + struct.pack("<H", room) + second[last + 34 :] + bytes(room)
    end = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, len(hidden), len(hidden), len(directory), len(files), 0
    )
    return files + directory + others + second + end
