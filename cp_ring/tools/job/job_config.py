"""The job's YAML file: sections `megatron`, `data`, `parallel`, `cp_ring` and `launch`.

One more section, `presets`, names variants of the job: `presets.tiny.megatron.num_layers: 2`
applies if `preset=tiny` is among the overrides. A preset changes the keys that it has, and null
removes a key. The section is no part of the job itself.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cp_ring.errors import ConfigError, one_line
from cp_ring.options import LEFT, SETTINGS, OptionError, Options

# the first comment of a packaged file speaks of commands from here on
_HINT = re.compile(r"(?:; [^;:]*)?: ")
_SECTION = "must be a section with keys"
_PLAIN = {
    "model_type": _SECTION,
    "dict_type": _SECTION,
    "dataclass_type": _SECTION,
    "path_type": "must be a path",
}  # plain text for pydantic's types of errors


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise ValueError(str(error)) from None


UserPath = Annotated[Path, AfterValidator(_expanded)]  # ~ is the home directory, as in a shell


def _read_options(section: Any, as_pydantic: Callable[[Any], Options]) -> Options:
    """The section cp_ring, which `Options` checks itself; its errors get pydantic's form."""
    if not isinstance(section, dict):
        return as_pydantic(section)
    errors: list[InitErrorDetails] = []
    known = {key: value for key, value in section.items() if key in SETTINGS}
    for settings in [*({key: value} for key, value in known.items()), known]:
        try:
            options = Options(**settings)
        except OptionError as error:
            kind = PydanticCustomError("option", "{problem}", {"problem": error.problem})
            detail = InitErrorDetails(type=kind, loc=(error.name,), input=error.value)
            errors += [detail] * (detail["loc"] not in [each["loc"] for each in errors])
    for key in section.keys() - known:
        errors += [InitErrorDetails(type="extra_forbidden", loc=(key,), input=section[key])]
    if errors:
        raise ValidationError.from_exception_data("cp_ring", errors)
    return options


class Section(BaseModel):
    """A section of the file; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """What to train on. Unused where `megatron` names datasets of its own (data_path,
    train_data_path, mock_data, ...).
    """

    path: UserPath | None = Field(
        None, description="A folder of texts or a .jsonl file; default: Python's standard library."
    )
    vocab_size: int = Field(
        4096,
        ge=300,
        description="Vocabulary size of the BPE tokenizer that is trained on the data.",
    )
    validation_fraction: float = Field(
        0.05, gt=0, le=0.5, description="Share of the documents that is used only for validation."
    )
    cache: UserPath = Field(Path("runs/corpora"), description="Where tokenized corpora are kept.")
    replace: bool = Field(False, description="Allow a run to resume with another corpus.")


class ParallelConfig(Section):
    """The size of each parallel dimension. Their product is the number of ranks."""

    model_config = ConfigDict(strict=True)  # true is no 1

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int = Field(1, ge=1)
    data_parallel_size: int = Field(
        1, ge=1, description="Not a Megatron argument: Megatron divides the ranks by the others."
    )

    @property
    def ranks(self) -> int:
        """Ranks of all nodes together."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )


class LaunchConfig(Section):
    """Where the ranks run and where their output goes."""

    run_dir: UserPath | None = Field(
        None, description="Checkpoints and logs; default: runs/<name of the file>."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: GPUs with NCCL where there are any, else gloo."
    )
    nnodes: int = Field(
        1, ge=1, description="Nodes; with more than one, start the job on each of them."
    )
    node_rank: int = Field(0, ge=0, description="Which of the nodes this one is.")
    master_addr: str | None = Field(
        None, description="Address of node 0; needed with more than one node."
    )
    master_port: int = Field(
        29500, ge=1, le=65535, description="Port on node 0; unused with one node."
    )
    max_restarts: int = Field(
        0, ge=0, description="How often torch's launcher starts the ranks again after a failure."
    )


