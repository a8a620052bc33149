"""`cp-ring patches`."""

from __future__ import annotations


def patches_command() -> None:
    """List every place where cp_ring changes other code at run time, and its state for the
    installed versions.
    """
    from cp_ring.patches import table
    from cp_ring.tools.cli.tables import print_table

    print_table(table())
