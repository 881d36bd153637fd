"""Two branches on two replicas, both on the CPU: the same film, whatever fails, and nothing left behind."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from undercrank import families
from undercrank.levers import cfg_parallel as module
from undercrank.levers import replica
from undercrank.levers.cfg_parallel import BATCHED, BY_TEXT, NAMED, CfgParallel
from undercrank.levers.uploads import Uploads, Watch
from undercrank.records import (
    BadInput,
    Cancelled,
    Case,
    Device,
    LeverRefused,
    Machine,
    Measurement,
    Promise,
    Request,
    Trace,
)
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline, tiny_pipeline_of

pytestmark = [
    # Mochi asks for an autocast that the CPU does not have, and runs without it.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Schedulers that hand a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

WAN = "wan2.1-1.3b"
ON = CfgParallel(device="cpu")
TRACE = Trace(stage_s={}, step_ms=(1.0,), stalls=0)


def rig_of(pipe) -> Rig:
    name = type(pipe).__name__
    row = families.of_pipeline(name) or families.family(WAN)
    return Rig(pipe, row, "cpu")


@pytest.fixture
def rig() -> Rig:
    return rig_of(tiny_pipeline(WAN))


def film(rig: Rig, steps: int = 3, **inputs) -> torch.Tensor:
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**tiny_inputs(rig.pipe, steps=steps, **inputs))[0]


def together(rig: Rig) -> int:
    return rig.counters.get("cfg_parallel.together", 0)


def routed(rig: Rig) -> int:
    return rig.counters.get("cfg_parallel.routed", 0)


@contextlib.contextmanager
def each_forward(denoiser, before) -> Iterator[None]:
    """`before(number of the call)` runs ahead of each forward."""
    stock, count = denoiser.forward, iter(range(10_000))

    def forward(*args, **kwargs):
        before(next(count))
        return stock(*args, **kwargs)

    with patch.object(denoiser, "forward", forward):
        yield


# --------------------------------------------------------------------------- the same film


@pytest.mark.parametrize("name", sorted(NAMED | BY_TEXT))
def test_pipelines_that_call_once_for_each_branch_make_the_same_film_bit_for_bit(name: str) -> None:
    rig = rig_of(tiny_pipeline_of(name))
    stock = film(rig)
    with ON.engage(rig):
        assert torch.equal(film(rig), stock), "one after the other"
        assert routed(rig) and not together(rig)
        assert torch.equal(film(rig), stock), "at once"
        assert together(rig) == routed(rig) > 0
        assert ON.verify(rig, TRACE) == []
    assert torch.equal(film(rig), stock)


@pytest.mark.parametrize("name", sorted(BATCHED))
def test_pipelines_that_batch_their_branches_make_the_same_film_up_to_rounding(name: str) -> None:
    rig = rig_of(tiny_pipeline_of(name))
    stock = film(rig)
    with ON.engage(rig):
        first, second = film(rig), film(rig)
        assert together(rig) == routed(rig) > 0
        assert torch.equal(first, second)
        assert torch.allclose(first, stock, rtol=1e-3, atol=1e-4)
        assert ON.verify(rig, TRACE) == []


@pytest.mark.parametrize("name", ["WanPipeline", "WanVideoToVideoPipeline"])
def test_one_tensor_for_both_texts_is_two_branches_all_the_same(name: str) -> None:
    rig = rig_of(tiny_pipeline_of(name))
    text = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(3))
    texts = {"prompt": None, "negative_prompt": None, "prompt_embeds": text, "negative_prompt_embeds": text}
    stock = film(rig, **texts)
    with ON.engage(rig):
        for _ in range(2):
            assert torch.equal(film(rig, **texts), stock)
        assert together(rig) == routed(rig) > 0 and ON.verify(rig, TRACE) == []


@pytest.mark.parametrize("name", [WAN, "hunyuanvideo-1.5-480p", "cogvideox-2b", "kandinsky5-lite"])
def test_between_devices_of_two_kinds_all_that_a_branch_needs_is_sent_and_its_answer_comes_back(name: str) -> None:
    """The primary on the logical device, where a tensor of another device is an error, and the replica on the CPU.

    Attention is computed in other steps there, so that the latents of both agree up to rounding.
    """
    from undercrank.audit import DEVICE, logical_device

    pipe = tiny_pipeline(name)
    stock = pipe(**tiny_inputs(pipe, steps=3))[0]
    rig = Rig(pipe, families.family(name), f"{DEVICE}:0")
    with logical_device(pipe) as auditor, patch.object(replica, "refuse_patched"), contextlib.ExitStack() as stack:
        stack.enter_context(rig.seams())
        stack.enter_context(ON.engage(rig))
        stack.enter_context(mirrored().engage(rig))
        assert {weight.device.type for weight in rig.replicas[0].parameters()} == {"cpu"}
        assert {weight.device.type for weight in rig.primaries[0].parameters()} == {DEVICE}
        for _ in range(2):
            with rig.call(), torch.no_grad():
                latents = auditor.to_cpu(pipe(**tiny_inputs(pipe, steps=3))[0])
            assert torch.allclose(latents, stock, rtol=1e-3, atol=1e-4)
        assert together(rig) == 3


def test_masks_that_a_model_makes_in_its_forward_are_two_sided_in_the_replicas_thread_too() -> None:
    """Else HunyuanVideo-1.5 would read its picture's mask back from the second device, four times a step."""
    rig = rig_of(tiny_pipeline("hunyuanvideo-1.5-480p"))
    stock, beside, inside, after = film(rig), [], [], []

    def modes() -> list[bool]:
        return [mode.knows_constants for mode in pushed()]

    def pushed() -> list[Uploads]:
        return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]

    with patch.object(Watch, "sends", True), ON.engage(rig), mirrored().engage(rig):
        twin = rig.replicas[0]
        twin.image_embedder.register_forward_hook(lambda *_: beside.append(modes()))
        twin.transformer_blocks[0].register_forward_pre_hook(lambda *_: inside.append(modes()))
        twin.proj_out.register_forward_hook(lambda *_: after.append((pushed()[0], len(pushed()[0]._constants))))
        for _ in range(2):
            assert torch.equal(film(rig), stock)
            mode, made = after[-1]
            assert made and not mode._constants, "what one generation made is not kept for the next"
    assert beside == [[True]] * 6 and inside == [[]] * 6
    assert modes() == []


