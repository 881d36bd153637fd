"""The doctor says what was seen and, where something is wrong, what to run. A pretended torch stands in for builds."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from undercrank import doctor, video
from undercrank.doctor import Finding
from undercrank.records import Device, Machine

GIB = 2**30
CPU = Device(kind="cpu", name="Processor", total_bytes=16 * GIB, free_bytes=8 * GIB)
GPU = Device(kind="cuda", name="Accelerator", total_bytes=141 * GIB, free_bytes=140 * GIB)


class Torch(SimpleNamespace):
    """As much of torch as the doctor asks."""

    def __init__(
        self, *, cuda: str | None = "12.8", works: bool = True, kernels: tuple[bool, bool, bool] = (True,) * 3
    ):
        cudnn, flash, efficient = kernels
        super().__init__(
            __version__="2.11.0",
            version=SimpleNamespace(cuda=cuda),
            cuda=SimpleNamespace(is_available=lambda: works, device_count=lambda: 2),
            backends=SimpleNamespace(
                cuda=SimpleNamespace(
                    cudnn_sdp_enabled=lambda: cudnn,
                    flash_sdp_enabled=lambda: flash,
                    mem_efficient_sdp_enabled=lambda: efficient,
                )
            ),
        )


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*devices: Device, driver: str | None = "580.1", torch: Torch | None = None) -> dict[str, Finding]:
        machine = Machine(name="m", devices=devices, cpu_count=1, driver=driver)
        monkeypatch.setattr(doctor, "this_machine", lambda: machine)
        monkeypatch.setitem(sys.modules, "torch", torch or Torch())  # type: ignore[arg-type]
        findings = doctor.examine()
        assert len({finding.about for finding in findings}) == len(findings)
        return {finding.about: finding for finding in findings}

    return run


def test_a_finding_is_one_line() -> None:
    assert Finding(level="ok", about="video", seen="h264").line() == "ok      video: h264"
    line = Finding(level="problem", about="gpu", seen="none", remedy="buy one").line()
    assert line == "PROBLEM gpu: none -> buy one"
    assert Finding(level="note", about="cpu", seen="x").line().startswith("note ")


def test_a_healthy_machine_has_no_problem_and_every_matter_is_looked_at(examine: Any) -> None:
    found = examine(GPU, CPU)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert list(found) == ["python", "cuda:0", "cpu", "gpu", "attention", "video", "models", "ledger"]
    assert found["cuda:0"].seen == "Accelerator, 140.0 of 141.0 GiB free"
    assert found["gpu"].seen == "torch 2.11.0, built for CUDA 12.8, driver 580.1, 2 usable"
    assert "torch" in found["python"].seen


def test_a_machine_without_a_gpu_is_healthy(examine: Any) -> None:
    found = examine(CPU, driver=None, torch=Torch(cuda=None, works=False))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["gpu"].seen == "no NVIDIA driver here; torch 2.11.0, built for the CPU"
    assert found["attention"].seen == "torch's own, on the CPU"


def test_a_gpu_with_a_torch_built_for_the_cpu_is_a_problem_with_its_remedy(examine: Any) -> None:
    gpu = examine(GPU, CPU, torch=Torch(cuda=None, works=False))["gpu"]
    assert gpu.level == "problem"
    assert "driver 580.1, but torch 2.11.0, built for the CPU" in gpu.seen
    assert "--reinstall torch" in gpu.remedy


def test_a_driver_that_torch_cannot_use_is_a_problem_with_its_remedy(examine: Any) -> None:
    gpu = examine(GPU, CPU, torch=Torch(works=False))["gpu"]
    assert gpu.level == "problem"
    assert "cannot use driver 580.1" in gpu.seen
    assert "update the driver" in gpu.remedy


@pytest.mark.parametrize(
    ("kernels", "seen"),
    [
        ((True, True, True), "cuDNN, flash, memory-efficient"),
        ((False, True, False), "flash"),
        ((False,) * 3, "math only"),
    ],
)
def test_the_attention_kernels_are_listed(examine: Any, kernels: tuple[bool, bool, bool], seen: str) -> None:
    assert examine(GPU, CPU, torch=Torch(kernels=kernels))["attention"].seen == seen


def test_little_free_memory_is_noted(examine: Any) -> None:
    tight = Device(kind="cpu", name="Processor", total_bytes=16 * GIB, free_bytes=2 * GIB - 1)
    assert examine(tight)["cpu"].level == "note"
    assert "close other programs" in examine(tight)["cpu"].remedy
    enough = Device(kind="cpu", name="Processor", total_bytes=16 * GIB, free_bytes=2 * GIB)
    assert (examine(enough)["cpu"].level, examine(enough)["cpu"].remedy) == ("ok", "")


def test_a_missing_codec_is_a_problem_with_its_remedy(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "missing_codecs", lambda: ["libx264"])
    found = examine(CPU)["video"]
    assert (found.level, found.seen) == ("problem", "PyAV lacks libx264")
    assert "av" in found.remedy


def test_where_models_and_rows_are_is_told(examine: Any, monkeypatch: pytest.MonkeyPatch, own_ledger: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/somewhere/hub")
    monkeypatch.setenv("UNDERCRANK_OFFLINE", "1")
    found = examine(CPU)
    assert "/somewhere/hub" in found["models"].seen
    assert "offline" in found["models"].seen
    assert found["ledger"].seen == f"{own_ledger} (not written yet)"
    own_ledger.write_text("")
    monkeypatch.setenv("UNDERCRANK_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = examine(CPU)
    assert found["ledger"].seen == str(own_ledger)
    assert "offline" not in found["models"].seen
