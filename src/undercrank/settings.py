"""The one place that reads the environment: `UNDERCRANK_*`, and the variables of others that decide what we see.

Standard library only: the command line must answer in tenths of a second (pydantic-settings alone costs 0.15 s).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    ledger: Path
    "UNDERCRANK_LEDGER: where rows measured on this machine are kept (JSON lines)."
    db: str | None
    "UNDERCRANK_DB: URL of the job store."
    data: Path
    "UNDERCRANK_DATA: where the studio keeps its jobs, clips and pictures."
    calibrations: Path
    "UNDERCRANK_CALIBRATIONS: where curves of checkpoints are kept, for step_cache (JSON lines); beside the ledger."
    offline: bool
    "UNDERCRANK_OFFLINE, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: never ask the network for a model."
    visible_cuda: str | None
    "CUDA_VISIBLE_DEVICES, as CUDA itself reads it."
    omp_wait_policy: str | None
    "OMP_WAIT_POLICY: whether waiting CPU threads spin or sleep, if the person has decided it."
    hub_cache: Path
    "HF_HUB_CACHE or HF_HOME/hub: where downloaded models lie."
    lpips_backbone: Path | None
    "UNDERCRANK_LPIPS_BACKBONE: torchvision's AlexNet weights, for LPIPS proper."


def settings() -> Settings:
    """Read anew at each call: a process that changes its environment is answered truly."""
    home = _path("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    cache = _path("XDG_CACHE_HOME") or Path.home() / ".cache"
    hub = _path("HF_HOME") or cache / "huggingface"
    ledger = _path("UNDERCRANK_LEDGER") or home / "undercrank" / "ledger.jsonl"
    return Settings(
        ledger=ledger,
        calibrations=_path("UNDERCRANK_CALIBRATIONS") or ledger.with_name("calibrations.jsonl"),
        db=os.environ.get("UNDERCRANK_DB") or None,
        data=_path("UNDERCRANK_DATA") or home / "undercrank" / "studio",
        offline=any(_truthy(name) for name in ("UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        visible_cuda=os.environ.get("CUDA_VISIBLE_DEVICES"),
        hub_cache=_path("HF_HUB_CACHE") or _path("HUGGINGFACE_HUB_CACHE") or hub / "hub",
        lpips_backbone=_path("UNDERCRANK_LPIPS_BACKBONE"),
    )


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(os.path.expanduser(value)) if value else None


def _truthy(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}
