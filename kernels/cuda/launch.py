"""Loads a fatbin and launches its kernels through the CUDA driver, by ctypes: no extension to build, 2 µs a launch.

A kernel takes one argument, a struct by value. Its members are declared once, in the ``.cu`` file, and read from there.
"""

import ctypes
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

FORMATS = {
    "int32_t": "i",
    "uint32_t": "I",
    "int64_t": "q",
    "uint64_t": "Q",
    "float": "f",
    "double": "d",
}
"""``struct``'s letter for a member's type, besides pointers (P)."""

MAX_PARAM_BYTES = 4096
"""What a kernel's arguments may take together on every GPU (CUDA programming guide, "Function parameters")."""

INVALID_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: no context is bound to the calling thread."""


class CudaError(RuntimeError):
    """A call of the driver failed."""


@dataclass(frozen=True)
class Params:
    """A kernel's argument: its members' names, and their types as a format of ``struct``, aligned as in C."""

    names: tuple[str, ...]
    format: str

    @property
    def size(self) -> int:
        return struct.calcsize(self.format)


def read_params(source: str, name: str) -> Params:
    """The members of ``struct NAME`` in CUDA C++, one a line.

    Raises:
        ValueError: there is no such struct, it is too large, or a line is not a member of a known type.
    """
    found = re.search(rf"struct {name} {{\n(.*?)\n}};", source, re.DOTALL)
    if found is None:
        raise ValueError(f"no struct {name}")
    names, letters = [], []
    for line in found[1].splitlines():
        member = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (\w+);(?:\s*//.*)?", line)
        if member is None or not (member[2] or member[1] in FORMATS):
            raise ValueError(f"struct {name}: cannot read {line.strip()!r}")
        names.append(member[3])
        letters.append("P" if member[2] else FORMATS[member[1]])
    # C pads a struct to a multiple of its largest alignment; `struct` does so when told to end in a member of none.
    params = Params(tuple(names), "@" + "".join(letters) + "0q")
    if params.size > MAX_PARAM_BYTES:
        raise ValueError(f"struct {name} takes {params.size} bytes, at most {MAX_PARAM_BYTES} can be passed")
    return params


class Kernel:
    """One function of a loaded module, and the memory from which its argument is copied at a launch.

    Not for two threads at a time: they would share that memory.
    """

    def __init__(self, function: int, context: int, params: Params, threads: int) -> None:
        self._function = function
        self._context = context
        self._threads = threads
        self._memory = ctypes.create_string_buffer(params.size)
        self._pack = struct.Struct(params.format).pack_into
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))
        self._launch: Callable[..., int] = _driver().cuLaunchKernel

    def launch(self, blocks: int, stream: int, *values: int | float) -> None:
        """Launch ``blocks`` blocks of threads on a stream of the kernel's device, which is the thread's current one.

        Args:
            stream: the handle, as in ``torch.cuda.Stream.cuda_stream``.
            values: of the struct's members, in order; a null pointer is 0.

        Raises:
            CudaError: the driver refuses.
            struct.error: the values do not fit the struct.
        """
        self._pack(self._memory, 0, *values)
        grid = (self._function, blocks, 1, 1, self._threads, 1, 1, 0, stream, self._arguments, None)
        code = self._launch(*grid)
        if code == INVALID_CONTEXT and _bind_if_none(self._context):
            code = self._launch(*grid)
        _check(code, "cuLaunchKernel")


def load_kernel(image: bytes, name: str, params: Params, threads: int, device_index: int) -> Kernel:
    """Load the fatbin ``image`` into the context that torch uses on the device, and find ``name`` in it.

    The module stays loaded as long as the process lives.

    Raises:
        CudaError: there is no driver, or the image has no code for the device or no such kernel.
    """
    driver = _driver()
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        _check(driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"cuModuleGetFunction {name}")
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert function.value is not None and context.value is not None
    return Kernel(function.value, context.value, params, threads)


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream, without the object around it, which costs as much as a launch."""
    return torch._C._cuda_getCurrentRawStream(device_index)


@cache
def _driver() -> Any:
    """The driver's library, which comes with the GPU's driver and not with CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"CUDA kernels need an NVIDIA driver: {error}") from error
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    return driver


def _bind_if_none(context: int) -> bool:
    """Bind torch's context to a thread that has none yet: the runtime does so on its first call, the driver never."""
    bound = ctypes.c_void_p()
    driver = _driver()
    driver.cuCtxGetCurrent(ctypes.byref(bound))
    return bound.value is None and driver.cuCtxSetCurrent(ctypes.c_void_p(context)) == 0


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        said = "unknown error" if text.value is None else text.value.decode()
        raise CudaError(f"{call}: {said} (CUDA error {code})")
