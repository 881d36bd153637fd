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
    offline: bool
    "UNDERCRANK_OFFLINE or HF_HUB_OFFLINE: never ask the network for a model."
    visible_cuda: str | None
    "CUDA_VISIBLE_DEVICES, as CUDA itself reads it."
    hub_cache: Path
    "HF_HUB_CACHE or HF_HOME/hub: where downloaded models lie."


def settings() -> Settings:
    """Read anew at each call: a process that changes its environment is answered truly."""
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Settings(
        ledger=Path(os.environ.get("UNDERCRANK_LEDGER") or home / "undercrank" / "ledger.jsonl"),
        offline=_truthy("UNDERCRANK_OFFLINE") or _truthy("HF_HUB_OFFLINE"),
        visible_cuda=os.environ.get("CUDA_VISIBLE_DEVICES"),
        hub_cache=Path(os.environ.get("HF_HUB_CACHE") or hub / "hub"),
    )


def _truthy(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}
