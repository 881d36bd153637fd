"""One suite for every lever in ORDER: what a lever must keep, whatever it does."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from undercrank.families import family
from undercrank.levers import ORDER, knobs, lever_of_knob
from undercrank.load import load
from undercrank.planner import load_spec
from undercrank.records import Case, Device, Lever, Machine, Plan, Promise, Trace
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline

FAMILY = "wan2.1-1.3b"
FAMILIES = {"text_trim": "hunyuanvideo-1.5-480p"}
"Where a lever is tried that has nothing to do on FAMILY."
SETTINGS = {
    "cfg_parallel": {"device": "cpu"},
    "cuda_graph": {"recorder": "tape"},
    "offload": {"mode": "group"},
    "prompt_cache": {"mode": "keep"},
    "quantize": {"transformer": "int8"},
}
"What a lever needs in order to work without a GPU, and to do anything at all."
ENGAGED = [lever for lever in ORDER if lever.engage is not Lever.engage]
AT_LOAD = [lever for lever in ORDER if lever.engage is Lever.engage]
"Those that are done with once the weights are read: what undoes them is a reload."


def made(cls: type[Lever]) -> Lever:
    return cls(**SETTINGS.get(cls.name, {}))


@pytest.fixture(params=ORDER, ids=lambda lever: lever.name)
def any_lever(request: pytest.FixtureRequest) -> Lever:
    return made(request.param)


@pytest.fixture(params=ENGAGED, ids=lambda lever: lever.name)
def lever(request: pytest.FixtureRequest) -> Lever:
    return made(request.param)


@pytest.fixture(params=AT_LOAD, ids=lambda lever: lever.name)
def load_lever(request: pytest.FixtureRequest) -> Lever:
    return made(request.param)


@pytest.fixture
def rig(lever: Lever) -> Rig:
    name = FAMILIES.get(lever.name, FAMILY)
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, family(name), "cpu")


def case(rig: Rig) -> Case:
    device = Device(kind="cuda", name="a GPU", capability=(9, 0))
    machine = Machine(name="a machine", devices=(device,), cpu_count=1)
    return Case(
        family=rig.family, machine=machine, device=device, width=832, height=480, num_frames=81, num_inference_steps=50,
        guidance_scale=5.0, dtype="bfloat16",
    )  # fmt: skip


def run(rig: Rig, steps: int = 3) -> torch.Tensor:
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**tiny_inputs(rig.pipe, steps=steps)).frames


def trace_of(steps: int = 3) -> Trace:
    return Trace(stage_s={}, step_ms=(1.0,) * steps, stalls=0, computed_steps=steps)


def test_a_lever_survives_json(any_lever: Lever) -> None:
    text = {"lever": any_lever.name, **any_lever.to_dict()}
    assert type(any_lever).from_dict(any_lever.to_dict()) == any_lever
    hint = Plan.__dataclass_fields__["levers"]
    assert hint and text["lever"] == any_lever.name


def test_a_lever_is_found_by_its_knobs(any_lever: Lever) -> None:
    for knob in any_lever.knobs or (any_lever.name,):
        assert lever_of_knob(knob) is type(any_lever) and knob in knobs()


def test_a_lever_tells_what_it_does_promises_costs_and_measured(any_lever: Lever) -> None:
    about = any_lever.about()
    for word in ("Does:", "Promises:", "Costs:", "Measured:"):
        assert word in about, f"{any_lever.name} says nothing under {word}"
    assert any_lever.summary


def test_leaving_a_lever_leaves_no_trace(lever: Lever, rig: Rig) -> None:
    run(rig)  # a stock run leaves fields of its own
    before = fingerprint(rig.pipe)
    with lever.engage(rig):
        assert differences(before, fingerprint(rig.pipe)), f"{lever.name} changed nothing when it was engaged"
    assert differences(before, fingerprint(rig.pipe)) == []


def test_a_run_under_a_lever_leaves_what_a_stock_run_leaves(lever: Lever, rig: Rig) -> None:
    run(rig)
    stock = fingerprint(rig.pipe)
    with lever.engage(rig):
        run(rig)
    assert differences(stock, fingerprint(rig.pipe)) == []


def test_an_exception_inside_leaves_no_trace(lever: Lever, rig: Rig) -> None:
    run(rig)
    before = fingerprint(rig.pipe)
    with pytest.raises(ZeroDivisionError), lever.engage(rig):
        raise ZeroDivisionError
    assert differences(before, fingerprint(rig.pipe)) == []


def test_an_exception_within_engage_leaves_no_trace(lever: Lever, rig: Rig) -> None:
    """Each of the changes that a lever makes through `undo` fails in turn; those before it are taken back."""
    import sys

    module = sys.modules[type(lever).__module__]
    run(rig)
    before = fingerprint(rig.pipe)
    failed = []
    for name in ("swap_attr", "swap_class", "swap_child", "swap_item", "appended", "kept"):
        if not hasattr(module, name):
            continue
        with patch.object(module, name, side_effect=OSError("no")) as change, contextlib.suppress(OSError):
            with lever.engage(rig):
                pass
        if change.called:
            failed.append(name)
        assert differences(before, fingerprint(rig.pipe)) == [], name
    assert failed, f"{lever.name} changes nothing through undo when it is engaged"


def test_the_film_moves_no_further_than_promised(lever: Lever, rig: Rig) -> None:
    stock = run(rig)
    with lever.engage(rig):
        moved = run(rig)
    promise = lever.promises(case(rig))
    if promise is Promise.EXACT:
        assert torch.equal(stock, moved)
    elif promise is Promise.ROUNDING:
        assert torch.allclose(stock, moved, rtol=1e-3, atol=1e-4)
    else:
        assert torch.isfinite(moved).all()


def test_the_second_film_equals_the_first(lever: Lever, rig: Rig) -> None:
    with lever.engage(rig):
        assert torch.equal(run(rig), run(rig))


def test_the_stock_film_is_back_after_leaving(lever: Lever, rig: Rig) -> None:
    stock = run(rig)
    with lever.engage(rig):
        run(rig)
    assert torch.equal(stock, run(rig))


def test_verify_is_content_when_the_lever_works(lever: Lever, rig: Rig) -> None:
    with lever.engage(rig):
        run(rig)
        assert lever.verify(rig, trace_of()) == []


def test_verify_complains_when_engage_does_nothing(lever: Lever, rig: Rig) -> None:
    run(rig)
    assert lever.verify(rig, trace_of()), f"{lever.name}.verify cannot fail"


# --------------------------------------------------------------------------- done with once the weights are read


@contextlib.contextmanager
def loaded(lever: Lever | None) -> Iterator[Rig]:
    """flipbook, whose layers are wide enough for every format."""
    row = family("flipbook")
    spec = load_spec(row)
    with load(lever.configure(spec) if lever else spec, row) as found:
        yield found.rig


def small_film(rig: Rig) -> torch.Tensor:
    inputs = {"prompt": "a red ball rolls left", "width": 64, "height": 64, "num_frames": 5, "num_inference_steps": 3}
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**inputs, generator=torch.Generator().manual_seed(1), output_type="pt").frames


def test_a_lever_at_load_changes_the_load_and_the_next_load_is_stock_again(load_lever: Lever) -> None:
    spec = load_spec(family("flipbook"))
    assert load_lever.configure(spec) != spec
    with loaded(None) as rig:
        stock = small_film(rig)
    with loaded(load_lever) as rig:
        first, second = small_film(rig), small_film(rig)
        assert load_lever.verify(rig, trace_of()) == []
    assert torch.equal(first, second) and torch.isfinite(first).all()
    assert load_lever.promises(case(rig)) is Promise.LOSSY and not torch.equal(first, stock)
    with loaded(None) as rig:
        assert torch.equal(small_film(rig), stock)


def test_verify_complains_when_the_load_did_nothing(load_lever: Lever) -> None:
    with loaded(None) as rig:
        small_film(rig)
        assert load_lever.verify(rig, trace_of()), f"{load_lever.name}.verify cannot fail"
