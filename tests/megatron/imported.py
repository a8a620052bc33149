"""What every rank of a test job imports and reads: once, in the process that ranks are forked from."""

import argparse
import contextlib
import gc
import warnings

from cp_ring.patches.cpu_runtime import functions_uncompiled

gc.disable()

with warnings.catch_warnings(), functions_uncompiled():
    warnings.simplefilter("ignore")
    import megatron.core.tokenizers.text
    import megatron.training.training  # noqa: F401
    import torch._dynamo  # noqa: F401  # the patch cpu_runtime sets its stance, in every rank
    from megatron.training.arguments import add_megatron_arguments

    import cp_ring.megatron.certificate.certify
    import cp_ring.megatron.checkpoints.loading
    import cp_ring.megatron.checkpoints.saving
    import cp_ring.megatron.gpt
    import cp_ring.megatron.recompute
    import cp_ring.patches.install
    import cp_ring.run  # noqa: F401

with contextlib.suppress(ImportError):  # megatron-core before 0.18 does not have it
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory

    read, known = Factory._get_field_docstrings, {}

    def read_once(factory, source):
        """Megatron parses the source of its settings for help texts, which is most of what a short job would take."""
        if source not in known:
            known[source] = read(factory, source)
        return dict(known[source])

    Factory._get_field_docstrings = read_once

add_megatron_arguments(argparse.ArgumentParser())
gc.freeze()  # a rank neither searches nor copies what is here
gc.enable()