def test_two_experts_have_a_replica_each() -> None:
    rig = rig_of(tiny_pipeline("wan2.2-a14b"))
    stock = film(rig, steps=4)
    with ON.engage(rig):
        assert len(rig.denoisers) == 4
        film(rig, steps=4)
        assert torch.equal(film(rig, steps=4), stock) and together(rig) == 4


def test_the_first_branch_is_computed_by_the_replica_in_another_thread(rig: Rig) -> None:
    calls = []
    with ON.engage(rig):
        film(rig)
        primary, twin = rig.denoisers
        for denoiser in (primary, twin):
            stock = denoiser.forward

            def forward(*args, stock=stock, denoiser=denoiser, **kwargs):
                calls.append((denoiser is twin, rig.branch, threading.current_thread() is threading.main_thread()))
                return stock(*args, **kwargs)

            denoiser.forward = forward
        film(rig)
        del primary.forward, twin.forward
    assert sorted(set(calls)) == [(False, "uncond", True), (True, "cond", False)]
    assert len(calls) == 6


def test_both_branches_really_run_at_the_same_time(rig: Rig) -> None:
    """Each waits for the other to have begun: one after the other, they would wait for ever."""
    with ON.engage(rig):
        film(rig)
        meeting = threading.Barrier(2, timeout=60)
        primary, twin = rig.denoisers
        with each_forward(primary, lambda i: meeting.wait()), each_forward(twin, lambda i: meeting.wait()):
            film(rig)
        assert together(rig) == 3


# --------------------------------------------------------------------------- guidance


def test_without_guidance_one_device_does_it(rig: Rig) -> None:
    stock = film(rig, guidance_scale=1.0)
    with ON.engage(rig):
        assert torch.equal(film(rig, guidance_scale=1.0), stock)
        assert not routed(rig)
        assert ON.verify(rig, TRACE) == ["no step had two branches to share out: no effect"]


def test_a_run_without_guidance_settles_nothing_for_the_next_one(rig: Rig) -> None:
    """The key is settled by a run that really had the replica work, and by no other."""
    stock = film(rig, guidance_scale=5.0)
    with ON.engage(rig):
        film(rig, guidance_scale=1.0)
        assert torch.equal(film(rig, guidance_scale=5.0), stock)
        assert routed(rig) == 3 and together(rig) == 0
        assert torch.equal(film(rig, guidance_scale=5.0), stock)
        assert together(rig) == 3


