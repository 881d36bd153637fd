"""What can be asked of a tensor without importing torch."""

from __future__ import annotations

from typing import Any


def version_of(tensor: Any) -> int:
    """Grows when the tensor is written into; 0 for none, and in inference mode, where nobody counts."""
    return 0 if tensor is None or tensor.is_inference() else int(tensor._version)
