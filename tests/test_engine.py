"""The engine: load, move between plans, make a clip, cancel, fail, close - each leaving nothing behind."""

import dataclasses
import gc
import json
import re
import shutil
import threading
import weakref
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import undercrank
from undercrank import engine as engine_module
from undercrank import families, images, planner
from undercrank.engine import Engine
from undercrank.levers import ORDER
from undercrank.records import (
    BadInput,
    Cancelled,
    Lever,
    LeverRefused,
    Needs,
    NotFound,
    OutOfMemory,
    Promise,
    Report,
    Request,
    RunFailed,
    Status,
)
from undercrank.testing import tiny_folder
from undercrank.undo import swap_attr
from undercrank.video import frames_hash, read_frames, read_recipe

ASKED = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder("wan2.1-1.3b", tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture
def request_(folder) -> Request:
    return Request(prompt="a red ball", model=str(folder), seed=7, **ASKED)


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


def test_a_clip_has_the_asked_shape_and_its_whole_story(engine, request_):
    clip = engine.generate(request_)
    assert clip.frames_FHWC.shape == (5, 32, 32, 3) and clip.frames_FHWC.dtype == np.uint8
    report = clip.report
    assert report.frames_hash == frames_hash(clip.frames_FHWC) and len(report.model_fingerprint) == 64
    assert report.trace.calls == {"cond": 3, "uncond": 3} and len(report.trace.step_ms) == 3
    assert [d.lever for d in report.plan.decisions] == [lever.name for lever in ORDER]
    assert report.request.seed == 7 and report.request.guidance_scale == 5.0
    assert Report.from_json(report.to_json(), levers=ORDER) == report


def test_a_film_that_is_black_or_stands_still_is_told_of(engine, request_, monkeypatch):
    assert not any("look at the film" in note for note in engine.generate(request_).report.notes)
    monkeypatch.setattr(engine_module.frames, "from_device", lambda film: np.zeros((5, 32, 32, 3), np.uint8))
    notes = engine.generate(request_).report.notes
    assert "look at the film: black: frames 1-5" in notes
    assert "look at the film: frozen (equal to the one before): frames 2-5" in notes


def test_the_same_seed_makes_the_same_film_and_another_seed_another(engine, request_):
    first, again = engine.generate(request_), engine.generate(request_)
    other = engine.generate(dataclasses.replace(request_, seed=8))
    assert first.report.frames_hash == again.report.frames_hash != other.report.frames_hash


def test_a_fresh_engine_makes_the_same_film(request_):
    hashes = set()
    for _ in range(2):
        with Engine() as engine:
            hashes.add(engine.generate(request_).report.frames_hash)
    assert len(hashes) == 1


@pytest.mark.parametrize("family", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p"])
@pytest.mark.parametrize("host_sync", ["off", "on"])
def test_a_shift_of_the_schedule_is_the_stock_schedulers_and_is_put_back(engine, tmp_path, family, host_sync):
    """UniPC has it in its configuration, flow-matching Euler beside it."""
    folder = tiny_folder(family, tmp_path / "model")
    asked = Request(prompt="a red ball", model=str(folder), seed=7, wishes=(("host_sync", host_sync),), **ASKED)
    plain = engine.generate(asked)
    shifted = engine.generate(dataclasses.replace(asked, flow_shift=11.0))
    config = folder / "scheduler" / "scheduler_config.json"
    name = "flow_shift" if "UniPC" in config.read_text() else "shift"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: 11.0}))
    with Engine() as another:
        stock = another.generate(asked)
    assert shifted.report.frames_hash == stock.report.frames_hash != plain.report.frames_hash
    assert engine.generate(asked).report.frames_hash == plain.report.frames_hash


def test_the_second_expert_has_a_guidance_of_its_own(engine, tmp_path):
    folder = tiny_folder("wan2.2-a14b", tmp_path / families.family("wan2.2-a14b").repo.rpartition("/")[2])
    asked = Request(prompt="a red ball", model=str(folder), seed=7, **ASKED | {"num_inference_steps": 6})
    films = {
        engine.generate(dataclasses.replace(asked, guidance_scale_2=scale)).report.frames_hash
        for scale in (None, asked.guidance_scale or 4.0, 9.0)
    }
    assert len(films) == 2  # left out, it is the first one's


