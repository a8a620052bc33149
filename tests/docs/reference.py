"""docs/reference.md, from the code: every key of a job, and the arguments of `ring_attention`;
python -m tests.docs.reference writes it.
"""

import inspect
from dataclasses import fields

import cp_ring
from cp_ring.megatron.option_values import choices_of
from cp_ring.megatron.options import SETTINGS
from cp_ring.tools.job import SECTIONS
from launch.budget import ROOT

PAGE = ROOT / "docs" / "reference.md"
TOP = """# Reference

Made of the code: `python -m tests.docs.reference` writes this page.

## Keys of a job

`cp-ring train my.yaml --set SECTION.KEY=VALUE` changes a key for one start.
Section `megatron` has [Megatron's own arguments](configurations.md#your-own-job), `num_layers` for `--num-layers`.
"""

TYPES = {"bool": "switch", "int": "whole number", "float": "number"}


def cell(text):
    shown = str(text).lower() if isinstance(text, bool) else str(text)
    return shown.replace("|", "\\|").replace("<", "&lt;")


def keys():
    parts = []
    for section in ("data", "launch"):
        parts += [f"### `{section}`", "", "| key | default | what it does |", "|---|---|---|"]
        for field in fields(SECTIONS[section]):
            default = cell(field.default or "none")
            parts.append(f"| `{field.name}` | {default} | {cell(field.metadata['text'])} |")
        parts.append("")
    parts += ["### `cp_ring`", "", "| key | default (values) | what it does |", "|---|---|---|"]
    for name, field in SETTINGS.items():
        default = "off" if field.default is False else str(field.default) or "none"
        values = ", ".join(choices_of(field)) or TYPES.get(field.type, "text")
        cells = [f"`{name}`", f"{default} ({values})", field.metadata["text"]]
        parts.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join([*parts, ""])


def function():
    """The arguments of `ring_attention`."""
    text = inspect.getdoc(cp_ring.ring_attention) or ""
    found = inspect.signature(cp_ring.ring_attention)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    call = f"ring_attention{found.replace(parameters=plain, return_annotation=found.empty)}"
    parts = ["## `ring_attention`", "", "```text", call, "```", ""]
    for paragraph in text.split("\n\n"):
        parts += [*section(paragraph.split("\n")), ""]
    return "\n".join(parts)


def section(lines):
    """A paragraph of a docstring as Markdown; `Args:` and the like become a list."""
    if lines[0].startswith("    "):
        return ["```text", *(line.strip() for line in lines), "```"]
    if not lines[0].endswith(":"):
        return [" ".join(lines)]
    parts = []
    for line in inspect.cleandoc("\n".join(lines[1:])).split("\n"):
        name, colon, rest = line.partition(": ")
        if colon and name.isidentifier():
            parts.append(f"- `{name}`: {rest}")
        elif parts and (line.startswith(" ") or not parts[-1].startswith("- ")):
            parts[-1] += f" {line.strip()}"
        else:
            parts += ["", line.strip()] if parts else [line.strip()]
    return [f"**{lines[0].removesuffix(':')}**", "", *parts]


def written():
    """The page as it must be."""
    return "\n".join([TOP, keys(), function(), ""])


if __name__ == "__main__":
    PAGE.write_text(written())