def test_guidance_that_holds_in_some_steps_only_shares_out_those() -> None:
    rig = rig_of(tiny_pipeline("hunyuanvideo-1.5-480p"))
    guider = rig.pipe.guider.new(start=0.3, stop=0.8)

    def film_anew() -> torch.Tensor:
        rig.pipe.guider = guider.new()  # stock asks a used one, at its last step, whether to encode a negative prompt
        return film(rig, steps=6)

    stock = film_anew()
    with ON.engage(rig):
        assert torch.equal(film_anew(), stock) and not together(rig)
        assert torch.equal(film_anew(), stock)
        assert 0 < together(rig) < 6
        assert not rig.counters.get("cfg_parallel.late")


def test_guidance_that_a_callback_switches_off_goes_on_alone(rig: Rig) -> None:
    def off_after_two(pipe, index, timestep, tensors):
        pipe._guidance_scale = 1.0 if index >= 1 else 5.0
        return {}

    stock = film(rig, steps=4, callback_on_step_end=off_after_two)
    with ON.engage(rig):
        for _ in range(2):
            assert torch.equal(film(rig, steps=4, callback_on_step_end=off_after_two), stock)
        assert together(rig) == routed(rig) == 2


def test_a_second_branch_that_never_comes_is_caught_before_the_scheduler_sees_the_empty_answer(rig: Rig) -> None:
    from undercrank.levers import branches

    with ON.engage(rig):
        film(rig)
        stock = film(rig, guidance_scale=1.0)
        with patch.object(branches, "_is_guided", lambda pipe: True):
            assert torch.equal(film(rig, guidance_scale=1.0), stock)
            assert rig.counters["cfg_parallel.late"] == 3
            assert any("never came" in complaint for complaint in ON.verify(rig, TRACE))


# --------------------------------------------------------------------------- which steps are known


def test_another_size_is_run_one_after_the_other_first_and_both_stay_known(rig: Rig) -> None:
    small, large = {"width": 64, "height": 64}, {"width": 96, "height": 64}
    stock = film(rig, **small)
    with ON.engage(rig):
        film(rig, **small)
        film(rig, **large)
        assert together(rig) == 0
        for size in (small, large, small):
            again = film(rig, **size)
            assert together(rig) == 3
        assert torch.equal(again, stock)


@pytest.mark.parametrize("other", [{"num_inference_steps": 4}, {"max_sequence_length": 64}])
def test_another_number_of_steps_or_length_of_text_is_another_kind(rig: Rig, other: dict) -> None:
    with ON.engage(rig):
        film(rig)
        film(rig, **other)
        assert routed(rig) and not together(rig)


def test_other_levers_or_modes_of_torch_are_another_kind(rig: Rig) -> None:
    with ON.engage(rig):
        film(rig)
        rig.engaged = (("step_cache", "{}"),)
        film(rig)
        assert routed(rig) and not together(rig)
        with torch.inference_mode():
            film(rig)
        assert routed(rig) and not together(rig)


def test_a_prompt_of_another_length_is_another_kind_where_padding_is_cut_off() -> None:
    """The texts keep their shape; how many tokens of them are valid decides the shapes inside the model."""
    rig = rig_of(tiny_pipeline("hunyuanvideo-1.5-480p"))
    with ON.engage(rig):
        film(rig, prompt="a ball")
        film(rig, prompt="a ball")
        assert together(rig)
        film(rig, prompt="a red ball that rolls to the left, slowly, until it is gone")
        assert routed(rig) and not together(rig)
        film(rig, prompt="a ball")
        assert together(rig)


def test_known_kinds_are_bounded(rig: Rig) -> None:
    from undercrank.levers import branches

    with ON.engage(rig), patch.object(branches, "SETTLED", 1):
        film(rig, steps=2)
        film(rig, steps=3)
        film(rig, steps=2)
        assert not together(rig)


# --------------------------------------------------------------------------- what fails


def test_a_worker_that_raises_fails_the_generation_once(rig: Rig) -> None:
    stock = film(rig)
    with ON.engage(rig):
        film(rig)

        def fail(index: int) -> None:
            if index == 1:
                raise RuntimeError("the replica stumbled")

        with each_forward(rig.replicas[0], fail), pytest.raises(RuntimeError, match="the replica stumbled"):
            film(rig)
        assert torch.equal(film(rig), stock) and together(rig) == 3
        assert ON.verify(rig, TRACE) == []


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_primary_that_raises_leaves_no_work_to_the_next_generation(rig: Rig, is_settled: bool) -> None:
    stock = film(rig)
    with ON.engage(rig):
        if is_settled:
            film(rig)
        at_work, done = threading.Event(), []

        def slow(index: int) -> None:
            if index == 1:
                at_work.set()
                threading.Event().wait(0.2)
            done.append(index)

        def fail(index: int) -> None:
            if index == 1:
                assert at_work.wait(60)
                raise ZeroDivisionError

        with each_forward(rig.replicas[0], slow), each_forward(rig.primaries[0], fail):
            with pytest.raises(ZeroDivisionError):
                film(rig)
            assert done == [0, 1], "drained before the failure was told"
        assert torch.equal(film(rig), stock)
        assert together(rig) == (3 if is_settled else 0), "a failed run settles nothing"


