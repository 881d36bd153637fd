"""Records are frozen values that survive JSON with their types; errors carry their exit codes."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercrank import records
from undercrank.doctor import Finding
from undercrank.levers import ORDER
from undercrank.records import (
    BadInput,
    Cancelled,
    Case,
    Decision,
    Device,
    Family,
    Fidelity,
    Lever,
    LeverRefused,
    LoadSpec,
    Machine,
    NotFound,
    OutOfMemory,
    Promise,
    Record,
    Request,
    RunFailed,
    Status,
    UndercrankError,
)


@dataclass(frozen=True, kw_only=True)
class Shrink(Lever):
    """A lever with settings of several types."""

    name = "shrink"
    scheme: str = "int8"
    threshold: float = 0.5
    steps: tuple[int, ...] = ()
    fps: Fraction = Fraction(16)


LEVERS = (*ORDER, Shrink)
RECORDS = sorted(
    {cls for cls in vars(records).values() if isinstance(cls, type) and issubclass(cls, Record)}
    - {Record, Lever}
    | {Finding, *LEVERS},
    key=lambda cls: cls.__name__,
)  # fmt: skip


def values(hint: Any) -> st.SearchStrategy[Any]:
    """A strategy for any type that a record's field may have."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(values(arg) for arg in args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(arg) for arg in args))
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    if hint is type(None):
        return st.none()
    if hint is Lever:
        return st.sampled_from(LEVERS).flatmap(instances)
    if issubclass(hint, Record):
        return st.deferred(lambda: instances(hint))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    plain = {
        str: st.text(max_size=5),
        int: st.integers(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        Fraction: st.fractions(),
    }
    return plain[hint]


WORDS = {
    "Attention": {"kernel": st.sampled_from(["best", "cudnn", "flash", "sage"])},
    "Compile": {"mode": st.sampled_from(["parity", "plain", "max"])},
    "CudaGraph": {"recorder": st.sampled_from(["cuda", "tape"])},
    "Decode": {"mode": st.sampled_from(["stream", "fused"])},
    "Offload": {"mode": st.sampled_from(["auto", "model", "group"])},
    "PromptCache": {"mode": st.sampled_from(["auto", "keep", "host"])},
    "Quantize": {
        "transformer": st.sampled_from(["auto", "off", "int8", "mxfp8"]),
        "text_encoder": st.sampled_from(["auto", "off", "fp8_dynamic"]),
        "vae": st.sampled_from(["auto", "off", "fp8"]),
    },
    "StepCache": {
        "cache": st.sampled_from(["auto", "magcache", "easycache"]),
        "quality": st.sampled_from(["auto", "quality", "balanced", "fast"]),
        "threshold": st.none() | st.floats(0, 10),
        "retention": st.none() | st.floats(0, 1),
        "budget": st.none(),
        "mask": st.just(""),
    },
}
"Fields of levers that take certain words only."


def instances(cls: type[Record]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    words = WORDS.get(cls.__name__, {})
    return st.builds(cls, **{f.name: words[f.name] if f.name in words else values(hints[f.name]) for f in fields(cls)})  # type: ignore[arg-type]


def typed(value: Any) -> Any:
    """A value together with the types inside it: a StrEnum equals its word and a Fraction its number."""
    if isinstance(value, Record):
        return type(value), {f.name: typed(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
    if isinstance(value, tuple | list):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, {key: typed(item) for key, item in value.items()}
    return type(value), value


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_record_comes_back_from_its_json_equal_and_of_the_same_types(cls: type[Record], data: Any) -> None:
    record = data.draw(instances(cls))
    back = cls.from_json(record.to_json(), levers=LEVERS)
    assert back == record
    assert typed(back) == typed(record)
    assert back.to_json() == record.to_json()


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_every_record_is_frozen_and_keyword_only(cls: type[Record]) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(f.kw_only for f in fields(cls))  # type: ignore[arg-type]


def test_a_record_cannot_be_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request().prompt = "other"  # type: ignore[misc]


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="Request has no field guidence") as caught:
        Request.from_dict({"guidence": 5.0})
    assert caught.value.field == "guidence"


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="LoadSpec lacks device") as caught:
        LoadSpec.from_dict({"family": "f", "source": "s", "dtype": "float32"})
    assert caught.value.field == "device"


def test_an_unknown_key_deep_inside_is_refused_too() -> None:
    machine = Machine(name="m", devices=(Device(kind="cpu"),), cpu_count=1).to_dict()
    machine["devices"][0]["speed"] = 3
    with pytest.raises(BadInput, match="Device has no field speed"):
        Machine.from_dict(machine)


@pytest.mark.parametrize("data", [[], 5, None, "text", [["prompt", "a cat"]]])
def test_what_is_no_object_is_no_record(data: Any) -> None:
    with pytest.raises(BadInput, match="Request must be an object, not "):
        Request.from_dict(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("fps", "1/0"), ("fps", "fast"), ("fps", [1]), ("fps", {}), ("wishes", "abc"), ("wishes", 3), ("wishes", ["ab"]),
     ("wishes", [["a"]]), ("wishes", [["a", "b", "c"]]), ("wishes", [3])],
)  # fmt: skip
def test_a_value_that_cannot_become_its_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"{field} cannot be ") as caught:
        Request.from_dict({field: value})
    assert caught.value.field == field


