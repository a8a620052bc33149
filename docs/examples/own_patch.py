"""A patch of your own: a change to an installed package at run time, all or nothing. Run: python
docs/examples/own_patch.py
"""

import torch
import torch.nn.functional as F

from cp_ring import ConfigError
from cp_ring.patches.patch import Patch

calls: list[tuple[int, ...]] = []


def replacements():
    """Yields (owner, attribute, new value); it runs when the patch is applied, not when this file
    is imported.
    """
    stock = F.scaled_dot_product_attention

    def recorded(query, *args, **kwargs):
        calls.append(tuple(query.shape))
        return stock(query, *args, **kwargs)

    yield F, "scaled_dot_product_attention", recorded


PATCH = Patch(
    name="record_attention",
    what="records the shape of every call of scaled_dot_product_attention",
    why="to find layers that still call it instead of ring attention",
    package="torch",
    versions=">=2.11",
    replacements=replacements,
)


def main():
    q, stock = torch.randn(1, 2, 8, 4), F.scaled_dot_product_attention
    PATCH.apply()
    F.scaled_dot_product_attention(q, q, q)
    assert calls == [(1, 2, 8, 4)] and PATCH.state() == "applied"
    PATCH.revert()  # restores exactly what was there
    assert F.scaled_dot_product_attention is stock

    # Outside its version range a patch is rejected with one line, and nothing is changed.
    old = Patch(
        name="old", what="-", why="-", package="torch", versions="<2", replacements=replacements
    )
    try:
        old.apply()
    except ConfigError as error:
        assert "is for <2" in str(error)
    else:
        raise AssertionError("an unknown version of the package was patched")


if __name__ == "__main__":
    main()
