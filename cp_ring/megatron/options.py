"""Defines every setting of a job once: its name, default, values, and effect.

Megatron's parser (`--cp-ring-*`), YAML files (section `cp_ring`) and the table of keys are all made
from this one dataclass. It extends the settings of attention calls.
"""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any, Self

from cp_ring.errors import ConfigError
from cp_ring.megatron import option_values
from cp_ring.options import CallSettings, setting
from cp_ring.plan.layout import LAYOUTS, NamedLayout

MASK_KINDS = (
    "shared-prefix", "images", "global", "tree", "block-causal", "block-diffusion", "documents",
    "prefix", "causal", "full", "any",
)  # fmt: skip
"""Kinds of masks that batches may declare: names of constructors of `Mask`, and `any`."""


class OptionError(ConfigError):
    """Raised for a value that a setting cannot have, as (name, value, problem); its one line names
    the flag.
    """

    def __str__(self) -> str:
        name, value, problem = self.args
        return f"{Options.flag(name)} {value!r}: {problem}"


@dataclass(frozen=True)
class Settings:
    """Settings that are checked when made. Raises `OptionError` for the first wrong one."""

    @classmethod
    def make(cls, **values: Any) -> Self:
        """Construct the settings; an unknown name is a `ConfigError` too."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"no setting {name!r}; known are {', '.join(known)}")
        return cls(**values)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            default = field.default
            if type(value) is type(default) and value == default:
                continue  # this also avoids asking for the names of kernels, which needs torch
            try:
                object.__setattr__(self, field.name, option_values.read(field, value))
            except ConfigError as error:
                raise OptionError(field.name, value, str(error)) from None


@dataclass(frozen=True)
class Options(Settings, CallSettings):
    """Settings of ring attention; immutable, and checked when made.

        options = Options(layout="balanced", certify="strict")

    Raises `OptionError`, a `ConfigError`, with one line that names the flag and what it accepts.
    """

    enabled: bool = setting(
        False,
        "Replace core attention by ring attention over the context-parallel group.",
    )
    beneath: str = setting(
        "",
        "In place of --cp-ring: leave all attention classes as they are, and run the ring beneath "
        "TransformerEngine's own context parallelism (te).",
        choices=("te",),
    )
    cpu: bool = setting(
        False,
        "Let Megatron run on a machine without CUDA (gloo); inert where CUDA is present.",
    )
    document_mask: bool = setting(
        False,
        "Mask packed documents from one another: a document ends with the end-of-document "
        "token, whose own prediction does not count, and position ids restart after it.",
    )
    mask_kinds: str = setting(
        "",
        "Kinds of masks that batches carry as cp_ring_mask, separated by commas, for the "
        f"certificate to probe: {', '.join(MASK_KINDS)}; any is every mask.",
        convert=option_values.joined,
        check=partial(option_values.only_known, "kind of mask", MASK_KINDS),
    )
    pack: str = setting(
        "first-fit",
        "Packing of --sft conversations into sequences: first-fit takes the longest first; fill "
        "keeps their order and cuts at the end of a sequence, so that only the last one has "
        "padding.",
        choices=("first-fit", "fill"),
    )
    cut_long: bool = setting(
        False,
        "Cut conversations (--sft) that are longer than a batch row, instead of rejecting them.",
    )
    balance_microbatches: bool = setting(
        False,
        "Reorder the sequences inside each step so that microbatches and data-parallel ranks "
        "have equal work.",
    )
    recurrent: str = setting(
        "auto",
        "Recurrent layers exchange heads or states among context-parallel ranks; auto takes "
        "states where heads do not divide, else what is predicted to be faster; a letter: only "
        "these layers take states.",
        choices=("heads", "states", "auto", "M", "G", "K"),
    )
    recompute: str = setting(
        "keep",
        "Recomputed attention layers keep their out and lse, so that the ring runs once, or "
        "replay the ring.",
        choices=("keep", "replay"),
    )
    loss_chunk: int = setting(
        0,
        "Compute logits and loss for this many tokens at a time, and again in backward, to save "
        "memory; 0 computes all at once.",
        least=0,
    )
    stock_loss_average: bool = setting(
        False,
        "Average the mean losses of context-parallel ranks as stock Megatron does without "
        "--calculate-per-token-loss, for bit-by-bit comparisons.",
    )
    hop_timeout: float = setting(
        600,
        "Seconds that a rank waits for a hop before the job ends with a report; 0 disables it.",
        least=0,
        most=10**7,
    )
    compare_every: int = setting(
        16,
        "Compare one new plan in this many among the ranks, after the first 32 of a group; 0 "
        "disables it.",
        least=0,
    )
    timing: int = setting(
        0,
        "Measure computing, waiting and the slowest rank once in this many steps; 0 disables it.",
        least=0,
    )
    debug: bool = setting(
        False,
        "Fill receive buffers with NaN and compare the ranks at every call, which is slow.",
    )
    certify: str = setting(
        "on",
        "Probe masks, attention, loss and gradients on this job's ranks before training, and "
        "end the job if they are not what its flags declare; strict also ends a job with a part "
        "that cannot be probed; with only, the job ends after the probes.",
        choices=("on", "off", "strict", "only"),
        convert=option_values.on_or_off,
    )

    @property
    def named_layout(self) -> NamedLayout:
        """Return the registered properties of `layout`."""
        return LAYOUTS[self.layout]

    @property
    def certifies(self) -> bool:
        """Return True if the job has a certificate: of ring attention, or of any other with
        `only`.
        """
        always = self.enabled or self.beneath != ""
        return self.certify == "only" or (always and self.certify != "off")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds in `mask_kinds`, and causal, which a batch without a mask is."""
        declared = (*self.mask_kinds.split(","), "causal") if self.mask_kinds else ()
        return tuple(dict.fromkeys(declared))

    def of_ring(self) -> dict[str, Any]:
        """Return what TransformerEngine's arguments do not settle: options of `use_ring`."""
        names = "route", "schedule", "kernel", "num_slots", "wire_dtype"
        return {name: getattr(self, name) for name in names} | {"timeout": self.hop_timeout or None}

    @staticmethod
    def flag(name: str) -> str:
        """Return the command-line flag of a setting: `enabled` is `--cp-ring`, `num_slots` is
        `--cp-ring-num-slots`.
        """
        return "--cp-ring" if name == "enabled" else "--cp-ring-" + name.replace("_", "-")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every setting as a flag. `from_args` checks the values later, so that errors are one
        clear line.
        """
        group = parser.add_argument_group(
            title="cp_ring", description="ring attention for context parallelism"
        )
        for name, field in SETTINGS.items():
            names = option_values.choices_of(field)
            known = f"; one of {', '.join(names)}" if names else ""
            shown = f"{field.metadata['text']} (default: {field.default}{known})"
            shown = shown.replace("%", "%%")
            options: dict[str, Any] = {
                "dest": _dest(name), "default": field.default, "help": shown,
            }  # fmt: skip
            if field.type == "bool":
                switch = argparse.BooleanOptionalAction if field.default else "store_true"
                group.add_argument(cls.flag(name), action=switch, **options)
                continue
            if name == "certify":
                options |= {"nargs": "?", "const": "on"}
            group.add_argument(cls.flag(name), metavar=name.upper(), **options)
            if name == "certify":
                group.add_argument(
                    "--no-" + cls.flag(name)[2:], action="store_const", const="off",
                    dest=_dest(name), 
                )  # fmt: skip
        return parser

    @classmethod
    def help(cls, width: int | None = None) -> str:
        """Return the help of cp_ring's flags as argparse prints it, without any other flag."""
        parser = argparse.ArgumentParser(
            add_help=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width)
        )
        shown = cls.add_arguments(parser).format_help()
        return shown[shown.index("cp_ring:") :]

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """Read the flags that `add_arguments` added from a parsed namespace."""
        parsed = vars(args)
        return cls(**{name: parsed[_dest(name)] for name in SETTINGS if _dest(name) in parsed})

    def to_args(self) -> list[str]:
        """Return the flags that differ from their defaults, as a command line."""
        line: list[str] = []
        for name, field in SETTINGS.items():
            value = getattr(self, name)
            if value != field.default:
                switch = self.flag(name) if value is True else "--no-" + self.flag(name)[2:]
                line += [switch] if field.type == "bool" else [self.flag(name), str(value)]
        return line


SETTINGS: dict[str, Field[Any]] = {
    each.name: each
    for each in sorted(fields(Options), key=lambda each: hasattr(CallSettings, each.name))
}
"""The fields of `Options` by name; those of calls come last."""


def _dest(name: str) -> str:
    return "cp_ring" if name == "enabled" else f"cp_ring_{name}"
