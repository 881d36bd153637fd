"""`accelerate` around a pipeline at hand: same latents, fewer stalls, and the pipeline as it was found."""

import contextlib
import copy
from unittest.mock import patch

import pytest
import torch
from accelerate.hooks import CpuOffload, add_hook_to_module
from accelerate.hooks import ModelHook as AccelerateHook

import undercrank
from undercrank.audit import stalls_and_result
from undercrank.engine import _HELD
from undercrank.levers import ORDER
from undercrank.levers.compile import Compile
from undercrank.records import BadInput, LeverRefused
from undercrank.rig import FLEETING
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline

FAMILIES = ["cogvideox-2b", "wan2.1-1.3b"]
STEPS = 4


class Stop(Exception):
    pass


@pytest.fixture(params=FAMILIES)
def pipe(request: pytest.FixtureRequest):
    pipe = tiny_pipeline(request.param)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def film(pipe, seed: int = 0, **more):
    with torch.no_grad():
        return pipe(**tiny_inputs(pipe, steps=STEPS, seed=seed), **more).frames


def stops_at(step: int, error: type[BaseException] = Stop):
    def callback(pipe, index, timestep, tensors):
        if index == step:
            raise error
        return {}

    return callback


def same_kinds(pipe, *calls) -> list[str]:
    """What differs between this pipeline and a twin that made the same calls without undercrank."""
    before = fingerprint(pipe)
    for call in calls:
        with contextlib.suppress(Stop, KeyboardInterrupt):
            call(pipe)
    return differences(before, fingerprint(pipe))


@pytest.mark.parametrize("name", FAMILIES)
def test_latents_are_equal_and_every_stall_is_gone(name: str) -> None:
    stock, latents = stalls_and_result(tiny_pipeline(name), tiny_inputs(name, steps=STEPS))
    fast, same = stalls_and_result(tiny_pipeline(name), tiny_inputs(name, steps=STEPS), host_sync="auto")
    assert stock.in_loop >= STEPS and fast.in_loop == 0
    assert torch.equal(latents, same)


def test_after_leaving_the_pipeline_is_what_the_same_stock_call_leaves(pipe) -> None:
    film(pipe)
    stock = fingerprint(pipe)
    with undercrank.accelerate(pipe, host_sync="on"):
        film(pipe)
    assert differences(stock, fingerprint(pipe)) == []
    assert same_kinds(pipe, film) == []


def test_a_first_call_inside_leaves_what_a_first_stock_call_leaves(pipe) -> None:
    twin = tiny_pipeline(undercrank.engine.family_of_pipeline(pipe).id)
    twin.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe, host_sync="on"):
        latents = film(pipe)
    assert torch.equal(latents, film(twin))
    for name in ("scheduler", "transformer", "vae"):
        ours, theirs = vars(getattr(pipe, name)), vars(getattr(twin, name))
        assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}, name
    assert {k: type(v) for k, v in vars(pipe).items()} == {k: type(v) for k, v in vars(twin).items()}


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_after_an_exception_in_step_2_the_pipeline_is_as_after_the_same_stock_exception(pipe, error) -> None:
    def broken(pipe):
        film(pipe, callback_on_step_end=stops_at(1, error))

    with contextlib.suppress(Stop, KeyboardInterrupt):
        broken(pipe)
    stock = fingerprint(pipe)
    with pytest.raises(error), undercrank.accelerate(pipe, host_sync="on"):
        broken(pipe)
    assert differences(stock, fingerprint(pipe)) == []
    assert torch.equal(film(pipe), film(tiny_pipeline_like(pipe)))


def tiny_pipeline_like(pipe):
    twin = tiny_pipeline(undercrank.engine.family_of_pipeline(pipe).id)
    twin.set_progress_bar_config(disable=True)
    return twin


def test_an_exception_inside_a_forward_leaves_the_next_run_right(pipe) -> None:
    good = film(pipe)
    hook = pipe.transformer.register_forward_hook(lambda *_: (_ for _ in ()).throw(Stop()))
    with undercrank.accelerate(pipe, host_sync="on"):
        with pytest.raises(Stop):
            film(pipe)
        hook.remove()
        assert torch.equal(film(pipe), good)


def test_nested_blocks_each_follow_their_own_words_and_leave_no_trace(pipe) -> None:
    good = film(pipe)
    before = fingerprint(pipe)
    with undercrank.accelerate(pipe, host_sync="on") as outer:
        assert torch.equal(film(pipe), good)
        with undercrank.accelerate(pipe, fidelity="exact", host_sync="off") as inner:
            assert torch.equal(film(pipe), good)
            assert inner.plan.levers == () and inner.plan.request.fidelity == "exact"
        assert [lever.name for lever in outer.plan.levers] == ["host_sync"]
        assert [lever for lever, _, _ in _HELD[pipe].engine._held] == list(outer.plan.levers)
        assert torch.equal(film(pipe), good)
    assert differences(before, fingerprint(pipe)) == []


