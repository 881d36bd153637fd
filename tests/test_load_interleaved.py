"""Loads that are cancelled, fail, are overtaken or follow one another, in any order, between clips: nothing is left.

500 random orders of up to four things each, which take about two minutes of one core; `--hypothesis-profile=long` tries
2000 of up to twelve.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from undercrank import load as load_module
from undercrank import testing
from undercrank.engine import OVERTAKEN, Engine
from undercrank.families import family
from undercrank.ledger import Ledger
from undercrank.levers.cfg_parallel import CfgParallel
from undercrank.load import load
from undercrank.machine import this_machine
from undercrank.records import BadInput, Cancelled, LoadSpec, Request, RunFailed
from undercrank.testing import differences, fingerprint_of_process, tiny_folder
from undercrank.trace import Event

NAME = "wan2.1-1.3b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(NAME, tmp_path_factory.mktemp("models") / "wan")


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
    before = fingerprint_of_process()
    with pytest.raises(Cancelled), load(spec, family(NAME), check_cancelled=Stops(at, stop)):
        pytest.fail("loaded")
    gc.collect()
    assert differences(before, fingerprint_of_process()) == []
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

    before = threading.active_count()
    with load_module._no_readers_left():
        pool = core_model_loading.ThreadPoolExecutor(max_workers=1)
        pool.submit(threading.Event().wait, 0.05)
        assert threading.active_count() > before
    assert threading.active_count() == before


# --------------------------------------------------------------------------- any order


class Disk(Exception):
    """What no library foresees."""


def smallest_folder(folder: Path, seed: int) -> Path:
    """The least pipeline that makes a film from a prompt: a load takes 0.1 s."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.WanPipeline(
            tokenizer=testing._tokenizer("t5"),
            text_encoder=transformers.UMT5EncoderModel(
                transformers.UMT5Config(
                    vocab_size=testing._VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
                    feed_forward_proj="gated-gelu", dropout_rate=0.0,
                )
            ),
            vae=diffusers.AutoencoderKLWan(
                z_dim=16, base_dim=2, dim_mult=[1, 1, 1, 1], num_res_blocks=0, temperal_downsample=[False, True, True]
            ),
            scheduler=testing._unipc(3.0),
            transformer=diffusers.WanTransformer3DModel(
                num_attention_heads=1, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=8, freq_dim=4,
                ffn_dim=8, num_layers=1, rope_max_seq_len=64,
            ),
        )  # fmt: skip
    return testing.saved(pipe, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Path]:
    here = tmp_path_factory.mktemp("two")
    return smallest_folder(here / "a", 0), smallest_folder(here / "b", 1)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


QUESTIONS = {"queued": 3, "reading": 4000, "placing": 500, "engaging": 3, "warming": 600}
"About how often a load asks in each state whether it is still wanted."

WHEN = st.sampled_from(list(QUESTIONS)).flatmap(
    lambda state: st.tuples(st.just(state), st.integers(0, QUESTIONS[state]))
)

MACHINE = this_machine()


class At:
    """Does something once: when a load is in this state and asks for the n-th time whether it is still wanted."""

    def __init__(self, engine: Engine, when: tuple[str, int], act: Callable[[], None]) -> None:
        self.engine, (self.state, self.nth), self.act = engine, when, act
        self.now, self.thread, self.came = "", threading.get_ident(), False

    def listen(self, event: Event) -> None:
        if event.loading is not None:
            self.now = event.loading.state
            self.look()  # a state may be over before anybody asks

    def look(self) -> None:
        if self.now == self.state and not self.came and threading.get_ident() == self.thread:
            self.nth -= 1
            if self.nth < 0:
                self.came = True
                self.act()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        real = self.engine.check_cancelled

        def check() -> None:
            self.look()
            real()

        with patch.object(self.engine, "check_cancelled", check):
            yield


def fail() -> None:
    raise Disk("gone")


