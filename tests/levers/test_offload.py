"""offload: the same film with the weights on the host, and a choice only where the resident form does not fit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.hooks import HookRegistry

from undercrank import families
from undercrank.ledger import Ledger
from undercrank.levers import formats, offload
from undercrank.levers.compile import Compile
from undercrank.levers.decode import Decode
from undercrank.levers.formats import FORMATS
from undercrank.levers.host_sync import HostSync
from undercrank.levers.offload import Offload
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.load import load
from undercrank.planner import load_spec, make_plan, refuse_if_too_big
from undercrank.records import BadInput, Device, Lever, LeverRefused, Machine, OutOfMemory, Plan, Request, Trace
from undercrank.rig import FLEETING, Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline

GIB = 1 << 30
GPU = Device(kind="cuda", name="a GPU", capability=(10, 0), free_bytes=139 * GIB)
WAN = "wan2.1-14b"
TRACE = Trace(stage_s={}, step_ms=(1.0,), stalls=0)


def plan(free_gib: float = 139, device: Device = GPU, **more: Any) -> Plan:
    wishes = tuple(more.pop("wishes", {}).items())
    machine = Machine(
        name="m",
        devices=(replace(device, free_bytes=int(free_gib * GIB)),),
        cpu_count=1,
        packages={"torchao": "0.18.0"},
    )
    request = Request(**{"prompt": "a fox", "model": WAN, "wishes": wishes, **more})
    return make_plan(request, family=families.family(request.model), machine=machine, ledger=Ledger())


def mode(made: Plan) -> str:
    return next((lever.mode for lever in made.levers if isinstance(lever, Offload)), "none")


def reason(made: Plan) -> str:
    return next(each.reason for each in made.decisions if each.lever == "offload")


def test_it_stays_off_where_everything_fits() -> None:
    made = plan()
    assert mode(made) == "none" and made.load.resident and reason(made) == "everything fits on the device"


def test_it_moves_as_little_as_the_device_asks_for() -> None:
    resident = plan().expected.peak_bytes or 0
    less = resident / GIB - 0.1
    assert mode(plan(less)) == "none"  # the text encoders wait on the host, and that is enough
    assert mode(plan(less, wishes={"prompt_cache": "keep"})) == "model"
    assert mode(plan(26)) == "group"
    small = plan(1)
    assert mode(small) == "none" and "does not fit with offload=group either" in reason(small)


def test_whether_all_fits_is_asked_of_the_clip_with_its_padding_trimmed() -> None:
    """Stock's mask over all pairs of tokens is no reason to move weights where it is not built."""
    clip = {"model": "hunyuanvideo-1.5-720p", "num_frames": 121}
    wide, narrow = plan(36, **clip), plan(22, **clip)
    assert reason(wide) == "everything fits on the device"
    assert mode(narrow) == "model" and narrow.expected.peak_bytes < 22 * GIB
    assert reason(plan(36, **clip, wishes={"text_trim": "off"})).startswith("does not fit")  # 41 GiB of mask


def test_the_plan_expects_less_of_the_device_and_the_request_is_no_longer_refused() -> None:
    made, resident = plan(26), plan(26, wishes={"offload": "none"})
    assert made.expected.peak_bytes < 26 * GIB < resident.expected.peak_bytes and not made.load.resident
    family, machine = families.family(WAN), Machine(name="m", devices=(replace(GPU, free_bytes=26 * GIB),), cpu_count=1)
    refuse_if_too_big(made, family, machine, machine.devices[0])
    with pytest.raises(OutOfMemory):
        refuse_if_too_big(resident, family, machine, machine.devices[0])


def test_weights_of_fewer_bits_are_counted_before_they_are_moved() -> None:
    resident = plan(wishes={"transformer_quant": "int8"})
    assert resident.expected.peak_bytes < plan().expected.peak_bytes
    free = resident.expected.peak_bytes / GIB + 0.1
    assert mode(plan(free)) != "none" and mode(plan(free, wishes={"transformer_quant": "int8"})) == "none"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BadInput, match="choose auto, none, model, group"):
        plan(wishes={"offload": "disk"})


def test_a_cpu_has_nowhere_to_send_a_model_from() -> None:
    cpu = Device(kind="cpu", name="Processor", free_bytes=48 * GIB)
    with pytest.raises(LeverRefused, match="the CPU is none"):
        plan(device=cpu, wishes={"offload": "model"})