def test_an_exact_block_inside_a_lossy_one_is_exact(pipe, monkeypatch) -> None:
    """A lever that spoils the latents, engaged outside, is off inside."""
    from contextlib import contextmanager

    from undercrank.records import Lever, Promise
    from undercrank.undo import appended

    class Spoil(Lever):
        name = "spoil"
        summary = "adds noise"

        def promises(self, case):
            return Promise.LOSSY

        @contextmanager
        def engage(self, rig):
            with appended(rig.at_start, lambda total: pipe.scheduler.sigmas.mul_(1.01) if hasattr(
                pipe.scheduler, "sigmas") else pipe.scheduler.alphas_cumprod.mul_(0.9)):  # fmt: skip
                yield

    for module in ("undercrank.planner.ORDER", "undercrank.levers.ORDER"):
        monkeypatch.setattr(module, (*ORDER, Spoil))
    good = film(pipe)
    with undercrank.accelerate(pipe, fidelity="fast", spoil="on") as outer:
        with undercrank.accelerate(pipe, fidelity="exact"):
            assert torch.equal(film(pipe), good)
        assert not torch.equal(film(pipe), good)
        assert outer.plan.promise is Promise.LOSSY


def test_a_class_and_a_signature_are_as_users_and_pipelines_expect(pipe) -> None:
    import inspect

    cls = type(pipe)
    signature = inspect.signature(cls.__call__)
    with undercrank.accelerate(pipe):
        assert isinstance(pipe, cls) and type(pipe).__name__ == cls.__name__
        assert inspect.signature(type(pipe).__call__) == signature
    assert type(pipe) is cls


def test_each_call_is_planned_from_its_own_arguments(pipe) -> None:
    with undercrank.accelerate(pipe) as run:
        film(pipe)
        assert run.plan.request.num_inference_steps == STEPS and len(run.trace.step_ms) == STEPS
        with torch.no_grad():
            pipe(**tiny_inputs(pipe, steps=2))
        assert run.plan.request.num_inference_steps == 2 and run.calls == 2


def test_on_a_cpu_host_sync_declines_and_says_why(pipe) -> None:
    with undercrank.accelerate(pipe) as run:
        film(pipe)
    (decision,) = [d for d in run.plan.decisions if d.lever == "host_sync"]
    assert decision.status == "declined" and "CPU" in decision.reason


def test_an_unknown_knob_is_refused_at_the_with(pipe) -> None:
    with pytest.raises(BadInput, match="host_sync"), undercrank.accelerate(pipe, host_synk="on"):
        pytest.fail("entered")
    assert pipe not in _HELD


def test_an_unknown_word_is_refused(pipe) -> None:
    with pytest.raises(BadInput, match="faithful"), undercrank.accelerate(pipe, fidelity="superb"):
        pytest.fail("entered")


def test_blocks_left_in_the_wrong_order_are_refused(pipe) -> None:
    outer, inner = undercrank.accelerate(pipe), undercrank.accelerate(pipe)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="wrong order"):
        outer.__exit__(None, None, None)


def test_a_lever_that_cannot_be_honoured_is_refused_at_the_call(pipe, monkeypatch) -> None:
    monkeypatch.setattr("undercrank.planner.unmet_need", lambda cls, case: "needs a second device")
    with undercrank.accelerate(pipe, host_sync="on"), pytest.raises(LeverRefused, match="second device"):
        film(pipe)


def test_a_pipeline_that_is_not_in_the_table_runs_stock_and_says_so() -> None:
    import diffusers

    class Unheard(diffusers.WanPipeline):
        pass

    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.__class__ = Unheard
    pipe.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe) as run:
        film_inputs = tiny_inputs("wan2.1-1.3b", steps=2)
        with torch.no_grad():
            pipe(**film_inputs)
    assert run.plan.levers == ()
    assert any("Unheard" in decision.reason for decision in run.plan.decisions if decision.lever == "host_sync")


