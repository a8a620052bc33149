"""Adds cp_ring's flags to Megatron's parser, and checks all flags after parsing, before any process
group exists.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

from cp_ring.megatron.flags.argument_parser import add_own_arguments
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch


def _add_arguments(add: Function, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return add_own_arguments(add(parser))


def _parse_and_check(parse: Function, *args: Any, **kwargs: Any) -> argparse.Namespace:
    from cp_ring.megatron.flags.resolve import accept, reject_file
    from cp_ring.megatron.rejection import rejecting

    with rejecting():
        reject_file(sys.argv[1:])
        parsed = parse(*args, **kwargs)
    return accept(parsed)


def _validate_and_check(
    validate: Function, args: argparse.Namespace, *rest: Any, **kwargs: Any
) -> Any:
    from cp_ring.megatron.compat import logits_without_te
    from cp_ring.megatron.flags.resolve import accept, accept_complete
    from cp_ring.megatron.rejection import megatrons_rejections, rejecting
    from cp_ring.patches.install import install_for_model

    if args.use_checkpoint_args:  # which Megatron has read by now
        args = accept(args)
    config = Options.from_args(args)
    objections = megatrons_rejections() if config.enabled or config.cpu else nullcontext()
    with rejecting(), objections, logits_without_te(args) if config.enabled else nullcontext():
        result = validate(args, *rest, **kwargs)
    accept_complete(args)
    if config.enabled:
        with rejecting():
            install_for_model(args, config)
    return result


PATCH = Patch(
    what="adds the --cp-ring flags to Megatron's parser and checks the flags before any process "
    "group exists",
    why="Megatron's scripts parse their flags themselves and have no hook between parsing and the "
    "first process group",
    needed=lambda args, options: not args.program,
    wraps={
        "megatron.training.arguments.add_megatron_arguments": _add_arguments,
        "megatron.training.arguments.parse_args": _parse_and_check,
        "megatron.training.arguments.validate_args": _validate_and_check,
    },
)
