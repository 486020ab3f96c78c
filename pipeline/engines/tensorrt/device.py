"""One NVIDIA GPU through ``cuda-python``: memory, copies, our kernels, CUDA graphs, all on one stream.

Everything is queued in order; only ``get`` and ``Fetch.wait`` wait. Device memory is a plain address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import BuildError, ServerError

KERNELS = Path(__file__).with_name("kernels.cu")


@dataclass
class Fetch:
    """Device memory on its way to the host."""

    array: NDArray[Any]  # pinned: filled once ``wait`` returns, and written again by a later fetch into it
    event: Any

    def wait(self) -> NDArray[Any]:
        """Waits until the bytes are there; returns ``array``."""
        from cuda.bindings import driver

        _check(driver.cuEventSynchronize(self.event))
        return self.array


class Device:
    """The GPU numbered ``ordinal`` of those that are visible. Raises BuildError when there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BuildError("cuda-python is not installed", "pip install 'enginegate[tensorrt]'") from error
        try:
            _check(driver.cuInit(0))
        except (RuntimeError, ServerError) as error:  # no driver library, or a driver without a GPU
            raise BuildError(f"no NVIDIA GPU: {error}", "run it on the kind of GPU that it was built for") from error
        self._driver = driver
        self._device = _check(driver.cuDeviceGet(ordinal))
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(self._device))))
        attribute = driver.CUdevice_attribute
        major, minor = (
            _check(driver.cuDeviceGetAttribute(kind, self._device))
            for kind in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.sm = f"{major}{minor}"
        self._stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._functions: dict[str, Any] = {}
        self._allocated: list[Any] = []

    @property
    def stream(self) -> int:
        """The stream's address, for TensorRT."""
        return int(self._stream)

    def compile(self, unit: str, logit_bits: int) -> None:
        """Makes the kernels of ``kernels.cu`` ready to launch; see there for both settings."""
        from cuda.bindings import nvrtc

        try:
            program = _check(nvrtc.nvrtcCreateProgram(KERNELS.read_bytes(), b"kernels.cu", 0, [], []))
        except RuntimeError as error:  # cuda-python without the library behind it
            raise BuildError(
                f"NVRTC is not here: {error}", "pip install nvidia-cuda-nvrtc, or a CUDA toolkit"
            ) from error
        options = [f"--gpu-architecture=sm_{self.sm}", f"-DUNIT={unit}", f"-DLOGIT_BITS={logit_bits}"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise ServerError(f"the kernels do not compile for sm_{self.sm}: {log.decode().strip()}")
        binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, binary))
        module = _check(self._driver.cuModuleLoadData(binary))
        for name in (b"write_cache", b"read_logits", b"advance"):
            self._functions[name.decode()] = _check(self._driver.cuModuleGetFunction(module, name))

    def empty(self, size: int) -> int:
        """The address of ``size`` new bytes, freed by ``close``. Raises ServerError when they are not there."""
        free, total = _check(self._driver.cuMemGetInfo())
        if size > free:
            raise ServerError(
                f"the GPU has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {size / 2**30:.1f} are asked for",
                "lower engine.max_batch or engine.max_tokens, or end what else runs on this GPU",
            )
        self._allocated.append(_check(self._driver.cuMemAlloc(size)))
        return int(self._allocated[-1])

    def clear(self, address: int, size: int) -> None:
        """Queues zeros."""
        _check(self._driver.cuMemsetD8Async(address, 0, size, self._stream))

    def put(self, address: int, array: NDArray[Any]) -> None:
        """Copies a small array to the device; it may change as soon as this returns."""
        array = np.ascontiguousarray(array)
        _check(self._driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self._stream))

    def get(self, address: int, array: NDArray[Any]) -> NDArray[Any]:
        """Fills ``array`` from the device, after everything queued; returns it."""
        _check(self._driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self._stream))
        _check(self._driver.cuStreamSynchronize(self._stream))
        return array

    def copy(self, target: tuple[int, int], source: tuple[int, int], width: int, height: int) -> None:
        """Copies ``height`` lines of ``width`` bytes within the device; each side: address and pitch."""
        plan = self._driver.CUDA_MEMCPY2D()
        plan.srcMemoryType = plan.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        plan.dstDevice, plan.dstPitch = target
        plan.srcDevice, plan.srcPitch = source
        plan.WidthInBytes, plan.Height = width, height
        _check(self._driver.cuMemcpy2DAsync(plan, self._stream))

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Queues a kernel, whose arguments are pointers (0: null) and then ints."""
        words = (*addresses, *sizes)
        kinds = (ctypes.c_void_p,) * len(addresses) + (ctypes.c_int,) * len(sizes)
        _check(
            self._driver.cuLaunchKernel(self._functions[name], *grid, threads, 1, 1, 0, self._stream, (words, kinds), 0)
        )

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What ``work`` queues as a CUDA graph; each call of the result queues it again."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _check(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            work()
        finally:
            graph = _check(driver.cuStreamEndCapture(self._stream))
        ready = _check(driver.cuGraphInstantiate(graph, 0))
        _check(driver.cuGraphDestroy(graph))
        return lambda: _check(driver.cuGraphLaunch(ready, self._stream))

    def host(self, shape: tuple[int, ...], kind: Any) -> Fetch:
        """Pinned host memory for ``fetch``."""
        driver = self._driver
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        address = int(_check(driver.cuMemHostAlloc(size, 0)))
        array = np.frombuffer((ctypes.c_byte * size).from_address(address), kind).reshape(shape)
        return Fetch(array, _check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def fetch(self, address: int, into: Fetch) -> None:
        """Queues a copy to the host; ``into.wait`` waits for it."""
        array = into.array
        _check(self._driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self._stream))
        _check(self._driver.cuEventRecord(into.event, self._stream))

    def close(self) -> None:
        """Waits for what is queued and frees the device memory."""
        _check(self._driver.cuStreamSynchronize(self._stream))
        while self._allocated:
            _check(self._driver.cuMemFree(self._allocated.pop()))


def _check(answer: tuple[Any, ...]) -> Any:
    """What a call of cuda-python returned beside its status. Raises ServerError for a bad status."""
    status, *values = answer
    if int(status) != 0:
        raise ServerError(f"CUDA: {status.name}", "see the server's log and start it again")
    return values[0] if len(values) == 1 else tuple(values) or None