def test_an_exception_in_a_forward_under_a_guider_that_installs_hooks_leaves_the_next_run_right() -> None:
    """Stock diffusers leaves the guider's hook behind, and the next run raises that it exists already."""
    from diffusers.guiders import SkipLayerGuidance
    from diffusers.hooks import LayerSkipConfig
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

    metadata = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, metadata)
    pipe = tiny_pipeline("hunyuanvideo-1.5-480p")
    pipe.set_progress_bar_config(disable=True)
    pipe.guider = SkipLayerGuidance(
        guidance_scale=4.0, skip_layer_guidance_scale=2.0, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0,
        skip_layer_config=LayerSkipConfig(indices=[0], fqn="transformer_blocks"),
    )  # fmt: skip
    good = film(pipe)
    forward, calls = pipe.transformer.forward, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 8:  # two passes in the first step, three in the next two: the pass that skips a layer
            raise Stop
        return forward(*args, **kwargs)

    with undercrank.accelerate(pipe):
        pipe.transformer.forward = broken
        with pytest.raises(Stop):
            film(pipe)
        del pipe.transformer.forward
        assert len(calls) == 8 and torch.equal(film(pipe), good)


# --------------------------------------------------------------------------- what people do inside a block


def test_a_copy_made_inside_the_block_runs_itself(pipe) -> None:
    good = film(pipe)
    with undercrank.accelerate(pipe, host_sync="off") as run:
        film(pipe)
        other = copy.deepcopy(pipe)
        for parameter in other.transformer.parameters():
            parameter.data.zero_()
        assert not torch.equal(film(other), good)
        assert run.calls == 1
    film(other)
    assert torch.equal(film(pipe), good)


def test_another_scheduler_or_dtype_given_inside_the_block_is_planned_for(pipe) -> None:
    with undercrank.accelerate(pipe, host_sync="on") as run:
        film(pipe)
        pipe.scheduler = type(pipe.scheduler).__mro__[1].from_config(pipe.scheduler.config)
        film(pipe)
        assert run.receipts[0].complaints == ()
        pipe.transformer.to(torch.float64)
        pipe.text_encoder.to(torch.float64)
        with contextlib.suppress(RuntimeError):  # whether the pipeline can is its own affair
            film(pipe)
        assert pipe.transformer.dtype == torch.float64
    assert type(pipe.scheduler).__module__.startswith("diffusers")
    assert "_known" not in vars(type(pipe.scheduler))


def test_blocks_of_two_pipelines_that_share_parts_nest(pipe) -> None:
    other = type(pipe)(**pipe.components)
    other.set_progress_bar_config(disable=True)
    good = film(pipe)
    before = fingerprint(pipe)
    with undercrank.accelerate(pipe, host_sync="on"), undercrank.accelerate(other, host_sync="on"):
        assert torch.equal(film(other), good)
        assert torch.equal(film(pipe), good)
    assert differences(before, fingerprint(pipe)) == []


def test_blocks_of_two_pipelines_that_share_parts_left_in_the_wrong_order_are_told_of(pipe) -> None:
    other = type(pipe)(**pipe.components)
    first, second = undercrank.accelerate(pipe), undercrank.accelerate(other)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="wrong order"):
        first.__exit__(None, None, None)