def test_on_a_cpu_which_is_the_host_nothing_is_gained_by_waiting_there() -> None:
    cpu = Device(kind="cpu", name="Processor")
    peaks = {
        plan(20, device=cpu, wishes=wish).expected.peak_bytes
        for wish in ({}, {"offload": "group"}, {"prompt_cache": "host"})
    }
    assert len(peaks) == 1
    machine = Machine(name="m", devices=(replace(cpu, free_bytes=20 * GIB),), cpu_count=1)
    with pytest.raises(OutOfMemory) as refusal:
        refuse_if_too_big(plan(20, device=cpu), families.family(WAN), machine, machine.devices[0])
    assert "offload" not in str(refusal.value) and "prompt_cache" not in str(refusal.value)


@pytest.mark.parametrize(("mode", "other"), [("group", "compile"), ("group", "cuda_graph"), ("model", "cuda_graph")])
def test_what_holds_on_to_addresses_of_weights_or_passes_no_hook_does_not_go_together_with_it(
    mode: str, other: str
) -> None:
    with pytest.raises(LeverRefused, match="does not go together with"):
        plan(wishes={"offload": mode, other: "on"})


def test_blocks_of_a_denoiser_that_comes_whole_are_compiled() -> None:
    assert {lever.name for lever in plan(wishes={"offload": "model", "compile": "on"}).levers} >= {"offload", "compile"}
    whole, by_blocks = plan(22, model="hunyuanvideo-1.5-720p", num_frames=33), plan(26)
    assert (mode(whole), mode(by_blocks)) == ("model", "group")
    said = [next(each.reason for each in made.decisions if each.lever == "compile") for made in (whole, by_blocks)]
    assert said[0].startswith("unmeasured on") and said[1] == "does not go together with offload=group: turn that off"


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p"])
def test_compiled_blocks_of_a_denoiser_that_comes_whole_make_the_film_of_a_resident_one(name: str) -> None:
    rig = Rig(tiny_pipeline(name), families.family(name), "cpu")
    rig.pipe.set_progress_bar_config(disable=True)
    compiled = Compile(backend="aot_eager")
    with compiled.engage(rig):
        resident = run(rig)
    with Offload(mode="model").engage(rig), compiled.engage(rig):
        for _ in range(2):
            assert torch.equal(run(rig), resident)
            assert rig.counters["compile.executed"] == rig.counters["compile.calls"] > 0
            assert compiled.verify(rig, TRACE) == []


def test_blocks_are_not_moved_in_formats_that_were_not_tried() -> None:
    with pytest.raises(LeverRefused, match="offload=group was not tried with transformer=nvfp4"):
        plan(wishes={"offload": "group", "transformer_quant": "nvfp4"})
    assert plan(wishes={"offload": "model", "transformer_quant": "nvfp4"}).load.formats


def run(rig: Rig, steps: int = 2) -> torch.Tensor:
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**tiny_inputs(rig.pipe, steps=steps)).frames


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p", "cogvideox-2b", "ltx-video"])
def test_the_film_is_stocks_to_the_bit_and_nothing_is_left(name: str) -> None:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, families.family(name), "cpu")
    stock, before = run(rig), fingerprint(pipe)
    with Offload(mode="group").engage(rig):
        assert torch.equal(run(rig), stock)
    assert differences(before, fingerprint(pipe)) == []