class Loads(RuleBasedStateMachine):
    """One engine and two models. What is served, and what is owed, is foretold and compared after each rule."""

    folders: tuple[Path, Path]
    films: dict[tuple[int, bool], str]

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        gc.freeze()  # what is there already is not looked at again by each `collect`: a millisecond, not 300
        self.before = fingerprint_of_process()
        self.flags, self.threads = dict(testing._torch_flags()), testing._threads()
        self.patch = patch.object(load_module, "_load_part", self._remembered(load_module._load_part))
        self.patch.start()
        self.both = False
        self.new_engine()

    def new_engine(self) -> None:
        self.engine = Engine(machine=MACHINE, ledger=Ledger(), hold_both=self.both)
        self.serves: int | None = None
        self.owes: int | None = None

    def _remembered(self, real: Any) -> Any:
        def remembered(*arguments):
            part = real(*arguments)
            if isinstance(part, diffusers.WanTransformer3DModel):
                gc.collect()
                former = self.engine.rig
                assert self.alive() == 1 + (1 + len(former.replicas) if former else 0)
                assert former is None or self.both, "never two models, unless asked"
            return part

        return remembered

    def alive(self) -> int:
        """Denoisers in memory, replicas included."""
        return sum(issubclass(type(found), diffusers.WanTransformer3DModel) for found in gc.get_objects())

    def request(self, model: int, twin: bool = False) -> Request:
        return Request(
            prompt="a ball", model=str(self.folders[model]), width=16, height=16, num_frames=1, num_inference_steps=1,
            seed=1, wishes=(("cfg_parallel", "cpu" if twin else "off"),),
        )  # fmt: skip

    def film(self, model: int, twin: bool, **options: Any) -> None:
        frames_hash = self.engine.generate(self.request(model, twin), **options).report.frames_hash
        assert self.films.setdefault((model, twin), frames_hash) == frames_hash, "every film of a model is the same"
        self.serves, self.owes = model, None

    def expect_after(self, model: int, at: At, error: BaseException | None) -> None:
        """What is served after a load of `model` that was to be ended at `at`."""
        if error is None:
            self.serves, self.owes = model, None
        elif not self.both and at.now != "queued" and self.serves != model:
            self.owes, self.serves = self.serves if self.serves is not None else self.owes, None

    # ------------------------------------------------------------------- rules

    @rule(model=st.integers(0, 1), twin=st.booleans())
    def a_clip(self, model: int, twin: bool) -> None:
        self.film(model, twin)

    @rule(model=st.integers(0, 1), twin=st.booleans(), warm=st.booleans())
    def a_load(self, model: int, twin: bool, warm: bool) -> None:
        states: list[str] = []
        self.engine.prepare(
            self.request(model, twin), warm=warm, listener=lambda event: states.append(event.loading.state)
        )
        assert (states[-1:] == ["ready"]) == (self.serves != model)
        self.serves, self.owes = model, None

    @rule(
        model=st.integers(0, 1),
        twin=st.booleans(),
        when=WHEN,
        how=st.sampled_from(["cancel", "fail", "close"]),
        clip=st.booleans(),
    )
    def a_load_that_ends_badly(self, model: int, twin: bool, when: tuple[str, int], how: str, clip: bool) -> None:
        engine, request = self.engine, self.request(model, twin)
        closing: list[threading.Thread] = []

        def close() -> None:
            closing.append(threading.Thread(target=engine.close))
            closing[0].start()
            while engine._cancel_reason is None:
                closing[0].join(0.001)

        at = At(engine, when, {"cancel": lambda: engine.cancel("enough"), "fail": fail, "close": close}[how])
        states: list[str] = []

        def listener(event: Event) -> None:
            if event.loading is not None:
                states.append(event.loading.state)
            at.listen(event)

        error: BaseException | None = None
        with at.armed():
            try:
                if clip:
                    engine.generate(request, listener=listener)
                else:
                    engine.prepare(request, listener=listener)
            except (Cancelled, Disk, BadInput, RunFailed) as raised:
                error = raised
        if states:
            expected = "ready" if "ready" in states else "failed" if how == "fail" else "cancelled"
            assert states[-1] == expected
        for thread in closing:
            thread.join()
            assert engine.model is None and engine.rig is None
            self.new_engine()
            return
        loads = bool(states)
        at.now = next((s for s in reversed(states) if s not in ("failed", "cancelled")), "")
        if at.now == "ready":
            self.serves, self.owes = model, None
        elif loads:
            self.expect_after(model, at, error)

    @rule(
        model=st.integers(0, 1),
        when=WHEN,
        newer=st.integers(0, 1),
        clip=st.booleans(),
        fails=st.booleans(),
    )
    def a_load_that_is_overtaken(self, model: int, when: tuple[str, int], newer: int, clip: bool, fails: bool) -> None:
        engine, errors = self.engine, []

        def overtake() -> None:
            try:
                if clip:
                    engine.generate(self.request(newer))
                elif fails:
                    engine.prepare(self.request(newer), listener=lambda event: fail() if event.done else None)
                else:
                    engine.prepare(self.request(newer), warm=False)
            except (Disk, BadInput) as error:
                errors.append(error)

        thread = threading.Thread(target=overtake)

        def start() -> None:
            thread.start()
            while len(engine._turns) < 2 and thread.is_alive():
                thread.join(0.001)

        at = At(engine, when, start)
        states: list[str] = []

        def listener(event: Event) -> None:
            states.append(event.loading.state)
            at.listen(event)

        reason = None
        with at.armed():
            try:
                engine.prepare(self.request(model), listener=listener)
            except Cancelled as cancelled:
                reason = str(cancelled)
        if thread.ident is None:  # the load was over before
            if states:
                self.serves, self.owes = model, None
            return
        thread.join()
        assert reason == OVERTAKEN and states[-1] == "cancelled"
        at.now = states[-2]
        self.expect_after(model, at, Cancelled(""))
        if not errors:
            self.serves, self.owes = newer, None
        elif not self.both and self.serves != newer:
            self.owes, self.serves = self.serves if self.serves is not None else self.owes, None

    @rule(model=st.integers(0, 1), twin=st.booleans(), at=st.integers(0, 2), cancels=st.booleans())
    def a_clip_that_ends_in_a_forward(self, model: int, twin: bool, at: int, cancels: bool) -> None:
        count, real, engine = itertools.count(), diffusers.WanTransformer3DModel.forward, self.engine

        def forward(module, *args, **kwargs):
            if next(count) == at:
                if not cancels:
                    raise Disk("gone")
                engine.cancel("enough")
            return real(module, *args, **kwargs)

        with patch.object(diffusers.WanTransformer3DModel, "forward", forward):
            with contextlib.suppress(Disk, Cancelled):
                self.film(model, twin)
        self.serves, self.owes = model, None

    @rule(model=st.integers(0, 1))
    def a_lever_that_cannot_be_engaged(self, model: int) -> None:
        def engage(*_: Any) -> None:
            raise Disk("no replica")

        had = self.serves
        if had == model and self.engine.rig and self.engine.rig.replicas:
            return  # it is engaged already
        with patch.object(CfgParallel, "engage", engage), contextlib.suppress(Disk):
            self.engine.generate(self.request(model, twin=True))
            raise AssertionError("engaged")
        if had != model:
            at = At(self.engine, ("engaging", 0), fail)
            at.now = "engaging"
            self.expect_after(model, at, Disk())

    @rule()
    def what_is_owed_comes_back(self) -> None:
        assert self.engine.restore() == (self.owes is not None)
        if self.owes is not None:
            self.serves, self.owes = self.owes, None
            self.film(self.serves, False)

    @rule(both=st.booleans())
    def an_unload(self, both: bool) -> None:
        self.engine.close()
        gc.collect()
        assert self.alive() == 0
        assert differences(self.before, fingerprint_of_process()) == []
        self.both = both
        self.new_engine()

    @invariant()
    def it_serves_what_it_should(self) -> None:
        name = None if self.serves is None else str(self.folders[self.serves])
        owed = None if self.owes is None else str(self.folders[self.owes])
        engine = self.engine
        assert engine.model == name and (engine.rig is not None) == (name is not None)
        assert (engine._owed.request.model if engine._owed else None) == owed
        assert engine._turns == [] and not engine._busy.locked() and engine._at_work is None

    @invariant()
    def nothing_is_left(self) -> None:
        threads = [name for name in map(str, testing._threads()) if "undercrank-replica" not in name]
        assert len(threads) == len(self.threads) and dict(testing._torch_flags()) == self.flags
        assert not load_module._LOADING.locked()
        gc.collect()
        rig = self.engine.rig
        assert self.alive() == (1 + len(rig.replicas) if rig else 0)

    def teardown(self) -> None:
        self.patch.stop()
        self.engine.close()
        gc.collect()
        assert self.alive() == 0
        assert differences(self.before, fingerprint_of_process()) == []


def test_any_order_of_loads_clips_cancels_and_failures_leaves_nothing(two, unfrozen) -> None:
    Loads.folders, Loads.films = two, {}
    is_long = settings.get_current_profile_name() == "long"
    run_state_machine_as_test(
        Loads,
        settings=settings(
            max_examples=2000 if is_long else 500,
            stateful_step_count=12 if is_long else 4,
            deadline=None,
            derandomize=not is_long,
            database=None,
        ),
    )
