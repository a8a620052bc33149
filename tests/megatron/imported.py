"""What every rank of a test job imports and reads: once, in the process that ranks are forked from."""

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import pkgutil
import sys
import warnings

from cp_ring.megatron.compat import functions_uncompiled

gc.disable()

with warnings.catch_warnings(), functions_uncompiled():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.helpers
    import megatron.core.tokenizers.text.models
    import megatron.training.training  # noqa: F401
    import numpy.ma  # numpy imports it with the first unique  # noqa: F401
    import torch._dynamo  # torch imports it with the first optimizer  # noqa: F401
    from megatron.training.arguments import add_megatron_arguments

    import cp_ring
    from cp_ring import patches

    for package in (cp_ring, patches):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(("cp_ring.tools", "cp_ring.configs")):
                importlib.import_module(module.name)

with contextlib.suppress(ImportError):  # megatron-core before 0.18 does not have it
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory

    read, known = Factory._get_field_docstrings, {}

    def read_once(factory, source):
        """Megatron parses the source of its settings for help texts, which is most of what a short
        job would take.
        """
        if source not in known:
            known[source] = read(factory, source)
        return dict(known[source])

    Factory._get_field_docstrings = read_once

with contextlib.suppress(ImportError):  # one counts its parameters; the other the CPU needs
    importlib.import_module("megatron.core.models.mimo")
    importlib.import_module("megatron.core.models.multimodal.llava_model")

# torch searches all installed packages for the first process group of each rank
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")
for stream in (sys.stdout, sys.stderr):
    vars(stream).pop("write", None)  # in which wandb looks for its runs, at each line

add_megatron_arguments(argparse.ArgumentParser())
gc.freeze()  # a rank neither searches nor copies what is here
gc.enable()
