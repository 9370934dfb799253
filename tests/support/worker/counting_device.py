"""A GPU that counts: torch code for ``cuda:0`` runs on CPU memory, and every copy, launch and wait is recorded.

``counting_device`` makes torch believe that a GPU exists. A tensor is "on the GPU" if its memory was made there; its
``device`` is then ``cuda:0``, and an operation that mixes it with a tensor on the host fails as on a GPU. Torch's
operations compute real values. Triton kernels are only recorded: their outputs keep the zeros that new memory has
here, so counts are exact and tokens are always 0.

The device is as slow as possible: nothing that was launched has finished until the host waits for it, or until
``CountingDevice.finish`` is called.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.common.launches import Launch
from quire.worker_proc.execute import decode_graphs

DEVICE = torch.device("cuda", 0)
_HOST = torch.device("cpu")

_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint", "eye"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided", "linspace"),
    )
)
_WAITING_OPERATIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("item", "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "bincount"),
        *("_unique2", "unique_dim", "unique_consecutive", "equal", "allclose"),
    )
)
"""Operations whose result or its shape the host needs."""

_READS = frozenset(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__", "numpy", "cpu", "__contains__")
)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


@dataclass(frozen=True, slots=True)
class Record:
    """Something that the host asked of the device.

    Attributes:
        kind: ``copy in`` (pinned, asynchronous), ``copy out`` (to pinned memory, asynchronous), ``launch`` (of a Triton
            kernel or a graph), ``operation`` (of torch), ``wait`` (the host waits, implicitly or by a pageable copy),
            ``event`` (the host waits for an event that has not finished).
        what: name of the kernel, operation or copy.
        line: ``file:line function`` of the innermost line of the product.
        stream: number of the stream; 0 is the default.
    """

    kind: str
    what: str
    line: str
    stream: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} at {self.line}"


class CountingDevice:
    """Owns the record of what the host asked of the device since the last ``take``."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._on_device: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self.issued = self.completed = 0
        self.capturing = False
        self.streams = [_Stream(self, 0)]
        self.stream = self.streams[0]

    def take(self) -> list[Record]:
        """Return what was recorded, and start over."""
        records, self._records = self._records, []
        return records

    def finish(self) -> None:
        """Let the device finish everything that was launched."""
        self.completed = self.issued

    def record(self, kind: str, what: str) -> None:
        if self.capturing and kind not in ("launch", "operation"):
            raise RuntimeError(f"not allowed while a graph is captured: {kind} ({what})")
        self.issued += 1
        if kind in ("wait", "event"):
            self.completed = self.issued
        self._records.append(Record(kind, what, _product_line(), self.stream.number))

    # ---- where tensors are

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the tensor's memory as the device's. It is kept for ever, so that its address is not used again."""
        storage = tensor.untyped_storage()
        self._on_device[storage._cdata] = storage
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    # ---- copies

    def copied_in(self, source: torch.Tensor, non_blocking: bool) -> None:
        if self.is_pinned(source) and non_blocking:
            self.record("copy in", f"{source.nbytes} bytes")
        else:
            self.record(
                "wait", f"copy of {source.nbytes} bytes from {'' if self.is_pinned(source) else 'un'}pinned memory"
            )

    def copied_out(self, target: torch.Tensor | None, nbytes: int, non_blocking: bool) -> None:
        if target is not None and self.is_pinned(target) and non_blocking:
            self.record("copy out", f"{nbytes} bytes")
        else:
            self.record("wait", f"copy of {nbytes} bytes to the host")

    def to(self, tensor: torch.Tensor, target: torch.device, non_blocking: bool) -> torch.Tensor:
        if target.type == "cuda":
            if self.holds(tensor):
                return tensor
            self.copied_in(tensor, non_blocking)
            return self.place(tensor.clone())
        if not self.holds(tensor):
            return tensor
        self.copied_out(None, tensor.nbytes, False)
        return tensor.clone()


class _Operations(TorchDispatchMode):
    """Places the results of operations, and records them with their waits."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, func._schema.name
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [device.holds(tensor) for tensor in given]
        if not any(there):
            return func(*args, **kwargs)
        hosts = [tensor for tensor, on in zip(given, there, strict=True) if not on and tensor.dim()]
        if name == "aten::copy_":
            self._copy(args, kwargs)
        elif name in _INDEXING:
            self._index(given, hosts, name)
        elif hosts:
            raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, found one on the host at {_product_line()}")
        elif name in _WAITING_OPERATIONS or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
            device.record("wait", name)
        elif not func.is_view and "empty" not in name:
            device.record("operation", name)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not (name == "aten::copy_" and not there[0]):
                if "empty" in name:
                    tensor.zero_()
                device.place(tensor)
        return result

    def _copy(self, args: Any, kwargs: Any) -> None:
        target, source = args[0], args[1]
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
        device = self._device
        if not device.holds(target):
            device.copied_out(target, source.nbytes, non_blocking)
        elif device.holds(source) or not source.dim():
            device.record("operation", "aten::copy_")
        else:
            device.copied_in(source, non_blocking)

    def _index(self, given: list[torch.Tensor], hosts: list[torch.Tensor], name: str) -> None:
        device = self._device
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:]):
            device.record("wait", f"{name} with a mask")
        for tensor in hosts:
            device.copied_in(tensor, False)
        device.record("operation", name)


