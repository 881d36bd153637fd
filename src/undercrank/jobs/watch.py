"""Time without comparing clocks: wall time that does not jump, and who has gone silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Clock:
    """Seconds since 1970 that do not jump while this process lives, whatever is done to the system's clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s


@dataclass(frozen=True, kw_only=True)
class _Seen:
    beat: object
    silent_s: float
    moved: bool


class Watch:
    """Who has gone silent, by counters that should move: call `look` often, at least four times within `patience_s`.

    A pause of the onlooker itself (a locked database, a suspended machine) counts for a quarter of the patience at
    most: those who could not speak meanwhile are not taken for dead.
    """

    def __init__(self, patience_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self._seen: dict[str, _Seen] = {}

    def look(self, beats: Mapping[str, object]) -> None:
        """Note the counters of all who should be alive; who is no longer among them is forgotten."""
        now = self._monotonic()
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self.patience_s / 4)
        self._looked_at = now
        self._seen = {key: self._next(key, beat, passed_s) for key, beat in beats.items()}

    def _next(self, key: str, beat: object, passed_s: float) -> _Seen:
        seen = self._seen.get(key)
        if seen is None:
            return _Seen(beat=beat, silent_s=0.0, moved=False)
        if seen.beat != beat:
            return _Seen(beat=beat, silent_s=0.0, moved=True)
        return _Seen(beat=beat, silent_s=seen.silent_s + passed_s, moved=seen.moved)

    @property
    def silent(self) -> frozenset[str]:
        """Those whose counter has stood still for the whole patience."""
        return frozenset(key for key, seen in self._seen.items() if seen.silent_s >= self.patience_s)

    @property
    def alive(self) -> frozenset[str]:
        """Those whose counter was seen to move, and not too long ago."""
        return frozenset(key for key, seen in self._seen.items() if seen.moved) - self.silent