def test_a_cancel_in_the_third_step_settles_nothing_and_the_next_film_is_whole(rig: Rig) -> None:
    stock = film(rig, steps=4)
    with ON.engage(rig):
        rig.at_step.append(stop := lambda index: rig.cancel() if index == 2 else None)
        with pytest.raises(Cancelled):
            film(rig, steps=4)
        rig.at_step.remove(stop)
        assert torch.equal(film(rig, steps=4), stock) and not together(rig)
        assert torch.equal(film(rig, steps=4), stock) and together(rig) == 4
        rig.at_step.append(stop)
        with pytest.raises(Cancelled):
            film(rig, steps=4)
        rig.at_step.remove(stop)
        assert torch.equal(film(rig, steps=4), stock) and together(rig) == 4


def test_a_cancel_between_the_two_branches_ends_the_run(rig: Rig) -> None:
    stock = film(rig)
    with ON.engage(rig):
        film(rig)
        with each_forward(rig.replicas[0], lambda index: rig.cancel() if index == 1 else None):
            with pytest.raises(Cancelled):
                film(rig)
        assert torch.equal(film(rig), stock)


def test_a_replica_that_is_lost_is_said_so_and_one_device_goes_on(rig: Rig) -> None:
    stock = film(rig)
    with ON.engage(rig):
        film(rig)
        real, twin = replica.sums, rig.replicas[0]

        def lost(denoiser):
            if denoiser is twin:
                raise RuntimeError("CUDA error: device-side assert triggered\nmore")
            return real(denoiser)

        with patch.object(replica, "sums", lost):
            assert torch.equal(film(rig), stock)
        complaint = ON.verify(rig, TRACE)[0]
        assert (
            "lost (RuntimeError: CUDA error: device-side assert triggered)" in complaint and "one device" in complaint
        )
        assert torch.equal(film(rig), stock), "and it stays lost"
        assert not routed(rig) and "one device" in ON.verify(rig, TRACE)[0]


def test_a_slow_replica_is_waited_for(rig: Rig) -> None:
    stock = film(rig)
    with ON.engage(rig):
        film(rig)
        with each_forward(rig.replicas[0], lambda index: threading.Event().wait(0.3)):
            assert torch.equal(film(rig), stock) and together(rig) == 3


# --------------------------------------------------------------------------- nothing is left


def test_a_replica_that_finds_no_memory_leaves_nothing(rig: Rig) -> None:
    film(rig)
    before, real, count = fingerprint(rig.pipe), replica._sent, iter(range(100))

    def sent(tensor, device):
        if next(count) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return real(tensor, device)

    with patch.object(replica, "_sent", sent):
        with pytest.raises(LeverRefused, match=r"second device has .* GiB free, replica needs .*out of memory"):
            with ON.engage(rig):
                pass
    assert differences(before, fingerprint(rig.pipe)) == [] and rig.replicas == []
    with ON.engage(rig):
        assert len(rig.replicas) == 1


def test_a_cancel_stops_the_filling_between_two_tensors(rig: Rig) -> None:
    before, real, sent = fingerprint(rig.pipe), replica._sent, []

    def cancel_at_the_third(tensor, device):
        sent.append(tensor)
        if len(sent) == 3:
            rig.cancel()
        return real(tensor, device)

    with patch.object(replica, "_sent", cancel_at_the_third), pytest.raises(Cancelled), ON.engage(rig):
        pass
    assert len(sent) == 3 and differences(before, fingerprint(rig.pipe)) == []


@pytest.mark.parametrize("name", ["swap_class", "appended"])
def test_an_install_that_fails_half_way_leaves_no_thread_and_no_replica(rig: Rig, name: str) -> None:
    film(rig)
    before = fingerprint(rig.pipe)
    with patch.object(module, name, side_effect=OSError("no")), pytest.raises(OSError), ON.engage(rig):
        pass
    assert differences(before, fingerprint(rig.pipe)) == [] and rig.replicas == []


