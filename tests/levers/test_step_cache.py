"""Skipped steps: equal to diffusers' own caches under the same decisions, and nothing of one run in the next."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler, MagCacheConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

from undercrank import paths, ratios, schedules
from undercrank.audit import stalls
from undercrank.engine import Run, accelerate
from undercrank.families import family
from undercrank.levers.compile import Compile
from undercrank.levers.cuda_graph import CudaGraph
from undercrank.levers.programs import checkpoint, phases, scheduler_title
from undercrank.levers.stacks import Stack
from undercrank.levers.step_cache import StepCache
from undercrank.paths import Path
from undercrank.ratios import Curve
from undercrank.records import BadInput, Lever, LeverRefused
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline, tiny_pipeline_of
from undercrank.undo import swap_attr

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32, which is no autocast
STEPS = 8
WAN = "wan2.1-1.3b"
NAMED = [
    "wan2.1-1.3b", "wan2.2-a14b", "hunyuanvideo", "hunyuanvideo-1.5-480p", "cogvideox-2b", "ltx-video", "mochi",
    "skyreels-v2-14b",
]  # fmt: skip
"One family of each kind of denoiser whose pipeline names its branches."
RULE = schedules.Rule(threshold=0.3, max_skip_steps=2, retention=0.2)


def made(name: str) -> Any:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def film(pipe: Any, steps: int = STEPS, **inputs: Any) -> torch.Tensor:
    output = pipe(**tiny_inputs(pipe, steps=steps, **inputs))
    return output.frames if isinstance(output.frames, torch.Tensor) else output[0]


def shares(pipe: Any, name: str, steps: int = STEPS) -> dict[str, int]:
    """How many steps are each denoiser's."""
    if "two_experts" not in family(name).traits:
        return {"transformer": steps}
    pipe.scheduler.set_timesteps(steps)
    return {phase.denoiser: phase.steps for phase in phases(Rig(pipe, family(name), "cpu"), steps).values()}


def calibrate(pipe: Any, name: str, steps: int = STEPS, ratio: float = 1.1) -> None:
    """Curves of a steady change, as a run that measured would have left them."""
    for denoiser, count in shares(pipe, name, steps).items():
        for branch in family(name).branch_names:
            levels = tuple(1 - step / count for step in range(count))
            ratios.append([curve_of(getattr(pipe, denoiser), pipe, denoiser, branch, levels, ratio)])


def curve_of(module: Any, pipe: Any, denoiser: str, branch: str, levels: tuple[float, ...], ratio: float) -> Curve:
    return Curve(
        source=ratios.HERE, checkpoint=checkpoint(module), family="tiny", repo="", dtype="float32",
        scheduler=scheduler_title(pipe.scheduler), denoiser=denoiser, branch=branch, levels=levels,
        ratios=(1.0, *[ratio] * (len(levels) - 1)), drifts=(0.0, *[ratio - 1] * (len(levels) - 1)),
    )  # fmt: skip


@contextlib.contextmanager
def cached(pipe: Any, **knobs: str) -> Iterator[Run]:
    knobs = knobs or {"transformer_cache_threshold": "0.3", "transformer_cache_retention": "0.2"}
    with accelerate(pipe, "fast", host_sync="off", text_trim="off", **knobs) as run:
        yield run


def skipped(run: Run) -> int:
    assert run.trace is not None
    return sum(digits.count("0") for digits in run.trace.schedules.values())


def complaints(run: Run) -> tuple[str, ...]:
    return tuple(text for receipt in run.receipts for text in receipt.complaints)


# --------------------------------------------------------------------------- the same as diffusers' own


