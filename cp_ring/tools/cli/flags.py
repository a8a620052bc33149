"""`cp-ring flags`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def flags_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the flags that cp_ring adds to a Megatron script: default, values, and what each does."""
    from cp_ring.options import Options
    from cp_ring.tools.cli.tables import print_table

    entries = Options.table()
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
    else:
        print_table(entries, whole=("flag",))