def test_the_film_is_the_stock_pipelines_film(engine, request_, folder):
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        prompt="a red ball", negative_prompt=engine.plan(request_).request.negative_prompt, output_type="np",
        generator=torch.Generator("cpu").manual_seed(7), guidance_scale=5.0, max_sequence_length=512, **ASKED,
    ).frames[0]  # fmt: skip
    exact = engine.generate(dataclasses.replace(request_, fidelity="exact", wishes=(("host_sync", "on"),)))
    assert np.array_equal(exact.frames_FHWC, np.rint(frames * 255).astype(np.uint8))


def test_a_request_never_depends_on_the_one_before(engine, request_):
    alone = engine.generate(request_).report.frames_hash
    engine.generate(dataclasses.replace(request_, width=64, num_inference_steps=5, guidance_scale=1.0, prompt="x"))
    assert engine.generate(request_).report.frames_hash == alone


def test_guidance_reaches_the_pipeline(engine, request_):
    one = engine.generate(dataclasses.replace(request_, guidance_scale=1.0))
    assert one.report.trace.calls == {"cond": 3}


def test_a_missing_seed_is_drawn_and_recorded(engine, request_):
    seeds = {engine.generate(dataclasses.replace(request_, seed=None)).report.request.seed for _ in range(2)}
    assert len(seeds) == 2 and None not in seeds


def test_negative_prompt_left_out_and_empty_are_the_same_where_the_model_has_no_own(engine, folder):
    base = Request(prompt="a ball", model="flipbook", seed=1, width=64, height=64, num_frames=5, num_inference_steps=2)
    left_out = engine.generate(base)
    empty = engine.generate(dataclasses.replace(base, negative_prompt=""))
    other = engine.generate(dataclasses.replace(base, negative_prompt="a blue square"))
    assert left_out.report.frames_hash == empty.report.frames_hash != other.report.frames_hash


def test_a_cut_prompt_is_said_with_how_much_was_kept(engine):
    asked = Request(
        prompt="a red ball " * 5000, seed=1, width=64, height=64, num_frames=5, num_inference_steps=1, model="flipbook"
    )
    notes = engine.generate(asked).report.notes
    assert any("tokens, the model reads 64" in note and "dropped" in note for note in notes), notes


# --------------------------------------------------------------------------- moving between plans


@contextmanager
def _told(log, name):
    log.append(f"+{name}")
    try:
        yield
    finally:
        log.append(f"-{name}")


@pytest.fixture
def spies(monkeypatch):
    """Three levers that only tell when they are entered and left. Each fails to engage when told to by its letter, and
    refuses to by its capital, which is told too."""
    log: list[str] = []
    failing: set[str] = set()

    def spy(letter: str) -> type[Lever]:
        def engage(self, rig):
            if letter in failing:
                raise OSError("cannot engage")
            if letter.upper() in failing:
                log.append(letter.upper())
                raise LeverRefused(f"{letter}: not on this model")
            return _told(log, letter)

        return dataclasses.dataclass(frozen=True, kw_only=True)(
            type(letter, (Lever,), {"name": letter, "summary": letter, "engage": engage, "__annotations__": {}})
        )

    levers = tuple(spy(letter) for letter in "abc")
    for module in ("undercrank.planner.ORDER", "undercrank.levers.ORDER"):
        monkeypatch.setattr(module, levers)
    return log, failing


def wishing(request: Request, **wishes: str) -> Request:
    return dataclasses.replace(request, wishes=tuple(wishes.items()))


def test_only_what_differs_is_left_and_entered(engine, request_, spies):
    log, _ = spies
    engine.generate(request_)
    assert log == ["+a", "+b", "+c"]
    log.clear()
    engine.generate(wishing(request_, c="off"))
    engine.generate(wishing(request_, b="off", c="off"))
    assert log == ["-c", "-b"]
    log.clear()
    engine.generate(wishing(request_, a="off"))
    assert log == ["-a", "+b", "+c"]