def test_threads_of_one_block_take_turns(pipe) -> None:
    import threading

    good, films = film(pipe), []
    with undercrank.accelerate(pipe, host_sync="on") as run:
        threads = [threading.Thread(target=lambda: films.append(film(pipe))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run.calls == 3
    assert len(films) == 3 and all(torch.equal(each, good) for each in films)


@pytest.mark.parametrize("thing", [None, "pipe", torch.nn.Linear(1, 1)])
def test_what_is_no_pipeline_is_refused(thing) -> None:
    with pytest.raises(BadInput, match="loaded diffusers pipeline"), undercrank.accelerate(thing):
        pytest.fail("entered")


def test_a_schedule_of_the_callers_own_is_counted_as_its_steps() -> None:
    import numpy as np

    pipe = tiny_pipeline("hunyuanvideo")
    pipe.set_progress_bar_config(disable=True)
    inputs = tiny_inputs("hunyuanvideo", steps=4)
    inputs.pop("num_inference_steps")
    with undercrank.accelerate(pipe) as run, torch.no_grad():
        pipe(**inputs, sigmas=np.linspace(1.0, 0.25, 3))
    assert run.plan.request.num_inference_steps == 3


def test_numpy_numbers_are_numbers(pipe) -> None:
    import numpy as np

    with undercrank.accelerate(pipe) as run, torch.no_grad():
        pipe(**(tiny_inputs(pipe, steps=3) | {"num_inference_steps": np.int64(3)}))
    assert run.plan.request.num_inference_steps == 3


def test_what_the_user_put_on_the_pipeline_is_kept_and_said() -> None:
    from diffusers import FirstBlockCacheConfig

    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe, host_sync="on") as run:
        film(pipe)
        film(pipe)
    assert run.plan.notes == (), "our own levers are not the user's"
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    cached = film(pipe)
    with undercrank.accelerate(pipe, host_sync="on") as run:
        assert torch.equal(film(pipe), cached)
    assert run.plan.notes == ("already on this pipeline, and kept: a step cache of diffusers",)
    assert pipe.transformer.is_cache_enabled


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p"])
def test_under_the_users_own_offloading_levers_act_in_every_call_and_its_hooks_stay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the device: at the end of each call diffusers takes such hooks off and puts them on again."""
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    words = {"transformer_cache": "mask", "transformer_cache_mask": "1101", "host_sync": "on"}
    words |= {"text_trim": "on"} if name != "wan2.1-1.3b" else {}
    clip = lambda: pipe(**tiny_inputs(pipe, steps=4)).frames  # noqa: E731
    with undercrank.accelerate(pipe, **words), torch.no_grad():
        resident = clip()
    pipe.enable_model_cpu_offload(device="cpu")
    hooked, sent = pipe.transformer.forward, []
    home = CpuOffload.init_hook
    monkeypatch.setattr(CpuOffload, "init_hook", lambda hook, module: sent.append(module) or home(hook, module))
    with undercrank.accelerate(pipe, **words) as run, torch.no_grad():
        for _ in range(2):
            assert torch.equal(clip(), resident)
            assert run.receipts and not [c for receipt in run.receipts for c in receipt.complaints]
        assert len(sent) == len({id(module) for module in sent}) * 2, "each part once at the end of each call"
        *_, last = pipe.transformer.children()
        with patch.object(last, "forward", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
            clip()
        assert len(sent) == len({id(module) for module in sent}) * 3, "after a failure too"
    assert pipe.transformer.forward is hooked and run.plan.notes == (
        "already on this pipeline, and kept: offloading or a device map",
    )


def test_weights_go_home_also_from_under_a_row_of_hooks_and_the_devices_cache_is_emptied_once_a_call() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_model_cpu_offload(device="cpu")
    add_hook_to_module(pipe.transformer, AccelerateHook(), append=True)
    home = CpuOffload.init_hook
    sent: list[object] = []
    with undercrank.accelerate(pipe), patch("diffusers.utils.torch_utils.empty_device_cache") as emptied:
        with patch.object(CpuOffload, "init_hook", lambda hook, module: sent.append(module) or home(hook, module)):
            for count in (1, 2):
                film(pipe)
                assert sent.count(pipe.transformer) == emptied.call_count == count


def test_under_group_offloading_of_the_users_own_hooks_that_go_take_no_lever_with_them() -> None:
    """By a stream, which a CPU has not, diffusers takes a hook off the denoiser after its first forward."""
    from diffusers.hooks import HookRegistry, ModelHook

    class Leaving(ModelHook):
        def post_forward(self, module, output):
            HookRegistry.check_if_exists_or_initialize(module).remove_hook(FLEETING[0], recurse=False)
            return output

    pipe = tiny_pipeline("hunyuanvideo-1.5-480p")
    pipe.set_progress_bar_config(disable=True)
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.register_hook(Leaving(), FLEETING[0])
    with undercrank.accelerate(pipe, text_trim="on") as run, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=4))
    assert run.rig.counters["text_trim.forwards"] == 8
    assert registry.hooks == {}


def test_a_copy_made_inside_the_block_sends_its_weights_home_by_itself() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe):
        film(pipe)
        other = copy.copy(pipe)
    other.enable_model_cpu_offload(device="cpu")
    sent: list[object] = []
    other.transformer._hf_hook.init_hook = sent.append
    film(other)
    assert sent == [other.transformer]


def test_the_users_own_group_offloading_is_said() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with undercrank.accelerate(pipe) as run:
        film(pipe)
    assert run.plan.notes == ("already on this pipeline, and kept: offloading or a device map",)


def test_a_lever_that_auto_chose_gives_way_to_what_the_user_put_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user moves blocks one by one: compiled code cannot pass their hooks, and nobody asked for it."""
    monkeypatch.setattr(Compile, "doubt", lambda self, case: None)
    monkeypatch.setattr(Compile, "only_measured", False)
    monkeypatch.setattr(Compile, "from_wish", classmethod(lambda cls, wishes: cls(backend="eager")))
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    stock = film(pipe)
    with undercrank.accelerate(pipe) as run:
        film(pipe)
    assert "compile" in {lever.name for lever in run.plan.levers}
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    with undercrank.accelerate(pipe) as run:
        for _ in range(2):
            assert torch.equal(film(pipe), stock)
            (found,) = [decision for decision in run.plan.decisions if decision.lever == "compile"]
            assert found.chosen == "off" and "runs under a hook" in found.reason
        pipe.transformer = tiny_pipeline("wan2.1-1.3b").transformer
        film(pipe)
        assert "compile" in {lever.name for lever in run.plan.levers}, "another denoiser is asked anew"
        pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    with undercrank.accelerate(pipe, compile="on"), pytest.raises(LeverRefused, match="runs under a hook"):
        film(pipe)
