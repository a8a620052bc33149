"""What every rank of a test job imports: loaded once, in the process that ranks are forked from."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.training.training  # noqa: F401

    import cp_ring.megatron.gpt
    import cp_ring.patches  # noqa: F401
