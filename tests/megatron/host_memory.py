"""Megatron's own ways of moving saved tensors to host memory, on the CPU, with stand-ins for CUDA
and TransformerEngine.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

MODULES = ["core_attn", "attn_proj"]
SETTINGS = {
    "fine_grained_activation_offloading": True,
    "offload_modules": MODULES,
    "min_offloaded_tensor_size": 1,
}


@contextmanager
def fine_grained():
    """The module of the feature, which moves tensors of the CPU, to memory that is not pinned;
    streams are those of cpu_runtime.

    Where it frees the storage of a tensor, the storage is gone: a later use of it crashes.
    """
    import megatron.core.extensions.transformer_engine as extensions
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

    make_pool = offloading.OffloadTensorPool.__init__
    chunk, pool = offloading.ChunkOffloadHandler, offloading.OffloadTensorPool
    with ExitStack() as stack:
        for owner, name, value in (
            (extensions, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)),
            (
                chunk,
                "_can_manage_tensor_for_offload",
                staticmethod(lambda x: not isinstance(x, torch.nn.Parameter)),
            ),
            (
                pool,
                "__init__",
                lambda self, device="cpu", pin_memory=False: make_pool(self, device, False),
            ),
            (torch.Tensor, "record_stream", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        offloading.PipelineOffloadManager.reset_instance()
        yield offloading
        offloading.PipelineOffloadManager.OFFLOAD_MGR = None


def moved_bytes(offloading):
    """Bytes that this rank moves for the microbatches in flight at a time, by module; known after
    the first step.
    """
    return dict(offloading.PipelineOffloadManager.get_instance().offload_summary_bytes)


class MarkedOnly:
    """As TransformerEngine before 2.10 keeps saved tensors: those that are marked wait in host
    memory, here a copy.

    moved: shapes of the tensors that were moved; left: of those that stayed.
    """

    def __init__(self):
        self.inside_context = False
        self.moved = []
        self.left = []

    def __enter__(self):
        self.inside_context = True
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.on_save_for_backward, self.on_get_saved_tensor
        )
        self._hooks.__enter__()

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self.inside_context = False

    def on_save_for_backward(self, tensor):
        marked = hasattr(tensor, "activation_offloading")
        (self.moved if marked else self.left).append(tuple(tensor.shape))
        return tensor.detach().clone() if marked else tensor

    def on_get_saved_tensor(self, saved):
        return saved


@contextmanager
def marked_only():
    """Models that are built inside keep their saved tensors as TransformerEngine before 2.10 does."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block

    context = MarkedOnly()
    with (
        mock.patch.object(
            transformer_block,
            "get_cpu_offload_context",
            lambda *_: (context, lambda hidden: hidden),
        ),
        mock.patch.object(layers, "HAVE_TE", True),
    ):
        yield context
