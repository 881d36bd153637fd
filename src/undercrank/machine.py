"""What this computer is: devices, free bytes, capability, versions. Without torch.

NVIDIA GPUs are read through NVML, which needs neither torch nor a CUDA context. Whether the installed torch can
use them is another question, which `undercrank doctor` answers.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

from undercrank.records import Device, Machine
from undercrank.settings import settings

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "av", "numpy")
"The packages whose versions decide results; they stand in every report and ledger row."
OPTIONAL = ("torchao", "flash_attn", "flash_attn_3", "flash-attn-4", "sageattention", "ray")
"Packages that a lever may need; named where they are installed."


def this_machine() -> Machine:
    """This computer as it is now: free bytes are those of the moment."""
    gpus, driver = _gpus()
    if versions().get("torch", "").endswith("+cpu"):
        gpus = ()  # a torch built for the CPU cannot use them; `undercrank doctor` says what to install
    return Machine(
        name=_processor(),
        devices=(*gpus, _cpu()),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        packages=versions(),
        driver=driver,
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES + OPTIONAL:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    total, free = min((memory.total, memory.available), _container_memory() or (memory.total, memory.available))
    return Device(kind="cpu", name=_processor(), total_bytes=total, free_bytes=min(free, memory.available))


def _container_memory() -> tuple[int, int] | None:
    """Total and free bytes of the control group (version 2) that we run in; None: no limit is set."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        stat = (group / "memory.stat").read_text()
    except OSError:
        return None
    if limit.strip() == "max":
        return None
    # The page cache counts as used there, and is given up when a program wants the memory.
    cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return int(limit), max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _processor() -> str:
    """The processor's own name where Linux tells it; the architecture elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except FileNotFoundError:
        return platform.processor() or platform.machine()


def _gpus() -> tuple[tuple[Device, ...], str | None]:
    """The GPUs that CUDA would show, in its order, and the driver's version. None: no NVIDIA driver here."""
    with _nvml() as ready:
        if not ready:
            return (), None
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        shown = _visible(handles, settings().visible_cuda)
        gpus = tuple(gpu for index, handle in enumerate(shown) if (gpu := _gpu(index, handle)))
        return gpus, _text(pynvml.nvmlSystemGetDriverVersion())


@contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no permission: this machine has no NVIDIA GPU for us
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _visible(handles: list[Any], visible: str | None) -> list[Any]:
    """CUDA_VISIBLE_DEVICES by index or by UUID; the first entry that names nothing ends the list, as in CUDA."""
    if visible is None:
        return handles
    by_uuid = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    shown = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(handles):
            shown.append(handles[int(entry)])
        elif match := [handle for uuid, handle in by_uuid.items() if entry and uuid.startswith(entry)]:
            shown.append(match[0])
        else:
            break
    return shown


def _gpu(index: int, handle: Any) -> Device | None:
    """None: a device that does not tell its memory (some boards share the host's): planned around, not used."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    return Device(
        kind="cuda",
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
