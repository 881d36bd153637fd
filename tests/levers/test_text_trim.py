"""text_trim: the film is stock's to the rounding, whatever the texts are, and no attention is given a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.models.transformers import transformer_hunyuan_video as v1_0
from diffusers.models.transformers import transformer_hunyuan_video15 as v1_5

from undercrank.audit import DEVICE, logical_device
from undercrank.families import FAMILIES, family
from undercrank.ledger import Ledger
from undercrank.levers import text_trim
from undercrank.levers.text_trim import PROVEN, Cut, TextTrim, find_cut
from undercrank.planner import make_plan
from undercrank.records import Device, LeverRefused, Machine, Request, Status
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline
from undercrank.undo import swap_attr, swap_class

T2V, I2V, V1_0, V1_0_I2V = "hunyuanvideo-1.5-480p", "hunyuanvideo-1.5-480p-i2v", "hunyuanvideo", "hunyuanvideo-i2v"
EACH = [T2V, I2V, V1_0, V1_0_I2V]
QUOTED = 'a shop with a sign that says "OPEN" and a wall with "no ads"'
LONG = "a very long negative prompt about everything that should not be seen in it, " * 2


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return rig_of(getattr(request, "param", T2V))


def rig_of(name: str, dtype: torch.dtype = torch.float32) -> Rig:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    if dtype is not torch.float32:
        pipe.to(dtype)
    return Rig(pipe, family(name), "cpu")


def film(rig: Rig, **settings: Any) -> torch.Tensor:
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**tiny_inputs(rig.pipe, steps=3, **settings)).frames


def trimmed(rig: Rig, **settings: Any) -> torch.Tensor:
    with TextTrim().engage(rig):
        frames = film(rig, **settings)
        assert TextTrim().verify(rig, None) == []  # type: ignore[arg-type]
    return frames


def error(stock: torch.Tensor, other: torch.Tensor) -> float:
    return float((stock - other).float().norm() / stock.float().norm())


@contextmanager
def masks_given(module: Any = v1_0) -> Iterator[list[Any]]:
    """(shape of the mask or None, tokens) of every attention of a block in that file."""
    seen: list[Any] = []
    original = module.dispatch_attention_fn

    def watched(query: torch.Tensor, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        seen.append((None if attn_mask is None else tuple(attn_mask.shape), query.shape[1]))
        return original(query, *args, attn_mask=attn_mask, **kwargs)

    with patch.object(module, "dispatch_attention_fn", watched):
        yield seen


# --------------------------------------------------------------------------- whole films


@pytest.mark.parametrize("rig", EACH, indirect=True)
@pytest.mark.parametrize("prompt", ["a red ball rolls left", "", QUOTED], ids=["plain", "empty", "quoted"])
def test_the_film_is_stocks(rig: Rig, prompt: str) -> None:
    stock = film(rig, prompt=prompt)
    with masks_given() as given:
        assert error(stock, trimmed(rig, prompt=prompt)) < 1e-5
    assert given and {shape for shape, _ in given} == {None}
    assert rig.counters["text_trim.reads"] == len(rig.branch_calls or "1")


@pytest.mark.parametrize("rig", [T2V, I2V], indirect=True)
@pytest.mark.parametrize("negative", ["", LONG, 'no "SALE" signs'], ids=["shorter", "longer", "quoted"])
def test_each_branch_has_its_own_length(rig: Rig, negative: str) -> None:
    stock = film(rig, prompt=QUOTED, negative_prompt=negative)
    with masks_given() as given:
        assert error(stock, trimmed(rig, prompt=QUOTED, negative_prompt=negative)) < 1e-5
    assert len({tokens for _, tokens in given}) == 2 and {shape for shape, _ in given} == {None}


@pytest.mark.parametrize("rig", [T2V, V1_0], indirect=True)
def test_without_and_with_a_second_branch(rig: Rig) -> None:
    """1.5 without guidance has one branch; 1.0 with true guidance has two."""
    if rig.family.id == T2V:
        rig.pipe.guider = type(rig.pipe.guider)(guidance_scale=1.0)
        settings, branches = {}, 1
    else:
        settings, branches = {"true_cfg_scale": 4.0, "negative_prompt": LONG}, 2
    stock = film(rig, **settings)
    assert error(stock, trimmed(rig, **settings)) < 1e-5
    assert rig.counters == {"text_trim.forwards": 3 * branches, "text_trim.reads": branches}


@pytest.mark.parametrize("rig", [T2V, I2V, V1_0], indirect=True)
def test_a_batch_of_different_lengths_keeps_a_mask_over_the_keys_only(rig: Rig) -> None:
    settings: dict[str, Any] = {"prompt": ["a", QUOTED]}
    if rig.family.id != V1_0:
        settings["negative_prompt"] = [LONG, "x"]
    stock = film(rig, **settings)
    with masks_given() as given:
        assert error(stock, trimmed(rig, **settings)) < 1e-5
    assert {shape for shape, _ in given} == {(2, 1, 1, tokens) for _, tokens in given}


@pytest.mark.parametrize("rig", [T2V], indirect=True)
def test_a_batch_of_equal_lengths_needs_no_mask(rig: Rig) -> None:
    settings = {"prompt": ["a red cat", "a red cat"], "negative_prompt": ["blurry", "blurry"]}
    stock = film(rig, **settings)
    with masks_given() as given:
        assert error(stock, trimmed(rig, **settings)) < 1e-5
    assert {shape for shape, _ in given} == {None}


@pytest.mark.parametrize("name", [T2V, V1_0])
def test_in_bfloat16_it_is_as_near_to_float32_as_stock_is(name: str) -> None:
    truth, half = film(rig_of(name)), rig_of(name, torch.bfloat16)
    stock, moved = film(half), trimmed(half)
    assert torch.isfinite(moved).all()
    assert error(truth, moved) < 1.25 * error(truth, stock)
    assert error(stock, moved) < 1.25 * error(truth, stock)


def test_these_tests_would_see_a_token_lost(rig: Rig) -> None:
    stock = film(rig)
    used = text_trim._used
    with patch.object(text_trim, "_used", lambda row: max(0, used(row) - 1)):
        assert error(stock, trimmed(rig)) > 5e-5


# --------------------------------------------------------------------------- one forward

TEXT, GLYPHS, LOOKS = 60, 20, 9
HOLES = [place % 3 == 1 for place in range(TEXT)]
FROM_THE_LEFT = [place >= TEXT - 7 for place in range(TEXT)]


def mask(row: int | list[bool], places: int) -> torch.Tensor:
    return torch.tensor([float(place < row) for place in range(places)] if isinstance(row, int) else row).float()


def arguments(texts: list[Any], glyphs: list[int] | None = None, picture: bool = False) -> dict[str, Any]:
    """A call of a tiny transformer; `glyphs` are 1.5's second text."""
    random = torch.Generator().manual_seed(3)
    batch, new = len(texts), glyphs is not None
    call = {
        "hidden_states": torch.randn(batch, 9 if new else 4, 2, 4, 4, generator=random),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, TEXT, 32, generator=random),
        "encoder_attention_mask": torch.stack([mask(row, TEXT) for row in texts]),
        "return_dict": False,
    }
    if glyphs is None:
        return call | {"pooled_projections": torch.randn(batch, 32, generator=random), "guidance": torch.ones(batch)}
    return call | {
        "encoder_hidden_states_2": torch.randn(batch, GLYPHS, 16, generator=random),
        "encoder_attention_mask_2": torch.stack([mask(row, GLYPHS) for row in glyphs]),
        "image_embeds": torch.randn(batch, LOOKS, 32, generator=random) * picture,
    }