def test_a_lever_that_fails_to_engage_leaves_the_rig_bare_and_the_engine_usable(engine, request_, spies):
    log, failing = spies
    failing.add("c")
    with pytest.raises(OSError, match="cannot engage"):
        engine.generate(request_)
    assert log == ["+a", "+b", "-b", "-a"]
    failing.clear()
    engine.generate(request_)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_lever_that_was_not_asked_for_and_refuses_is_left_out_with_its_reason(engine, request_, spies, is_loaded):
    log, failing = spies
    if is_loaded:
        engine.generate(wishing(request_, a="off", b="off", c="off"))
    failing.add("B")
    for tried in (["+a", "B", "+c"], []):  # it is not tried again
        log.clear()
        report = engine.generate(request_).report
        assert log == tried
        assert (
            [receipt.lever for receipt in report.receipts] == [lever.name for lever in report.plan.levers] == ["a", "c"]
        )
        (found,) = [decision for decision in report.plan.decisions if decision.lever == "b"]
        assert (found.status, found.chosen, found.reason) == (Status.UNSUPPORTED, "off", "not on this model")
    with pytest.raises(LeverRefused, match="b: not on this model"):
        engine.generate(wishing(request_, b="on"))
    failing.clear()
    assert len(engine.generate(wishing(request_, b="on")).report.receipts) == 3


def test_what_a_lever_that_refuses_had_kept_off_is_on_and_the_promise_is_of_those_that_are_on(
    engine, request_, spies, monkeypatch
):
    log, failing = spies
    a, b, c = sorted(planner.ORDER, key=lambda cls: cls.name)
    monkeypatch.setattr(b, "needs", Needs(conflicts=frozenset({"a"})))
    monkeypatch.setattr(c, "promises", lambda self, case: Promise.ROUNDING if "b" in case.engaged else Promise.EXACT)
    assert [lever.name for lever in engine.generate(request_).report.plan.levers] == ["a", "c"]
    engine.close()
    failing.add("A")
    with Engine() as other:
        for _ in range(2):
            plan = other.generate(request_).report.plan
            assert [lever.name for lever in plan.levers] == ["b", "c"] and plan.promise is Promise.ROUNDING
            reasons = {decision.lever: decision.reason for decision in plan.decisions}
            assert reasons["a"] == "not on this model" and "turn that off" not in reasons["b"]
    assert log[-2:] == ["-c", "-b"] and log.count("A") == 1


def test_a_cancel_while_levers_are_entered_is_heard_before_the_next_one(engine, request_, spies):
    log, _ = spies

    def listener(event):
        if event.loading is not None and event.loading.state == "engaging":
            engine.cancel("enough")

    with pytest.raises(Cancelled, match="enough"):
        engine.prepare(request_, listener=listener)
    assert log == ["+a", "-a"]


def test_what_refused_on_one_model_is_tried_on_the_next(engine, request_, spies, folder, tmp_path):
    log, failing = spies
    failing.add("B")
    assert len(engine.prepare(request_, warm=False).levers) == 2
    failing.clear()
    other = shutil.copytree(folder, tmp_path / "other")
    assert len(engine.prepare(dataclasses.replace(request_, model=str(other)), warm=False).levers) == 3


def test_closing_leaves_every_lever_also_when_one_fails_to_leave(request_, spies):
    log, _ = spies
    engine = Engine()
    engine.generate(request_)
    engine._held[2][1].callback(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    assert log[-3:] == ["-c", "-b", "-a"]


def test_a_complaint_of_a_lever_stands_in_the_report(engine, request_, monkeypatch):
    from undercrank.levers.host_sync import HostSync

    monkeypatch.setattr(HostSync, "verify", lambda self, rig, trace: ["nothing happened"])
    report = engine.generate(wishing(request_, host_sync="on")).report
    assert report.receipts[0].complaints == ("nothing happened",) and "host_sync: nothing happened" in report.notes


def test_another_load_replaces_the_first_and_frees_it(engine, request_, folder, tmp_path):
    engine.generate(request_)
    old = weakref.ref(engine.rig.pipe.transformer)
    other = tiny_folder("wan2.1-1.3b", tmp_path / "other", seed=1)
    clip = engine.generate(dataclasses.replace(request_, model=str(other)))
    gc.collect()
    assert old() is None and clip.report.plan.load.source == str(other)


def test_close_frees_the_weights_and_leaves_no_thread(request_):
    before = threading.enumerate()
    engine = Engine()
    engine.generate(request_)
    kept = weakref.ref(engine.rig.pipe.transformer)
    engine.close()
    gc.collect()
    assert kept() is None and threading.enumerate() == before


# --------------------------------------------------------------------------- loads


@pytest.fixture
def other(request_, tmp_path) -> Request:
    return dataclasses.replace(request_, model=str(tiny_folder("wan2.1-1.3b", tmp_path / "other", seed=1)))


def weights() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.nn.Parameter) for found in gc.get_objects())


