"""Is this machine ready? Each finding says what was seen and, where something is wrong, what to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from undercrank.machine import this_machine, versions
from undercrank.records import Machine, Record
from undercrank.settings import settings


@dataclass(frozen=True, kw_only=True)
class Finding(Record):
    level: str
    "ok, note or problem"
    about: str
    seen: str
    remedy: str = ""

    def line(self) -> str:
        sign = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[self.level]
        return f"{sign} {self.about}: {self.seen}" + (f" -> {self.remedy}" if self.remedy else "")


def examine() -> tuple[Finding, ...]:
    """All findings, the machine first."""
    machine = this_machine()
    return (
        Finding(level="ok", about="python", seen=", ".join(f"{k} {v}" for k, v in versions().items())),
        *_devices(machine),
        *_torch_against_driver(machine),
        *_kernels(machine),
        *_codecs(),
        *_models(),
    )


def _devices(machine: Machine) -> Iterator[Finding]:
    for device in machine.devices:
        total, free = device.total_bytes / 2**30, device.free_bytes / 2**30
        seen = f"{device.name}, {free:.1f} of {total:.1f} GiB free"
        tight = free < 2
        yield Finding(
            level="note" if tight else "ok",
            about=device.torch_name,
            seen=seen,
            remedy="close other programs: a clip of flipbook needs about 1 GiB" if tight else "",
        )


def _torch_against_driver(machine: Machine) -> Iterator[Finding]:
    """The usual trap: a GPU, and a torch that was built without it or for a newer driver."""
    import torch

    build = f"torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}"
    if machine.driver is None:
        yield Finding(level="ok", about="gpu", seen=f"no NVIDIA driver here; {build}")
    elif torch.version.cuda is None:
        remedy = "uv pip install --torch-backend=auto --reinstall torch"
        yield Finding(level="problem", about="gpu", seen=f"driver {machine.driver}, but {build}", remedy=remedy)
    elif not torch.cuda.is_available():
        remedy = (
            "update the driver, or install the torch build that matches it (uv pip install --torch-backend=auto torch)"
        )
        yield Finding(level="problem", about="gpu", seen=f"{build} cannot use driver {machine.driver}", remedy=remedy)
    else:
        yield Finding(
            level="ok", about="gpu", seen=f"{build}, driver {machine.driver}, {torch.cuda.device_count()} usable"
        )


def _kernels(machine: Machine) -> Iterator[Finding]:
    """Which attention kernels may be chosen."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(level="ok", about="attention", seen="torch's own, on the CPU")
        return
    flags = {
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    yield Finding(
        level="ok", about="attention", seen=", ".join(name for name, on in flags.items() if on) or "math only"
    )


def _codecs() -> Iterator[Finding]:
    from undercrank.video import missing_codecs

    missing = missing_codecs()
    if missing:
        remedy = "pip install --force-reinstall av"
        yield Finding(level="problem", about="video", seen=f"PyAV lacks {', '.join(missing)}", remedy=remedy)
    else:
        yield Finding(level="ok", about="video", seen="h264 for mp4, ffv1 for masters")


def _models() -> Iterator[Finding]:
    now = settings()
    network = "the network is switched off (offline)" if now.offline else "missing ones are fetched when first named"
    yield Finding(
        level="ok", about="models", seen=f"flipbook inside the package; others from {now.hub_cache}, {network}"
    )
    yield Finding(level="ok", about="ledger", seen=f"{now.ledger}{'' if now.ledger.exists() else ' (not written yet)'}")
