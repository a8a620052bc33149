"""Every cp_ring setting, once: its name, default, choices, validation and help text.

Megatron's parser (`--cp-ring-*`), YAML files (section `cp_ring`) and the functional API all read
this one model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from cp_ring.errors import ConfigError, PlanError
from cp_ring.observe.steps import parse_trace
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS, parse, resolve, text
from cp_ring.runtime import RUNTIME

Wire = Literal["auto", "plain", "int8", "fp8", "latent"]
WireDtype = Literal["input", "float32", "bfloat16"]
Recompute = Literal["keep", "replay"]
Certify = Literal["on", "off", "strict"]
Pack = Literal["first-fit", "in-order", "fill"]

MASK_KINDS = (
    "shared-prefix", "images", "global", "tree", "block-causal", "block-diffusion", "documents",
    "prefix",
    "causal",
    "full",
    "any",
)  # fmt: skip
"""Kinds of masks that batches may declare: names of constructors of `Mask`, and `any`."""

UNTRIED = ("cuda-graphs", "moe-overlap")
"""Features of Megatron for which ring attention is written, and which no GPU run has shown yet:
rejected unless allowed.
"""

PLUGINS = "cp_ring.plugins"
"""Entry point group of packages that add kernels, layouts or routes: each entry names a module that
registers them.