def test_leaving_twice_over_and_again_leaves_nothing(rig: Rig) -> None:
    stock = film(rig)
    before = fingerprint(rig.pipe)
    for _ in range(2):
        with ON.engage(rig):
            film(rig)
            assert torch.equal(film(rig), stock)
            assert any(thread.name.startswith("undercrank-replica") for thread in threading.enumerate())
        assert differences(before, fingerprint(rig.pipe)) == []
        assert rig.replicas == []


def test_closing_a_router_twice_is_harmless(rig: Rig) -> None:
    from undercrank.levers import branches

    router = branches.Router(rig, branches.Road(torch.device("cpu"), torch.device("cpu")), named=True, batched=False)
    router.close()
    router.close()


def test_a_deep_copy_of_the_scheduler_steps_by_itself(rig: Rig) -> None:
    """Diffusion forcing copies the scheduler for each frame."""
    import copy
    import inspect

    with ON.engage(rig):
        other = copy.deepcopy(rig.pipe.scheduler)
        other.set_timesteps(3)
        other.step(torch.zeros(1, 2), other.timesteps[0], torch.zeros(1, 2))
        assert other.step_index == 1 and rig.pipe.scheduler.step_index is None
        assert "sample" in inspect.signature(rig.pipe.scheduler.step).parameters


# --------------------------------------------------------------------------- the same weights


def test_the_replica_has_the_weights_of_the_denoiser_and_memory_of_its_own(rig: Rig) -> None:
    denoiser = rig.pipe.transformer
    with ON.engage(rig) as filled:
        twin = rig.replicas[0]
        ours, theirs = dict(denoiser.state_dict()), dict(twin.state_dict())
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert not {t.data_ptr() for t in ours.values()} & {t.data_ptr() for t in theirs.values()}
        assert filled.fill_bytes == replica.bytes_of(twin) and filled.fill_s > 0


def test_weights_that_are_changed_in_place_reach_the_replica_before_the_next_run(rig: Rig) -> None:
    """As a LoRA is fused: through `.data`, which no version counter sees."""
    with ON.engage(rig):
        film(rig)
        before = film(rig)
        rig.pipe.transformer.blocks[0].attn1.to_q.weight.data += 0.5
        changed = film(rig)
        assert rig.counters["cfg_parallel.updated"] == 1 and not together(rig)
        assert torch.equal(film(rig), changed) and together(rig) == 3
    assert torch.equal(film(rig), changed) and not torch.equal(before, changed)


