"""Lets stock Megatron run without CUDA: gloo ranks on the CPU, for trying, testing and CI.

Megatron uses `device="cuda"`, CUDA streams, events, random states and memory statistics in many
places, and does not start without CUDA. This patch redirects all of them to the CPU. If CUDA is
present it changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from cp_ring.megatron.compat import functions_uncompiled, has_training_loop
from cp_ring.patches.patch import Patch, Replacement

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Sends every torch call that names a CUDA device to the CPU, and answers `tensor.type()` as
    Megatron's assertions expect.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device and args and _on_cpu(args[0]) is CPU:
            return CPU
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            kwargs = {
                name: False if name == "pin_memory" else _on_cpu(value)
                for name, value in kwargs.items()
            }
        if func is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        return func(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


class InertStream:
    """Replaces a CUDA stream and does nothing, because work on the CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    __enter__ = record_event = _itself
    __exit__ = wait_stream = wait_event = record = wait = synchronize = _nothing

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True


class InertEvent(InertStream):
    """Replaces a CUDA event."""


class ApplyWhenUnpickled:
    """Goes to a spawned process with multiprocessing's preparation data, and applies the patch when
    it is unpickled there.
    """

    def __reduce__(self) -> Any:
        return apply_in_worker, ()


def apply_in_worker() -> bool:
    """Apply the part of the patch that needs torch alone; spawned processes such as checkpoint
    writers call it.
    """
    _WORKER.apply()
    return _WORKER.applied


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _without(option: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without the option that names a device."""

    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(option, None)
        return function(*args, **kwargs)

    return without


def _counts_of_experts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the sizes that experts exchange as numbers on the host, because gloo does not take
    tensors.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    # a checkpoint written on a GPU holds a state of another size
    if state.numel() == torch.get_rng_state().numel():
        torch.set_rng_state(state)


_from_group = DeviceMesh.from_group


def _mesh_of_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return _from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _manual_seed(seed: int) -> None:
    # torch.manual_seed would call torch.cuda.manual_seed_all again
    torch.default_generator.manual_seed(int(seed))


def _resident_bytes(*args: Any, **kwargs: Any) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes(*args: Any, **kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_properties(*args: Any, **kwargs: Any) -> SimpleNamespace:
    # From architecture 10 on, Megatron does not require CUDA_DEVICE_MAX_CONNECTIONS=1.
    return SimpleNamespace(
        name="cpu",
        major=10,
        minor=0,
        total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        multi_processor_count=os.cpu_count(),
    )


def _partitioned_indices(cu_seqlens: torch.Tensor, tokens: int, cp: int, rank: int) -> torch.Tensor:
    """Return a rank's tokens of documents that are split one by one; replaces
    `transformer_engine_torch.thd_get_partitioned_indices`.
    """
    from cp_ring.plan.layout import Layout

    edges = np.unique(cu_seqlens.numpy())
    return torch.from_numpy(Layout.per_document_zigzag(edges, cp).positions(rank))


_STAND_INS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "get_device_properties": _device_properties,
    "get_device_capability": lambda *args: (10, 0),
    "get_device_name": lambda *args: "cpu",
    "memory_stats": lambda *args: defaultdict(int),
    "memory_allocated memory_reserved device_memory_used": _resident_bytes,
    "max_memory_allocated max_memory_reserved": _peak_bytes,
    "Stream": InertStream,
    "Event": InertEvent,
    "current_stream default_stream": InertStream,
    "stream": lambda stream: contextlib.nullcontext(),
    "set_device synchronize empty_cache set_stream ipc_collect reset_peak_memory_stats "
    "is_current_stream_capturing": _nothing,
}
_RANDOM = {
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}
"""Functions that replace those of torch.cuda and of torch.cuda.random."""


def _torch_replacements() -> Iterator[Replacement]:
    for names, value in _STAND_INS.items():
        for name in names.split():
            # torch.compile needs one object per name
            yield torch.cuda, name, functools.partial(value) if " " in names else value
    for name, of_random in _RANDOM.items():
        yield torch.cuda, name, of_random
        yield torch.cuda.random, name, of_random
    yield torch.cuda, "manual_seed_all", functools.partial(_manual_seed)
    yield DeviceMesh, "from_group", staticmethod(_mesh_of_group)
    yield torch.Tensor, "cuda", _itself
    yield torch.Tensor, "pin_memory", _itself
    yield torch.Tensor, "record_stream", _nothing
    yield torch.nn.Module, "cuda", _itself


def _megatron_replacements() -> Iterator[Replacement]:
    if os.environ.get("RANK", "0") != "0":  # which CUDA libraries are missing is said once a job
        warnings.filterwarnings("ignore", module=r".*\bmegatron\b")
    import multiprocessing.spawn

    with functions_uncompiled():
        from megatron.core import utils
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.multimodal import llava_model
        from megatron.core.models.vision import clip_vit_model
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

    preparation_data = multiprocessing.spawn.get_preparation_data

    def preparation_data_with_patch(name: str) -> dict[str, Any]:
        return {"cp_ring": ApplyWhenUnpickled(), **preparation_data(name)}

    for name, option in (("init_process_group", "device_id"), ("barrier", "device_ids")):
        yield torch.distributed, name, _without(option, getattr(torch.distributed, name))
    yield multiprocessing.spawn, "get_preparation_data", preparation_data_with_patch
    yield random, "_set_cuda_rng_state", _set_rng_state
    yield moe_utils, "maybe_move_tensor_to_cpu", _counts_of_experts
    # since 0.20, which looks up classes that do not exist without TransformerEngine
    if hasattr(multi_token_prediction, name := "is_inference_column_parallel_linear"):
        yield multi_token_prediction, name, _nothing
    if utils.tex is None:  # Megatron splits packed documents by TransformerEngine
        split = SimpleNamespace(thd_get_partitioned_indices=_partitioned_indices)
        yield utils, "tex", split
        if hasattr(utils, "get_thd_batch_on_this_cp_rank"):  # since when it asks for its version
            yield utils, "_te_version", utils.PkgVersion("1.10")
        # the last norm of a hybrid model ignores its specification
        yield hybrid_block, "TENorm", WrappedTorchNorm
        # Megatron's multimodal model requires TransformerEngine's class in the layers of a split
        # language model, because Megatron's own class takes no split without --cp-ring.
        stand_ins = {
            "HAVE_TE": True,
            "HAVE_TEX": True,
            "tex": split,
            "TEDotProductAttention": DotProductAttention,
            "is_te_min_version": lambda *_: True,
        }
        for name in vars(llava_model).keys() & stand_ins:
            yield llava_model, name, stand_ins[name]
    if clip_vit_model.NORM_IMPL is torch.nn.LayerNorm:  # this norm takes no configuration
        encoder = clip_vit_model.CLIPViTModel
        norms = dict.fromkeys(("ln_pre_impl", "ln_post_impl"), WrappedTorchNorm)
        yield encoder, "__init__", functools.partialmethod(encoder.__init__, **norms)
    if has_training_loop():  # programs on megatron.core alone may lack it
        yield from _training_replacements()


def _training_replacements() -> Iterator[Replacement]:
    with functions_uncompiled():
        import megatron.training.initialize as initialize
        import megatron.training.training  # noqa: F401

    on_the_cpu = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    yield initialize, "initialize_megatron", on_the_cpu
    yield initialize, "set_jit_fusion_options", _nothing  # it warms up CUDA kernels


class OnTheCpu(contextlib.ExitStack):
    """Is not left when Python ends, as the context of a generator would be: torch is gone then."""

    def __enter__(self) -> OnTheCpu:
        # Megatron compiles small fusions; on the CPU that needs a C++ compiler
        self.enter_context(torch.compiler.set_stance("force_eager"))
        self.enter_context(CudaMeansCpu())
        return self


def _unneeded() -> str:
    return "CUDA is present" if torch.cuda.is_available() else ""


PATCH = Patch(
    what="answers Megatron's CUDA calls (devices, streams, random states, memory) with the CPU; "
    "applies in spawned processes too",
    why="Megatron does not start without CUDA; this lets it train on gloo CPU ranks",
    needed=lambda args, options: options.cpu,
    order=0,  # before anything imports Megatron
    replacements=lambda: [*_torch_replacements(), *_megatron_replacements()],
    unneeded=_unneeded,
    within=OnTheCpu,
)
_WORKER = Patch(
    what="applies the part of cpu_runtime that a spawned process needs",
    why=PATCH.why,
    replacements=_torch_replacements,
    unneeded=_unneeded,
    within=CudaMeansCpu,
)