@contextlib.contextmanager
def stock_magcache(pipe: Any, name: str, ratio: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for denoiser, steps in shares(pipe, name).items():
            module = getattr(pipe, denoiser)
            module.enable_cache(
                MagCacheConfig(
                    threshold=RULE.threshold, max_skip_steps=RULE.max_skip_steps, retention_ratio=RULE.retention,
                    num_inference_steps=steps, mag_ratios=[1.0, *[ratio] * (steps - 1)],
                )
            )  # fmt: skip
            stack.callback(module.disable_cache)
        yield


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """diffusers 0.42.1 does not know the blocks of HunyuanVideo-1.5 and SkyReels: tell it for the length of a test."""
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
    from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2TransformerBlock

    for block, text in ((HunyuanVideo15TransformerBlock, 1), (SkyReelsV2TransformerBlock, None)):
        TransformerBlockRegistry.register(
            model_class=block,
            metadata=TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=text),
        )
    try:
        yield
    finally:
        for block in (HunyuanVideo15TransformerBlock, SkyReelsV2TransformerBlock):
            TransformerBlockRegistry._registry.pop(block, None)


@pytest.mark.parametrize("name", NAMED)
def test_skipping_equals_diffusers_magcache(name: str) -> None:
    """LTX-2 is left out: diffusers' cache puts the text where its blocks return sound."""
    pipe = made(name)
    calibrate(pipe, name)
    stock = film(pipe)
    with registered(), stock_magcache(pipe, name, 1.1):
        theirs = film(pipe)
    with cached(pipe) as run:
        ours = film(pipe)
    assert skipped(run) and complaints(run) == ()
    assert torch.equal(ours, theirs) and not torch.equal(ours, stock)
    assert torch.equal(film(pipe), stock)