class _Functions(TorchFunctionMode):
    """Answers where a tensor is, and handles what would leave the dispatcher or need CUDA."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        device = self._device
        if name == "__get__":
            return self._attribute(func, args)
        if func in _FACTORIES or name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
            return self._make(func, name, args, kwargs)
        if not (args and isinstance(args[0], torch.Tensor)):
            return func(*args, **kwargs)
        tensor = args[0]
        if name == "to":
            return self._to(func, args, kwargs)
        if name == "cuda":
            return device.to(tensor, DEVICE, kwargs.get("non_blocking", False))
        if name == "pin_memory":
            return device.pin(tensor.clone())
        if name == "is_pinned":
            return device.is_pinned(tensor)
        if name in _READS and device.holds(tensor):
            if name in ("numpy", "__array__"):
                raise TypeError(f"{name}: the tensor is on {DEVICE}: use .cpu() first")
            device.copied_out(None, tensor.nbytes, False)
            with _nothing_held(device, tensor) as copy:
                return copy if name == "cpu" else func(copy, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _attribute(self, func: Any, args: Any) -> Any:
        attribute = func.__self__.__name__
        if attribute in ("device", "is_cuda", "is_cpu") and self._device.holds(args[0]):
            return {"device": DEVICE, "is_cuda": True, "is_cpu": False}[attribute]
        return func(*args)

    def _make(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor of a factory function: on the device if it is asked for, or like a tensor that is there."""
        device = self._device
        like = args[0] if args and isinstance(args[0], torch.Tensor) and name not in ("tensor", "as_tensor") else None
        asked = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        on_device = torch.device(asked).type == "cuda" if asked is not None else like is not None and device.holds(like)
        if like is not None and device.holds(like):
            made = func(*args, **kwargs)
            return device.place(made) if on_device else made.clone()
        if on_device and name in ("tensor", "as_tensor", "new_tensor"):
            return device.to(func(*args, **kwargs), DEVICE, False)
        made = func(*args, **kwargs)
        if on_device:
            if "empty" in name:
                made.zero_()
            device.place(made)
        return device.pin(made) if pinned else made

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        target = kwargs.pop("device", None)
        if rest and isinstance(rest[0], torch.device | str):
            target = rest.pop(0)
        elif rest and isinstance(rest[0], torch.Tensor):
            other = rest.pop(0)
            target = DEVICE if self._device.holds(other) else _HOST
            rest.insert(0, other.dtype)
        non_blocking = kwargs.pop("non_blocking", False)
        if len(rest) > 1 and isinstance(rest[1], bool):
            non_blocking = rest.pop(1)
        copy = kwargs.pop("copy", False)
        result = tensor
        if target is not None:
            result = self._device.to(tensor, torch.device(target), non_blocking)
        if rest or kwargs:
            converted = func(result, *rest, **kwargs)
            result = self._device.place(converted) if self._device.holds(result) else converted
        if copy and result is tensor:
            result = tensor.clone()
            if self._device.holds(tensor):
                self._device.place(result)
        return result


