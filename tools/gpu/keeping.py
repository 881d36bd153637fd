"""One failed row must not cost the others: its error is the row."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


def kept(work: Callable[[], Any]) -> Any:
    """What it found, or how it failed."""
    try:
        return work()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc().splitlines()[-12:]}