def forward(rig: Rig, *args: Any, **call: Any) -> torch.Tensor:
    with torch.no_grad(), swap_attr(rig, "running", True):
        return rig.pipe.transformer(*args, **call)[0]


@pytest.mark.parametrize("picture", [False, True], ids=["no picture", "picture"])
@pytest.mark.parametrize(
    ("texts", "glyphs"),
    [([7], [0]), ([7], [4]), ([7, 40], [0, 3]), ([7, 3], [0, 4]), ([TEXT], [GLYPHS]), ([0], [3]), ([0, 5], [2, 0]),
     ([HOLES], [1]), ([FROM_THE_LEFT, 9], [0, 2])],
)  # fmt: skip
def test_one_forward_of_1_5(rig: Rig, texts: list[Any], glyphs: list[int], picture: bool) -> None:
    call = arguments(texts, glyphs, picture)
    stock = forward(rig, **call)
    with TextTrim().engage(rig):
        assert error(stock, forward(rig, **call)) < 1e-5


@pytest.mark.parametrize("rig", [V1_0, V1_0_I2V], indirect=True)
@pytest.mark.parametrize("texts", [[7], [7, 40], [TEXT], [HOLES], [FROM_THE_LEFT, 9]])
def test_one_forward_of_1_0(rig: Rig, texts: list[Any]) -> None:
    call = arguments(texts)
    stock = forward(rig, **call)
    with TextTrim().engage(rig):
        assert error(stock, forward(rig, **call)) < 1e-5