A script that imports such a module itself before it parses its arguments needs no entry point.
"""


@RUNTIME.cache()
def load_plugins() -> None:
    """Imports the modules of the entry point group `PLUGINS`, once."""
    for plugin in importlib.metadata.entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as error:  # whatever the import of another's module raises
            raise ConfigError(
                f"plugin {plugin.name} ({plugin.value}) cannot be imported: {error}"
            ) from None


def choices(setting: str) -> tuple[str, ...]:
    """The names that a setting accepts, () if it is not a choice. Kernels, layouts and routes are
    those registered by now.
    """
    if setting == "kernel":
        # loads torch, which a command line that names no kernel does without
        from cp_ring.kernels import REGISTRY

        return ("auto", *REGISTRY)
    if setting == "layout":
        return tuple(LAYOUTS)
    if setting == "route":
        return ("auto", *ROUTES)
    if setting == "heads":
        return ()
    return tuple(map(str, typing.get_args(ContextParallelConfig.model_fields[setting].annotation)))


class ContextParallelConfig(BaseModel):
    """Settings of ring attention; immutable, validated when made.

    Raises `ConfigError` (through `make` and `from_args`) with one line that names the flag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(
        False,
        description="Replace core attention by ring attention over the context-parallel group.",
    )
    cpu: bool = Field(
        False,
        description="Let Megatron run on a machine without CUDA (gloo); inert where CUDA is "
        "present.",
    )
    kernel: str = Field(
        "auto",
        description="Attention kernel of each tile; auto takes the fastest one that can do the job.",
    )
    layout: str = Field(
        "zigzag",
        description="Which rank holds which tokens; balanced weighs documents, masks and the "
        "windows of all layers.",
    )
    document_mask: bool = Field(
        False,
        description="Tokens see only their own document, which ends with the end-of-document "
        "token; position ids begin anew in each, and that token's own prediction "
        "counts for nothing in the loss.",
    )
    mask_kinds: str = Field(
        "",
        description="Kinds of the masks that batches carry as cp_ring_mask, separated by commas, "
        f"which the certificate then probes: {', '.join(MASK_KINDS)}; any is every "
        "mask.",
    )
    pack: Pack = Field(
        "first-fit",
        description="How --sft puts conversations into batch rows: first-fit, the longest first; "
        "in-order; or fill, in order and cut where a batch row ends, which leaves "
        "padding in the last one only.",
    )
    cut_long: bool = Field(
        False,
        description="Cut conversations that are longer than a batch row (--sft) instead of "
        "rejecting them; fill cuts anyway.",
    )
    balance_microbatches: bool = Field(
        False,
        description="Deal out the batch rows of each step so that its microbatches, and the "
        "data-parallel ranks, have equal work; it changes which of them share a "
        "microbatch, never which are in a step.",
    )
    route: str = Field(
        "direct",
        description="How keys and values reach the ranks that need them; auto takes the fastest "
        "by predicted time.",
    )
    schedule: str = Field(
        "auto",
        description="The hop at which a rank uses the keys of each other: auto; ring, one source "
        "a hop; gather, all in one hop; or the hop of each ring distance, as in "
        "0,1,2,2.",
    )
    slot_shards: int = Field(
        SLOT_SHARDS,
        ge=1,
        description="Sources of a hop at most, so the shards of keys and values that a receive "
        "buffer holds.",
    )
    heads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="Neighboring context-parallel ranks that exchange tokens for heads, around a "
        "ring of as many times fewer members; 1 is the ring alone, auto takes the "
        "fastest number by predicted time.",
    )
    node_size: int = Field(
        0,
        ge=0,
        description="Neighboring context-parallel ranks on one node, by which the routes direct "
        "and relay go; 0 is what the launcher (torchrun or Slurm) says.",
    )
    num_slots: int = Field(
        2,
        ge=2,
        le=8,
        description="Receive buffers for keys and values; memory grows with this, not with cp.",
    )
    wire: Wire = Field(
        "auto",
        description="How keys and values travel: plain, as they are; latent, as the latents of "
        "multi-latent attention; int8 or fp8, quantized by token and head, which "
        "costs accuracy; auto is latent where a model of the time says that it pays, "
        "else plain.",
    )
    wire_dtype: WireDtype = Field(
        "input", description="Precision in which partial key and value gradients travel."
    )
    recompute: Recompute = Field(
        "keep",
        description="Where activations are recomputed: keep out and lse of attention, per layer "
        "and microbatch, so that the ring runs once; or replay the ring.",
    )
    offload: bool = Field(
        False,
        description="Keep what attention layers save for backward (q, k, v, out and lse, or out "
        "and lse where activations are recomputed) in host memory between forward and "
        "backward, fetched one layer ahead.",
    )
    loss_chunk: int = Field(
        0,
        ge=0,
        description="Compute logits and loss of so many tokens of a rank at a time, and the "
        "logits again in backward, where those of all tokens would not fit into "
        "memory; 0 computes all at once.",
    )
    allow_untried: str = Field(
        "",
        description="Features of Megatron, separated by commas, to accept although no GPU run has "
        f"shown them with ring attention yet: {', '.join(UNTRIED)}.",
    )
    run_dir: str = Field(
        "",
        description="Folder for steps.jsonl, a line per logged step, and the file DONE; none by "
        "default.",
    )

    hop_timeout: float = Field(
        600,
        ge=0,
        description="Seconds that a hop or a collective may wait before the job is ended with a "
        "report; 0 is any time.",
    )
    compare_every: int = Field(
        16,
        ge=0,
        description="Compare what ranks are about to compute for one in so many new plans, after "
        "the first 32 of a group; 0 compares none. Packed documents bring a new plan "
        "with every microbatch.",
    )
    timing: int = Field(
        0,
        ge=0,
        description="Every so many steps, measure what each hop computes and waits for, and name "
        "slow ranks and links; 0 never.",
    )
    trace: str = Field(
        "",
        description="STEP or STEP:COUNT: write a trace of these steps, of all ranks on one clock, "
        "to trace-STEP.json in --cp-ring-run-dir, or where the job runs.",
    )
    debug: bool = Field(
        False,
        description="Fill receive buffers with NaN and compare what ranks are about to compute at "
        "every call. Slow.",
    )
    keep_checkpoints: int = Field(
        0, ge=0, description="How many checkpoints are kept, the newest ones; 0 keeps all."
    )
    trust_checkpoint: bool = Field(
        False,
        description="Load whatever is pickled in a checkpoint, which lets it run code: only for "
        "files of known origin.",
    )
    certify: Certify = Field(
        "on",
        description="Probe masks, attention, loss and gradients on this job's own ranks before it "
        "trains, and stop it if they are not what its flags declare; leaves a "
        "certificate beside the checkpoints. strict also stops a job of which a part "
        "cannot be probed.",
    )

    @field_validator("kernel", "layout", "route")
    @classmethod
    def _registered(cls, value: str, info: ValidationInfo) -> str:
        setting = str(info.field_name)
        if value not in choices(setting):
            load_plugins()
        if value not in choices(setting):
            *others, last = (repr(name) for name in choices(setting))
            raise PydanticCustomError(
                "unknown_name",
                "input should be {known}",
                {"known": f"{', '.join(others)} or {last}"},
            )
        return value

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_as_text(cls, value: Any) -> Any:
        """Reads a list too, as YAML has it: [0, 1, 2, 2] is 0,1,2,2."""
        return text(value) if isinstance(value, list | tuple) else value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        try:
            return text(parse(value))
        except PlanError as error:
            raise ValueError(str(error).partition(": ")[2]) from None

    @field_validator("mask_kinds", "allow_untried", mode="before")
    @classmethod
    def _names_as_text(cls, value: Any) -> Any:
        """Reads a list too, as YAML has it."""
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("mask_kinds", "allow_untried")
    @classmethod
    def _known_names(cls, value: str, info: ValidationInfo) -> str:
        what, known = (
            ("kind of mask", MASK_KINDS)
            if info.field_name == "mask_kinds"
            else ("untried feature", UNTRIED)
        )
        for name in value.split(",") if value else ():
            if name not in known:
                context = {"name": name, "what": what, "known": ", ".join(known)}
                raise PydanticCustomError(
                    "unknown_name", "{name} is no {what}; known are {known}", context
                )
        return value

    @field_validator("trace", mode="before")
    @classmethod
    def _known_steps(cls, value: Any) -> str:
        parse_trace(str(value))
        return str(value)

    @property
    def traced(self) -> range:
        """The steps of `trace`."""
        return parse_trace(self.trace)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in `mask_kinds`."""
        return tuple(self.mask_kinds.split(",")) if self.mask_kinds else ()

    def check_schedule(self, cp: int) -> None:
        """Raises `ConfigError` if the schedule is not one for `cp` ranks, or has more than
        `slot_shards` sources at a hop.

        With `heads` it is that of the ring's members, with `auto` that of the ranks. `relay` has a
        schedule of its own.
        """
        if self.node_size and cp % self.node_size:
            raise ConfigError(
                f"{self.flag('node_size')} {self.node_size} does not divide the {cp} "
                "context-parallel ranks"
            )
        heads = 1 if self.heads == "auto" else self.heads
        if cp % heads:
            raise ConfigError(
                f"{self.flag('heads')} {heads} does not divide the {cp} context-parallel ranks: "
                "change either"
            )
        try:
            own_schedule = self.route in ROUTES and ROUTES[self.route].own_schedule
            if own_schedule and cp > 1:
                own_schedule(
                    self.schedule, cp // heads, members_of_node(self.node_size or 1, heads)
                )
            else:
                resolve(self.schedule, cp // heads, 1, self.slot_shards)
        except PlanError as error:
            named = str(error).replace("schedule ", self.flag("schedule") + " ", 1)
            raise ConfigError(named.replace("slot_shards", self.flag("slot_shards"))) from None

    @field_validator("certify", mode="before")
    @classmethod
    def _certify_of_switch(cls, value: Any) -> Any:
        """Reads a boolean too: `certify: true` in a YAML file is on."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @classmethod
    def flag(cls, field: str) -> str:
        """The command-line flag of a field: `enabled` is `--cp-ring`, `num_slots` is
        `--cp-ring-num-slots`.
        """
        return "--cp-ring" if field == "enabled" else "--cp-ring-" + field.replace("_", "-")

    @classmethod
    def add_arguments(
        cls, parser: argparse.ArgumentParser, hidden: bool = False
    ) -> argparse.ArgumentParser:
        """Adds every field as a flag; values are validated later, by `from_args`, for one clear
        message.

        With `hidden` the parser's help does not list them.
        """
        group = parser.add_argument_group(
            title="cp_ring", description="ring attention for context parallelism"
        )
        for name, field in cls.model_fields.items():
            known = f"; one of {', '.join(choices(name))}" if choices(name) else ""
            shown = f"{field.description} (default: {field.default}{known})".replace("%", "%%")
            shown = argparse.SUPPRESS if hidden else shown
            options: dict[str, Any] = {"dest": _dest(name), "default": field.default, "help": shown}
            if field.annotation is bool:
                switch = argparse.BooleanOptionalAction if field.default else "store_true"
                group.add_argument(cls.flag(name), action=switch, **options)
            elif name == "certify":
                group.add_argument(
                    cls.flag(name), nargs="?", const="on", metavar=name.upper(), **options
                )
                group.add_argument("--no-" + cls.flag(name)[2:], action="store_const", const="off", dest=_dest(name),
                                   help=argparse.SUPPRESS if hidden else None)  # fmt: skip
            else:
                group.add_argument(cls.flag(name), metavar=name.upper(), **options)
        return parser

    @classmethod
    def help(cls, width: int | None = None) -> str:
        """The flags and what they do, as argparse prints them, without any other flag."""
        parser = argparse.ArgumentParser(
            add_help=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width)
        )
        shown = cls.add_arguments(parser).format_help()
        return shown[shown.index("cp_ring:") :]

    @classmethod
    def table(cls) -> list[dict[str, str]]:
        """One entry per flag: flag, default, values, and what it does."""
        return [
            {
                "flag": cls.flag(name),
                "default": "off" if field.default is False else str(field.default) or "none",
                "values": _values(name, field.annotation),
                "what it does": str(field.description),
            }
            for name, field in cls.model_fields.items()
        ]

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ContextParallelConfig:
        """Reads the flags that `add_arguments` added from a parsed namespace."""
        return cls.make(
            **{
                name: getattr(args, _dest(name))
                for name in cls.model_fields
                if hasattr(args, _dest(name))
            }
        )

    @classmethod
    def make(cls, **values: Any) -> ContextParallelConfig:
        """As the constructor, but raises `ConfigError` with one line that names the flag and what
        it accepts.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if name not in cls.model_fields:
                raise ConfigError(
                    f"cp_ring has no setting {name!r}; it has {', '.join(cls.model_fields)}"
                ) from None
            message = (
                str(first["ctx"]["error"])
                if first["type"] == "value_error"
                else first["msg"].lower()
            )
            raise ConfigError(f"{cls.flag(name)} {first['input']!r}: {message}") from None

    def to_args(self) -> list[str]:
        """The flags that differ from their defaults, as a command line."""
        line: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                switch = self.flag(name) if value is True else "--no-" + self.flag(name)[2:]
                line += [switch] if field.annotation is bool else [self.flag(name), str(value)]
        return line


def _values(name: str, annotation: Any) -> str:
    known = choices(name)
    if known:
        return ", ".join(known)
    return {bool: "switch", int: "whole number", float: "number"}.get(annotation, "text")


def _dest(name: str) -> str:
    return "cp_ring" if name == "enabled" else f"cp_ring_{name}"
