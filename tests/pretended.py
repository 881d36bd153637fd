"""An engine that plans in earnest and goes through the stages of a run, but whose pictures come from the seed alone.

For tests in which the worker matters and the film does not. Run as a program it is a worker process:
`python -m tests.pretended URL DATA [STEP_S]`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from undercrank import video
from undercrank.engine import Clip
from undercrank.ledger import Ledger
from undercrank.machine import this_machine
from undercrank.planner import make_plan
from undercrank.records import Cancelled, Report, Request, Trace
from undercrank.sources import which_model
from undercrank.trace import Event, Listener, ignore


class PretendedEngine:
    step_s: ClassVar[float] = 0.0
    during: ClassVar[Callable[[PretendedEngine, Event, Request], None]] = staticmethod(lambda *_: None)
    "Called before each event is told."
    alive: ClassVar[list[PretendedEngine]] = []
    born: ClassVar[list[PretendedEngine]] = []
    made: ClassVar[list[str]] = []
    "Prompts, in the order in which their films were begun."

    def __init__(self, **options: Any) -> None:
        self.rig: Any = None
        self.model: str | None = None
        self.owes: str | None = None
        self._reason: str | None = None
        type(self).alive.append(self)
        type(self).born.append(self)

    def cancel(self, reason: str = "cancelled") -> bool:
        self._reason = reason
        return False

    def close(self) -> None:
        self.rig = self.model = None
        type(self).alive.remove(self)

    def prepare(self, request: Request, *, listener: Listener = ignore) -> None:
        with self._going_on(request, listener) as tell:
            self._load(request.model, tell)

    def restore(self, *, listener: Listener = ignore) -> bool:
        if self.owes is None:
            return False
        with self._going_on(Request(prompt="", model=self.owes), listener) as tell:
            self._load(self.owes, tell)
        return True

    def generate(self, request: Request, *, listener: Listener = ignore, on_latents: Any = None) -> Clip:
        type(self).made.append(request.prompt)
        family, load = which_model(request)
        machine = _machine()
        plan = make_plan(request, family=family, machine=machine, ledger=Ledger(), load=load)
        steps = plan.request.num_inference_steps or 1
        with self._going_on(request, listener) as tell:
            self._load(request.model, tell)
            tell("text", 0, 1)
            tell("denoise", 0, steps)
            for step in range(1, steps + 1):
                time.sleep(self.step_s)
                tell("denoise", step, steps)
            tell("decode", 0, 1)
        frames_FHWC = _frames(plan.request)
        report = Report(
            undercrank="0", request=plan.request, machine=machine, model_fingerprint="ff", plan=plan, receipts=(),
            trace=Trace(stage_s={"load": 0.0, "denoise": 0.1}, step_ms=(1.0,) * steps, stalls=None),
            frames_hash=video.frames_hash(frames_FHWC),
        )  # fmt: skip
        assert plan.request.fps is not None
        return Clip(frames_FHWC=frames_FHWC, fps=plan.request.fps, report=report)

    def _load(self, model: str, tell: Callable[[str, int, int], None]) -> None:
        if self.model != model:
            self.owes, self.model, self.rig = self.model or self.owes, None, None
            tell("load", 0, 100)
            tell("load", 100, 100)
            self.rig, self.model, self.owes = SimpleNamespace(), model, None

    @contextmanager
    def _going_on(self, request: Request, listener: Listener) -> Iterator[Callable[[str, int, int], None]]:
        self._reason = None

        def tell(stage: str, done: int, total: int) -> None:
            event = Event(stage=stage, done=done, total=total)
            self.during(self, event, request)
            listener(event)
            if self._reason:
                raise Cancelled(self._reason)

        yield tell


_machine = functools.cache(this_machine)


def _frames(request: Request) -> np.ndarray:
    shape = (request.num_frames or 1, request.height or 16, request.width or 16, 3)
    return np.random.default_rng(request.seed).integers(0, 256, shape, np.uint8)


def small(prompt: str = "a red ball", **settings: Any) -> Request:
    return Request(prompt=prompt, **({"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 4} | settings))


if __name__ == "__main__":
    from undercrank.jobs import Store
    from undercrank.worker import Habits, Worker

    url, data = sys.argv[1:3]
    PretendedEngine.step_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    with Store.open(url) as store, Worker(store, Path(data), habits=Habits(), new_engine=PretendedEngine) as worker:
        print(worker.id, flush=True)
        worker.run()