def failing_in(state: str):
    """A listener that fails when a load comes to this state."""

    def listener(event):
        if event.loading and event.loading.state == state:
            raise ZeroDivisionError(state)

    return listener


def test_a_load_goes_through_its_states_and_a_failed_one_says_how_far_it_came(engine, request_, other):
    told = []
    engine.prepare(wishing(request_, host_sync="on"), listener=lambda event: told.append(event.loading))
    states = [at.state for n, at in enumerate(told) if n == 0 or told[n - 1].state != at.state]
    assert [s for n, s in enumerate(states) if s not in states[:n]] == [
        "queued", "reading", "placing", "engaging", "warming", "ready",
    ]  # fmt: skip
    assert {at.component for at in told if at.state == "engaging"} == {"host_sync"}
    told.clear()

    def listener(event):
        told.append(event.loading)
        if event.loading.state == "placing":
            engine.cancel("enough")

    with pytest.raises(Cancelled):
        engine.prepare(other, listener=listener)
    assert told[-1] == dataclasses.replace(told[-2], state="cancelled") and told[-1].component
    with pytest.raises(ZeroDivisionError):
        engine.prepare(other, listener=lambda event: told.append(event.loading) or failing_in("reading")(event))
    assert told[-1].state == "failed"


def test_a_load_that_cannot_begin_leaves_what_is_loaded_alone(engine, request_, other):
    engine.generate(request_)
    rig = engine.rig
    next((Path(other.model) / "vae").glob("*.safetensors")).unlink()
    with pytest.raises(NotFound):
        engine.prepare(other)
    assert engine.rig is rig and engine.model == request_.model and not engine.restore()


@pytest.mark.parametrize("state", ["reading", "placing", "engaging", "warming"])
def test_what_made_room_for_a_load_that_failed_comes_back_and_makes_the_same_film(engine, request_, other, state):
    request, before = wishing(request_, host_sync="on"), weights()
    good = engine.generate(request).report.frames_hash
    old = weakref.ref(engine.rig.pipe.transformer)
    with pytest.raises(ZeroDivisionError) as kept:
        engine.prepare(wishing(other, host_sync="on"), listener=failing_in(state))
    gc.collect()
    assert old() is None and engine.rig is None and engine.model is None and weights() == before
    assert kept.value.args == (state,), "the error itself is kept, and keeps no weight"
    assert engine.restore() and engine.model == request.model and not engine.restore()
    assert [lever.name for lever, *_ in engine._held] == ["host_sync"]
    stages = []
    clip = engine.generate(request, listener=lambda event: stages.append(event.stage))
    assert clip.report.frames_hash == good and "load" not in stages


def test_what_is_owed_is_forgotten_once_something_else_is_loaded_or_it_cannot_be_had(request_, other, tmp_path):
    with Engine() as engine:
        engine.generate(request_)
        with pytest.raises(ZeroDivisionError):
            engine.prepare(other, listener=failing_in("placing"))
        engine.prepare(other, warm=False)
        assert not engine.restore() and engine.model == other.model
        with pytest.raises(ZeroDivisionError):
            engine.prepare(request_, listener=failing_in("placing"))
        shutil.rmtree(other.model)
        with pytest.raises(NotFound):
            engine.restore()
        assert not engine.restore() and engine.rig is None


def test_an_engine_that_may_hold_both_serves_the_one_until_the_other_is_ready(request_, other):
    with Engine(hold_both=True) as engine:
        engine.generate(request_)
        rig, seen = engine.rig, []

        def listener(event):
            seen.append((event.loading.state, engine.rig is rig))
            failing_in("warming")(event)

        with pytest.raises(ZeroDivisionError):
            engine.prepare(other, listener=listener)
        assert {here for _, here in seen} == {True} and engine.rig is rig and not engine.restore()
        old = weakref.ref(rig.pipe.transformer)
        rig = None
        engine.prepare(other)
        gc.collect()
        assert engine.model == other.model and old() is None


