"""What this computer is, read without torch; a pretended NVML stands in for GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undercrank import machine
from undercrank.records import Device, Machine


class NVML:
    """As much of pynvml as is asked for; `calls` tells whether it was shut down."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 3, *, driver: bool = True, as_bytes: bool = False) -> None:
        self.count, self.driver, self.as_bytes = count, driver, as_bytes
        self.calls: list[str] = []

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if not self.driver:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return self._text(f"GPU-{handle}{handle}ab-cd")

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self._text(f"Accelerator {handle}")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1000 + handle, free=500 + handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [9, handle]

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._text("580.1")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = NVML()
    monkeypatch.setattr(machine, "pynvml", fake)
    install(monkeypatch, "2.11.0+cu128")
    return fake


def install(monkeypatch: pytest.MonkeyPatch, torch: str | None) -> None:
    """Pretend that this build of torch is installed; None: none is."""
    version = machine.metadata.version

    def pretended(name: str) -> str:
        if name != "torch":
            return version(name)
        if torch is None:
            raise machine.metadata.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(machine.metadata, "version", pretended)


def names() -> list[str]:
    return [device.name for device in machine.this_machine().devices if device.kind == "cuda"]


def test_the_gpus_come_first_then_the_cpu(nvml: NVML) -> None:
    here = machine.this_machine()
    assert [device.torch_name for device in here.devices] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    second = Device(kind="cuda", index=1, name="Accelerator 1", capability=(9, 1), total_bytes=1001, free_bytes=501)
    assert here.devices[1] == second
    assert here.driver == "580.1"
    assert nvml.calls == ["init", "shutdown"]


def test_older_bindings_that_answer_in_bytes_are_understood(nvml: NVML) -> None:
    nvml.as_bytes = True
    assert names() == ["Accelerator 0", "Accelerator 1", "Accelerator 2"]
    assert machine.this_machine().driver == "580.1"


def test_without_a_driver_there_is_the_cpu_alone(nvml: NVML) -> None:
    nvml.driver = False
    here = machine.this_machine()
    assert [device.kind for device in here.devices] == ["cpu"]
    assert here.driver is None
    assert nvml.calls == ["init"]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 0 ", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-11", [1]),
        ("GPU-22ab-cd,0", [2, 0]),
        ("GPU-77", []),
        ("0,,1", [0]),
    ],
)
def test_cuda_visible_devices_chooses_and_orders_the_gpus(
    nvml: NVML, monkeypatch: pytest.MonkeyPatch, visible: str, shown: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert names() == [f"Accelerator {index}" for index in shown]


def test_hidden_gpus_are_counted_from_zero(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    first = machine.this_machine().devices[0]
    assert (first.torch_name, first.name) == ("cuda:0", "Accelerator 2")


def test_a_torch_built_for_the_cpu_hides_the_gpus_and_not_the_driver(
    nvml: NVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "2.11.0+cpu")
    here = machine.this_machine()
    assert [device.torch_name for device in here.devices] == ["cpu"]
    assert here.device(None).kind == "cpu"
    assert here.driver == "580.1", "what the doctor tells the person to install torch for"


@pytest.mark.parametrize("torch", ["2.11.0", "2.11.0+cu128", "2.11.0a0+git1234", None])
def test_any_other_torch_leaves_the_gpus_in_sight(
    nvml: NVML, monkeypatch: pytest.MonkeyPatch, torch: str | None
) -> None:
    install(monkeypatch, torch)
    assert len(names()) == 3


def test_a_gpu_that_does_not_tell_its_memory_is_left_out_and_the_others_keep_their_numbers(
    nvml: NVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = nvml.nvmlDeviceGetMemoryInfo

    def silent(handle: int) -> Any:
        if handle == 1:
            raise nvml.NVMLError("Not Supported")
        return told(handle)

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", silent)
    here = machine.this_machine()
    assert [(device.torch_name, device.name) for device in here.devices[:-1]] == [
        ("cuda:0", "Accelerator 0"), ("cuda:2", "Accelerator 2"),
    ]  # fmt: skip
    assert nvml.calls == ["init", "shutdown"]


def test_nvml_is_shut_down_after_an_error_too(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(handle: int) -> str:
        raise RuntimeError("fallen off the bus")

    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lost)
    with pytest.raises(RuntimeError, match="fallen off"):
        machine.this_machine()
    assert nvml.calls == ["init", "shutdown"]


def test_this_machine_has_a_cpu_with_memory_and_survives_json() -> None:
    here = machine.this_machine()
    cpu = here.devices[-1]
    assert cpu.kind == "cpu"
    assert cpu.name == here.name != ""
    assert 0 < cpu.free_bytes < cpu.total_bytes
    assert here.cpu_count >= 1
    assert Machine.from_json(here.to_json()) == here


GIB = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`memory(limit, used)`: a host of 64 GiB, 48 of them free, and what the control group's files hold."""
    host = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    read_text = Path.read_text

    def install(limit: str | None, used: str | None, stat: str = "anon 1\n") -> tuple[int, int]:
        group = Path("/sys/fs/cgroup")
        files = {group / "memory.max": limit, group / "memory.current": used, group / "memory.stat": stat}

        def read(path: Path, *args: Any, **kwargs: Any) -> str:
            if path.parent != Path("/sys/fs/cgroup"):
                return read_text(path, *args, **kwargs)
            text = files.get(path)
            if text is None:
                raise FileNotFoundError(path)
            return text

        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: host)
        monkeypatch.setattr(Path, "read_text", read)
        cpu = machine.this_machine().device("cpu")
        return cpu.total_bytes // GIB, cpu.free_bytes // GIB

    return install


@pytest.mark.parametrize(
    ("limit", "used", "total", "free"),
    [
        (8, 3, 8, 5),
        (60, 3, 60, 48),  # the host has less left than the container may take
        (128, 3, 64, 48),  # a limit beyond the host's memory limits nothing
        (64, 30, 64, 34),
    ],
)
def test_a_container_s_memory_is_its_limit_where_that_is_less_than_the_host_s(
    memory: Any, limit: int, used: int, total: int, free: int
) -> None:
    assert memory(f"{limit * GIB}\n", f"{used * GIB}\n") == (total, free)


@pytest.mark.parametrize(("limit", "used"), [("max\n", "1000\n"), (None, None), (None, "1000\n"), ("1000\n", None)])
def test_without_a_container_s_limit_the_memory_is_the_host_s(memory: Any, limit: str | None, used: str | None) -> None:
    assert memory(limit, used) == (64, 48)


def test_the_packages_that_a_lever_may_need_are_named_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "OPTIONAL", ("pytest", "no-such-package"))
    here = machine.this_machine()
    assert "pytest" in here.packages
    assert "no-such-package" not in here.packages


def test_versions_name_what_is_installed_and_leave_out_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr(machine, "OPTIONAL", ())
    found = machine.versions()
    assert set(found) == {"python", "numpy"}
    assert found["numpy"].count(".") == 2


def test_a_machine_without_cpuinfo_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr("builtins.open", absent)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    assert machine._processor() == "riscv64"


def test_a_container_over_its_limit_has_no_free_memory_left(memory: Any) -> None:
    assert memory(f"{8 * GIB}", f"{9 * GIB}")[1] == 0


def test_the_page_cache_of_a_container_counts_as_free(memory: Any) -> None:
    assert memory(f"{8 * GIB}", f"{7 * GIB}", f"anon 1\ninactive_file {4 * GIB}\nslab 5\n")[1] == 5