def test_a_value_of_the_wrong_kind_deep_inside_is_refused_too() -> None:
    machine = Machine(name="m", devices=(Device(kind="cpu"),), cpu_count=1).to_dict()
    with pytest.raises(BadInput, match="Device must be an object, not str"):
        Machine.from_dict(machine | {"devices": ["cpu"]})
    with pytest.raises(BadInput, match="packages cannot be 'torch'"):
        Machine.from_dict(machine | {"packages": "torch"})


def test_json_is_plain_ascii_without_nan() -> None:
    text = Request(prompt="\u732b \U0001f408").to_json()
    assert text.isascii()
    assert Request.from_json(text).prompt == "\u732b \U0001f408"
    with pytest.raises(ValueError, match="JSON"):
        Request(guidance_scale=float("nan")).to_json()
    with pytest.raises(ValueError, match="JSON"):
        Request(guidance_scale=float("inf")).to_json()


def test_sets_are_written_in_one_order() -> None:
    family = dataclasses.replace(a_family(), traits=frozenset("hgfedcba"))
    assert family.to_dict()["traits"] == list("abcdefgh")


def test_a_lever_is_written_with_its_name_and_settings() -> None:
    lever = Shrink(threshold=0.25)
    plain = a_plan((lever,)).to_dict()["levers"]
    assert plain == [{"lever": "shrink", "scheme": "int8", "threshold": 0.25, "steps": [], "fps": "16"}]


def test_a_plan_with_a_lever_that_this_version_lacks_is_refused_by_name() -> None:
    text = a_plan((Shrink(),)).to_json()
    names = ", ".join(lever.name for lever in ORDER)
    with pytest.raises(BadInput, match=f"unknown lever 'shrink': this version has {names}"):
        records.Plan.from_json(text, levers=ORDER)
    with pytest.raises(BadInput, match="this version has none"):
        records.Plan.from_json(text)


@pytest.mark.parametrize("lever", [{}, {"scheme": "int8"}, {"lever": None}, {"lever": []}, "shrink", None, 3])
def test_a_lever_without_a_known_name_is_refused(lever: Any) -> None:
    plain = a_plan(()).to_dict() | {"levers": [lever]}
    with pytest.raises(BadInput, match="unknown lever|levers cannot be"):
        records.Plan.from_dict(plain, levers=LEVERS)


def test_an_indented_json_says_the_same() -> None:
    request = Request(prompt="a", seed=3)
    assert json.loads(request.to_json(indent=2)) == request.to_dict()
    assert "\n" in request.to_json(indent=2)


# --------------------------------------------------------------------------- words


def test_the_promise_of_several_levers_is_that_of_the_weakest() -> None:
    exact, rounding, lossy = Promise
    assert Promise.weakest([]) is exact
    assert Promise.weakest([exact, rounding]) is rounding
    assert Promise.weakest([lossy, rounding, exact]) is lossy
    assert (exact.rank, rounding.rank, lossy.rank) == (0, 1, 2)


@pytest.mark.parametrize("word", list(Fidelity))
def test_fidelity_exact_admits_only_exact_levers_and_every_other_word_lossy_ones_too(word: Fidelity) -> None:
    assert word.ceiling is (Promise.EXACT if word is Fidelity.EXACT else Promise.LOSSY)


@pytest.mark.parametrize("word", list(Fidelity))
def test_every_fidelity_word_is_known_as_plain_text_too(word: Fidelity) -> None:
    assert Fidelity.of(word.value) is word
    assert Fidelity.of(word) is word
    assert Request(fidelity=word.value).fidelity is word  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["", "EXACT", "best", "exact ", None, 3])
def test_an_unknown_fidelity_is_refused_with_the_choice(word: Any) -> None:
    with pytest.raises(BadInput, match="choose exact, faithful, quality, balanced, fast") as caught:
        Request(fidelity=word)
    assert caught.value.field == "fidelity"


