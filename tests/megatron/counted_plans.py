"""Runs a module's `main` as `python -m tests.megatron.counted_plans MODULE [its words]`, and tells
each plan of a microbatch that a training process makes.
"""

import importlib
import sys

from torch.utils.data import get_worker_info

from cp_ring.megatron.adapter import microbatch_mask

make = microbatch_mask._make_plan


def told(*given):
    if get_worker_info() is None:
        sys.stdout.write("<a plan made in training>\n")
    return make(*given)


microbatch_mask._make_plan = told
importlib.import_module(sys.argv.pop(1)).main()