class Lora(torch.nn.Module):
    """What matters of a LoRA layer of peft: weights under new names, and a strength that is no weight."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, {"style": 1.0}
        self.down = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden_states) + self.up(self.down(hidden_states)) * self.scaling["style"]


def lora_on(pipe) -> Lora:
    torch.manual_seed(0)
    attention = pipe.transformer.blocks[0].attn1
    attention.to_q = Lora(attention.to_q)
    return attention.to_q


def test_a_lora_that_is_there_from_the_start_is_on_both(rig: Rig) -> None:
    lora = lora_on(rig.pipe)
    stock = film(rig)
    with ON.engage(rig):
        film(rig)
        assert torch.equal(film(rig), stock) and together(rig) == 3
        lora.scaling["style"] = 0.25
        weaker = film(rig)
        assert rig.counters["cfg_parallel.updated"] == 1
        assert torch.equal(film(rig), weaker) and together(rig) == 3
    assert torch.equal(film(rig), weaker) and not torch.equal(stock, weaker)


def test_a_lora_that_comes_later_is_computed_on_one_device_and_said_so(rig: Rig) -> None:
    with ON.engage(rig):
        film(rig)
        lora_on(rig.pipe)
        moved = film(rig)
        assert not routed(rig) and "LoRA" in ON.verify(rig, TRACE)[0]
    assert torch.equal(film(rig), moved)


# --------------------------------------------------------------------------- what is refused


def test_a_hooked_offloaded_compiled_or_quantised_denoiser_is_refused(rig: Rig) -> None:
    denoiser = rig.pipe.transformer

    def refused(match: str) -> None:
        with pytest.raises(LeverRefused, match=match), ON.engage(rig):
            pass

    with patch.object(denoiser.blocks[0], "forward", denoiser.blocks[0].forward):
        refused("blocks.0 runs under a hook")
    denoiser.blocks[0]._hf_hook = object()
    refused("offloaded")
    del denoiser.blocks[0]._hf_hook
    denoiser.blocks[0]._compiled_call_impl = lambda: None
    refused("compiled already")
    denoiser.blocks[0]._compiled_call_impl = None

    class Odd(torch.nn.Parameter):
        pass

    denoiser.blocks[0].attn1.to_q.weight = Odd(torch.zeros(1), requires_grad=False)
    refused("is a Odd: only plain weights")
    denoiser.blocks[0].attn1.to_q.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
    refused("is on meta and not on cpu")


def test_one_cpu_has_no_second_device_unless_it_is_named(rig: Rig) -> None:
    with pytest.raises(LeverRefused, match="needs a second device"), CfgParallel().engage(rig):
        pass


def gpu(index: int, free_gib: float = 140.0, name: str = "NVIDIA H200") -> Device:
    free = int(free_gib * 2**30)
    return Device(kind="cuda", index=index, name=name, capability=(9, 0), total_bytes=free, free_bytes=free)


def case(*devices: Device, family: str = "hunyuanvideo-1.5-720p", **other) -> Case:
    row = families.family(family)
    fields = {
        "family": row,
        "device": devices[0],
        "machine": Machine(name="a machine", devices=devices, cpu_count=8),
        "width": 1280,
        "height": 720,
        "num_frames": 33,
        "num_inference_steps": 30,
        "guidance_scale": 6.0,
        "dtype": "bfloat16",
    }
    return Case(**(fields | other))


def test_a_second_device_without_room_is_refused_with_both_numbers() -> None:
    reason = CfgParallel().lacks(case(gpu(0), gpu(1, 11.2)))
    assert reason is not None
    assert reason.startswith("second device has 11.2 GiB free, replica needs 17.") and "cfg_parallel=off" in reason
    assert CfgParallel().lacks(case(gpu(0), gpu(1))) is None
    assert "needs a second device, and this machine has cuda:0" in str(CfgParallel().lacks(case(gpu(0))))


def test_the_second_device_is_the_one_with_room_that_is_like_the_first_and_has_most_free() -> None:
    devices = gpu(0), gpu(1, 60), gpu(2, 100, "NVIDIA L40S"), gpu(3, 80), gpu(4, 4)
    assert module.second_device(case(*devices), "best") == devices[3]
    assert module.second_device(case(gpu(0), gpu(1, 4), gpu(2, 100, "NVIDIA L40S")), "best").index == 2
    assert module.second_device(case(*devices), "cuda:1") == devices[1]


def row_of(lever: str, gain: float, **fields) -> Measurement:
    row = Measurement(
        id=f"{lever}-{gain}", family="wan2.1-14b", lever=lever, source="random weights", machine="m",
        device="NVIDIA H200", versions={}, width=832, height=480, num_frames=81, num_inference_steps=5,
        dtype="bfloat16", n=2, gain=gain, distances={"max_abs": 0.0},
    )  # fmt: skip
    return replace(row, **fields)


def decided(*rows: Measurement, **request) -> dict[str, str]:
    from undercrank.ledger import Ledger
    from undercrank.planner import make_plan

    row = families.family("wan2.1-14b")
    machine = Machine(name="a machine", devices=(gpu(0), gpu(1)), cpu_count=8)
    asked = Request(model=row.id, prompt="a ball", **request)
    plan = make_plan(asked, family=row, machine=machine, ledger=Ledger(rows))
    return {d.lever: d.reason if d.chosen == "off" else d.chosen for d in plan.decisions}


def test_auto_engages_only_where_rows_show_a_gain_and_the_same_frames() -> None:
    assert "unmeasured on NVIDIA H200" in decided()["cfg_parallel"]
    assert decided(row_of("cfg_parallel", 1.9))["cfg_parallel"] == "on"
    assert (
        "not measured bit-identical" in decided(row_of("cfg_parallel", 1.9, distances={"max_abs": 1.0}))["cfg_parallel"]
    )
    assert "unmeasured" in decided(row_of("cfg_parallel", 1.9, device="NVIDIA L40S"))["cfg_parallel"]
    assert decided(row_of("cfg_parallel", 1.9), fidelity="exact")["cfg_parallel"] == "on"


def test_auto_takes_two_devices_or_compiled_code_whichever_was_measured_faster() -> None:
    two = decided(row_of("cfg_parallel", 1.9), row_of("compile", 1.3))
    assert two["cfg_parallel"] == "on" and "two branches are computed at once" in two["compile"]
    one = decided(row_of("cfg_parallel", 1.1), row_of("compile", 1.3))
    assert one["compile"] not in ("off", "") and "rounding" in one["cfg_parallel"]
    off = decided(row_of("cfg_parallel", 1.1), row_of("compile", 1.3), wishes=(("compile", "off"),))
    assert off["cfg_parallel"] == "on"


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("hunyuanvideo", "one branch"),
        ("cosmos-2.5-2b", "works on the first branch's answer"),
    ],
)
def test_pipelines_that_cannot_share_out_say_why(pipeline: str, reason: str) -> None:
    assert reason in str(CfgParallel().lacks(case(gpu(0), gpu(1), family=pipeline)))


def test_every_family_is_routed_or_named_with_its_reason() -> None:
    known = NAMED | BY_TEXT | BATCHED | set(module.WHY_NOT)
    assert {row.pipeline for row in families.FAMILIES} <= known


def test_it_promises_bits_only_in_eager_code_on_devices_of_one_kind_and_branch_by_branch() -> None:
    two = gpu(0), gpu(1)
    assert CfgParallel().promises(case(*two)) is Promise.EXACT
    assert CfgParallel().promises(case(*two, engaged=("compile",))) is Promise.ROUNDING
    assert CfgParallel().promises(case(*two, family="cogvideox-2b")) is Promise.ROUNDING
    assert CfgParallel().promises(case(gpu(0), gpu(1, name="NVIDIA L40S"))) is Promise.ROUNDING


def test_it_doubts_what_would_move_the_film_or_gain_nothing() -> None:
    two = gpu(0), gpu(1)
    assert CfgParallel().doubt(case(*two)) is None
    assert "guidance is off" in str(CfgParallel().doubt(case(*two, guidance_scale=1.0)))
    assert "rounding" in str(CfgParallel().doubt(case(*two, engaged=("compile",))))
    assert "another kind" in str(CfgParallel().doubt(case(gpu(0), gpu(1, name="NVIDIA L40S"))))


def test_the_knob_takes_a_device() -> None:
    assert CfgParallel.from_wish({"cfg_parallel": "cuda:1"}) == CfgParallel(device="cuda:1")
    assert CfgParallel.from_wish({"cfg_parallel": "on"}) == CfgParallel()
    with pytest.raises(BadInput, match="such as cuda:1"):
        CfgParallel.from_wish({"cfg_parallel": "yes"})


# --------------------------------------------------------------------------- with other levers, and by the doors


def stacked(rig: Rig, *levers) -> contextlib.ExitStack:
    """In ORDER, as the engine enters them."""
    stack = contextlib.ExitStack()
    stack.enter_context(ON.engage(rig))
    for lever in levers:
        stack.enter_context(lever.engage(rig))
    return stack


def compiled():
    from undercrank.levers.compile import Compile

    return Compile(backend="eager")


def mirrored():
    from undercrank.levers.host_sync import HostSync

    return HostSync()


def skipping():
    from undercrank.levers.step_cache import StepCache

    return StepCache(cache="mask", mask="101101")


def deciding():
    """First Block Cache, which looks at data in each forward."""
    from undercrank.levers.step_cache import StepCache

    return StepCache(cache="fbcache", threshold=0.2)


def attending():
    from undercrank.levers.attention import Attention

    return Attention(kernel="flash")


def trimmed():
    from undercrank.levers.text_trim import TextTrim

    return TextTrim()


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        (WAN, (mirrored,)),
        (WAN, (attending,)),
        (WAN, (compiled,)),
        ("hunyuanvideo-1.5-480p", (trimmed, mirrored)),
        ("hunyuanvideo-1.5-480p", (trimmed, mirrored, compiled)),
    ],
)
def test_levers_engage_on_the_replica_too_and_the_film_is_theirs_bit_for_bit(name: str, levers: tuple) -> None:
    rig = rig_of(tiny_pipeline(name))
    alone = contextlib.ExitStack()
    for make in levers:
        alone.enter_context(make().engage(rig))
    with alone:
        theirs = film(rig)
    on = [make() for make in levers]
    with stacked(rig, *on):
        assert torch.equal(film(rig), theirs) and not together(rig)
        assert torch.equal(film(rig), theirs) and together(rig) == 3
        for lever in (ON, *on):
            assert lever.verify(rig, TRACE) == []


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        (WAN, (skipping,)),
        (WAN, (deciding,)),
        ("wan2.2-a14b", (skipping,)),
        ("hunyuanvideo-1.5-480p", (trimmed, skipping, compiled, mirrored)),
    ],
)
def test_each_branch_skips_what_it_would_skip_on_one_device(name: str, levers: tuple) -> None:
    rig = rig_of(tiny_pipeline(name))
    on = [make() for make in levers]
    with contextlib.ExitStack() as alone:
        for lever in on:
            alone.enter_context(lever.engage(rig))
        theirs, ran = film(rig, steps=6), dict(rig.executed)
    assert any(False in run for run in ran.values()), "something was skipped"
    with stacked(rig, *on):
        assert torch.equal(film(rig, steps=6), theirs) and not together(rig)
        for _ in range(3):
            assert torch.equal(film(rig, steps=6), theirs) and together(rig) == 6
            assert rig.executed == ran
        for lever in (ON, *on):
            assert lever.verify(rig, TRACE) == []


def test_easycache_whose_first_branch_decides_for_the_second_is_refused(rig: Rig) -> None:
    from undercrank.levers.step_cache import StepCache

    with ON.engage(rig), pytest.raises(LeverRefused, match="easycache: the first branch decides"):
        with StepCache(cache="easycache").engage(rig):
            pass


def test_step_cache_and_batched_branches_take_one_of_the_two() -> None:
    from undercrank.levers.step_cache import StepCache

    cog = case(gpu(0), gpu(1), family="cogvideox-2b", engaged=("step_cache",))
    assert "turn that off" in str(CfgParallel().lacks(cog))
    cog = case(gpu(0), gpu(1), family="cogvideox-2b", engaged=("cfg_parallel",))
    assert "turn that off" in str(StepCache().lacks(cog))
    wan = case(gpu(0), gpu(1), family=WAN, engaged=("cfg_parallel", "step_cache"))
    assert StepCache().lacks(wan) is None and CfgParallel().lacks(wan) is None


def test_only_one_thread_compiles_at_a_time() -> None:
    """Nothing is compiled in a run that computes branches at once: what is not known yet is run one by one."""
    rig = rig_of(tiny_pipeline(WAN))
    with stacked(rig, compiled()):
        for inputs in ({}, {"width": 96}):
            film(rig, **inputs)
            assert rig.counters["compile.graphs"] == 2 and not together(rig), "one for each of the two"
            film(rig, **inputs)
            assert not rig.counters.get("compile.graphs") and together(rig) == 3


def test_accelerate_takes_a_device_by_name_and_gives_the_pipeline_back_as_it_was() -> None:
    import undercrank

    pipe = tiny_pipeline(WAN)
    stock = pipe(**tiny_inputs(pipe, steps=3))[0]
    before = fingerprint(pipe)
    with undercrank.accelerate(pipe, cfg_parallel="cpu") as run:
        for _ in range(2):
            assert torch.equal(pipe(**tiny_inputs(pipe, steps=3))[0], stock)
        assert run.plan is not None and run.plan.promise is Promise.EXACT
        assert run.rig.counters["cfg_parallel.together"] == 3
        assert "on cpu" in run.receipts[0].remarks[0] and "3 of 3 steps had both at once" in run.receipts[0].remarks[0]
        assert [receipt.complaints for receipt in run.receipts] == [()]
        pipe(**tiny_inputs(pipe, steps=3, guidance_scale=1.0))
        before["pipe._guidance_scale"] = 1.0
        assert "no effect" in run.receipts[0].complaints[0]
        assert any("guidance is off" in decision.reason for decision in run.plan.decisions)
    assert differences(before, fingerprint(pipe)) == []


def test_on_without_a_second_device_is_refused_with_the_reason() -> None:
    import undercrank

    pipe = tiny_pipeline(WAN)
    with undercrank.accelerate(pipe, cfg_parallel="on"), pytest.raises(LeverRefused, match="needs a second device"):
        pipe(**tiny_inputs(pipe, steps=3))
    assert LeverRefused.exit_code == 3


def test_a_lever_that_fails_after_the_attention_was_swapped_leaves_the_pipeline_as_it_was() -> None:
    import undercrank
    from undercrank.levers.compile import Compile

    pipe = tiny_pipeline(WAN)
    pipe(**tiny_inputs(pipe, steps=2))
    before = fingerprint(pipe)
    levers = {"cfg_parallel": "cpu", "attention_backend": "flash", "compile": "on"}
    with undercrank.accelerate(pipe, **levers) as run, patch.object(Compile, "engage", side_effect=OSError("no")):
        with pytest.raises(OSError):
            pipe(**tiny_inputs(pipe, steps=2))
        assert run.rig.replicas == []
    assert differences(before, fingerprint(pipe)) == []