@pytest.mark.parametrize(
    ("error", "exit_code", "status", "code"),
    [
        (RunFailed, 1, 500, "run_failed"),
        (BadInput, 2, 400, "bad_input"),
        (LeverRefused, 3, 409, "lever_refused"),
        (OutOfMemory, 4, 507, "out_of_memory"),
        (NotFound, 5, 424, "missing"),
        (Cancelled, 130, 499, "cancelled"),
    ],
)
def test_every_error_has_its_exit_code_and_status(
    error: type[UndercrankError], exit_code: int, status: int, code: str
) -> None:
    assert issubclass(error, UndercrankError)
    assert (error.exit_code, error.http_status, error.code) == (exit_code, status, code)
    assert str(error("what and why")) == "what and why"


def test_bad_input_names_its_field_and_is_a_value_error() -> None:
    error = BadInput("no", field="seed")
    assert error.field == "seed"
    assert BadInput("no").field is None
    assert isinstance(error, ValueError)


# --------------------------------------------------------------------------- devices


GPU = Device(kind="cuda", index=0)
SECOND = Device(kind="cuda", index=1)
CPU = Device(kind="cpu")
MACHINE = Machine(name="m", devices=(GPU, SECOND, CPU), cpu_count=1)


def test_a_device_has_its_torch_name() -> None:
    assert (GPU.torch_name, SECOND.torch_name, CPU.torch_name) == ("cuda:0", "cuda:1", "cpu")


@pytest.mark.parametrize(("name", "device"), [(None, GPU), ("cuda", GPU), ("cuda:1", SECOND), ("cpu", CPU)])
def test_a_machine_finds_its_devices_by_name_accelerators_first(name: str | None, device: Device) -> None:
    assert MACHINE.device(name) is device


def test_an_unknown_device_is_refused_with_what_there_is() -> None:
    with pytest.raises(BadInput, match="device 'cuda:2': this machine has cuda:0, cuda:1, cpu") as caught:
        MACHINE.device("cuda:2")
    assert caught.value.field == "device"


# --------------------------------------------------------------------------- the lever protocol


@dataclass(frozen=True, kw_only=True)
class Idle(Lever):
    name = "idle"
    more: int = field(default=0)


def test_a_lever_that_says_nothing_does_nothing() -> None:
    load = LoadSpec(family="f", source="s", dtype="float32", device="cpu")
    idle = Idle()
    assert idle.promises(a_case()) is Promise.EXACT
    assert idle.doubt(a_case()) is None
    assert idle.configure(load) is load
    with idle.engage(None):  # type: ignore[arg-type]
        pass
    assert idle.verify(None, None) == []  # type: ignore[arg-type]


def test_a_lever_without_settings_takes_on_and_nothing_else() -> None:
    assert Idle.from_wish({}) == Idle()
    assert Idle.from_wish({"idle": "on"}) == Idle()
    with pytest.raises(BadInput, match="idle=fast: idle takes auto, on or off") as caught:
        Idle.from_wish({"idle": "fast"})
    assert caught.value.field == "idle"


@pytest.mark.parametrize("lever", ORDER, ids=lambda lever: lever.name)
def test_every_lever_says_what_it_does_promises_costs_and_what_was_measured(lever: type[Lever]) -> None:
    about = lever.about()
    assert about.startswith(f"{lever.name}: ")
    for word in ("Does:", "Promises:", "Costs:", "Measured:"):
        assert word in about
    assert lever.summary


def test_levers_compare_by_their_settings() -> None:
    assert Idle(more=1) == Idle(more=1) != Idle(more=2)
    assert Idle() != Shrink()
    assert len({Idle(), Idle()}) == 1


# --------------------------------------------------------------------------- examples


def a_family() -> Family:
    return Family(
        id="f", title="F", repo="o/f", pipeline="P", task="t2v", size_multiple=16, frame_step=4, width=64, height=32,
        num_frames=5, fps=Fraction(16), num_inference_steps=4, guidance_scale=5.0,
    )  # fmt: skip


def a_case() -> Case:
    return Case(
        family=a_family(), machine=MACHINE, device=CPU, width=64, height=32, num_frames=5, num_inference_steps=4,
        guidance_scale=5.0, dtype="float32",
    )  # fmt: skip


def a_plan(levers: tuple[Lever, ...]) -> records.Plan:
    decisions = tuple(
        Decision(lever=lever.name, requested="auto", chosen="on", status=Status.APPLIED, promise=Promise.EXACT,
                 reason="why not") for lever in levers
    )  # fmt: skip
    return records.Plan(
        request=Request(), load=LoadSpec(family="f", source="s", dtype="float32", device="cpu"), levers=levers,
        decisions=decisions, promise=Promise.EXACT,
        expected=records.Expected(seconds=None, seconds_basis="none", peak_bytes=None, memory_basis="none"),
    )  # fmt: skip


@pytest.mark.parametrize("fps", ["1e9999999999", True, "1/0", "9" * 400])
def test_a_frame_rate_that_would_be_computed_for_ever_is_refused(fps: object) -> None:
    with pytest.raises(BadInput, match="fps"):
        Request.from_dict({"fps": fps})
