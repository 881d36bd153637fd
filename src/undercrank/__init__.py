"""undercrank: any diffusers video pipeline as fast as the hardware allows, and the truth about what it cost.

    with undercrank.accelerate(pipe): pipe(...)
    undercrank.generate("a red ball rolls left").save("ball.mp4")

The names below are imported when they are first used: `import undercrank` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from undercrank.engine import Clip, Engine, accelerate, generate
    from undercrank.records import Fidelity, Plan, Promise, Report, Request

_HOMES = {
    "accelerate": "engine",
    "generate": "engine",
    "Engine": "engine",
    "Clip": "engine",
    "Request": "records",
    "Plan": "records",
    "Report": "records",
    "Fidelity": "records",
    "Promise": "records",
}

__all__ = [
    "Clip",
    "Engine",
    "Fidelity",
    "Plan",
    "Promise",
    "Report",
    "Request",
    "__version__",
    "accelerate",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"undercrank has no {name}")
    return getattr(import_module(f"undercrank.{_HOMES[name]}"), name)
