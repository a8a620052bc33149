"""Activations that wait in host memory between forward and backward, and are fetched one layer
ahead.

Inside `Offload.layer()`, autograd's saved tensors are copied to host memory, and the device forgets
them. In backward, the first tensor of a layer that is needed fetches this layer and, beside the
computation, the one whose forward came before it. So the device holds the tensors of at most two
layers of a microbatch, however many there are. Values are the same bits.

On CUDA both directions have a stream of their own and the host memory is pinned. On the CPU a copy
stands for host memory, so that order, content and bytes can be tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Offload:
    """Moves saved tensors of layers to host memory and back. One object for all layers of a model.

    `with offload.layer(): out = cp_ring.ring_attention(q, k, v, group)` moves what this call saves:
    q, k, v, out and lse. Other operations that save the same tensors keep them on the device,
    unless they run inside `sharing()`.

    least: tensors of fewer bytes stay on the device.
    peak: the largest number of bytes of fetched tensors that were on the device at a time.
    """

    def __init__(self, least: int = 256) -> None:
        self.least, self.peak = least, 0
        self._copies: weakref.WeakSet[_Copy] = weakref.WeakSet()
        self._last: _Layer | None = None
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    @contextmanager
    def layer(self, keep: Iterable[Tensor | None] = ()) -> Iterator[None]:
        """A new layer: tensors that are saved for backward inside wait in host memory, except those
        of `keep`.

        Give weights as `keep`: they are on the device anyway. What stays on the device must not be
        changed in place before backward, which raises then, as ever in autograd; what has moved is
        as it was when it was saved.
        """
        layer, kept = self._begin(), {x.data_ptr() for x in keep if x is not None}

        def pack(tensor: Tensor) -> Kept | Waiting:
            stays = tensor.nbytes < self.least or tensor.data_ptr() in kept
            return Kept(tensor, tensor._version) if stays else self._put(tensor, layer)

        with saved_tensors_hooks(pack, tensor_of):
            yield

    def sharing(self) -> saved_tensors_hooks:
        """A context in which saved tensors that the last layer has moved are not saved again;
        others are saved as ever.

        So is a tensor that was changed in place after it was moved.
        """
        layer = self._last

        def pack(tensor: Tensor) -> Kept | Waiting:
            copy = None if layer is None else layer.find(tensor)
            return Kept(tensor, tensor._version) if copy is None else _waiting(tensor, copy)

        return saved_tensors_hooks(pack, tensor_of)

    def put(self, *tensors: Tensor) -> tuple[Waiting, ...]:
        """Moves tensors to host memory, as a layer. They are dropped there with the objects that
        are returned.
        """
        layer = self._begin()
        return tuple(self._put(tensor, layer) for tensor in tensors)

    def host_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(copy.host.nbytes for copy in list(self._copies))

    def device_bytes(self) -> int:
        """Bytes of fetched tensors that are on the device now."""
        return sum(copy.host.nbytes for copy in list(self._copies) if copy.fetched is not None)

    def _begin(self) -> _Layer:
        layer = _Layer(self, self._last)
        self._last = layer
        return layer

    def _put(self, tensor: Tensor, layer: _Layer) -> Waiting:
        copy = layer.find(tensor)
        if copy is None:
            flat = (
                tensor.as_strided((tensor.numel(),), (1,))
                if _dense(tensor)
                else tensor.contiguous().view(-1)
            )
            copy = _Copy(layer, tensor, *self._to_host(flat))
            layer.copies.append(weakref.ref(copy))
            self._copies.add(copy)
        return _waiting(tensor, copy)

    def _to_host(self, flat: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy of `flat` in host memory, and the event after which it is complete; None where it
        is complete now.
        """
        if not flat.is_cuda:
            return flat.clone(), None
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        stream = self._stream(flat.device, "to host")
        stream.wait_stream(torch.cuda.current_stream(flat.device))  # which computes the tensor
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
            moved = stream.record_event()
        # autograd drops the tensor now; its memory must not be used again before the copy is made
        flat.record_stream(stream)
        return host, moved

    def fetch(self, copy: _Copy) -> None:
        """Brings the copy to its device, unless it is there or on its way."""
        if copy.fetched is not None:
            return
        if copy.device.type != "cuda":
            copy.fetched = copy.host.clone()
        else:
            current = torch.cuda.current_stream(copy.device)
            stream = self._stream(copy.device, "to device")
            copy.fetched = torch.empty(copy.host.shape, dtype=copy.host.dtype, device=copy.device)
            # work that was enqueued before may still use the memory that was just allocated
            stream.wait_stream(current)
            if copy.moved is not None:
                stream.wait_event(copy.moved)
            with torch.cuda.stream(stream):
                copy.fetched.copy_(copy.host, non_blocking=True)
                copy.ready = stream.record_event()
            copy.fetched.record_stream(stream)  # it may be dropped without having been used
        self.peak = max(self.peak, self.device_bytes())

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]