def test_a_warm_up_is_one_step_and_changes_no_film(request_, other, monkeypatch):
    import diffusers

    forwards = []
    real = diffusers.WanTransformer3DModel.forward
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "forward", lambda *a, **k: forwards.append(1) or real(*a, **k))
    with Engine() as engine:
        engine.prepare(request_)
        assert len(forwards) == 2, "a conditional branch and an unconditional one"
        warm = engine.generate(request_).report.frames_hash
        engine.prepare(other, warm=False)
        assert len(forwards) == 2 + 6
        assert engine.generate(request_).report.frames_hash == warm


def test_a_warm_up_hears_of_a_cancel_between_two_torch_functions(engine, request_, monkeypatch):
    left = []
    real = engine.check_cancelled

    def check():
        if left:
            left[0] -= 1
            if left[0] == 0:
                engine.cancel("enough")
            assert left[0] >= 0, "asked again after a cancel"
        real()

    monkeypatch.setattr(engine, "check_cancelled", check)
    with pytest.raises(Cancelled, match="enough"):
        engine.prepare(request_, listener=lambda event: left.append(40) if event.loading.state == "warming" else None)
    assert left == [0] and engine.rig is None


def test_a_newer_load_overtakes_an_older_one(engine, request_, other):
    ends = {}

    def load(request, name, **options):
        try:
            engine.prepare(request, warm=False, **options)
        except Cancelled as cancelled:
            ends[name] = str(cancelled)

    newer = [
        threading.Thread(target=load, args=(request, name)) for request, name in ((other, "2nd"), (request_, "3rd"))
    ]

    def listener(event):
        if event.loading.state == "placing" and newer[0].ident is None:
            for n, thread in enumerate(newer):
                thread.start()
                while len(engine._turns) < n + 2:
                    thread.join(0.001)

    load(request_, "1st", listener=listener)
    for thread in newer:
        thread.join()
    assert ends == {"1st": engine_module.OVERTAKEN, "2nd": engine_module.OVERTAKEN} and engine.model == request_.model


def test_a_clip_is_overtaken_by_nothing(engine, request_, other):
    refused = []

    def listener(event):
        if event.stage in ("load", "denoise") and not event.done:
            with pytest.raises(RunFailed, match="another clip") as caught:
                engine.prepare(other)
            refused.append(caught)

    engine.generate(request_, listener=listener)
    assert len(refused) >= 2


def test_a_load_that_asks_for_another_from_within_is_refused_and_waits_for_nobody(engine, request_, other):
    refused = []

    def listener(event):
        if event.loading.state == "placing" and not refused:
            with pytest.raises(RunFailed, match="another clip") as caught:
                engine.prepare(other)
            refused.append(caught)

    engine.prepare(request_, warm=False, listener=listener)
    assert refused and engine.model == request_.model


def test_closing_from_within_stops_a_load_and_leaves_nothing(request_):
    engine = Engine()
    with pytest.raises(Cancelled, match="closed"):
        engine.prepare(request_, listener=lambda event: engine.close() if event.loading.state == "placing" else None)
    assert engine.rig is None and engine.model is None


def test_what_came_in_while_the_engine_was_being_closed_does_not_begin(engine, request_, monkeypatch):
    began = engine._begin
    monkeypatch.setattr(engine, "_begin", lambda turn: (setattr(engine, "_closed", True), began(turn)))
    with pytest.raises(RunFailed, match="closed"):
        engine.prepare(request_)
    assert engine.rig is None


def test_closing_from_another_thread_stops_a_load_and_waits_for_it(request_):
    engine = Engine()
    closing = threading.Thread(target=engine.close)

    def listener(event):
        if event.loading.state == "placing" and closing.ident is None:
            closing.start()
            while engine._cancel_reason is None:
                closing.join(0.001)

    with pytest.raises(Cancelled, match="closed"):
        engine.prepare(request_, listener=listener)
    closing.join()
    assert engine.rig is None
    with pytest.raises(RunFailed, match="closed"):
        engine.prepare(request_)


