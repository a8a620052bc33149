"""Looks at the files of data sets before a process group exists: what Megatron would find hours
later, or never.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from cp_ring.errors import ConfigError

Conversation = list[dict[str, Any]]

SPLITS = ("training", "validation", "test")
FIRST_LINES = 1000
"""Of a file of conversations; the others are looked at where they become tokens."""

_MAGIC = b"MMIDIDX\x00\x00"
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # bytes of a token, by Megatron's codes
_PART = "<QBQQ"


def problem_of_tokens(prefix: str, split: str | None) -> str:
    """Why Megatron cannot train on `prefix`.idx and `prefix`.bin, "" where it can: the files are
    cut short, or a part of `split` (969,30,1; None for all tokens) that is not 0 has no token, and
    Megatron would count its epochs for ever.
    """
    with open(f"{prefix}.idx", "rb") as file:
        head = file.read(len(_MAGIC) + struct.calcsize(_PART))
    if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + struct.calcsize(_PART):
        return f"{prefix}.idx is no index of a token file"
    _, code, count, documents = struct.unpack_from(_PART, head, len(_MAGIC))
    needed, size = len(head) + 12 * count + 8 * documents, os.path.getsize(f"{prefix}.idx")
    if code not in _SIZES or size < needed:
        return f"{prefix}.idx is cut short: {size} of {needed} bytes"
    lengths = np.fromfile(f"{prefix}.idx", np.int32, count, offset=len(head))
    starts = np.fromfile(f"{prefix}.idx", np.int64, count, offset=len(head) + 4 * count)
    end = int((starts + lengths.astype(np.int64) * _SIZES[code]).max()) if count else 0
    if (size := os.path.getsize(f"{prefix}.bin")) < end:
        return f"{prefix}.bin is cut short: its index names {end} bytes, and it holds {size}"
    for name, begin, stop in _parts(split, count):
        if not lengths[begin:stop].any():
            return (
                f"{name} gets no token of its {count} documents: give --split another part for it, "
                "or 0 (of validation and test with --eval-iters 0)"
                if split
                else "it holds no token"
            )
    return ""


def _parts(split: str | None, count: int) -> Iterator[tuple[str, int, int]]:
    """The parts of a data set that are not 0, by Megatron's rule: name, first document, end."""
    if split is None:
        yield "training", 0, count
        return
    weights = [float(word) for word in split.replace("/", ",").split(",") if word.strip()][:3]
    weights += [0.0] * (3 - len(weights))
    begin = 0.0
    for name, weight in zip(SPLITS, weights, strict=True):
        end = begin + weight / (math.fsum(weights) or 1.0)
        if weight:
            yield name, round(begin * count), round(end * count)
        begin = end


def problem_of_conversations(path: str) -> str:
    """What is wrong with the first line of a file of conversations that is not one, or ""."""
    with open(path, "rb") as file:
        for number, line in zip(range(1, FIRST_LINES + 1), file, strict=False):
            try:
                if line.strip():
                    conversations_of(line, f"line {number}")
            except ConfigError as error:
                return str(error)
    return ""


def conversations_of(line: bytes, where: str) -> list[Conversation]:
    """The conversations of a line of JSON: every system message begins another one.

    The content of a message is text, a list of parts, or null where it calls tools: the template of
    the tokenizer decides. Raises `ConfigError` that begins with `where`.
    """
    try:
        content = json.loads(line)
        messages = content["messages"]
        conversations: list[Conversation] = []
        for message in messages:
            said = message.get("content")
            calls = said is None and message.get("tool_calls")
            if not isinstance(message["role"], str) or not (isinstance(said, str | list) or calls):
                raise TypeError
            if message["role"] == "system" or not conversations:
                conversations.append([])
            conversations[-1].append({"content": None} | message)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f'{where} is not a JSON object with "messages", a list of {{"role": ..., "content": '
            f"...}}, whose content is text, a list of parts, or null beside tool_calls"
        ) from None
    if not conversations:
        raise ConfigError(f"{where} has no message")
    if content.get("tools"):
        raise ConfigError(
            f"{where} has tools, which Megatron's tokenizers do not take: write them into its "
            "system message"
        )
    return conversations
