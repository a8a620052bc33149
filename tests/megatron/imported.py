"""What every rank of a test job imports: loaded once, in the process that ranks are forked from."""

import argparse
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.tokenizers.text
    import megatron.training.training  # noqa: F401
    from megatron.training.arguments import add_megatron_arguments

    import cp_ring.megatron.gpt
    import cp_ring.patches  # noqa: F401

add_megatron_arguments(argparse.ArgumentParser())  # reads its help texts from source files, which Python then keeps