def test_a_cancel_that_came_when_nothing_was_under_way_ends_nothing(engine, request_):
    engine.generate(request_)
    engine.cancel("too late")
    assert engine.generate(wishing(request_, cfg_parallel="cpu")).report.receipts[-1].lever == "cfg_parallel"


# --------------------------------------------------------------------------- failing and stopping


def test_a_cancel_stops_within_one_step_and_the_next_run_is_right(engine, request_):
    good = engine.generate(request_).report.frames_hash
    seen = []

    def listener(event):
        seen.append((event.stage, event.done))
        if event.stage == "denoise" and event.done == 2:
            engine.cancel("enough")

    with pytest.raises(Cancelled, match="enough"):
        engine.generate(dataclasses.replace(request_, num_inference_steps=9), listener=listener)
    assert seen[-1] == ("denoise", 2)
    assert engine.generate(request_).report.frames_hash == good


def test_a_model_prepared_ahead_needs_no_load_for_its_first_clip(engine, request_):
    stages = []
    plan = engine.prepare(request_, listener=lambda event: stages.append(event.stage))
    assert set(stages) == {"load"} and engine.rig is not None
    stages.clear()
    clip = engine.generate(request_, listener=lambda event: stages.append(event.stage))
    assert "load" not in stages and clip.report.plan.load == plan.load


def test_the_latents_of_each_step_can_be_seen(engine, request_):
    seen = []
    clip = engine.generate(request_, on_latents=lambda rig, index, latents: seen.append((rig, index, latents.shape)))
    assert [(rig, index) for rig, index, _ in seen] == [(engine.rig, index) for index in range(3)]
    assert {shape for *_, shape in seen} == {(1, 16, 2, 4, 4)}
    assert clip.report.frames_hash == engine.generate(request_).report.frames_hash


def test_a_cancel_while_loading_leaves_nothing(request_):
    engine = Engine()

    def listener(event):
        if event.stage == "load" and event.done:
            engine.cancel()

    with pytest.raises(Cancelled):
        engine.generate(request_, listener=listener)
    assert engine.rig is None and engine._held == []


def broken_forward(error):
    def forward(*args, **kwargs):
        raise error

    return forward