class _Layer:
    """The tensors that were moved in one call of one layer. Its copies keep it alive, not the other
    way round.
    """

    def __init__(self, offload: Offload, before: _Layer | None) -> None:
        self.offload = offload
        self.copies: list[weakref.ref[_Copy]] = []
        self.used = False
        self._before = None if before is None else weakref.ref(before)

    def alive(self) -> list[_Copy]:
        """The copies that are still needed."""
        return [copy for ref in self.copies if (copy := ref()) is not None]

    def find(self, tensor: Tensor) -> _Copy | None:
        """The copy of the same elements, if there is one."""
        return next((copy for copy in self.alive() if copy.is_of(tensor)), None)

    def use(self) -> None:
        """Fetches all of this layer and of the one before it, at the first call."""
        if self.used:
            return
        self.used = True
        before = None if self._before is None else self._before()
        for copy in [*self.alive(), *(before.alive() if before is not None else [])]:
            self.offload.fetch(copy)


class _Copy:
    """The elements of a tensor in host memory; `moved` and `ready` are the events after which host
    and device have them.
    """

    def __init__(
        self, layer: _Layer, tensor: Tensor, host: Tensor, moved: torch.cuda.Event | None
    ) -> None:
        self.layer, self.host, self.device, self.moved = layer, host, tensor.device, moved
        self.fetched: Tensor | None = None
        self.ready: torch.cuda.Event | None = None
        # Another tensor may come to lie where this one was, so an address says something only as
        # long as the storage lives.
        self._key, self._storage = _key(tensor), StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the copy has the same elements, none of which was changed in place since."""
        return _dense(tensor) and self._key == _key(tensor) and not self._storage.expired()


@dataclass(frozen=True, eq=False)
class Waiting:
    """A tensor whose elements wait in host memory."""

    copy: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return int(self.copy.host.nbytes)

    def tensor(self) -> Tensor:
        """The tensor on its device, ready for the current stream."""
        copy = self.copy
        copy.layer.use()
        copy.layer.offload.fetch(copy)
        if copy.ready is not None:
            torch.cuda.current_stream(copy.device).wait_event(copy.ready)
        fetched: Tensor = copy.fetched.as_strided(self.shape, self.stride)
        return fetched


@dataclass(frozen=True, eq=False)
class Kept:
    """A saved tensor that stays on its device, and its version then: torch compares none of tensors
    that hooks have packed.
    """

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        """The tensor. Raises `RuntimeError`, as torch does, if it was changed in place."""
        if self.saved._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.saved.shape)} that backward needs has been modified by an "
                f"inplace operation: it is at version {self.saved._version}, and was saved at "
                f"version {self.version}"
            )
        return self.saved


def _waiting(tensor: Tensor, copy: _Copy) -> Waiting:
    dense = tensor if _dense(tensor) else torch.empty(tensor.shape, device="meta")
    return Waiting(copy, tensor.shape, dense.stride())


def tensor_of(saved: Tensor | Kept | Waiting) -> Tensor:
    """The tensor itself, or the one that waits in host memory, on its device."""
    return saved if isinstance(saved, Tensor) else saved.tensor()


def _key(tensor: Tensor) -> tuple[int, int, torch.dtype, int]:
    return (
        tensor.data_ptr(),
        tensor.numel(),
        tensor.dtype,
        0 if tensor.is_inference() else tensor._version,
    )


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps or overlaps, in any order."""
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    ordered = sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    return tensor.numel() > 0 and extent == tensor.numel() and all(step > 0 for step, _ in ordered)
