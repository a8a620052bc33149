"""What a certificate must leave as it was in a process: everything that training may read and that
is no weight.
"""

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings

import numpy as np
import torch
import torch.distributed as dist

DEPTH = 4  # of containers within containers
LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def whole():
    """The state of this process: {name: a value that compares}."""
    return _of_python() | _of_torch() | _of_megatron()


def changes(before, after):
    """The names that differ, each with both values."""
    none = "(none)"
    return {
        name: (str(before.get(name, none))[:200], str(after.get(name, none))[:200])
        for name in sorted(before.keys() | after.keys())
        if before.get(name, none) != after.get(name, none)
    }


def _of_python():
    return {
        **{f"os.environ {name}": value for name, value in os.environ.items()},
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "numpy's errors": str(np.geterr()),
        "sys.argv": list(sys.argv),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "filters of warnings": str(warnings.filters),
        "handlers of signals": str([signal.getsignal(each) for each in signal.valid_signals()]),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "recursion": sys.getrecursionlimit(),
        "threads": sorted(
            {each.name for each in threading.enumerate()} - {"cp_ring watchdog"}  # of training too
        ),
        "log": (logging.root.level, str(logging.root.handlers), logging.root.manager.disable),
        "hooks": (id(sys.excepthook), id(sys.stdout), id(sys.stderr)),
    }


def _of_torch():
    backends = torch.backends
    default = dist.distributed_c10d._world
    found = {
        "torch's generator": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul": torch.get_float32_matmul_precision(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "default": (torch.get_default_dtype(), torch.get_default_device()),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "groups": sorted(map(str, default.pg_names.values())),
        "backend": str(default.default_pg),
    }
    flags = {
        "cudnn": "enabled benchmark deterministic allow_tf32",
        "cuda.matmul": "allow_tf32 allow_fp16_reduced_precision_reduction "
        "allow_bf16_reduced_precision_reduction",
        "mkldnn": "enabled deterministic allow_tf32",
        "opt_einsum": "enabled strategy",
    }
    for owner, names in flags.items():
        for name in names.split():
            place = backends
            for part in owner.split("."):
                place = getattr(place, part)
            found[f"torch.backends.{owner}.{name}"] = getattr(place, name, None)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"sdp {kind}"] = getattr(backends.cuda, f"{kind}_sdp_enabled")()
    return found


def _of_megatron():
    """The values in the modules and classes of Megatron that are loaded."""
    from megatron.core import tensor_parallel

    from cp_ring.megatron import settings

    found = {"settings of cp_ring": settings.current()}
    found |= {
        f"tracker {name}": state.tolist()
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and module is not None:
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    for own, inside in list(vars(value).items()):
                        _note(found, f"{name}.{key}.{own}", inside)
                else:
                    _note(found, f"{name}.{key}", value)
    return found


def _note(found, name, value):
    if "__" in name or isinstance(value, types.ModuleType) or callable(value):
        return
    found[name] = _readable(value, DEPTH)


def _readable(value, depth):
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value.detach().flatten()[:64].tolist()
    if isinstance(value, logging.Logger):
        return value.level, value.disabled, str(value.handlers)
    if depth and isinstance(value, dict):
        return {str(key): _readable(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_readable(each, depth - 1) for each in value]
    inside = getattr(value, "__dict__", None)
    if depth and inside and not isinstance(value, type) and not callable(value):
        return id(value), {key: _readable(each, depth - 1) for key, each in list(inside.items())}
    return id(value)
