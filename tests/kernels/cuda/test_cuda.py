"""The CUDA C++ kernels: compiled for every generation of GPU, and run thread by thread on the CPU.

No GPU is needed: CUDA's headers compute with small floats on the host too, so that a C++ compiler can build a kernel
without barriers or shared memory as a plain function. ``grid/cache_write.py`` runs it where there is a GPU.
"""

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.cache.cache_write import ACTIVATION_DTYPES, CACHE_DTYPES, write_cache_reference
from quire.kernels.common.checks import nhd_view
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits
from quire.kernels.cuda import cache_write_cuda
from quire.kernels.cuda.build import ARCHITECTURES, SOURCES, CudaBuildError, fatbin, find_nvcc, source_of
from quire.kernels.cuda.cache_write_cuda import THREADS, kernel_name, plan_launch, run_width, write_cache_cuda
from quire.kernels.cuda.launch import CudaError, Params, load_kernel, read_params

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")

NAMES = {kernel_name(key, cache) for key in ACTIVATION_DTYPES for cache in CACHE_DTYPES}

HOST = """
struct Index { unsigned x; };
static thread_local Index blockIdx, threadIdx;
#define __launch_bounds__(threads)
#define __grid_constant__
#include "cache_write.cu"
static_assert(THREADS == THREADS_OF_LAUNCHER);
extern "C" void on_every_thread(void (*kernel)(CacheWriteParams), const CacheWriteParams* p, unsigned blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) kernel(*p);
}
"""


