"""tools/gpu/rows.py: what the scripts on a GPU wrote becomes rows that the ledger reads."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from undercrank import families
from undercrank.ledger import Ledger, read_ledger
from undercrank.planner import make_plan
from undercrank.records import Device, Machine, Measurement, Request

TOOL = Path(__file__).parents[1] / "tools" / "gpu" / "rows.py"


def tool() -> Any:
    import sys

    spec = spec_from_file_location("gpu_rows", TOOL)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules["gpu_rows"] = module
    spec.loader.exec_module(module)
    return module


def side(ms: float, **more: Any) -> dict[str, Any]:
    return {"ms": [ms, ms + 1], "median_ms": ms, "gain": [1.2, 1.1], "weights_gb": 9.0, "peak_gb": 20.0} | more


def test_each_companion_becomes_a_row_and_dense_sides_and_failures_none(own_ledger: Path) -> None:
    compiled = {"one_forward": 0.03, "compile_s": 20.0, "graphs": 1, "layers": 6, "finite": True}
    story = {
        "machine": {"name": "m", "packages": {"torch": "2.11.0"}, "driver": "580", "devices": [{"name": "an H200"}]},
        "torch": "2.11.0",
        "products": {"rows": {}, "products": {}, "took_s": 1.0},
        "wan 14b: transformer=fp8": {
            "faithful": side(2800.0, **compiled | {"one_forward": 0.0}),
            "transformer=fp8": side(2400.0, **compiled),
            "transformer=int8": {"failed": "RuntimeError"},
            "took_s": 60.0,
        },
        "wan 14b: vae=fp8": {"faithful": side(1800.0), "vae=fp8": side(1850.0, relative_error=0.02)},
        "wan 14b: together": {"faithful": side(7000.0), "transformer=fp8 vae=fp8": side(6000.0)},
        "wan 14b: layouts": {"faithful": side(2800.0, **compiled), "tokens by rows": side(2700.0, **compiled)},
        "wan 14b: floor of one forward": {"faithful": 0.02, "transformer=fp8": 0.04, "took_s": 30.0},
        "compile": {"failed": "OutOfMemoryError"},
    }
    rows = tool().companion_rows(story)
    assert [row.setting for row in rows] == ["transformer=fp8", "vae=fp8", "transformer=fp8 vae=fp8"]
    denoiser, vae, both = rows
    assert (denoiser.step_ms, denoiser.gain, denoiser.total_s) == (2400.0, 1.15, None)
    assert denoiser.distances == {"one_forward": 0.03} and denoiser.floor == {"one_forward": 0.02}
    assert "compiled in 20.0 s, dense 20.0 s" in denoiser.note and denoiser.peak_bytes == 20_000_000_000
    assert vae.step_ms is None and vae.gain is None and "a decoding: 1800.0 ms dense, 1850.0 ms" in vae.note
    assert both.total_s == 6.0 and both.gain == 1.15
    own_ledger.write_text("".join(row.to_json() + "\n" for row in rows))
    assert read_ledger().rows[-len(rows) :] == tuple(rows)


def test_a_run_by_groups_becomes_a_row_that_speaks_of_memory_and_of_no_gain(own_ledger: Path) -> None:
    resident = {"step_s": 2.0, "decode_s": 1.0, "denoise_gib": 30.0, "decode_gib": 31.0}
    moved = {"step_s": 2.2, "decode_s": 1.1, "denoise_gib": 5.0, "decode_gib": 12.5, "over_resident": {"step_s": 1.1}}
    story = {
        "machine": {"name": "m", "packages": {"torch": "2.11.0"}, "driver": "580", "devices": [{"name": "an H200"}]},
        "torch": "2.11.0",
        "stages: wan2.1-14b": {"stock": {}},
        "capped: wan2.1-14b": {"resident": resident, "group, 22 GiB": moved, "took_s": 1.0},
        "capped: hunyuanvideo-1.5-720p": {"resident": resident, "group, 22 GiB": {"failed": "OutOfMemoryError"}},
    }
    (row,) = tool().capped_rows(story)
    assert (row.family, row.lever, row.setting, row.step_ms, row.gain) == (
        "wan2.1-14b",
        "offload",
        "group",
        2200.0,
        None,
    )
    assert row.peak_bytes == 12.5 * 2**30 and "1.100 of it" in row.note
    own_ledger.write_text(row.to_json() + "\n")
    assert read_ledger().rows[-1] == row


def test_two_devices_make_rows_that_auto_follows_where_the_latents_are_equal_and_one_device_makes_none() -> None:
    """Compiled code beside it, which drifted, does not speak against the eager row."""
    drifted = {"equal": False, "max_ulps": 3, "max_abs": 0.5, "relative": 0.007}
    both = {
        "steps": 2, "step_ms": {"B": [10.0, 12.0]}, "peak_gib": {"B": {"cuda:0": 34.0, "cuda:1": 18.0}},
        "pair_ratios": [1.9, 1.8], "drift": {"equal": True}, "at_once": 2, "stalls": {"B": [0, 0]},
        "replica_gib": 26.7, "replica_fill_s": 0.9,
    }  # fmt: skip
    story = {
        "machine": {"name": "m", "packages": {"torch": "2.11.0"}, "devices": [{"name": "NVIDIA H200"}]},
        "rows": {
            "wan2.1-14b, eager": both,
            "wan2.1-14b, compiled": both | {"drift": drifted},
            "wan2.1-1.3b, eager": both | {"peak_gib": {"B": {"cuda:0": 34.0}}},
            "cogvideox-2b, eager": {"failed": "OutOfMemoryError"},
        },
    }
    eager, compiled = rows = tool().branch_rows(story)
    assert (eager.family, eager.setting, eager.gain, eager.step_ms) == ("wan2.1-14b", "", 1.85, 11.0)
    assert eager.distances == {"max_abs": 0.0} and eager.peak_bytes == 34 * 2**30
    assert compiled.setting == "over compiled" and compiled.distances == {"max_abs": 0.5, "relative": 0.007}

    gpus = tuple(
        Device(kind="cuda", index=index, name="NVIDIA H200", capability=(9, 0), free_bytes=140 * 2**30)
        for index in (0, 1)
    )
    machine, asked = Machine(name="a machine", devices=gpus, cpu_count=8), Request(prompt="a fox", model="wan2.1-14b")

    def is_on(*rows: Measurement) -> bool:
        made = make_plan(asked, family=families.family(asked.model), machine=machine, ledger=Ledger(rows))
        return "cfg_parallel" in {lever.name for lever in made.levers}

    assert is_on(*rows) and is_on(eager)
    assert not is_on(compiled) and not is_on(replace(eager, distances={"max_abs": 1e-6}))
