"""Tiny pipelines of every family: they run, repeat bit for bit, and agree with their row."""

from __future__ import annotations

import functools
import importlib
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from undercrank import families, testing
from undercrank.audit import quiet_libraries
from undercrank.families import FAMILIES, latent_shape, tokens
from undercrank.records import BadInput, Family, NotFound
from undercrank.testing import (
    BUILDERS,
    differences,
    fingerprint,
    fingerprint_of_process,
    tiny_folder,
    tiny_inputs,
    tiny_pipeline,
    tiny_pipeline_of,
)

pytestmark = [
    # Mochi computes its rotary angles under autocast to float32, which a CPU does not have.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Cosmos' UniPC with Karras sigmas hands a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
ROWS = pytest.mark.parametrize(
    "row",
    # One runs at 720x480 only: seconds where the others take tenths.
    [pytest.param(row, marks=pytest.mark.slow if "one_size" in row.traits else ()) for row in FAMILIES],
    ids=lambda row: row.id,
)
SOME = pytest.mark.parametrize("name", ["flipbook", "wan2.2-a14b", "cogvideox-2b", "hunyuanvideo-1.5-480p"])


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.lru_cache(maxsize=1)
def shared(name: str) -> DiffusionPipeline:
    return tiny_pipeline(name)


def latents(pipe: DiffusionPipeline, row: Family | str, **kwargs: Any) -> torch.Tensor:
    return pipe(**tiny_inputs(row, **{"steps": 2, **kwargs})).frames


# --------------------------------------------------------------------------- every row runs


@ROWS
def test_it_runs_from_a_prompt_and_repeats_bit_for_bit(row: Family) -> None:
    pipe = shared(row.id)
    assert type(pipe).__name__ == row.pipeline
    first = latents(pipe, row)
    assert torch.isfinite(first).all()
    assert torch.equal(latents(pipe, row), first)
    assert not torch.equal(latents(pipe, row, prompt="a blue box moves right"), first)
    assert not torch.equal(latents(pipe, row, seed=1), first)


@ROWS
def test_the_seed_decides_every_weight_and_the_global_random_state_stays(row: Family) -> None:
    state = torch.random.get_rng_state()
    one, two, three = (weights(tiny_pipeline(row, seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)


def weights(pipe: DiffusionPipeline) -> dict[str, torch.Tensor]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {f"{part}.{name}": w for part, m in parts.items() for name, w in m.state_dict().items()}


@ROWS
def test_a_run_leaves_the_global_random_state(row: Family) -> None:
    pipe, state = shared(row.id), torch.random.get_rng_state()
    latents(pipe, row)
    assert torch.equal(torch.random.get_rng_state(), state)


@ROWS
def test_the_decoded_clip_has_the_size_and_the_frames_asked_for(row: Family) -> None:
    pipe = shared(row.id)
    kwargs = tiny_inputs(row, steps=2, output_type="np")
    frames, (width, height) = pipe(**kwargs).frames, asked_size(kwargs)
    assert frames.shape[-4:] == (asked_frames(kwargs), height, width, 3)


def asked_size(kwargs: dict[str, Any]) -> tuple[int, int]:
    return kwargs.get("width", 64), kwargs.get("height", 64)


def asked_frames(kwargs: dict[str, Any]) -> int:
    return kwargs["num_frames"] if "num_frames" in kwargs else len(kwargs.get("video") or kwargs["control_video"])


@ROWS
def test_latents_and_tokens_are_as_the_row_computes_them(row: Family) -> None:
    pipe, kwargs = shared(row.id), tiny_inputs(row, steps=2)
    seen: list[int] = []
    handle = blocks(pipe)[0].register_forward_pre_hook(lambda m, a, k: seen.append(length(a, k)), with_kwargs=True)
    out = pipe(**kwargs).frames
    handle.remove()
    clip = (*asked_size(kwargs), asked_frames(kwargs))
    frames, rows, columns = latent_shape(row, *clip)
    frames = math.ceil(frames / row.patch[0]) * row.patch[0]  # CogVideoX 1.5 pads
    channels = pipe.vae.config.get("latent_channels") or pipe.vae.config.get("z_dim")
    assert out.numel() == frames * rows * columns * channels
    assert set(seen) == {tokens(row, *clip)}


def blocks(pipe: DiffusionPipeline) -> nn.ModuleList:
    names = ("blocks", "transformer_blocks", "visual_transformer_blocks")
    return next(getattr(pipe.transformer, name) for name in names if hasattr(pipe.transformer, name))


def length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens of the video stream: a tensor of (batch, tokens, width), or (frames, rows, columns, width)."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return math.prod(hidden.shape[1:-1]) if hidden.shape[0] <= 2 else math.prod(hidden.shape[:-1])


@ROWS
def test_a_stock_run_after_a_stock_run_changes_nothing(row: Family) -> None:
    pipe = shared(row.id)
    latents(pipe, row)
    before = fingerprint(pipe)
    latents(pipe, row)
    assert differences(before, fingerprint(pipe)) == []


@pytest.mark.parametrize("name", testing.OTHERS)
def test_classes_that_no_row_has_run_and_repeat_bit_for_bit(name: str) -> None:
    state = torch.random.get_rng_state()
    with quiet_libraries():
        pipe = tiny_pipeline_of(name)
        with torch.no_grad():
            first, again, other = (pipe(**tiny_inputs(pipe, steps=2, seed=seed)).frames for seed in (0, 0, 1))
    assert type(pipe).__name__ == name and torch.equal(torch.random.get_rng_state(), state)
    first, again, other = (frames[-1] for frames in (first, again, other))  # the batch's only one, or the last window
    assert torch.isfinite(first).all() and torch.equal(first, again) and not torch.equal(first, other)


def test_a_class_is_built_by_name_as_its_first_row() -> None:
    pipe = tiny_pipeline_of("LTXPipeline", scheduler="FlowMatchHeunDiscreteScheduler")
    assert type(pipe).__name__ == "LTXPipeline" and isinstance(pipe.scheduler, diffusers.FlowMatchHeunDiscreteScheduler)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("WanPipelin", BadInput, "nearest are WanPipeline"),
        ("HeliosPipeline", NotFound, "HeliosTransformer3DModel"),
        ("WanPipeline/../x", BadInput, "nearest are"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tiny_pipeline_of(name)


def test_every_builder_is_used_and_every_row_has_one() -> None:
    assert {row.pipeline for row in FAMILIES} == set(BUILDERS)


# --------------------------------------------------------------------------- why the table is stricter than diffusers


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cogvideox-2b", RuntimeError),
        ("cogvideox-5b", RuntimeError),
        ("cogvideox-1.5-5b", RuntimeError),
        ("mochi", RuntimeError),
        ("cogvideox-5b-i2v", ValueError),
    ],
)
def test_stock_pipelines_fail_in_the_run_at_sizes_they_accept(name: str, error: type[Exception]) -> None:
    width = tiny_inputs(name)["width"] + 8
    with pytest.raises(error, match="shape|size|resolution"):
        latents(tiny_pipeline(name), name, width=width)


@pytest.mark.parametrize(("name", "extra", "columns"), [("wan2.2-ti2v-5b", 16, 4), ("hunyuanvideo-1.5-480p", 8, 4)])
def test_stock_pipelines_shrink_sizes_they_accept(name: str, extra: int, columns: int) -> None:
    assert latents(tiny_pipeline(name), name, width=64 + extra).shape[-1] == columns


@pytest.mark.parametrize("name", ["cogvideox-2b", "cogvideox-1.5-5b"])
def test_stock_cogvideox_returns_more_frames_than_asked_for(name: str) -> None:
    assert latents(tiny_pipeline(name), name, num_frames=5, output_type="np").shape[1] == 8


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")  # the reason of the NaN
def test_stock_kandinsky_makes_nan_of_short_clips() -> None:
    name = "kandinsky5-lite-i2v"
    assert latents(tiny_pipeline(name), name, num_frames=13).isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # LTX, of one sigma
@pytest.mark.parametrize("name", ["ltx-video", "ltx-video-i2v", "ltx-2", "ltx-2-i2v", "mochi", "cogvideox-5b-v2v"])
def test_stock_pipelines_cannot_run_one_step(name: str) -> None:
    assert families.least_steps(families.family(name)) == 2
    try:
        frames = latents(tiny_pipeline(name), name, steps=1, output_type="pt")
    except (IndexError, ZeroDivisionError, ValueError, RuntimeError):
        return
    assert frames.isnan().any()


# --------------------------------------------------------------------------- what makes a family that family


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("wan2.1-1.3b", "UniPCMultistepScheduler"),
        ("skyreels-v2-14b", "UniPCMultistepScheduler"),
        ("cogvideox-2b", "CogVideoXDDIMScheduler"),
        ("cogvideox-5b", "CogVideoXDPMScheduler"),
        ("cogvideox-1.5-5b", "CogVideoXDPMScheduler"),
        ("hunyuanvideo-1.5-480p", "FlowMatchEulerDiscreteScheduler"),
        ("ltx-video", "FlowMatchEulerDiscreteScheduler"),
        ("mochi", "FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_the_scheduler_is_the_checkpoints(name: str, scheduler: str) -> None:
    assert type(tiny_pipeline(name).scheduler).__name__ == scheduler


def test_another_scheduler_can_be_asked_for() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b", scheduler="FlowMatchEulerDiscreteScheduler")
    assert isinstance(pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler)
    assert torch.isfinite(latents(pipe, "wan2.1-1.3b")).all()


def test_two_experts_take_turns() -> None:
    pipe = tiny_pipeline("wan2.2-a14b")
    seen: list[str] = []
    for name in ("transformer", "transformer_2"):
        getattr(pipe, name).register_forward_pre_hook(lambda module, args, name=name: seen.append(name))
    latents(pipe, "wan2.2-a14b", steps=6)
    assert list(dict.fromkeys(seen)) == ["transformer", "transformer_2"]
    assert len(seen) == 12


def test_guidance_and_picture_matter() -> None:
    pipe = tiny_pipeline("wan2.1-14b-480p-i2v")
    first = latents(pipe, pipe)
    other = tiny_inputs(pipe)["image"].rotate(90)
    assert not torch.equal(latents(pipe, pipe, image=other), first)
    assert not torch.equal(latents(pipe, pipe, guidance_scale=1.0), first)


@ROWS
def test_inputs_can_be_asked_for_by_the_pipeline(row: Family) -> None:
    pipe = shared(row.id)
    by_row, by_pipe = tiny_inputs(row), tiny_inputs(pipe)
    assert by_row.keys() == by_pipe.keys()
    assert by_row["generator"] is not tiny_inputs(row)["generator"]


def test_inputs_of_a_stranger_are_refused() -> None:
    class StrangePipeline(DiffusionPipeline):
        pass

    with pytest.raises(LookupError, match="StrangePipeline"):
        tiny_inputs(StrangePipeline())


# --------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    "name",
    ["flipbook", "wan2.1-14b-480p-i2v", "wan2.2-a14b", "wan2.2-ti2v-5b", "cogvideox-2b", "cogvideox-5b-control"],
)
def test_a_saved_pipeline_loads_and_makes_the_same_film(name: str, tmp_path: Path) -> None:
    folder = tiny_folder(name, tmp_path / "model")
    assert "TokenizersBackend" not in (folder / "model_index.json").read_text()
    loaded = DiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    built = tiny_pipeline(name)
    assert type(loaded) is type(built)
    same = weights(loaded)
    assert all(torch.equal(value, same[key]) for key, value in weights(built).items())
    # Not bit for bit: weights mapped from a file are aligned otherwise, which changes the CPU kernels' sums.
    torch.testing.assert_close(latents(loaded, name), latents(built, name), atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------- the fingerprint sees


def _patched_forward(pipe: DiffusionPipeline) -> None:
    pipe.transformer.forward = functools.partial(pipe.transformer.forward)


def _patched_block(pipe: DiffusionPipeline) -> None:
    blocks(pipe)[1]._compiled_call_impl = lambda *a, **k: None


def _swapped_list(pipe: DiffusionPipeline) -> None:
    for name, child in pipe.transformer.named_children():
        if isinstance(child, nn.ModuleList):
            pipe.transformer._modules[name] = nn.ModuleList(child)
            return


def _subclassed_scheduler(pipe: DiffusionPipeline) -> None:
    pipe.scheduler.__class__ = type(type(pipe.scheduler).__name__, (type(pipe.scheduler),), {})


class _Mirror(torch.Tensor):
    pass


def _mirrored_timesteps(pipe: DiffusionPipeline) -> None:
    pipe.scheduler.timesteps = pipe.scheduler.timesteps.as_subclass(_Mirror)


def _mirror_in_a_list(pipe: DiffusionPipeline) -> None:
    pipe.scheduler.model_outputs = [torch.zeros(1).as_subclass(_Mirror)]


def _hook(pipe: DiffusionPipeline) -> None:
    pipe.vae.register_forward_hook(lambda *a: None)


def _written_weight(pipe: DiffusionPipeline) -> None:
    next(pipe.text_encoder.parameters()).data.mul_(1)
    with torch.no_grad():
        next(pipe.transformer.parameters()).mul_(1)


def _replaced_weight(pipe: DiffusionPipeline) -> None:
    module = next(m for m in pipe.transformer.modules() if isinstance(m, nn.Linear))
    module.weight = nn.Parameter(module.weight.detach().clone())


def _replaced_part(pipe: DiffusionPipeline) -> None:
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)


def _progress_bar(pipe: DiffusionPipeline) -> None:
    pipe.progress_bar = pipe.progress_bar


CHANGES: dict[str, Callable[[DiffusionPipeline], None]] = {
    "transformer.forward": _patched_forward,
    "_compiled_call_impl": _patched_block,
    "transformer children": _swapped_list,
    "scheduler class": _subclassed_scheduler,
    "scheduler.timesteps: ('Tensor'": _mirrored_timesteps,
    "scheduler.model_outputs": _mirror_in_a_list,
    "vae._forward_hooks": _hook,
    "tensor": _written_weight,
    "weight tensor": _replaced_weight,
    "pipe.scheduler": _replaced_part,
    "pipe.progress_bar": _progress_bar,
}


@SOME
@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_seen(name: str, line: str) -> None:
    pipe = tiny_pipeline(name)
    before = fingerprint(pipe)
    assert differences(before, fingerprint(pipe)) == []
    CHANGES[line](pipe)
    assert any(line in said for said in differences(before, fingerprint(pipe)))


def test_a_patched_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = shared("flipbook")
    before = fingerprint(pipe)
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "forward", lambda self: None)
    assert any("WanTransformer3DModel" in said for said in differences(before, fingerprint(pipe)))


def test_a_changed_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, stop = shared("flipbook"), threading.Event()
    before, flash = fingerprint(pipe), torch.backends.cuda.flash_sdp_enabled()
    thread = threading.Thread(target=stop.wait, name="left behind")
    thread.start()
    torch.backends.cuda.enable_flash_sdp(not flash)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(os.environ, "LEFT_BEHIND", "1")
        said = "\n".join(differences(before, fingerprint(pipe)))
    torch.backends.cuda.enable_flash_sdp(flash)
    stop.set()
    thread.join()
    for words in ("thread: left behind", "environment: LEFT_BEHIND", "torch: attention flash", "torch: grad"):
        assert words in said
    assert differences(before, fingerprint(pipe)) == []


def test_a_compilers_flag_is_seen_once_there_is_a_compiler() -> None:
    import torch._inductor.config as inductor

    pipe = shared("flipbook")
    before = fingerprint(pipe)
    with inductor.patch("emulate_precision_casts", not inductor.emulate_precision_casts):  # monkeypatch would drop it
        changed = differences(before, fingerprint(pipe))
    assert differences(before, fingerprint(pipe)) == []
    assert any("emulate_precision_casts" in said for said in changed)


def test_unknown_rows_are_refused_by_name() -> None:
    with pytest.raises(families.BadInput, match="nearest are"):
        tiny_pipeline("wan9")


PATCHES: dict[str, tuple[str, str]] = {
    "transformers.core_model_loading.ThreadPoolExecutor": ("transformers.core_model_loading", "ThreadPoolExecutor"),
    "safetensors.torch.safe_open": ("safetensors.torch", "safe_open"),
    "torch.nn.functional.scaled_dot_product_attention": ("torch.nn.functional", "scaled_dot_product_attention"),
    "diffusers.utils.logging._tqdm_active": ("diffusers.utils.logging", "_tqdm_active"),
}


@pytest.mark.parametrize("line", PATCHES)
def test_a_patched_module_of_a_library_is_seen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = importlib.import_module(PATCHES[line][0]), PATCHES[line][1]
    before = fingerprint_of_process()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, None)
        changed = differences(before, fingerprint_of_process())
    assert differences(before, fingerprint_of_process()) == []
    assert len(changed) == 1 and changed[0].startswith(line)


def test_a_patched_method_of_a_librarys_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of_process()
    monkeypatch.setattr(nn.Module, "forward", lambda self: None)
    assert any(
        "torch.nn.modules.module.Module functions" in said for said in differences(before, fingerprint_of_process())
    )


def test_a_thread_and_a_flag_that_are_left_behind_are_seen_with_no_pipeline() -> None:
    stop, before = threading.Event(), fingerprint_of_process()
    thread = threading.Thread(target=stop.wait, name="left behind")
    thread.start()
    torch.set_default_dtype(torch.float64)
    said = "\n".join(differences(before, fingerprint_of_process()))
    torch.set_default_dtype(torch.float32)
    stop.set()
    thread.join()
    assert "thread: left behind" in said and "torch: default dtype" in said
    assert differences(before, fingerprint_of_process()) == []