@pytest.fixture(scope="module")
def params() -> Params:
    return read_params(source_of("cache_write"), "CacheWriteParams")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Any:
    """``write_cache_cuda`` for tensors on the CPU, by the same source and the same packed argument."""
    nvcc = find_nvcc()
    assert nvcc is not None
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cpp").write_text(HOST)
    flags = ["-x", "c++", "-std=c++17", "-O1", "-shared", "-cudart=none", "-Xcompiler=-fPIC,-w", f"-I{SOURCES}"]
    flags.append(f"-DTHREADS_OF_LAUNCHER={THREADS}")
    subprocess.run([nvcc, *flags, "host.cpp", "-o", "host.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "host.so"))

    def write(key: Any, value: Any, cache: Any, slots: Any, layout: Any, k_scale: Any, v_scale: Any) -> bool:
        launch = plan_launch(key, value, cache, slots, layout, k_scale, v_scale)
        kernel = ctypes.cast(library[launch.name], ctypes.c_void_p)
        library.on_every_thread(kernel, struct.pack(params.format, *launch.values), launch.blocks)
        return bool(launch.values[params.names.index("wide")])

    return write


@needs_nvcc
@pytest.mark.parametrize("key_dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize(("layout", "head_dim"), [("NHD", 24), ("HND", 20), ("HND", 64)])
def test_equals_reference_on_the_host(
    on_host: Any, layout: Any, head_dim: int, cache_dtype: torch.dtype, key_dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(4)
    fused = (torch.randn(33, 7, head_dim, generator=rng) * 4).to(key_dtype)
    fused[0, :, :4] = torch.tensor([torch.inf, -1e4, 1e-4, -0.0])
    # The values lie head by head: their strides are not the keys'.
    key, value = fused[:, :3], fused[:, 3:6].transpose(0, 1).contiguous().transpose(0, 1)
    slots = torch.randperm(8 * 6, generator=rng)[:33]
    slots[[3, 17]] = -1
    before = torch.randn(2, 8, 6, 3, head_dim, generator=rng).to(cache_dtype)
    before = nhd_view(before, layout).contiguous()
    scales = [None, torch.tensor([0.07]), torch.tensor([0.5, 3.1, 0.011])]
    for k_scale, v_scale in [(None, None), (scales[1], scales[2])] if cache_dtype in FP8_DTYPES else [(None, None)]:
        result, expected = before.clone(), before.clone()
        wide = on_host(key, value, result, slots, layout, k_scale, v_scale)
        write_cache_reference(key, value, expected, slots, layout, k_scale, v_scale)
        assert torch.equal(as_bits(result), as_bits(expected))
        assert wide == (head_dim != 20 or key_dtype is torch.float32)


@needs_nvcc
def test_slots_behind_the_cache_are_not_written(on_host: Any) -> None:
    memory = torch.zeros(2, 3, 4, 1, 16)
    ones = torch.ones(2, 1, 16)
    on_host(ones, ones, memory[:, :2], torch.tensor([8, 2**40]), "NHD", None, None)
    assert memory.count_nonzero() == 0


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fatbin")
    made = fatbin("cache_write", folder)
    (path,) = folder.glob("*.fatbin")
    assert path.read_bytes() == made
    assert fatbin("cache_write", folder) == made  # from the cache: there is still one
    assert len(list(folder.glob("*.fatbin"))) == 1
    return path


def cuobjdump(*arguments: str | Path) -> str:
    """The tool that comes with triton, where the CUDA toolkit brings none of its own."""
    nvcc = find_nvcc()
    tool = None if nvcc is None else nvcc.resolve().with_name("cuobjdump")
    if tool is None or not tool.exists():
        triton = pytest.importorskip("triton", reason="there is no cuobjdump")
        tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


@needs_nvcc
def test_every_kernel_is_there_for_every_generation_and_spills_nothing(image: Path) -> None:
    usage = cuobjdump("-res-usage", image)
    found = set()
    for part in usage.split("arch = ")[1:]:
        architecture = part.split(maxsplit=1)[0]
        for name, registers, stack in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", part):
            found.add((architecture, name))
            # 64 registers let 1,024 threads run at a time; a copy needs that many loads in flight.
            assert int(registers) <= 64, (name, architecture)
            assert int(stack) == 0, (name, architecture)
    assert found == {(f"sm_{number}", name) for number in ARCHITECTURES for name in NAMES}


@needs_nvcc
def test_a_kernel_takes_as_many_bytes_as_are_packed(image: Path, params: Params) -> None:
    # The upper half of the attribute's second word is the size of all arguments.
    sizes = re.findall(r"EIATTR_PARAM_CBANK\s+Format:\s+EIFMT_SVAL\s+Value:\s+0x\w+ 0x(\w+)", cuobjdump("-elf", image))
    assert len(sizes) == len(NAMES) * len(ARCHITECTURES)
    assert {int(size, 16) >> 16 for size in sizes} == {params.size}


def test_params_are_read_from_the_source() -> None:
    source = """
struct Other {
    int64_t no;
};
struct Mine {
    const float* x;  // a pointer
    void* y;
    int32_t count;
    int64_t stride;
    float eps;
};
"""
    params = read_params(source, "Mine")
    assert params.names == ("x", "y", "count", "stride", "eps")
    assert params.size == 8 + 8 + 4 + 4 + 8 + 4 + 4
    packed = struct.pack(params.format, 1, 2, 3, 4, 0.5)
    assert struct.unpack_from("=qqi4xqf", packed) == (1, 2, 3, 4, 0.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("int x, y;", "cannot read 'int x, y;'"),
        ("bool wide;", "cannot read 'bool wide;'"),
        ("\n".join(f"int64_t x{i};" for i in range(513)), "takes 4104 bytes, at most 4096"),
    ],
)
def test_a_struct_that_cannot_be_packed_is_refused(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_params(f"struct P {{\n{body}\n}};", "P")
    with pytest.raises(ValueError, match="no struct Q"):
        read_params("struct P {\nint64_t x;\n};", "Q")


def test_runs_are_wide_only_where_all_is_aligned() -> None:
    tokens, cache = torch.zeros(4, 2, 16, dtype=torch.float16), torch.zeros(2, 1, 4, 2, 16, dtype=torch.float8_e5m2)
    assert run_width(tokens, tokens, cache) == 8
    assert run_width(torch.zeros(4, 2, 17)[:, :, 1:], torch.zeros(4, 2, 16), torch.zeros(2, 1, 4, 2, 16)) == 1
    assert run_width(tokens, torch.zeros(4, 2, 20, dtype=torch.float16)[:, :, :16], cache) == 1
    assert run_width(tokens, tokens, torch.zeros(2, 1, 4, 2, 20, dtype=torch.float8_e5m2)[..., :16]) == 1
    assert run_width(tokens[..., :12], tokens[..., :12], cache[..., :12]) == 1


def test_the_launcher_checks_first_and_says_what_a_launch_needs() -> None:
    tokens, slots = torch.zeros(5, 2, 16), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"value: dimension 0 \(num_tokens\) is 4, expected 5"):
        write_cache_cuda(tokens, tokens[:4], torch.zeros(2, 3, 8, 2, 16), slots)
    with pytest.raises(RuntimeError, match="CUDA kernels need CUDA, and the tensors are on 'cpu'"):
        write_cache_cuda(tokens, tokens, torch.zeros(2, 3, 8, 2, 16), slots)
    huge = torch.zeros(1, device="cpu").expand(2, cache_write_cuda.LIMIT // 8, 8, 2, 16)
    with pytest.raises(ValueError, match="2147483648 slots, expected less than 2147483648"):
        plan_launch(tokens, tokens, huge, slots, "NHD", None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_driver_is_said(params: Params) -> None:
    with pytest.raises(CudaError):
        load_kernel(b"", "cache_write_float32_float32", params, THREADS, 0)


def test_the_compiler_is_found_and_its_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "nvcc"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\ncase "$1" in --version) ;; --list*) echo sm_90;; *) echo "no such type" >&2; exit 2;; esac'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == fake
    with pytest.raises(CudaBuildError, match="no such type"):
        fatbin("cache_write", tmp_path)
    assert not list(tmp_path.glob("*.fatbin"))


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire").chmod(0o777)
    with pytest.raises(CudaBuildError, match="can be written to by others"):
        fatbin("cache_write")
