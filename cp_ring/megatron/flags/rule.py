"""What a rule is: a reason for which cp_ring rejects a job, and what rules read of a job. The table
is `cp_ring.megatron.flags.rules`.

Nothing heavy is imported here: the flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cp_ring.errors import ConfigError, Reasons
from cp_ring.megatron.flags import implementations
from cp_ring.megatron.flags.layer_pattern import (
    RECURRENT,
    RECURRENT_KINDS,
    letters_of,
    pattern_of,
    shown_pattern,
)
from cp_ring.megatron.options import Options

_WORD = re.compile(r"([\w-]+)(?:([<>=%])(.+))?")
# of flags whose values have another name
_DESTINATIONS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}
OF_THE_MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
)
_OTHER_NAMES = {
    "num_layers": ("encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"),
    "seq_length": ("encoder_seq_length",),
}


@dataclass(frozen=True)
class Rule:
    """A reason to reject a job, with the line that says so.

    when: a function of the job, whose true value is what it has found, or words that must all hold:
        a flag that is given, `--a<1`, `--a>1`, `--a=text`, `--a%b` (b does not divide a), one of
        several as `x|y`, or `!` and what must not hold.
    text, way_out: the line, `text: way_out`. `{--flag}` is a flag with its value, `{name}` an
        attribute of the job, `{found}` what `when` has found, of an iterator each in a line; of
        words, the flag of the first one, with its value where the word compares it.
    why: for people who ask for more than the line says.
    example: flags that the rule rejects, and others after ` / `.
    """

    when: str | Callable[[Job], Any]
    text: str
    way_out: str = ""
    why: str = ""
    example: str = ""

    def lines(self, job: Job) -> Iterator[str]:
        """The lines with which the job is rejected: one, or one for each that an iterator finds."""
        reasons = job.holds(self.when) if isinstance(self.when, str) else self.when(job)
        for job.found in reasons if isinstance(reasons, Iterator) else filter(None, [reasons]):
            yield f"{self.text}{': ' * bool(self.way_out)}{self.way_out}".format_map(job)


def problem(job: Job, rules: Iterable[Rule]) -> str:
    """The line of the first rule that rejects the job, or ""."""
    return next((line for rule in rules for line in rule.lines(job)), "")


def check_rules(job: Job, rules: Iterable[Rule]) -> None:
    """Raises `ConfigError` with the lines of all rules that reject the job."""
    reasons = Reasons()
    for rule in rules:
        with reasons.of():
            if lines := list(rule.lines(job)):
                raise ConfigError(*lines)
    reasons.end()


class Job:
    """Megatron's arguments, or a configuration with the same names, and the settings of cp_ring:
    None for what they lack.

    own: by default among the arguments. argv: the command line, where there is one. ulysses: ranks
    that exchange heads.
    """

    found: Any = None

    def __init__(
        self,
        args: Any,
        own: Options | None = None,
        argv: Sequence[str] = (),
        ulysses: int = 1,
    ):
        self.args, self.own, self.argv = args, own or Options.from_args(args), argv
        self.ulysses = ulysses

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name, None)

    def __getitem__(self, name: str) -> Any:
        value = self.value(name)
        if not name.startswith("--"):
            return value
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        return name if value in (None, "") or isinstance(value, bool) else f"{name} {shown}"

    def value(self, name: str) -> Any:
        """The value of a flag, or the attribute `name`."""
        if name == "--cp-ring":
            return self.own.enabled
        if name.startswith("--cp-ring-"):
            return getattr(self.own, name[len("--cp-ring-") :].replace("-", "_"))
        return getattr(self, _DESTINATIONS.get(name, name.removeprefix("--").replace("-", "_")))

    def holds(self, words: str) -> str:
        """What of the first word holds if all words hold, else ""."""
        held = [self._held(word.removeprefix("!")) for word in words.split()]
        all_held = all(
            bool(each) != word.startswith("!")
            for each, word in zip(held, words.split(), strict=True)
        )
        return (next(iter(held), "") or words or "any") if all_held else ""

    def _held(self, word: str) -> str:
        for name, operator, other in (_WORD.fullmatch(each).groups() for each in word.split("|")):  # type: ignore[union-attr]
            value = self.value(name)
            if not operator:
                holds = bool(value)
            elif operator == "=":
                holds = str(value) == other
            elif operator == "%":
                divisor = self.value(other)
                holds = bool(value and isinstance(divisor, int) and divisor and value % divisor)
            else:
                known = isinstance(value, int | float)
                holds = known and (
                    value < float(other) if operator == "<" else value > float(other)
                )
            if holds:
                return self[name] if operator else name
        return ""

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size or 1

    @property
    def cp(self) -> int:
        return self.context_parallel_size or 1

    @property
    def chunks(self) -> int:
        """Those of the zigzag layout."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks; 0 where the ranks are not a whole number of models."""
        ranks, rest = divmod(
            self.world_size or 0, self.tp * (self.pipeline_model_parallel_size or 1) * self.cp
        )
        return 0 if rest else ranks

    @property
    def together(self) -> int:
        """Batch rows of a microbatch of all data-parallel ranks; 0 if unknown."""
        return (self.micro_batch_size or 0) * self.data_parallel

    @property
    def sizes_from_a_file(self) -> bool:
        """Whether Megatron reads the sizes of the model from a checkpoint or its own YAML file."""
        return bool(self.use_checkpoint_args or self.yaml_cfg)

    @property
    def missing_sizes(self) -> str:
        """Sizes of the model that no flag gives."""
        missing = (
            name
            for name in OF_THE_MODEL
            if all(self.value(key) is None for key in (name, *_OTHER_NAMES.get(name, ())))
        )
        return "" if self.sizes_from_a_file else ", ".join(missing)

    @property
    def comm_types(self) -> list[str]:
        """The `cp_comm_type` of each layer; one, if all have the same. Megatron's own help has
        allgather.
        """
        kinds = self.cp_comm_type or "p2p"
        return [
            {"allgather": "all_gather"}.get(kind, kind)
            for kind in ([kinds] if isinstance(kinds, str) else kinds)
        ]

    @property
    def other_types(self) -> list[str]:
        """Types of layers that are not the ring of `--cp-ring-heads` and `--cp-ring-schedule`."""
        return [kind for kind in self.comm_types if kind != "p2p"]

    @property
    def gathers(self) -> bool:
        return self.cp > 1 and "all_gather" in self.comm_types

    @property
    def nests(self) -> bool:
        """Whether layers exchange heads among some ranks, in a ring of such members."""
        return self.cp > 1 and "a2a+p2p" in self.comm_types

    @property
    def product(self) -> int:
        return prod(self.hierarchical_context_parallel_sizes or ())

    @property
    def splits_packed(self) -> bool:
        """Whether packed batches of a script are split by the balanced layout."""
        packed = self.sft or self.dataloader_inter_document_masking
        return bool(packed and self.own.named_layout.weighs and not self.own.document_mask)

    @property
    def reorders(self) -> bool:
        """Whether ranks hold other tokens than by Megatron's own split."""
        return not self.own.named_layout.stock

    @property
    def reorders_program(self) -> bool:
        """Whether layers of a program may get tokens in another order, or documents."""
        moved = self.reorders or self.own.document_mask or self.own.kinds or self.packed
        return bool(self.program and (moved or "states" in self.own.recurrent_ways.values()))

    @property
    def masks_documents(self) -> bool:
        """Whether the documents of each batch row are those that Megatron's data set finds by the
        end-of-document token.
        """
        return self.own.document_mask and not (self.dataloader_inter_document_masking or self.sft)

    @property
    def has_transformer_engine(self) -> bool:
        return implementations.has_transformer_engine()

    @property
    def has_apex_norm(self) -> bool:
        return implementations.has_apex_norm(self.normalization)

    @property
    def letters(self) -> str:
        return letters_of(self.args)

    @property
    def pattern(self) -> str:
        return shown_pattern(self.args)

    @property
    def recurrent(self) -> str:
        """The first kind of layers whose state runs along the sequence, "" without such layers."""
        return next((kind for letter, kind in RECURRENT.items() if letter in self.letters), "")

    def recurrent_with(self, way: str) -> list[str]:
        """The kinds of recurrent layers of the model that exchange what `way` says."""
        ways = self.own.recurrent_ways
        kinds = (kind for letter, kind in RECURRENT_KINDS.items() if letter in self.letters)
        return [kind for kind in kinds if ways[kind] == way]

    @property
    def graph_modules(self) -> str:
        """Megatron's flag for the modules in CUDA graphs, which is another one before 0.19."""
        has_modules = hasattr(self.args, "cuda_graph_modules")
        return "--cuda-graph-modules" if has_modules else "--cuda-graph-scope"

    @property
    def graphs(self) -> str:
        """The flags that ask for CUDA graphs, "" without graphs."""
        old = [name for name in ("enable", "external") if self.value(f"{name}_cuda_graph")]
        kind, modules = self.cuda_graph_impl or "none", " ".join(sorted(_modules_in_graphs(self)))
        if not old and kind == "none" and "full_iteration" not in modules:
            return ""
        shown = f"--{old[0]}-cuda-graph" if old else f"--cuda-graph-impl {kind}"
        return f"{shown} {self.graph_modules} {modules}" if modules else shown

    @property
    def graphs_of_attention(self) -> str:
        """The flags that put attention into a CUDA graph, "" without them: graphs of whole layers,
        of a whole step, and of `attn`. Layers of a hybrid model are attention or something else.
        """
        modules = _modules_in_graphs(self)
        separate = self.cuda_graph_impl == "transformer_engine" or self.external_cuda_graph
        alone = {"moe_router", "moe_preprocess", "mamba"}
        if separate or pattern_of(self.args):  # else graphs hold these with attention
            alone |= {"mlp", "moe"}
        return "" if modules and modules <= alone else self.graphs

    @property
    def recomputes_attention(self) -> bool:
        """Whether core attention alone is recomputed."""
        return self.recompute_granularity == "selective" and "core_attn" in (
            self.recompute_modules or ["core_attn"]
        )

    @property
    def moved_to_host(self) -> str:
        """Megatron's flag that moves tensors of attention to host memory, "" without one."""
        moved = [
            module for module in self.offload_modules or () if module in ("core_attn", "attn_proj")
        ]
        if self.fine_grained_activation_offloading and moved:
            return f"--offload-modules {' '.join(moved)}"
        return (
            f"--cpu-offloading-num-layers {self.cpu_offloading_num_layers}"
            if self.cpu_offloading_num_layers
            else ""
        )


def _modules_in_graphs(job: Job) -> set[str]:
    """The modules in CUDA graphs by name, none for all of a layer."""
    modules: set[str] = set()
    for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated"):
        values = job.value(name) or ()
        values = values.split(",") if isinstance(values, str) else values
        values = values if isinstance(values, list | tuple) else (values,)
        modules |= {str(getattr(value, "name", value)) for value in values}
    return modules - {"full"}