@pytest.mark.parametrize("stage", ["text_encoder", "transformer", "vae"])
def test_after_a_failure_in_any_stage_the_next_run_is_right(engine, request_, stage):
    good = engine.generate(request_).report.frames_hash
    part = getattr(engine.rig.pipe, stage)
    method = "decode" if stage == "vae" else "forward"
    setattr(part, method, broken_forward(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        engine.generate(request_)
    delattr(part, method)
    assert engine.generate(request_).report.frames_hash == good


@pytest.mark.parametrize(
    ("call", "where"), [(3, "step 2, branch cond:"), (4, "step 2, branch uncond:"), (6, "step 3, branch uncond:")]
)
def test_non_finite_latents_are_a_failure_that_names_the_step_and_the_branch(engine, request_, call, where):
    engine.generate(request_)
    layer, calls = engine.rig.pipe.transformer.proj_out, []

    def poison(module, args, output):
        calls.append(1)
        return output * float("inf") if len(calls) == call else output

    hook = layer.register_forward_hook(poison)
    with pytest.raises(RunFailed, match=f"^non-finite latents at {where}"):
        engine.generate(request_)
    hook.remove()


def test_latents_that_overflow_outside_of_the_model_name_the_step(engine, request_):
    engine.generate(request_)
    step, calls = engine.rig.pipe.scheduler.step, []

    def poisoned(*args, **kwargs):
        calls.append(1)
        output = step(*args, **kwargs)
        return (output[0] * float("nan"),) if len(calls) == 2 else output

    with swap_attr(engine.rig.pipe.scheduler, "step", poisoned):
        with pytest.raises(RunFailed, match="^non-finite latents at step 2: the run overflowed"):
            engine.generate(request_)


def test_non_finite_frames_are_a_failure(engine, request_):
    engine.generate(request_)
    hook = engine.rig.pipe.vae.decoder.register_forward_hook(lambda m, a, out: out * float("nan"))
    with pytest.raises(RunFailed, match="finite"):
        engine.generate(request_)
    hook.remove()


def test_memory_that_runs_out_is_answered_with_a_size_that_would_fit(engine, request_):
    engine.generate(request_)
    engine.rig.pipe.transformer.forward = broken_forward(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemory, match="would fit|fewer frames"):
        engine.generate(dataclasses.replace(request_, width=64, num_frames=9))
    del engine.rig.pipe.transformer.forward


@pytest.mark.parametrize("component", ["text_encoder", "transformer", "vae.decoder"])
def test_after_memory_ran_out_in_any_stage_the_engine_makes_the_next_clip_as_ever(engine, request_, component):
    before = engine.generate(request_).report.frames_hash
    lost = []

    def run_out(module, *args):
        filled = torch.zeros(1000)
        lost.append(weakref.ref(filled))
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = _part(engine.rig.pipe, component).register_forward_pre_hook(run_out)
    asked = dataclasses.replace(request_, prompt="a blue cube", width=64, num_frames=9)
    with pytest.raises(OutOfMemory, match="the plan expected .* GiB, the run had taken") as caught:
        engine.generate(asked)
    hook.remove()
    assert lost and lost[0]() is None, "the error holds what the failed run had computed"
    found = re.search(r"(\d+)x(\d+) with (\d+) frames would fit", str(caught.value))
    assert found is None or int(found[1]) * int(found[2]) * int(found[3]) < 64 * 32 * 9
    assert engine.generate(request_).report.frames_hash == before


def _part(pipe, path):
    for name in path.split("."):
        pipe = getattr(pipe, name)
    return pipe


def test_memory_is_refused_before_anything_is_read(engine, request_, monkeypatch):
    monkeypatch.setattr(engine_module, "load", lambda *a, **k: pytest.fail("loaded"))
    poor = dataclasses.replace(
        engine.machine, devices=tuple(dataclasses.replace(d, free_bytes=10**6) for d in engine.machine.devices)
    )
    engine.machine = poor
    with pytest.raises(OutOfMemory, match="needs about"):
        engine.generate(Request(prompt="x", model="flipbook"))


@pytest.mark.parametrize(
    "bad",
    [
        {"width": 33}, {"num_frames": 6}, {"num_inference_steps": 0}, {"guidance_scale": float("nan")}, {"seed": -1},
        {"image": "picture.png"}, {"wishes": (("warp", "9"),)}, {"device": "cuda:7"}, {"fps": Fraction(0)},
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_read(engine, request_, monkeypatch, bad):
    monkeypatch.setattr(engine_module, "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(BadInput):
        engine.generate(dataclasses.replace(request_, **bad))


def test_an_exact_request_refuses_a_lossy_wish(engine, request_, monkeypatch):
    from undercrank.levers.host_sync import HostSync

    monkeypatch.setattr(HostSync, "promises", lambda self, case: Promise.LOSSY)
    with pytest.raises(LeverRefused, match="exact"):
        engine.generate(dataclasses.replace(wishing(request_, host_sync="on"), fidelity="exact"))


def test_a_missing_folder_is_missing(engine, request_):
    with pytest.raises(NotFound, match="nowhere"):
        engine.generate(dataclasses.replace(request_, model="./nowhere"))


# --------------------------------------------------------------------------- files


def test_a_saved_clip_carries_its_recipe_and_its_master_its_pixels(engine, request_, tmp_path):
    clip = engine.generate(request_)
    clip.save(tmp_path / "clip.mp4")
    clip.save_master(tmp_path / "clip.mkv")
    assert read_recipe(tmp_path / "clip.mp4")["frames_hash"] == clip.report.frames_hash
    assert np.array_equal(read_frames(tmp_path / "clip.mkv"), clip.frames_FHWC)


def test_generate_is_one_line(folder):
    clip = undercrank.generate("a ball", model=str(folder), seed=7, host_sync="on", fidelity="exact", fps="8", **ASKED)
    assert clip.fps == 8 and [r.lever for r in clip.report.receipts] == ["host_sync"]


def test_a_picture_is_animated_upright_and_cropped(engine, tmp_path):
    from PIL import Image

    model = tiny_folder("wan2.1-14b-480p-i2v", tmp_path / "i2v")
    Image.new("RGB", (90, 50), (200, 30, 30)).save(tmp_path / "p.png")
    asked = Request(prompt="x", model=str(model), image=str(tmp_path / "p.png"), seed=1, **ASKED)
    assert engine.generate(asked).frames_FHWC.shape == (5, 32, 32, 3)


def test_a_model_that_animates_a_picture_is_made_ready_without_one(engine, tmp_path, monkeypatch):
    from PIL import Image

    Image.new("RGB", (32, 32), (200, 30, 30)).save(tmp_path / "p.png")
    model = tiny_folder("wan2.1-14b-480p-i2v", tmp_path / "i2v")
    asked = Request(prompt="", model=str(model), seed=1, **ASKED)
    steps, pictures, plain = [], [], images.plain
    monkeypatch.setattr(images, "plain", lambda *size: pictures.append(size) or plain(*size))
    engine.prepare(asked, listener=lambda event: steps.append(event.loading and event.loading.state))
    assert steps[-2:] == ["warming", "ready"]
    assert pictures == [(32, 32)], "of the clip's size"
    loaded = engine.rig.pipe
    with pytest.raises(BadInput, match="give one with --image"):
        engine.generate(asked)
    film = engine.generate(dataclasses.replace(asked, image=str(tmp_path / "p.png"))).frames_FHWC
    assert film.shape == (5, 32, 32, 3) and engine.rig.pipe is loaded


def test_an_unreadable_picture_is_refused_before_loading(engine, tmp_path, monkeypatch):
    (tmp_path / "p.png").write_bytes(b"not a picture")
    monkeypatch.setattr(engine_module, "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(BadInput):
        engine.generate(Request(prompt="x", model="wan2.1-14b-480p-i2v", image=str(tmp_path / "p.png")))


# --------------------------------------------------------------------------- a pipeline at hand, threads, closing


def test_a_pipeline_at_hand_makes_clips_and_stays_loaded(folder):
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    before = type(pipe)
    with Engine(pipe=pipe) as engine:
        asked = Request(prompt="a ball", model="ltx-video", seed=1, **ASKED)
        clip = engine.generate(asked)
    assert clip.report.request.model == "wan2.1-1.3b" and clip.report.plan.load.source == "live"
    assert clip.report.plan.load.parameters < 10**7, "counted in the pipeline, not in the family's row"
    assert type(pipe) is before and "progress_bar" not in vars(pipe)


def test_a_closed_engine_makes_no_more_clips(request_):
    engine = Engine()
    engine.close()
    with pytest.raises(RunFailed, match="closed"):
        engine.generate(request_)


def test_an_engine_makes_one_clip_at_a_time(engine, request_):
    refused = []

    def listener(event):
        if event.stage == "denoise" and event.done == 1:
            with pytest.raises(RunFailed, match="another clip") as caught:
                engine.generate(request_)
            refused.append(caught)

    engine.generate(request_, listener=listener)
    assert len(refused) == 1


def test_engines_in_threads_load_one_after_the_other(request_):
    hashes, errors = [], []

    def make():
        try:
            with Engine() as engine:
                hashes.append(engine.generate(request_).report.frames_hash)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(hashes) == 3 and len(set(hashes)) == 1


def test_the_load_is_told_once(engine, request_):
    first, second = engine.generate(request_).report.trace, engine.generate(request_).report.trace
    assert first.load_bytes > 0 and first.stage_s["load"] > 0
    assert second.load_bytes == 0 and second.stage_s["load"] == 0


def test_engines_closed_in_the_order_they_were_opened_leave_the_libraries_as_they_were(request_):
    import diffusers.utils.logging as theirs

    before = theirs._tqdm_active
    first, second = Engine(), Engine()
    first.generate(request_)
    assert theirs._tqdm_active is before, "the user's own bars are on while an engine is open"
    second.generate(request_)
    first.close()
    second.close()
    assert theirs._tqdm_active is before


def test_a_class_that_is_in_no_row_has_no_facts_of_another_model():
    import diffusers

    from undercrank.engine import family_of_pipeline
    from undercrank.testing import tiny_pipeline

    class Unheard(diffusers.WanPipeline):
        pass

    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.__class__ = Unheard
    row = family_of_pipeline(pipe)
    assert row.id == "unknown:Unheard" and row.max_sequence_length is None and row.transformer_params == 0