def test_both_streams_of_ltx_2_are_cached_or_neither() -> None:
    """What a stack of blocks that changes nothing but by addition would return: picture and sound alike."""
    pipe = made("ltx-2")
    with cached(pipe, transformer_cache_mask="11110000") as run:
        film(pipe)
        held = pipe.transformer.transformer_blocks.part.cache.residuals._buffers
    assert complaints(run) == () and skipped(run) == 4 * len(run.trace.schedules)
    assert held and all(len(both) == 2 and None not in map(type, both) for both in held.values())
    assert all(residual is not None for both in held.values() for residual in both)


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo", "cogvideox-2b", "ltx-video", "mochi"])
def test_the_first_block_cache_equals_diffusers(name: str) -> None:
    pipe = made(name)
    stock = film(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    theirs = film(pipe)
    pipe.transformer.disable_cache()
    with cached(pipe, transformer_cache="fbcache", transformer_cache_threshold="0.5") as run:
        ours = film(pipe)
    assert skipped(run) and complaints(run) == ()
    assert torch.equal(ours, theirs) and not torch.equal(ours, stock)


# --------------------------------------------------------------------------- nothing of one run reaches the next

KNOBS = [
    {"transformer_cache": "magcache", "transformer_cache_threshold": "0.3", "transformer_cache_retention": "0.2"},
    {"transformer_cache_budget": "4"},
    {"transformer_cache": "fbcache", "transformer_cache_threshold": "0.5"},
    {"transformer_cache": "easycache", "transformer_cache_threshold": "5"},
]


@pytest.fixture(scope="module")
def wan() -> Any:
    return made(WAN)


class Stop(Exception):
    """Raised in a callback."""


def stopped(pipe: Any, at: int = 3) -> None:
    def stop(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == at:
            raise Stop
        return {}

    with contextlib.suppress(Stop):
        film(pipe, callback_on_step_end=stop)


def cancelled(pipe: Any, run: Run, at: int = 3) -> None:
    from undercrank.records import Cancelled

    def cancel(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == at:
            run.rig.cancel()
        return {}

    with contextlib.suppress(Cancelled):
        film(pipe, callback_on_step_end=cancel)


BETWEEN = {
    "another prompt": lambda pipe, run: film(pipe, prompt="a blue box moves right"),
    "another size": lambda pipe, run: film(pipe, width=96, height=32),
    "more steps": lambda pipe, run: film(pipe, steps=12),
    "fewer steps": lambda pipe, run: film(pipe, steps=5),
    "guidance off": lambda pipe, run: film(pipe, guidance_scale=1.0),
    "two clips": lambda pipe, run: film(pipe, num_videos_per_prompt=2),
    "an exception at step 3": lambda pipe, run: stopped(pipe),
    "a cancel at step 3": lambda pipe, run: cancelled(pipe, run),
}


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(knobs.values()))
def test_a_second_call_equals_the_first_whatever_lies_between(wan: Any, knobs: dict[str, str]) -> None:
    calibrate(wan, WAN)
    with cached(wan, **knobs) as run:
        first = film(wan)
        assert skipped(run) and complaints(run) == ()
        for what, between in BETWEEN.items():
            between(wan, run)
            assert torch.equal(film(wan), first), what
            assert complaints(run) == (), what


def test_uncached_runs_before_and_after_are_equal_bit_for_bit(wan: Any) -> None:
    calibrate(wan, WAN)
    before = film(wan)
    whole = fingerprint(wan)
    for _ in range(3):
        with cached(wan):
            film(wan)
        assert torch.equal(film(wan), before)
    assert differences(whole, fingerprint(wan)) == []


@pytest.mark.parametrize(
    "knobs",
    [
        {"transformer_cache_threshold": "0"},
        {"transformer_cache_budget": str(STEPS)},
        {"transformer_cache_mask": "1" * STEPS},
        {"transformer_cache_retention": "1"},
        {"transformer_cache": "fbcache", "transformer_cache_threshold": "0"},
        {"transformer_cache": "easycache", "transformer_cache_threshold": "0"},
    ],
    ids=str,
)
def test_settings_that_skip_nothing_leave_every_bit(wan: Any, knobs: dict[str, str]) -> None:
    calibrate(wan, WAN)
    stock = film(wan)
    with cached(wan, **knobs) as run:
        assert torch.equal(film(wan), stock)
    assert skipped(run) == 0


# --------------------------------------------------------------------------- step counts


def test_an_explicit_choice_stays_on_at_every_step_count_with_its_curve_read_anew(wan: Any) -> None:
    calibrate(wan, WAN, steps=50, ratio=1.01)
    made_for = {}
    with cached(wan, transformer_cache="magcache") as run:
        for steps in (50, 20, 8):
            film(wan, steps=steps, num_frames=1)
            made_for[steps] = run.trace.schedules["transformer/cond"]
            assert [r.lever for r in run.receipts] == ["step_cache"]
    rule = StepCache(cache="magcache", quality="balanced").rule
    for steps, digits in made_for.items():
        curve = schedules.nearest((1.0, *[1.01] * 49), steps)
        assert digits == "".join("01"[computed] for computed in schedules.magcache(curve, rule)), steps
    assert all("0" in digits for digits in made_for.values())


def test_a_budget_is_kept_and_leaves_the_first_steps_alone(wan: Any) -> None:
    calibrate(wan, WAN, steps=20, ratio=1.02)
    with cached(wan, transformer_cache_budget="9") as run:
        film(wan, steps=20, num_frames=1)
        ran = set(run.trace.schedules.values())
        assert len(ran) == 1, "both branches skip the same steps"
        (digits,) = ran
        assert digits.count("1") == 9 and digits.startswith("1111") and digits.endswith("1")
        film(wan, steps=10, num_frames=1)
        assert {d.count("1") for d in run.trace.schedules.values()} == {9}
    with cached(wan, transformer_cache_budget="9", transformer_cache_retention="0.4") as run:
        film(wan, steps=20, num_frames=1)
        assert all(d.startswith("1" * 8) and d.count("1") == 9 for d in run.trace.schedules.values())


def path_of(pipe: Any, schedule: str) -> Path:
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(len(schedule))
    levels = tuple(float(t) / 1000 for t in scheduler.timesteps)
    return Path(
        source="searched here", checkpoint=checkpoint(pipe.transformer), family=WAN, dtype="float32",
        scheduler=scheduler_title(pipe.scheduler), denoiser="transformer", steps=len(schedule), levels=levels,
        budget=schedule.count("1"), schedule=schedule, error=0.01, films=1, prompts=("a",), seeds=(1,), width=32,
        height=32, num_frames=5, guidance_scale=5.0, forwards=1,
    )  # fmt: skip


def test_a_searched_path_is_taken_for_its_budget_and_for_no_other(wan: Any) -> None:
    calibrate(wan, WAN, 12)
    paths.append([path_of(wan, "110110010011")])
    with cached(wan, transformer_cache_budget="7") as run:
        film(wan, 12)
        assert set(run.trace.schedules.values()) == {"110110010011"}
    with cached(wan, transformer_cache_budget="8") as run:
        film(wan, 12)
        assert {digits.count("1") for digits in run.trace.schedules.values()} == {8}


def test_a_path_is_not_taken_for_as_many_steps_at_other_levels_of_noise(wan: Any) -> None:
    calibrate(wan, WAN, 12)
    path = path_of(wan, "110110010011")
    paths.append([dataclasses.replace(path, levels=tuple(level * 0.9 for level in path.levels))])
    with cached(wan, transformer_cache_budget="7") as run:
        film(wan, 12)
        assert "110110010011" not in run.trace.schedules.values()


def test_the_shift_in_force_is_part_of_what_a_path_is_for() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    assert scheduler_title(scheduler) == "FlowMatchEulerDiscreteScheduler, shift 7"
    scheduler.set_shift(5.0)
    assert scheduler_title(scheduler) == "FlowMatchEulerDiscreteScheduler, shift 5"


def test_the_searched_path_of_a_preset_needs_no_curve(wan: Any) -> None:
    paths.append([path_of(wan, "110110010011"), path_of(wan, "110010000011")])
    for quality, digits in (("quality", "110110010011"), ("balanced", "110010000011")):
        with cached(wan, transformer_cache="searched", transformer_cache_quality=quality) as run:
            film(wan, 12)
            assert set(run.trace.schedules.values()) == {digits} and not complaints(run)
    assert ratios.read_curves() == ()


def test_a_path_that_nobody_searched_for_is_refused_with_the_remedy(wan: Any) -> None:
    with pytest.raises(LeverRefused, match=r"no path of 7 computed steps of 12 .* calibrate --search"):
        with cached(wan, transformer_cache="searched", transformer_cache_quality="quality"):
            film(wan, 12)
    paths.append([path_of(wan, "110110010011")])
    with torch.no_grad():
        wan.transformer.proj_out.bias.add_(1)  # other weights
    with pytest.raises(LeverRefused, match="for these weights"):
        with cached(wan, transformer_cache="searched", transformer_cache_quality="quality"):
            film(wan, 12)


def test_auto_takes_the_searched_path_where_one_is_known_and_the_rule_where_the_weights_are_others(wan: Any) -> None:
    paths.append([path_of(wan, "110110010011")])
    with accelerate(wan, "quality", host_sync="off", text_trim="off") as run:
        film(wan, 12)
        assert next(d for d in run.plan.decisions if d.lever == "step_cache").chosen == "searched quality"
        assert set(run.trace.schedules.values()) == {"110110010011"}
        film(wan, 16)  # no path of so many steps: it measures, as ever
        assert not skipped(run)
    with torch.no_grad():
        wan.transformer.proj_out.bias.add_(1)
    calibrate(wan, WAN, 12)
    with accelerate(wan, "quality", host_sync="off", text_trim="off") as run:
        film(wan, 12)
        assert "110110010011" not in run.trace.schedules.values()


def test_settings_may_be_numbers(wan: Any) -> None:
    calibrate(wan, WAN)
    with cached(wan, transformer_cache_threshold="0.3", transformer_cache_retention="0.2") as run:
        words = film(wan)
    with accelerate(wan, transformer_cache_threshold=0.3, transformer_cache_retention=0.2, host_sync="off") as run:
        assert torch.equal(film(wan), words) and skipped(run)


def test_auto_goes_off_at_few_steps_and_on_again(wan: Any) -> None:
    chosen = []
    with accelerate(wan, "quality", host_sync="off") as run:
        for steps in (12, 8, 12):
            film(wan, steps=steps, num_frames=1)
            decision = next(d for d in run.plan.decisions if d.lever == "step_cache")
            chosen.append(decision.status.value)
            if steps == 8:
                assert "8 steps are few" in decision.reason
    assert chosen == ["applied", "declined", "applied"]


def test_a_run_that_measures_is_exact_and_the_next_one_skips(wan: Any) -> None:
    stock = film(wan, steps=12)
    with accelerate(wan, "quality", host_sync="off") as run:
        assert torch.equal(film(wan, steps=12), stock)
        assert "measured it; the next run skips" in run.receipts[0].remarks[0]
        assert skipped(run) == 0 and complaints(run) == ()
    curves = ratios.read_curves()
    assert {(c.denoiser, c.branch, c.steps) for c in curves} == {
        ("transformer", "cond", 12), ("transformer", "uncond", 12)
    }  # fmt: skip
    with cached(wan, transformer_cache_quality="fast") as run:
        film(wan, steps=12)
    assert skipped(run) and ratios.read_curves() == curves


def test_measured_ratios_are_those_that_diffusers_measures(wan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wan.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    film(wan)
    wan.transformer.disable_cache()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    theirs = [[float(word) for word in line.strip("[]").split(",")] for line in lines]
    with cached(wan, transformer_cache="magcache"):
        film(wan)
    ours = {curve.branch: curve.ratios for curve in ratios.read_curves()}
    assert list(ours["cond"]) == pytest.approx(theirs[0], rel=1e-5)
    assert list(ours["uncond"]) == pytest.approx(theirs[1], rel=1e-5)


def test_other_weights_are_measured_anew(wan: Any) -> None:
    calibrate(wan, WAN)
    other = made(WAN)
    with torch.no_grad():
        next(iter(other.transformer.parameters())).add_(0.01)
    with cached(other, transformer_cache="magcache") as run:
        film(other)
    assert skipped(run) == 0 and "nothing was known of these weights" in run.receipts[0].remarks[0]


def test_a_run_that_failed_leaves_no_curve(wan: Any) -> None:
    with cached(wan, transformer_cache="magcache"):
        stopped(wan)
    assert ratios.read_curves() == ()


# --------------------------------------------------------------------------- two experts


def test_each_expert_has_its_own_schedule_and_begins_computed() -> None:
    pipe = made("wan2.2-a14b")
    calibrate(pipe, "wan2.2-a14b")
    with cached(pipe) as run:
        film(pipe)
    lengths = {key: len(digits) for key, digits in run.trace.schedules.items()}
    early, late = lengths["transformer/cond"], lengths["transformer_2/cond"]
    assert early + late == STEPS and early and late
    assert all(digits[0] == "1" for digits in run.trace.schedules.values()) and skipped(run)


def test_a_mask_that_skips_where_the_second_expert_begins_is_refused() -> None:
    pipe = made("wan2.2-a14b")
    boundary = shares(pipe, "wan2.2-a14b")["transformer"]
    mask = "".join("01"[step != boundary] for step in range(STEPS))
    with (
        pytest.raises(BadInput, match=f"step {boundary + 1} must be computed"),
        cached(pipe, transformer_cache_mask=mask),
    ):
        film(pipe)


# --------------------------------------------------------------------------- branches


def test_branches_without_a_name_are_told_apart_by_their_text() -> None:
    pipe = tiny_pipeline_of("WanVideoToVideoPipeline")
    pipe.set_progress_bar_config(disable=True)
    inputs = {"steps": 6}
    pipe(**tiny_inputs(pipe, **inputs))
    total = None
    with cached(pipe, transformer_cache="magcache") as run:
        pipe(**tiny_inputs(pipe, **inputs))
        total = len(run.trace.step_ms)
    assert {c.branch for c in ratios.read_curves()} == {"branch 1", "branch 2"}
    mask = "1" * (total - 1) + "0"
    with cached(pipe, transformer_cache_mask=mask) as run:
        pipe(**tiny_inputs(pipe, **inputs))
    assert run.trace.schedules == {"transformer/branch 1": mask, "transformer/branch 2": mask}
    assert complaints(run) == ()


def test_texts_that_change_from_step_to_step_are_never_mixed(wan: Any) -> None:
    """As in a pipeline that puts its texts together anew in each step, and names no branches."""
    stock = film(wan)
    with cached(wan, transformer_cache_mask="11110000") as run:
        assert not torch.equal(film(wan), stock)
        ours = wan.transformer.forward

        def renewed(**inputs: Any) -> Any:
            return ours(**inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].clone()})

        with (
            swap_attr(wan.transformer, "forward", renewed),
            swap_attr(wan.transformer, "cache_context", lambda name, **where: contextlib.nullcontext()),
        ):
            same = film(wan)
    assert torch.equal(same, stock) and any("told apart" in text for text in complaints(run))


def test_a_branch_that_was_away_for_a_step_is_computed() -> None:
    """Guidance in the middle of the run only: the other branch comes late, and has nothing to reuse at first."""
    pipe = made("hunyuanvideo-1.5-480p")
    pipe.guider = pipe.guider.new(start=0.3, stop=0.9)
    with cached(pipe, transformer_cache_mask="10000000") as run:
        film(pipe)
    ran = run.trace.schedules
    assert ran["transformer/pred_cond"] == "10000000"
    late = ran["transformer/pred_uncond"]
    assert 0 < len(late) < STEPS and late == "1" + "0" * (len(late) - 1)
    assert complaints(run) == ()


# --------------------------------------------------------------------------- what the model still looks like


def test_a_model_with_a_swapped_stack_keeps_its_names(wan: Any) -> None:
    keys = list(wan.transformer.state_dict())
    plain = wan.transformer.blocks
    with cached(wan, transformer_cache="magcache"):
        film(wan)
        blocks = wan.transformer.blocks
        assert isinstance(blocks, Stack) and list(wan.transformer.state_dict()) == keys
        assert len(blocks) == len(plain) and blocks[0] is plain[0] and list(blocks) == list(plain)
        assert type(blocks[:1]) is torch.nn.ModuleList
    assert wan.transformer.blocks is plain


def test_a_pipeline_that_shares_the_denoiser_is_left_alone(wan: Any) -> None:
    from diffusers import WanPipeline

    other = WanPipeline(**wan.components)
    other.set_progress_bar_config(disable=True)
    stock = film(other)
    with cached(wan, transformer_cache_mask="1" + "0" * 7):
        film(wan)
        assert torch.equal(film(other), stock)


def test_residuals_are_counted_in_the_receipt(wan: Any) -> None:
    with cached(wan, transformer_cache_mask="11110000") as run:
        film(wan)
    config = wan.transformer.config
    tokens = 2 * 8 * 8 // 4
    assert run.receipts[0].bytes == 2 * tokens * config.num_attention_heads * config.attention_head_dim * 4


# --------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("cls", "why"),
    [("WanVACEPipeline", "control hints"), ("LattePipeline", "in turn"), ("AnimateDiffPipeline", "not known")],
)
def test_a_stack_that_is_no_stack_is_refused_by_name_and_left_alone_by_auto(cls: str, why: str) -> None:
    pipe = tiny_pipeline_of(cls)
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(LeverRefused, match=why), cached(pipe, transformer_cache="magcache"):
        pipe(**tiny_inputs(pipe, steps=2))
    with accelerate(pipe, "fast", host_sync="off") as run:
        pipe(**tiny_inputs(pipe, steps=2))
    assert next(d for d in run.plan.decisions if d.lever == "step_cache").status.value == "declined"


