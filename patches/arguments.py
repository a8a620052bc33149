"""Adds cp_ring's flags to Megatron's parser, and checks all flags after parsing, before any process
group exists.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from cp_ring.megatron.flags.argument_parser import add_own_arguments, reject_flags
from cp_ring.megatron.options import Options
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


def _replacements() -> Iterator[Replacement]:
    import megatron.training.arguments as arguments
    import megatron.training.initialize as initialize

    add_megatron_arguments = arguments.add_megatron_arguments
    parse_args, validate_args = arguments.parse_args, arguments.validate_args

    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.error = partial(reject_flags, parser)  # type: ignore[method-assign]
        return add_own_arguments(add_megatron_arguments(parser))

    def parse_and_check(*args: Any, **kwargs: Any) -> argparse.Namespace:
        from cp_ring.megatron.flags.resolve import accept
        from cp_ring.megatron.rejection import rejecting

        with rejecting():
            parsed = parse_args(*args, **kwargs)
        return accept(parsed)

    def validate_and_check(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        from cp_ring.megatron.compat import logits_without_te
        from cp_ring.megatron.flags.resolve import accept_complete
        from cp_ring.megatron.rejection import megatrons_rejections, rejecting
        from cp_ring.patches.install import install_for_model

        config = Options.from_args(args)
        objections = megatrons_rejections() if config.enabled or config.cpu else nullcontext()
        with rejecting(), objections, logits_without_te(args) if config.enabled else nullcontext():
            result = validate_args(args, *rest, **kwargs)
        accept_complete(args)
        if config.enabled:
            with rejecting():
                install_for_model(args, config)
        return result

    yield arguments, "add_megatron_arguments", add_arguments
    yield from replace_everywhere([arguments, initialize], "parse_args", parse_and_check)
    yield from replace_everywhere([arguments, initialize], "validate_args", validate_and_check)


PATCH = Patch(
    what="adds the --cp-ring flags to Megatron's parser and checks the flags before any process "
    "group exists",
    why="Megatron's scripts parse their flags themselves and have no hook between parsing and the "
    "first process group",
    needed=lambda args, options: not args.program,
    replacements=_replacements,
)