class JobConfig(Section):
    """A whole job. `megatron` maps one to one to Megatron's arguments (snake_case for
    --snake-case).
    """

    megatron: dict[str, Any] = Field(default_factory=dict)
    data: DataConfig = DataConfig()  # type: ignore[call-arg]
    parallel: ParallelConfig = ParallelConfig()  # type: ignore[call-arg]
    cp_ring: Annotated[Options, WrapValidator(_read_options)] = Options()
    launch: LaunchConfig = LaunchConfig()  # type: ignore[call-arg]
    _source: str = ""

    @property
    def source(self) -> str:
        """The file or the packaged name, for messages."""
        return self._source


def load(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job from a file, or by name from the configurations that come with cp_ring, and
    applies `a.b=c` overrides.

    `preset=NAME` among the overrides chooses a variant from the file's section `presets`; its place
    among the overrides does not matter. The output of a variant goes to a folder of its own.

    Raises `ConfigError` with one line that names the file or key.
    """
    path = find(source)
    settings = read(path, source)
    presets = settings.pop("presets", None) or {}
    chosen = [
        override.partition("=")[2] for override in overrides if override.startswith("preset=")
    ]
    if chosen:
        settings = _merged(settings, _find_preset(presets, chosen[-1], source))
    for override in overrides:
        if not override.startswith("preset="):
            _apply_override(settings, override)
    launch = settings.setdefault("launch", {})
    if isinstance(launch, dict):
        launch.setdefault("run_dir", "-".join([f"runs/{path.stem}", *chosen[-1:]]))
    return validate(settings, source)


def find(source: str) -> Path:
    """The path of a file, or of the packaged NAME.yaml of cp_ring.configs if `source` is such a
    NAME.
    """
    path = Path(source)
    if os.path.isfile(path):
        return path
    known = packaged()
    if source in known:
        return known[source]
    raise ConfigError(
        f"{source}: no such file, nor one of the packaged configurations ({', '.join(known)})"
    )


def packaged() -> dict[str, Path]:
    """The configurations that come with cp_ring, by name."""
    import cp_ring.configs

    return {
        file.stem: file
        for folder in cp_ring.configs.__path__
        for file in sorted(Path(folder).glob("*.yaml"))
    }


def summaries() -> list[dict[str, str]]:
    """The name, the presets and the first comment of each packaged configuration."""
    entries = []
    for name, path in packaged().items():
        lines = path.read_text().splitlines()
        comment = " ".join(
            line.lstrip("# ")
            for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
        )
        about = _HINT.split(comment, maxsplit=1)[0]
        entries.append(
            {
                "name": name,
                "presets": ", ".join(read(path, name).get("presets", {})),
                "about": about,
            }
        )
    return entries


def read(path: Path, source: str) -> dict[str, Any]:
    """The sections of a file, unchecked. Raises `ConfigError` that names `source` if it cannot be
    read or has no sections.
    """
    try:
        with path.open() as file:
            settings = _from_yaml(file.read(_MOST_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not valid YAML: {one_line(error)}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: needs the sections {', '.join(JobConfig.model_fields)}")
    return settings


_MOST_BYTES, _DEEPEST, _MOST_NODES = 1 << 20, 32, 100_000


class _Loader(yaml.SafeLoader):
    """Rejects a key that is given twice, of which YAML's own loader silently takes the second
    value, and text that grows.

    The time of YAML's scanner grows with the square of the depth, and aliases of aliases stand for
    any number of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # nodes under a node by its identity, where an alias counts as what it stands for
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node, if it is not too deep and does not stand for too many."""
        event = self.peek_event()
        mark, self._depth = event.start_mark, self._depth + 1
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(
                None, None, f"it is nested too deeply: {_DEEPEST} levels are allowed", mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(
                    None, None, "an alias stands for what it is in", mark
                )
            return node
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        if self._sizes[id(node)] > _MOST_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"it has more than {_MOST_NODES} values", mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep)


def _number_or_text(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """3:2 is text, as in YAML 1.2; PyYAML would read it as 182, in base 60."""
    if ":" in node.value:
        return node.value
    number = loader.construct_yaml_int if node.tag.endswith("int") else loader.construct_yaml_float
    return number(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number_or_text)


def _from_yaml(text: str) -> Any:
    if len(text) > _MOST_BYTES:
        raise yaml.YAMLError(f"it has more than {_MOST_BYTES} characters")
    return yaml.load(text, _Loader)


def _find_preset(presets: Any, name: str, source: str) -> dict[str, Any]:
    if not isinstance(presets, dict) or not isinstance(presets.get(name), dict):
        known = ", ".join(presets) if isinstance(presets, dict) and presets else "none"
        raise ConfigError(
            f"{source}: no preset {name!r} in its section presets; there are: {known}"
        )
    return dict(presets[name])


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`settings` with the keys of `changes` in place of its own; nested sections are merged in the
    same way.
    """
    merged = dict(settings)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = (
            _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def validate(settings: dict[str, Any], source: str) -> JobConfig:
    """Makes the job. Raises `ConfigError` that names each wrong key, with similar known ones."""
    try:
        job = JobConfig.model_validate(settings)
        job._source = source
    except ValidationError as error:
        lines = [_describe(each) for each in error.errors()]
        raise ConfigError(*(f"{source}: {line}" for line in lines)) from None
    launch, ranks = job.launch, job.parallel.ranks
    if lines := [
        *(
            f"megatron.{key} belongs in its own section: set parallel.{key}"
            for key in job.megatron
            if key in ParallelConfig.model_fields
        ),
        *(
            f"megatron.{key} belongs in the section cp_ring"
            for key in job.megatron
            if key.startswith("cp_ring")
        ),
        *(
            f"cp_ring.{key} follows from {place}: set that"
            for key, place in (("run_dir", "launch.run_dir"), ("cpu", "launch.device"))
            if getattr(job.cp_ring, key)
        ),
        *[f"launch.node_rank {launch.node_rank} must be below launch.nnodes {launch.nnodes}"]
        * (launch.node_rank >= launch.nnodes),
        *[f"launch.nnodes {launch.nnodes} needs launch.master_addr, the address of node 0"]
        * (launch.nnodes > 1 and launch.master_addr is None),
        *[
            f"{ranks} ranks (the product of the sizes in section parallel) do not divide by "
            f"launch.nnodes {launch.nnodes}"
        ]
        * (ranks % launch.nnodes > 0),
    ]:
        raise ConfigError(*(f"{source}: {line}" for line in lines))
    return job


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in place. The value is read as YAML: numbers, true, null and [lists] are not
    text.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected section.key=value")
    try:
        value = _from_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--set {override[:200]}: the value is not valid YAML: {one_line(error)[:300]}"
        ) from None
    *sections, last = key.split(".")
    place = settings
    for section in sections:
        inner = place.get(section)
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
        place = inner
    place[last] = value


def _describe(error: Any) -> str:
    """One of pydantic's errors in one line."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] != "extra_forbidden":
        message = error["msg"] if error["type"] == "option" else error["msg"].lower()
        return f"{key}: {_PLAIN.get(error['type'], message)}, not {error['input']!r}"
    if location[0] == "cp_ring" and location[-1] in LEFT:
        return f"{key} left cp_ring: {LEFT[location[-1]]}"
    section: Any = JobConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    names = list(getattr(section, "model_fields", SETTINGS))
    near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
    prefix = ".".join(location[:-1])
    if not near and not prefix:  # perhaps without its section
        homes = {
            name: getattr(of.annotation, "model_fields", SETTINGS)
            for name, of in JobConfig.model_fields.items()
            if name != "megatron"
        }
        home = next((name for name, keys in homes.items() if key in keys), "megatron")
        near = [f"{home}.{key}"] * isinstance(error["input"], str | int | float)
    if near:
        return f"{key}: unknown key; did you mean {'.'.join([*location[:-1], near[0]])}?"
    return f"{key}: unknown key; {prefix or 'the file'} has {', '.join(names)}"