@contextmanager
def _nothing_held(device: CountingDevice, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a copy of a tensor's values on the host."""
    key = tensor.untyped_storage()._cdata
    storage = device._on_device.pop(key)
    try:
        copy = tensor.detach().clone()
    finally:
        device._on_device[key] = storage
    yield copy


class _Event:
    def __init__(self, device: CountingDevice) -> None:
        self._device, self._at = device, 0

    def record(self, stream: "_Stream | None" = None) -> None:
        self._at = self._device.issued

    def query(self) -> bool:
        return self._at <= self._device.completed

    def synchronize(self) -> None:
        if not self.query():
            self._device.record("event", "synchronize")


class _Stream:
    def __init__(self, device: CountingDevice, number: int) -> None:
        self._device, self.number = device, number

    def wait_stream(self, stream: "_Stream") -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def synchronize(self) -> None:
        self._device.record("wait", "stream synchronize")


class _Graph:
    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    def replay(self) -> None:
        self._device.record("launch", "graph")


@contextmanager
def counting_device() -> Iterator[CountingDevice]:
    """Run torch with a GPU that counts; see the module."""
    device = CountingDevice()

    def new_stream(*args: Any, **kwargs: Any) -> _Stream:
        device.streams.append(_Stream(device, len(device.streams)))
        return device.streams[-1]

    @contextmanager
    def on_stream(stream: _Stream) -> Iterator[None]:
        before, device.stream = device.stream, stream
        try:
            yield
        finally:
            device.stream = before

    @contextmanager
    def capture(graph: _Graph, **kwargs: Any) -> Iterator[None]:
        device.capturing = True
        try:
            yield
        finally:
            device.capturing = False

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132, name="H100"),
        "mem_get_info": lambda device=None: (1 << 33, 1 << 33),
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: device_wait(),
        "Event": lambda **kwargs: _Event(device),
        "Stream": new_stream,
        "current_stream": lambda device_=None: device.stream,
        "stream": on_stream,
        "CUDAGraph": lambda: _Graph(device),
        "graph": capture,
        "graph_pool_handle": lambda: None,
    }

    def device_wait() -> None:
        device.record("wait", "synchronize")

    with ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        # One graph of each kind, for any number of rows: the steps of more sizes ask for the same.
        stack.enter_context(mock.patch.object(decode_graphs, "capture_sizes", lambda max_rows: [max_rows]))
        stack.enter_context(mock.patch.object(decode_graphs, "_WARM_UPS", 1))
        _record_triton(stack, device)
        stack.enter_context(_Operations(device))
        stack.enter_context(_Functions(device))
        yield device


def _record_triton(stack: ExitStack, device: CountingDevice) -> None:
    """Replace the launch of every Triton kernel by its record."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Tensor) and not device.holds(argument):
                raise RuntimeError(f"{self.__name__}: an argument is on the host")
        device.record("launch", self.__name__)

    stack.enter_context(mock.patch.object(JITFunction, "run", run))
    # No launch keeps a variant, and one that a real GPU left behind is not used.
    stack.enter_context(mock.patch.object(Launch, "__call__", Launch.dispatch))


def _product_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("quire."):
            return f"{module.removeprefix('quire.').replace('.', '/')}.py:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside the product"
