"""The device as seen without torch: CPU flags from the kernel, the C++ compiler, CUDA devices from the driver."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
from dataclasses import replace
from pathlib import Path

from engine.assembly.errors import AssemblyError
from engine.contracts.model import DeviceFacts
from engine.native import Compiler, find_compiler

CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "cxx",
)
"""What kernels may ask for: processor flags, and a compiler to build them with."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""


def device_facts(device: str) -> DeviceFacts:
    """Facts of ``auto``, ``cpu`` or ``cuda``. Raises :class:`AssemblyError` when cuda is asked for and absent."""
    if device == "cpu":
        return cpu_facts()
    found, reason = cuda_facts()
    if found is not None:
        return found
    if device == "cuda":
        raise AssemblyError([f"device=cuda: {reason}. Use device=cpu, or device=auto to take what is there"])
    return cpu_facts()


def cpu_facts(cpuinfo: str = "/proc/cpuinfo") -> DeviceFacts:
    """This machine's processor; ``memory_bytes`` is its physical memory."""
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: no flags to tell
        text = ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    compiler = find_compiler()
    if isinstance(compiler, Compiler):
        present.add("cxx")
    return DeviceFacts(
        kind="cpu",
        name=name.group(1).strip() if name else platform.processor() or platform.machine(),
        memory_bytes=physical_memory(),
        features=frozenset(present.intersection(CPU_FEATURES)),
        no_cxx=compiler if isinstance(compiler, str) else "",
    )


def physical_memory() -> int:
    """Bytes of physical memory this process may use (a cgroup's limit counts)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def cuda_facts(index: int = 0) -> tuple[DeviceFacts | None, str]:
    """The CUDA device that torch will call ``cuda:0``, or ``None`` and why there is none."""
    if not torch_built_for_cuda():
        return None, "the installed torch is built without CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "no NVIDIA driver (libcuda.so.1) is installed"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None, "the NVIDIA driver does not start"
    if count.value <= index:
        return None, "no CUDA device is visible (CUDA_VISIBLE_DEVICES?)"
    return replace(_describe(driver, index), count=count.value), ""


def num_cuda_devices() -> int:
    """That this process sees, by the driver; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _describe(driver: ctypes.CDLL, index: int) -> DeviceFacts:
    handle, memory = ctypes.c_int(0), ctypes.c_size_t(0)
    name = ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    for status in (
        driver.cuDeviceGet(ctypes.byref(handle), index),
        driver.cuDeviceGetName(name, 256, handle),
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle),
    ):
        if status != 0:
            raise AssemblyError([f"device=cuda: the NVIDIA driver answers with error {status}"])
    return DeviceFacts(
        kind="cuda",
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
        memory_bytes=memory.value,
    )


def torch_built_for_cuda() -> bool:
    """Read from torch's version file: importing torch takes more than a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return False
    found = re.search(r"^cuda\s*(?::[^=]*)?=\s*(.+)$", version.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None and found.group(1).strip() != "None"