def test_a_cache_of_diffusers_that_is_on_already_is_not_stacked_upon(wan: Any) -> None:
    wan.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    try:
        with pytest.raises(LeverRefused, match="disable_cache"), cached(wan, transformer_cache="magcache"):
            film(wan)
    finally:
        wan.transformer.disable_cache()


def test_a_device_map_is_refused(wan: Any) -> None:
    wan.transformer.hf_device_map = {"blocks.0": 0, "blocks.1": 1}
    try:
        with pytest.raises(LeverRefused, match="several devices"), cached(wan, transformer_cache="magcache"):
            film(wan)
    finally:
        del wan.transformer.hf_device_map


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"transformer_cache": "teacache"}, "transformer_cache"),
        ({"transformer_cache": "mask"}, "transformer_cache_mask"),
        ({"transformer_cache": "magcache", "transformer_cache_mask": "101"}, "transformer_cache_mask"),
        ({"transformer_cache_quality": "best"}, "transformer_cache_quality"),
        ({"transformer_cache_threshold": "-1"}, "transformer_cache_threshold"),
        ({"transformer_cache_threshold": "much"}, "transformer_cache_threshold"),
        ({"transformer_cache_threshold": "nan"}, "transformer_cache_threshold"),
        ({"transformer_cache_retention": "2"}, "transformer_cache_retention"),
        ({"transformer_cache_budget": "0"}, "transformer_cache_budget"),
        ({"transformer_cache_budget": "4.5"}, "transformer_cache_budget"),
        ({"transformer_cache_budget": "4", "transformer_cache_threshold": "0.1"}, "transformer_cache_budget"),
        ({"transformer_cache": "fbcache", "transformer_cache_budget": "4"}, "transformer_cache_budget"),
        ({"transformer_cache": "fbcache", "transformer_cache_retention": "0.2"}, "transformer_cache_retention"),
        ({"transformer_cache_mask": "101", "transformer_cache_threshold": "0.2"}, "transformer_cache_threshold"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused_by_name(wishes: dict[str, str], field: str) -> None:
    with pytest.raises(BadInput) as raised:
        StepCache.from_wish(wishes)
    assert raised.value.field == field


def test_a_mask_of_another_length_than_the_run_is_refused_before_anything_is_loaded(wan: Any) -> None:
    with pytest.raises(BadInput, match="mask of 3 steps for a run of 8"), cached(wan, transformer_cache_mask="101"):
        film(wan)


def test_verify_sees_a_pattern_that_is_not_the_planned_one(wan: Any) -> None:
    lever = StepCache(cache="mask", mask="11110000")
    rig = Rig(wan, family(WAN), "cpu")
    with rig.seams(), lever.engage(rig), rig.call(), torch.no_grad():
        wan(**tiny_inputs(wan, steps=STEPS))
        trace = Run(fidelity=None, wishes=(), rig=rig).trace
        assert lever.verify(rig, trace) == []
        rig.executed["transformer/cond"][5] = True
        assert any("planned" in text for text in lever.verify(rig, trace))


def test_zero_skips_are_said_so(wan: Any) -> None:
    calibrate(wan, WAN, ratio=1.4)
    with cached(wan, transformer_cache_threshold="0.01") as run:
        film(wan)
    assert complaints(run) == ("skipped none of 8 steps",)


# --------------------------------------------------------------------------- with other levers

FAST_COMPILER = Compile(backend="eager")
"""torch's own compiler front, and its graphs run as they are: what the levers do to each other is the same as under
inductor, and the bits are those of plain code."""


def ran(rig: Rig, *levers: Lever) -> torch.Tensor:
    """A film under levers that are entered in this order."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(rig.seams())
        for lever in levers:
            stack.enter_context(lever.engage(rig))
        with rig.call(), torch.no_grad():
            latents = rig.pipe(**tiny_inputs(rig.pipe, steps=STEPS)).frames
        for lever in levers:
            assert lever.verify(rig, None) == [], lever.name
    return latents


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "hunyuanvideo", "cogvideox-2b"])
def test_computed_steps_run_compiled_code_in_both_orders(name: str) -> None:
    pipe = made(name)
    calibrate(pipe, name)
    rig, cache = Rig(pipe, family(name), "cpu"), StepCache(cache="magcache", threshold=0.3, retention=0.2)
    plain = ran(rig, cache)
    pattern = rig.executed
    uncached = ran(rig, FAST_COMPILER)
    first = ran(rig, cache, FAST_COMPILER)
    assert rig.executed == pattern
    computed = sum(map(sum, pattern.values()))
    blocks = sum(len(module) for module in pipe.transformer.children() if isinstance(module, torch.nn.ModuleList))
    assert rig.counters["compile.executed"] == computed * blocks
    graphs = rig.counters.get("compile.graphs", 0)
    second = ran(rig, FAST_COMPILER, cache)
    assert rig.executed == pattern and rig.counters["compile.executed"] == computed * blocks
    assert rig.counters.get("compile.graphs", 0) == 0 and graphs == 0
    assert torch.equal(first, second) and torch.allclose(first, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(ran(rig, FAST_COMPILER), uncached)


def test_a_recorded_forward_is_told_by_its_program_and_its_residual() -> None:
    """The tape stands for CUDA graphs: recorded operations are replayed, the Python code of the model is not run."""
    pipe = made(WAN)
    calibrate(pipe, WAN)
    rig, cache = Rig(pipe, family(WAN), "cpu"), StepCache(cache="magcache", threshold=0.3, retention=0.2)
    plain = ran(rig, cache)
    pattern = rig.executed
    tape = CudaGraph(recorder="tape")
    with rig.seams(), cache.engage(rig), tape.engage(rig):
        films = []
        for inputs in ({}, {"width": 96}, {}, {}):
            with rig.call(), torch.no_grad():
                films.append(pipe(**tiny_inputs(pipe, steps=STEPS, **inputs)).frames)
            assert rig.executed == pattern and cache.verify(rig, None) == []
        assert rig.counters["cuda_graph.replays"] > 0
    assert torch.equal(films[0], plain) and torch.equal(films[2], plain) and torch.equal(films[3], plain)
    assert "step_cache.program" not in rig.program


def test_a_run_that_measures_or_decides_by_data_is_never_recorded() -> None:
    pipe = made(WAN)
    rig, tape = Rig(pipe, family(WAN), "cpu"), CudaGraph(recorder="tape")
    for cache in (StepCache(cache="measure"), StepCache(cache="fbcache", threshold=0.5)):
        plain = ran(rig, cache)
        with rig.seams(), cache.engage(rig), tape.engage(rig), rig.call(), torch.no_grad():
            film = pipe(**tiny_inputs(pipe, steps=STEPS)).frames
            assert rig.counters.get("cuda_graph.replays", 0) == 0
        assert torch.equal(film, plain)


@pytest.mark.parametrize(
    ("knobs", "most"),
    [
        ({"transformer_cache": "magcache", "transformer_cache_threshold": "0.3"}, 0),
        ({"transformer_cache": "measure"}, 0),
        ({"transformer_cache_mask": "11110000"}, 0),
        ({"transformer_cache": "fbcache", "transformer_cache_threshold": "0.5"}, 2 * (STEPS - 1)),
        ({"transformer_cache": "easycache", "transformer_cache_threshold": "5"}, STEPS),
    ],
    ids=str,
)
def test_what_is_decided_before_the_loop_waits_for_nothing_in_it(wan: Any, knobs: dict[str, str], most: int) -> None:
    """On the logical device, where every copy back to the host is seen; caches that look at data are counted."""
    calibrate(wan, WAN)
    waits = stalls(wan, tiny_inputs(wan, steps=STEPS), host_sync="auto", **knobs).in_loop
    assert waits <= most and bool(waits) is bool(most)


def test_a_checkpoint_is_another_with_an_adapter_another_value_or_another_dtype() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plain = checkpoint(model)
    assert checkpoint(model) == plain and len(plain) == 32
    model[0].lora_A = torch.nn.Linear(4, 2)
    assert checkpoint(model) != plain
    del model[0].lora_A
    assert checkpoint(model) == plain
    assert checkpoint(model.bfloat16()) != plain
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert checkpoint(other) != plain