def test_the_cut_of_a_call() -> None:
    def kept(*args: Any) -> tuple[list[int], bool]:
        cut = find_cut(arguments(*args))
        return [cut.kept.get(name, -1) for name in (*text_trim.TEXTS, text_trim.PICTURE)], cut.whole

    assert kept([7], [0]) == ([7, 0, 0], True)
    assert kept([7], [4], True) == ([7, 4, -1], True)
    assert kept([7, 40], [4, 0]) == ([40, 4, 0], False)
    assert kept([7, 3], [0, 4]) == ([7, 4, 0], False)  # both hold seven, in other places
    assert kept([HOLES], [1]) == ([TEXT - 1, 1, 0], False)
    assert kept([0], [0]) == ([1, 0, 0], False)
    assert kept([7]) == ([7, -1, -1], True)


def test_a_cut_takes_views() -> None:
    call = arguments([7], [2])
    short = Cut(kept={"encoder_hidden_states": 7}, whole=True).apply(call)
    assert short["encoder_hidden_states"].shape[1] == 7 and call["encoder_hidden_states"].shape[1] == TEXT
    assert short["encoder_hidden_states"].data_ptr() == call["encoder_hidden_states"].data_ptr()


def test_stock_builds_a_mask_over_all_pairs_and_the_lever_none(rig: Rig) -> None:
    call = arguments([7], [0])
    with masks_given(v1_5) as stock:
        forward(rig, **call)
    tokens = 2 * 4 * 4 + TEXT + GLYPHS + LOOKS
    assert stock == [((1, 1, tokens, tokens), tokens)] * 3
    with TextTrim().engage(rig), masks_given(v1_5) as own, masks_given(v1_0) as plain:
        forward(rig, **call)
    assert own == [] and plain == [(None, 2 * 4 * 4 + 7)] * 3


def test_outside_a_run_it_is_stock(rig: Rig) -> None:
    call = arguments([7], [3])
    with torch.no_grad():
        stock = rig.pipe.transformer(**call)[0]
        with TextTrim().engage(rig), masks_given(v1_5) as given:
            assert torch.equal(stock, rig.pipe.transformer(**call)[0])
    assert len(given) == 3 and not rig.counters


