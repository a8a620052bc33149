"""Megatron's own parser and validation, asked about a job before any rank starts.

Megatron's validation is written for a rank with CUDA and TransformerEngine. Here it is asked on any
machine, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from cp_ring.errors import ConfigError, Reasons, one_line
from cp_ring.megatron.compat import logits_without_te
from cp_ring.megatron.flags import argument_parser

_HOPPER = (9, 0)
_FUSED = {
    "megatron.core.transformer.moe.moe_utils": (
        "permute permute_with_probs unpermute sort_chunks_by_index sort_chunks_by_index_with_probs"
    ),
    "megatron.core.models.common.embeddings.rope_utils": (
        "apply_rotary_pos_emb apply_rotary_pos_emb_thd"
    ),
}
"""Functions `fused_...` of TransformerEngine that Megatron's validation looks for."""


def rejection(args: argparse.Namespace, ranks: int) -> str:
    """Why Megatron's own validation rejects these parsed arguments for so many ranks, in one line;
    "" where it accepts them.

    It is asked as on an H100 with TransformerEngine, whether there is one here or not. `args` stay
    as they are.
    """
    from megatron.training import arguments

    asked = copy.deepcopy(args)
    asked.rank, asked.local_rank, asked.world_size = 0, 0, ranks
    sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    with (
        # before Blackwell Megatron demands one connection, and several with sharded parameters
        _as_on_a_gpu("8" if sharded else "1"),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with logits_without_te(asked):
                arguments.validate_args(asked)
            arguments.core_transformer_config_from_args(asked)
        # assertions, and whatever else a check of Megatron's raises
        except (Exception, SystemExit) as error:
            return one_line(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return ""


@contextlib.contextmanager
def _as_on_a_gpu(connections: str) -> Iterator[None]:
    """Megatron's validation finds what a rank with an H100 and TransformerEngine has, where it is
    not there already.
    """
    import importlib

    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": connections})
        )
        if not torch.cuda.is_available():
            properties = argparse.Namespace(
                major=_HOPPER[0], minor=_HOPPER[1], multi_processor_count=132, total_memory=80 << 30
            )
            answers: dict[str, Any] = {
                "get_device_capability": _HOPPER,
                "get_device_properties": properties,
                "device_count": 8,
            }
            for name, answer in answers.items():
                stack.enter_context(
                    mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
                )
        for name, functions in _FUSED.items():
            module = importlib.import_module(name)
            for function in (f"fused_{name}" for name in functions.split()):
                if getattr(module, function, None) is None:
                    stack.enter_context(mock.patch.object(module, function, object(), create=True))
        yield


@contextlib.contextmanager
def _quick_import() -> Iterator[None]:
    """Imports of Megatron take half the time: it asks for torch's compiler and for wandb when it is
    imported, and a process that only reads flags uses neither.
    """
    import torch

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return function or as_it_is

    without = {"wandb": None} if "wandb" not in sys.modules else {}
    sys.modules |= without  # type: ignore[arg-type]
    try:
        with mock.patch.object(torch, "compile", as_it_is):
            yield
    finally:
        for name in without:
            del sys.modules[name]


def build_parser() -> argparse.ArgumentParser:
    """As `argument_parser.build_parser`, in half the time."""
    with _quick_import():
        return argument_parser.build_parser()


def to_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> list[str]:
    """The command line for settings whose keys are Megatron's flags in snake_case. The parser says
    what is wrong with them.

    A list becomes several values, true a flag without a value, and None nothing. False becomes
    nothing or, if Megatron has a negative flag (`--no-rope-fusion` for apply_rope_fusion), that
    flag.
    """
    known = parser._option_string_actions
    negative = {
        action.dest: flag
        for flag, action in known.items()
        if isinstance(action, argparse._StoreFalseAction)
    }
    line: list[str] = []
    for key, value in settings.items():
        dashes, as_it_is = f"--{key.replace('_', '-')}", f"--{key}"
        flag = as_it_is if as_it_is in known else dashes
        action = known.get(flag)
        switch = action is not None and action.nargs == 0
        if action is None and key in negative and isinstance(value, bool):
            line += [] if value else [negative[key]]
        elif value is False and isinstance(action, argparse.BooleanOptionalAction):
            line.append("--no-" + flag[2:])
        elif isinstance(value, bool):
            line += [] if switch and not value else [flag]
        elif value is not None:
            values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
            # a value that starts with a dash would be read as a flag of its own
            joined = len(values) == 1 and (switch or values[0].startswith("-"))
            line += [f"{flag}={values[0]}"] if joined else [flag, *values]
    return line


def check(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Parses a command line as Megatron does, with its types and choices.

    Raises `ConfigError` with argparse's messages, each of which names a flag.
    """
    try:
        return parser.parse_args(list(line))
    except ConfigError:
        reasons = Reasons()
        starts = [place for place, word in enumerate(line) if word.startswith("--")]
        for start, stop in itertools.pairwise([*starts, len(line)]):  # argparse stops at the first
            flag = line[start].partition("=")[0]
            try:
                parser.parse_args(list(line[start:stop]))
            except ConfigError as error:
                named = str(error) if flag in str(error) else f"{flag}: {error}"
                reasons.found[named] = None
        reasons.end()
        raise
