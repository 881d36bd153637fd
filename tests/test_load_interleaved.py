"""Loads that are cancelled, fail or follow one another, in any order, between clips: nothing of them is left.

`--hypothesis-profile=long` runs 500 random orders.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from undercrank import load as load_module
from undercrank.engine import Engine
from undercrank.families import family
from undercrank.load import load
from undercrank.records import BadInput, Cancelled, LoadSpec, Request
from undercrank.testing import _torch_flags, tiny_folder

NAME = "wan2.1-1.3b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(NAME, tmp_path_factory.mktemp("models") / "wan")


def flags() -> dict[str, Any]:
    return dict(_torch_flags())


def threads() -> set[str]:
    """tqdm starts its monitor with the first bar."""
    return {thread.name for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}


class Stops:
    """Does something at the n-th time that a load asks whether it is still wanted."""

    def __init__(self, at: int, act: Any) -> None:
        self.left, self.act = at, act

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.act()


def stop() -> None:
    raise Cancelled("not wanted any more")


@pytest.mark.parametrize("at", [0, 1, 60, 138, 700, 2500, 4000, 6000, 8000])
def test_a_load_stops_between_any_two_tensors_and_leaves_nothing(folder, monkeypatch, at: int) -> None:
    parts, real = [], load_module._load_part

    def remembered(*arguments):
        parts.append(weakref.ref(part := real(*arguments)))
        return part

    monkeypatch.setattr(load_module, "_load_part", remembered)
    spec = LoadSpec(family=NAME, source=str(folder), dtype="float32", device="cpu")
    before = flags(), threads()
    with pytest.raises(Cancelled), load(spec, family(NAME), check_cancelled=Stops(at, stop)):
        pytest.fail("loaded")
    gc.collect()
    assert (flags(), threads()) == before
    assert not any(part() is not None for part in parts)
    assert not load_module._LOADING.locked()


def test_a_load_that_waits_for_its_turn_can_be_cancelled(folder) -> None:
    spec = LoadSpec(family=NAME, source=str(folder), dtype="float32", device="cpu")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            with load(spec, family(NAME), check_cancelled=stop):
                pass
        except Cancelled as cancelled:
            ended.append(cancelled)

    with load_module._LOADING:
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(60)
        assert ended, "while the other load still holds its turn"


def test_an_error_that_a_library_made_of_a_cancel_is_a_cancel_again() -> None:
    with pytest.raises(Cancelled), load_module._read_errors(Path("/models/x"), stop):
        raise OSError("unable to load weights")


def test_threads_that_a_library_reads_with_are_waited_for_even_where_it_forgets_them() -> None:
    from transformers import core_model_loading

    before = threads()
    with load_module._no_readers_left():
        pool = core_model_loading.ThreadPoolExecutor(max_workers=1)
        pool.submit(threading.Event().wait, 0.05)
        assert threads() > before
    assert threads() == before


class Disk(Exception):
    """What no library foresees."""


class Engines(RuleBasedStateMachine):
    """One engine at a time; each rule is a clip, a load that ends badly, or the end of the engine."""

    folder: Path
    reference: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[weakref.ref[Any]] = []
        self.before = flags(), threads()
        self.patch = patch.object(load_module, "_load_part", self._remembered(load_module._load_part))
        self.patch.start()
        self.engine = Engine()

    def _remembered(self, real: Any) -> Any:
        def remembered(*arguments):
            part = real(*arguments)
            if type(part).__name__ == "WanTransformer3DModel":
                gc.collect()
                assert not any(other() is not None for other in self.loaded), "never two models"
                self.loaded.append(weakref.ref(part))
            return part

        return remembered

    def make(self, twin: bool) -> None:
        request = Request(
            prompt="a ball", model=str(self.folder), width=64, height=64, num_frames=5, num_inference_steps=2, seed=1,
            wishes=(("cfg_parallel", "cpu" if twin else "off"),),
        )  # fmt: skip
        frames_hash = self.engine.generate(request).report.frames_hash
        type(self).reference = self.reference or frames_hash
        assert frames_hash == self.reference, "every clip is the same one"

    @rule(twin=st.booleans())
    def a_clip(self, twin: bool) -> None:
        self.make(twin)

    @rule(twin=st.booleans(), at=st.integers(0, 9000))
    def a_clip_that_is_cancelled_while_it_loads(self, twin: bool, at: int) -> None:
        engine = self.engine
        real = engine.check_cancelled

        def check() -> None:
            stops()
            real()

        stops = Stops(at, lambda: engine.cancel("enough"))
        with patch.object(engine, "check_cancelled", check):
            with contextlib.suppress(Cancelled):
                self.make(twin)

    @rule(twin=st.booleans(), at=st.integers(0, 9000))
    def a_clip_whose_load_fails(self, twin: bool, at: int) -> None:
        def fail() -> None:
            raise Disk("gone")

        with patch.object(self.engine, "check_cancelled", Stops(at, fail)):
            with contextlib.suppress(Disk, BadInput):
                self.make(twin)

    @rule(twin=st.booleans(), at=st.integers(0, 5), cancels=st.booleans())
    def a_clip_that_ends_in_a_forward(self, twin: bool, at: int, cancels: bool) -> None:
        from diffusers import WanTransformer3DModel

        count, real, engine = itertools.count(), WanTransformer3DModel.forward, self.engine

        def forward(module, *args, **kwargs):
            if next(count) == at:
                if not cancels:
                    raise Disk("gone")
                engine.cancel("enough")
            return real(module, *args, **kwargs)

        with patch.object(WanTransformer3DModel, "forward", forward):
            with contextlib.suppress(Disk, Cancelled):
                self.make(twin)

    @rule()
    def another_engine(self) -> None:
        self.engine.close()
        gc.collect()
        assert not any(other() is not None for other in self.loaded)
        assert threads() == self.before[1]
        self.engine = Engine()

    @invariant()
    def nothing_is_left(self) -> None:
        assert flags() == self.before[0]
        replicas = {name for name in threads() if name.startswith("undercrank-replica")}
        assert threads() - replicas == self.before[1], "no thread but that of a replica"
        assert not load_module._LOADING.locked()

    def teardown(self) -> None:
        self.patch.stop()
        self.engine.close()
        gc.collect()
        assert not any(other() is not None for other in self.loaded)
        assert (flags(), threads()) == self.before


def test_any_order_of_clips_cancels_and_failures_leaves_nothing(folder) -> None:
    Engines.folder, Engines.reference = folder, None
    torch.manual_seed(0)
    orders = 500 if settings.get_current_profile_name() == "long" else 6
    run_state_machine_as_test(
        Engines, settings=settings(max_examples=orders, stateful_step_count=6, deadline=None, derandomize=orders < 500)
    )
