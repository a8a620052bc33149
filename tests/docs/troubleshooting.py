"""The rejected settings in docs/troubleshooting.md, from the table of rules; python -m
tests.docs.troubleshooting writes them.
"""

import re
from pathlib import Path

from cp_ring.megatron.flags.rules import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- made of the table of rules -->\n", "<!-- the rest is written by hand -->\n"


def shown(text: str) -> str:
    """A line with `...` for values."""
    return re.sub(r"\{[^-}][^}]*\}", "...", re.sub(r"\{(--[\w-]+)\}", r"\1 ...", text)).replace(
        "... ...", "..."
    )


def tables() -> str:
    parts = []
    for name, rules in TABLE.items():
        rows = [
            f"| `{line}` | {rule.why} | {shown(rule.way_out)} |"
            for rule in rules
            if re.search("[a-z]", line := shown(rule.text))
        ]
        parts += [
            f"### {name}",
            "",
            "| line | why | what to do |",
            "|---|---|---|",
            *dict.fromkeys(rows),
            "",
        ]
    return "\n".join(["", *parts, ""])


def written() -> str:
    """The page as it must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written())
