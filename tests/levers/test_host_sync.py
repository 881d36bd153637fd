"""host_sync on the logical device: no stall is left, no bit has moved."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import undercrank
from undercrank.audit import DEVICE, logical_device, quiet_libraries, stalls_and_result
from undercrank.engine import family_of_pipeline
from undercrank.families import FAMILIES, family
from undercrank.levers.host_sync import BY_NUMBER, LEFT, PROVEN, HostSync
from undercrank.levers.mirror import Mirror
from undercrank.rig import Rig
from undercrank.testing import OTHERS, differences, fingerprint, tiny_inputs, tiny_pipeline, tiny_pipeline_of

pytestmark = [
    # Mochi asks for an autocast that the CPU does not have, and runs without it.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Cosmos' UniPC with Karras sigmas hands a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
STEPS = 4
BY_CLASS = {row.pipeline: row.id for row in reversed(FAMILIES) if "one_size" not in row.traits}
STALL_FREE = sorted({*BY_CLASS.values(), "wan2.2-a14b", "cogvideox-5b", "flipbook"})


def watched(name: str, lever: bool, steps: int = STEPS, scheduler: str | None = None, **settings):
    """Latents and stalls of one run on the logical device."""
    pipe = tiny_pipeline(name, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    inputs = tiny_inputs(name, steps=steps, **settings)
    rig = Rig(pipe, family(name), f"{DEVICE}:0")
    with logical_device(pipe) as auditor, rig.seams(), rig.call(), torch.no_grad():
        auditor.in_loop = lambda: rig.running
        if lever:
            with HostSync().engage(rig):
                latents = auditor.to_cpu(pipe(**inputs).frames)
        else:
            latents = auditor.to_cpu(pipe(**inputs).frames)
    return latents, auditor.found(steps)


@pytest.mark.parametrize("name", STALL_FREE)
def test_no_stall_is_left_and_latents_are_equal(name: str) -> None:
    stock, _ = watched(name, lever=False)
    mirrored, after = watched(name, lever=True)
    assert after.in_loop == 0, after.sites
    assert torch.equal(stock, mirrored)


def test_every_family_is_held_to_that() -> None:
    assert {row.pipeline for row in FAMILIES} == set(BY_CLASS) | {"CogVideoXImageToVideoPipeline"}


def test_the_79_stalls_of_the_cogvideox_study_are_found_and_gone() -> None:
    """The published table: 20 steps, dynamic guidance: 39 + 20 in the scheduler, 20 in the pipeline."""
    settings = {"steps": 20, "use_dynamic_cfg": True, "guidance_scale": 6.0}
    stock, before = watched("cogvideox-2b", False, **settings)
    mirrored, after = watched("cogvideox-2b", True, **settings)
    assert [(site.file.rsplit("/", 1)[1], site.count) for site in before.sites] == [
        ("scheduling_ddim_cogvideox.py", 39),
        ("pipeline_cogvideox.py", 20),
        ("scheduling_ddim_cogvideox.py", 20),
    ]
    assert after.in_loop == 0 and torch.equal(stock, mirrored)


def test_the_noise_of_a_host_generator_is_sent_and_not_waited_for() -> None:
    stock, before = watched("cogvideox-5b", lever=False)
    sent, after = watched("cogvideox-5b", lever=True)
    assert any(site.file.endswith("torch_utils.py") for site in before.sites)
    assert after.in_loop == 0 and torch.equal(stock, sent)


TEXTS = {
    "two prompts of different lengths": {
        "prompt": ['a red ball says "hello there"', "x"],
        "negative_prompt": ["", "y"],
    },
    "empty prompts": {"prompt": "", "negative_prompt": ""},
}


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", ["hunyuanvideo-1.5-480p", "hunyuanvideo-1.5-480p-i2v", "mochi"])
def test_masks_that_a_model_reads_back_are_read_before_the_loop(name: str, texts: str) -> None:
    stock, before = watched(name, lever=False, steps=2, **TEXTS[texts])
    twinned, after = watched(name, lever=True, steps=2, **TEXTS[texts])
    assert before.in_loop > 10 and after.in_loop == 0, after.sites
    assert torch.equal(stock, twinned)


@pytest.mark.parametrize("name", BY_CLASS.values())
def test_every_proven_pipeline_makes_the_same_latents_on_the_cpu(name: str) -> None:
    pipe = tiny_pipeline(name)
    with torch.no_grad():
        stock = pipe(**tiny_inputs(name, steps=3)).frames
    rig = Rig(pipe, family(name), "cpu")
    with rig.seams(), HostSync().engage(rig), rig.call(), torch.no_grad():
        mirrored = pipe(**tiny_inputs(name, steps=3)).frames
    assert torch.equal(stock, mirrored) and HostSync().verify(rig, None) == []


@pytest.mark.parametrize("name", OTHERS)
def test_classes_that_no_row_has_never_wait_either(name: str) -> None:
    """On the logical device, but for the lines in the table, and on the CPU; and nothing is left behind."""
    with quiet_libraries():
        pipe = tiny_pipeline_of(name)
        stock, latents = stalls_and_result(pipe, tiny_inputs(pipe, steps=4))
        before = fingerprint(pipe)
        after, same = stalls_and_result(pipe, tiny_inputs(pipe, steps=4), host_sync="on")
        assert differences(before, fingerprint(pipe)) == []
        assert stock.in_loop > 0 and {(site.file, site.line) for site in after.sites} <= {row[:2] for row in LEFT}
        assert equal(latents, same)
        with torch.no_grad():
            plain = pipe(**tiny_inputs(pipe, steps=2)).frames
        rig = Rig(pipe, family_of_pipeline(pipe), "cpu")
        with rig.seams(), HostSync().engage(rig), rig.call(), torch.no_grad():
            assert equal(plain, pipe(**tiny_inputs(pipe, steps=2)).frames)


def equal(one, other) -> bool:
    """Framepack returns a list of windows."""
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


def test_every_line_in_the_table_of_what_is_left_still_waits() -> None:
    with quiet_libraries():
        pipe = tiny_pipeline_of("CosmosVideoToWorldPipeline")
        after, _ = stalls_and_result(pipe, tiny_inputs(pipe, steps=2), host_sync="on")
    assert {(site.file, site.line) for site in after.sites} == {row[:2] for row in LEFT}


def test_what_is_proven_is_what_is_tested() -> None:
    assert {*BY_CLASS, *OTHERS, "CogVideoXImageToVideoPipeline"} == PROVEN


def test_nothing_is_known_to_be_left_where_it_may_not_be() -> None:
    """No line of a pipeline, a model or a scheduler that these run is in the table of what is left."""
    closed = ("cogvideo", "wan", "hunyuan", "ltx", "mochi")
    assert not [file for file, _, _ in LEFT if any(name in file for name in closed)]


def test_the_rehearsal_meets_every_system_that_the_loop_asks_for() -> None:
    for steps in (1, 2, 3, 9):
        _, after = watched("wan2.1-1.3b", lever=True, steps=steps)
        assert after.in_loop == 0, (steps, after.sites)


@pytest.mark.parametrize("name", sorted(BY_NUMBER))
def test_a_scheduler_that_only_looks_things_up_is_given_a_number(name: str) -> None:
    pipe = tiny_pipeline("cogvideox-2b", scheduler=name)
    seen: list[type] = []

    class Told(type(pipe.scheduler)):
        def step(self, *args, **kwargs):
            scalars = (value for value in args if not (torch.is_tensor(value) and value.dim()))
            seen.extend(type(value) for value in scalars if torch.is_tensor(value) or type(value) is int)
            return super().step(*args, **kwargs)

    Told.__name__, Told.__module__ = name, type(pipe.scheduler).__module__
    pipe.scheduler.__class__ = Told
    with undercrank.accelerate(pipe, host_sync="on"):
        pipe(**tiny_inputs(pipe, steps=3))
    assert seen and set(seen) == {int}


def test_a_schedule_written_by_the_pipeline_is_mirrored_too() -> None:
    rig = Rig(tiny_pipeline("wan2.1-1.3b"), family("wan2.1-1.3b"), "cpu")
    with HostSync().engage(rig), rig.call():
        rig.scheduler.set_timesteps(4)
        rig.scheduler.timesteps = torch.tensor([900, 500, 100])
        assert isinstance(rig.scheduler.timesteps, Mirror)


def test_outside_a_call_nothing_is_mirrored() -> None:
    rig = Rig(tiny_pipeline("wan2.1-1.3b"), family("wan2.1-1.3b"), "cpu")
    with HostSync().engage(rig):
        rig.scheduler.set_timesteps(4)
        assert type(rig.scheduler.timesteps) is torch.Tensor


def test_no_mirror_is_left_after_an_exception_in_the_loop() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family("wan2.1-1.3b"), "cpu")

    def stop(pipe, index, timestep, tensors):
        assert isinstance(timestep, Mirror)
        if index == 2:
            raise ZeroDivisionError
        return {}

    with rig.seams(), HostSync().engage(rig):
        with pytest.raises(ZeroDivisionError), rig.call(), torch.no_grad():
            pipe(**tiny_inputs(pipe, steps=4), callback_on_step_end=stop)
        held = [*vars(pipe.scheduler).values(), *vars(pipe).values(), *pipe.scheduler.timestep_list]
        assert not [value for value in held if isinstance(value, Mirror)]


def test_two_of_them_on_one_scheduler_nest() -> None:
    """A pipeline called inside another's callback may share its scheduler."""
    pipe = tiny_pipeline("wan2.1-1.3b")
    outer, inner = (Rig(pipe, family("wan2.1-1.3b"), "cpu") for _ in range(2))
    with HostSync().engage(outer), outer.call(), HostSync().engage(inner), inner.call():
        pipe.scheduler.set_timesteps(4)
        assert "_setting" not in vars(pipe.scheduler) and isinstance(pipe.scheduler.timesteps, Mirror)
    assert type(pipe.scheduler).__module__.startswith("diffusers") and type(pipe.scheduler.timesteps) is torch.Tensor