def test_positional_arguments_are_understood(rig: Rig) -> None:
    call = arguments([7], [3])
    first = [call.pop(name) for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    stock = forward(rig, *first, **call)
    with TextTrim().engage(rig), masks_given() as given:
        assert error(stock, forward(rig, *first, **call)) < 1e-5
    assert {shape for shape, _ in given} == {None}


# --------------------------------------------------------------------------- one read a branch


def test_the_masks_are_read_once_and_again_when_they_change(rig: Rig) -> None:
    one, two = arguments([7], [3]), arguments([9], [0])
    with TextTrim().engage(rig):
        for call in (one, two, one, two):
            forward(rig, **call)
        assert rig.counters["text_trim.reads"] == 2
        two["encoder_attention_mask"][:, :20] = 1.0  # written into
        stock = find_cut(two)
        forward(rig, **two)
        assert rig.counters["text_trim.reads"] == 3 and stock.kept["encoder_hidden_states"] == 20
        one["encoder_attention_mask"] = one["encoder_attention_mask"].clone()  # another tensor
        forward(rig, **one)
        assert rig.counters["text_trim.reads"] == 4


def test_texts_that_change_in_every_step_are_not_hoarded(rig: Rig) -> None:
    trim = text_trim._Trim(rig, rig.pipe.transformer)
    for length in range(1, 12):
        trim._cut_of(arguments([length], [0]))
    assert len(trim._known) <= 4
    trim.forget(None)
    assert not trim._known


def test_tensors_of_inference_mode_are_taken(rig: Rig) -> None:
    with torch.inference_mode():
        call = arguments([7], [3])
        with TextTrim().engage(rig), swap_attr(rig, "running", True):
            for _ in range(2):
                rig.pipe.transformer(**call)
    assert rig.counters["text_trim.reads"] == 1


def test_a_generation_waits_once_a_branch_more_and_no_step_does() -> None:
    def waits(lever: bool, steps: int) -> int:
        rig = Rig(rig_of(T2V).pipe, family(T2V), f"{DEVICE}:0")
        with logical_device(rig.pipe) as auditor, rig.seams(), rig.call(), torch.no_grad():
            auditor.in_loop = lambda: rig.running
            with TextTrim().engage(rig) if lever else swap_attr(rig, "device", rig.device):
                rig.pipe(**tiny_inputs(T2V, steps=steps))
        return auditor.found(steps).in_loop

    assert [waits(True, steps) - waits(False, steps) for steps in (2, 3)] == [2, 2]


# --------------------------------------------------------------------------- among others


def test_a_forward_that_fails_leaves_stock_attention(rig: Rig) -> None:
    call = arguments([7], [3])
    with TextTrim().engage(rig):
        with pytest.raises(RuntimeError):
            forward(rig, **call | {"hidden_states": torch.zeros(1, 5, 2, 4, 4)})
        with torch.no_grad(), masks_given(v1_5) as given:
            rig.pipe.transformer(**call)
    assert len(given) == 3


def test_a_hook_on_the_instance_stays_in_the_call(rig: Rig) -> None:
    """accelerate and diffusers put their hooks there before a lever comes."""
    seen, inner = [], rig.pipe.transformer.forward

    def hooked(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["encoder_hidden_states"].shape[1])
        return inner(*args, **kwargs)

    call = arguments([7], [3])
    with swap_attr(rig.pipe.transformer, "forward", hooked), TextTrim().engage(rig):
        forward(rig, **call)
    assert seen == [7] and "forward" not in vars(rig.pipe.transformer)


def test_a_class_given_later_stays_in_the_call(rig: Rig) -> None:
    cls, seen = type(rig.pipe.transformer), []

    def spied(self: Any, **call: Any) -> Any:
        seen.append(call["encoder_hidden_states"].shape[1])
        return cls.forward(self, **call)

    later = type(cls.__name__, (cls,), {"forward": spied})
    with TextTrim().engage(rig), swap_class(rig.pipe.transformer, later):
        forward(rig, **arguments([7], [3]))
    assert seen == [7]


def test_names_and_weights_are_untouched(rig: Rig) -> None:
    """Files of LoRA weights name modules and parameters."""
    transformer = rig.pipe.transformer
    before = [*dict(transformer.named_modules())], [*transformer.state_dict()], [*transformer.attn_processors]
    with TextTrim().engage(rig):
        assert before == (
            [*dict(transformer.named_modules())], [*transformer.state_dict()], [*transformer.attn_processors],
        )  # fmt: skip
        transformer.set_attention_backend("native")
        assert {p._attention_backend for p in transformer.attn_processors.values() if hasattr(p, "_parallel_config")}


def test_processors_of_somebody_else_are_left_and_told_of(rig: Rig) -> None:
    class Own(v1_5.HunyuanVideo15AttnProcessor2_0):
        pass

    for block in rig.pipe.transformer.transformer_blocks:
        block.attn.set_processor(Own())
    call = arguments([7], [3])
    stock = forward(rig, **call)
    with TextTrim().engage(rig):
        assert error(stock, forward(rig, **call)) < 1e-5  # trimmed, but for the mask
        assert type(rig.pipe.transformer.transformer_blocks[0].attn.processor) is Own
        (complaint,) = TextTrim().verify(rig, None)  # type: ignore[arg-type]
    assert "masks are still built" in complaint


# --------------------------------------------------------------------------- the plan


def plan(name: str, fidelity: str = "faithful", device: str = "cuda", **wishes: str):
    devices = (Device(kind=device, name="one", capability=(9, 0), total_bytes=2**40, free_bytes=2**40),)
    machine = Machine(name="a machine", devices=devices, cpu_count=1)
    request = Request(
        model=name,
        prompt="x",
        image="a.png" if "image_input" in family(name).traits else None,
        fidelity=fidelity,  # type: ignore[arg-type]
        wishes=tuple(wishes.items()),
    )
    made = make_plan(request, family=family(name), machine=machine, ledger=Ledger(()))
    return next(decision for decision in made.decisions if decision.lever == "text_trim")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", EACH)
def test_auto_engages_it_where_blocks_mask_padding(name: str, device: str) -> None:
    assert plan(name, device=device).status is Status.APPLIED


def test_exact_leaves_it_off() -> None:
    assert plan(T2V, "exact").status is Status.DECLINED


@pytest.mark.parametrize("row", [row for row in FAMILIES if row.pipeline not in PROVEN], ids=lambda row: row.id)
def test_elsewhere_there_is_a_reason(row: Any) -> None:
    if row.traits & {"video_input", "control_input"}:
        pytest.skip("the plan is made for a pipeline at hand only")
    decision = plan(row.id)
    assert decision.status is Status.UNSUPPORTED and row.pipeline in decision.reason
    with pytest.raises(LeverRefused, match=f"text_trim=on: .*{row.pipeline}"):  # nothing is loaded for it
        plan(row.id, text_trim="on")


def test_a_model_without_masked_texts_is_refused_and_left_alone() -> None:
    """A pipeline of a class that no table knows comes as far as this; it is refused before anything is touched."""
    rig = rig_of("mochi")
    before = fingerprint(rig.pipe)
    with pytest.raises(LeverRefused, match="MochiTransformer3DModel"), TextTrim().engage(rig):
        pass
    assert differences(before, fingerprint(rig.pipe)) == []
