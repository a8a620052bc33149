"""Every cp_ring setting, once: its name, default, choices, validation and help text.

Megatron's parser (`--cp-ring-*`), YAML files (section `cp_ring`) and the functional API all read this one model.
"""

from __future__ import annotations

import argparse
import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cp_ring.errors import ConfigError

Kernel = Literal["auto", "transformer_engine", "cudnn", "flash", "flash_aten", "cpu", "reference"]
LayoutName = Literal["zigzag", "contiguous", "balanced"]
Route = Literal["direct", "ring"]
WireDtype = Literal["input", "float32"]
Recompute = Literal["keep", "replay"]
Certify = Literal["on", "off", "strict"]


class ContextParallelConfig(BaseModel):
    """Settings of ring attention; immutable, validated when made.

    Raises `ConfigError` (through `make` and `from_args`) with one line that names the flag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(False, description="Replace core attention by ring attention over the context-parallel group.")
    cpu: bool = Field(False, description="Let Megatron run on a machine without CUDA (gloo); inert where CUDA is present.")
    kernel: Kernel = Field("auto", description="Attention kernel of each tile; auto takes the fastest one that can do the job.")
    layout: LayoutName = Field("zigzag", description="Which rank holds which tokens; balanced needs --cp-ring-document-mask.")
    document_mask: bool = Field(
        False,
        description="Tokens see only their own document, which ends with the end-of-document token; "
        "position ids begin anew in each, and that token's own prediction counts for nothing in the loss.",
    )
    route: Route = Field("direct", description="How keys and values reach the ranks that need them.")
    num_slots: int = Field(2, ge=2, le=8, description="Receive buffers for keys and values; memory grows with this, not with cp.")
    wire_dtype: WireDtype = Field("input", description="Precision in which partial key and value gradients travel.")
    recompute: Recompute = Field(
        "keep",
        description="Where activations are recomputed: keep out and lse of attention, per layer and microbatch, so that the "
        "ring runs once; or replay the ring.",
    )
    run_dir: str = Field("", description="Folder for steps.jsonl, a line per logged step, and the file DONE; none by default.")

    hop_timeout: float = Field(
        600, ge=0, description="Seconds that a hop or a collective may wait before the job is ended with a report; 0 is any time."
    )
    keep_checkpoints: int = Field(0, ge=0, description="How many checkpoints are kept, the newest ones; 0 keeps all.")
    trust_checkpoint: bool = Field(
        False,
        description="Load whatever is pickled in a checkpoint, which lets it run code: only for files of known origin.",
    )
    certify: Certify = Field(
        "on",
        description="Probe masks, attention, loss and gradients on this job's own ranks before it trains, and stop it if they "
        "are not what its flags declare; leaves a certificate beside the checkpoints. strict also stops a job of which a part "
        "cannot be probed.",
    )

    @field_validator("certify", mode="before")
    @classmethod
    def _certify_of_switch(cls, value: Any) -> Any:
        """Reads a boolean too: `certify: true` in a YAML file is on."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @classmethod
    def flag(cls, field: str) -> str:
        """The command-line flag of a field: `enabled` is `--cp-ring`, `num_slots` is `--cp-ring-num-slots`."""
        return "--cp-ring" if field == "enabled" else "--cp-ring-" + field.replace("_", "-")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds every field as a flag; values are validated later, by `from_args`, for one clear message."""
        group = parser.add_argument_group(title="cp_ring", description="ring attention for context parallelism")
        for name, field in cls.model_fields.items():
            shown = f"{field.description} (default: {field.default}{_choices(field.annotation)})".replace("%", "%%")
            options: dict[str, Any] = {"dest": _dest(name), "default": field.default, "help": shown}
            if field.annotation is bool:
                switch = argparse.BooleanOptionalAction if field.default else "store_true"
                group.add_argument(cls.flag(name), action=switch, **options)
            elif name == "certify":
                group.add_argument(cls.flag(name), nargs="?", const="on", metavar=name.upper(), **options)
                group.add_argument("--no-" + cls.flag(name)[2:], action="store_const", const="off", dest=_dest(name))
            else:
                group.add_argument(cls.flag(name), metavar=name.upper(), **options)
        return parser

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ContextParallelConfig:
        """Reads the flags that `add_arguments` added from a parsed namespace."""
        return cls.make(**{name: getattr(args, _dest(name)) for name in cls.model_fields if hasattr(args, _dest(name))})

    @classmethod
    def make(cls, **values: Any) -> ContextParallelConfig:
        """As the constructor, but raises `ConfigError` with one line that names the flag and what it accepts."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if name not in cls.model_fields:
                raise ConfigError(f"cp_ring has no setting {name!r}; it has {', '.join(cls.model_fields)}") from None
            raise ConfigError(f"{cls.flag(name)} {first['input']!r}: {first['msg'].lower()}") from None

    def to_args(self) -> list[str]:
        """The flags that differ from their defaults, as a command line."""
        line: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                switch = self.flag(name) if value is True else "--no-" + self.flag(name)[2:]
                line += [switch] if field.annotation is bool else [self.flag(name), str(value)]
        return line


def _dest(name: str) -> str:
    return "cp_ring" if name == "enabled" else f"cp_ring_{name}"


def _choices(annotation: Any) -> str:
    choices = typing.get_args(annotation) if not isinstance(annotation, types.UnionType) else ()
    return f"; one of {', '.join(map(str, choices))}" if choices else ""