@pytest.mark.parametrize("stored", [("transformer", "int8"), ("text_encoder", "fp8")])
def test_quantised_weights_are_moved_to_the_bit(stored: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LEAST_FEATURES", {False: 16, True: 16})
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    formats.convert(pipe.transformer, "transformer", FORMATS[stored], device="cpu")
    formats.convert(pipe.vae, "vae", FORMATS["vae", "fp8"], device="cpu")
    rig = Rig(pipe, families.family("wan2.1-1.3b"), "cpu")
    resident = run(rig)
    with Offload(mode="group").engage(rig):
        assert torch.equal(run(rig), resident)


@pytest.mark.parametrize("mode", ["group", "model"])
@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p"])
def test_other_levers_act_in_the_second_call_as_in_the_first(name: str, mode: str) -> None:
    """At the end of a call stock takes its hooks off and puts them on again. The CPU stands for the device here."""
    rig = Rig(tiny_pipeline(name), families.family(name), "cpu")
    rig.pipe.set_progress_bar_config(disable=True)
    others = [StepCache(cache="mask", mask="1101"), HostSync()]
    if name != "wan2.1-1.3b":
        others.insert(0, TextTrim())

    def films(*levers: Lever) -> list[tuple[torch.Tensor, dict[str, int]]]:
        with ExitStack() as stack:
            for lever in levers:
                stack.enter_context(lever.engage(rig))
            return [(run(rig, steps=4), dict(rig.counters)) for _ in range(2)]

    resident = films(*others)
    before = fingerprint(rig.pipe)
    for (there, acted), (here, counted) in zip(films(Offload(mode=mode), *others), resident, strict=True):
        assert torch.equal(there, here) and acted == counted
    assert [each for each in differences(before, fingerprint(rig.pipe)) if " tensor: " not in each] == []  # moved


def test_hooks_that_diffusers_takes_away_after_a_forward_take_no_other_lever_with_them() -> None:
    """By a stream, which a CPU has not, it follows the first forward with hooks of its own and removes them then."""
    from diffusers.hooks import ModelHook

    class Fleeting(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            module._diffusers_hook.remove_hook(FLEETING[1], recurse=False)
            return output

    name = "hunyuanvideo-1.5-480p"
    rig = Rig(tiny_pipeline(name), families.family(name), "cpu")
    rig.pipe.set_progress_bar_config(disable=True)
    denoiser = rig.pipe.transformer
    registered = HookRegistry.register_hook

    def with_fleeting(registry: HookRegistry, hook: ModelHook, hook_name: str) -> None:
        registered(registry, hook, hook_name)
        if hook_name == "group_offloading":
            registered(registry, Fleeting(), FLEETING[1])

    with TextTrim().engage(rig):
        trimmed = run(rig)
    before = fingerprint(rig.pipe)
    with patch.object(HookRegistry, "register_hook", with_fleeting), Offload(mode="group").engage(rig):
        with TextTrim().engage(rig):
            assert denoiser._diffusers_hook.get_hook(FLEETING[1]) is not None
            assert torch.equal(run(rig), trimmed)
            assert denoiser._diffusers_hook.get_hook(FLEETING[1]) is None
            assert rig.counters["text_trim.forwards"] == 4
    assert differences(before, fingerprint(rig.pipe)) == []


def test_weights_that_are_not_resident_are_loaded_onto_the_host() -> None:
    """The device does not exist here: nothing is sent to it before the lever is engaged."""
    row = families.family("flipbook")
    spec = replace(Offload(mode="group").configure(load_spec(row)), device="cuda:7")
    with load(spec, row) as found:
        assert found.rig.device == "cuda:7"
        assert {str(weight.device) for weight in found.rig.pipe.transformer.parameters()} == {"cpu"}


class Values:
    """A tensor as far as sending it goes: there is no second device here."""

    def __init__(self, where: str = "cpu") -> None:
        self.where = where

    def to(self, device: str, **_: Any) -> Values:
        return Values(device)


class Vae:
    def __init__(self) -> None:
        self.weights = [SimpleNamespace(data=Values()) for _ in range(3)]
        self.fails = False

    def parameters(self) -> list[Any]:
        return self.weights[:2]

    def buffers(self) -> list[Any]:
        return self.weights[2:]

    def encode(self, x: Values) -> list[str]:
        if self.fails:
            raise ZeroDivisionError
        return [x.where, *(weight.data.where for weight in self.weights)]

    decode = encode


def test_under_group_a_vae_is_on_the_device_while_it_is_called_and_on_the_host_between() -> None:
    vae = Vae()
    before = [weight.data for weight in vae.weights]
    with offload._whole_while_called(vae, "xpu"):
        for call in (vae.encode, vae.decode):
            assert call(Values()) == ["xpu"] * 4
            assert [weight.data for weight in vae.weights] == before
        vae.fails = True
        with pytest.raises(ZeroDivisionError):
            vae.decode(Values())
        assert [weight.data for weight in vae.weights] == before
    assert "decode" not in vars(vae)


def test_decode_by_chunks_goes_together_with_group() -> None:
    rig = Rig(tiny_pipeline("hunyuanvideo-1.5-480p"), families.family("hunyuanvideo-1.5-480p"), "cpu")
    rig.pipe.set_progress_bar_config(disable=True)
    inputs = lambda: tiny_inputs(rig.pipe, steps=2) | {"output_type": "pt"}  # noqa: E731
    with Decode().engage(rig), rig.seams(), torch.no_grad():
        with rig.call():
            resident = rig.pipe(**inputs()).frames
        with Offload(mode="group").engage(rig), rig.call():
            moved = rig.pipe(**inputs()).frames
            assert rig.counters == {"decode.films": 1}
    assert torch.equal(resident, moved)
