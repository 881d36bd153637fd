"""prompt_cache: a prompt is read once, by the weights that are there, and the film is the one it was."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

from undercrank import families, memory
from undercrank.levers.prompt_cache import MOST_PROMPTS, NOT_READERS, PromptCache, _kept_prompts
from undercrank.planner import case_of, load_spec, resolve, under
from undercrank.records import BadInput, Case, Device, Machine, Request
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline


@contextmanager
def on(rig: Rig, mode: str = "keep") -> Iterator[None]:
    with PromptCache(mode=mode).engage(rig), rig.seams():
        yield


@pytest.fixture(params=["wan2.1-1.3b", "hunyuanvideo-1.5-480p", "ltx-video", "cogvideox-2b"])
def rig(request: pytest.FixtureRequest) -> Rig:
    pipe = tiny_pipeline(request.param)
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, families.family(request.param), "cpu")


@pytest.fixture
def wan() -> Rig:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, families.family("wan2.1-1.3b"), "cpu")


def film(rig: Rig, **inputs: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """Latents of one run, and how many prompts were read and found in it."""
    with rig.call(), torch.no_grad():
        latents = rig.pipe(**tiny_inputs(rig.pipe, steps=2) | inputs).frames
    return latents, {name: rig.counters.get(f"prompt_cache.{name}", 0) for name in ("read", "found", "not_kept")}


def read(rig: Rig, prompt: str = "a fox", **more: Any) -> bool:
    """Was the encoder asked?"""
    before = rig.counters.get("prompt_cache.found", 0)
    with torch.no_grad():
        rig.pipe.encode_prompt(prompt, **more)
    return rig.counters.get("prompt_cache.found", 0) == before


def test_the_same_prompt_is_not_read_again_and_the_latents_are_equal(rig: Rig) -> None:
    stock, _ = film(rig)
    calls: list[int] = []
    for name, part in rig.pipe.components.items():
        if name.startswith("text_encoder"):
            part.register_forward_hook(lambda *_: calls.append(1))
    with on(rig):
        first, counted = film(rig)
        assert torch.equal(first, stock) and counted["read"] and not counted["found"]
        asked = len(calls)
        second, again = film(rig)
        assert torch.equal(second, stock) and again["found"] == counted["read"] and not again["read"]
        assert asked and len(calls) == asked


def test_another_prompt_or_length_is_read(wan: Rig) -> None:
    with on(wan):
        assert read(wan) and not read(wan)
        assert read(wan, "a cat") and read(wan, max_sequence_length=8) and read(wan, negative_prompt="x")
        assert not read(wan) and not read(wan, "a cat")


def test_a_change_of_the_weights_is_another_key_also_where_no_version_tells_of_it(wan: Rig) -> None:
    weight = next(p for p in wan.pipe.text_encoder.parameters() if p.ndim == 2)
    with on(wan):
        assert read(wan) and not read(wan)
        with torch.no_grad():
            weight.mul_(1.01)
        assert read(wan) and not read(wan)
        weight.data += 0.01  # as adapters are merged
        assert read(wan) and not read(wan)
        wan.pipe.text_encoder.to(torch.bfloat16)
        assert read(wan) and not read(wan)


def test_an_adapter_and_its_strength_are_part_of_the_key(wan: Rig) -> None:
    layer = next(m for m in wan.pipe.text_encoder.modules() if isinstance(m, torch.nn.Linear))
    with on(wan):
        assert read(wan) and not read(wan)
        layer.scaling = {"style": 1.0}
        assert read(wan) and not read(wan)
        layer.scaling = {"style": 0.5}
        assert read(wan) and not read(wan)


def test_a_hook_on_an_encoder_is_part_of_the_key(wan: Rig) -> None:
    layer = next(m for m in wan.pipe.text_encoder.modules() if isinstance(m, torch.nn.Linear))
    with on(wan):
        assert read(wan) and not read(wan)
        handle = layer.register_forward_hook(lambda module, args, output: output * 2)
        assert read(wan) and not read(wan)
        handle.remove()
        assert not read(wan)


@pytest.mark.parametrize("pipeline", sorted({row.pipeline for row in families.FAMILIES}))
def test_what_a_pipeline_calls_besides_is_no_reader(pipeline: str) -> None:
    """Under `host` it would wait on the host while the run needs it on the device."""
    cls = getattr(diffusers, pipeline)
    names = [name for name in inspect.signature(cls).parameters if name not in NOT_READERS]
    source = inspect.getsource(cls.__call__)
    modules = [name for name in names if not name.startswith(("tokenizer", "processor", "guider"))]
    assert not [name for name in modules if f"self.{name}(" in source]


def test_another_encoder_is_another_key(wan: Rig) -> None:
    with on(wan):
        assert read(wan)
        wan.pipe.text_encoder = tiny_pipeline("wan2.1-1.3b", seed=1).text_encoder
        assert read(wan) and not read(wan)


def test_of_more_prompts_than_are_kept_the_one_asked_for_longest_ago_goes(wan: Rig) -> None:
    with on(wan):
        for index in range(MOST_PROMPTS):
            assert read(wan, f"fox {index}")
        assert not read(wan, "fox 0")
        assert read(wan, "one more")  # fox 1 goes
        assert not read(wan, "fox 0") and read(wan, "fox 1")
        assert len(_kept_prompts[wan.pipe]) == MOST_PROMPTS


def test_what_is_written_into_a_prompt_that_was_returned_stays_with_its_owner(wan: Rig) -> None:
    with on(wan), torch.no_grad():
        first = wan.pipe.encode_prompt("a fox")[0]
        kept = first.clone()
        first.zero_()
        second = wan.pipe.encode_prompt("a fox")[0]
        assert torch.equal(second, kept)
        second.zero_()
        assert torch.equal(wan.pipe.encode_prompt("a fox")[0], kept)


def test_embeddings_that_are_given_and_encoders_in_training_are_not_kept(wan: Rig) -> None:
    with on(wan), torch.no_grad():
        embeds = wan.pipe.encode_prompt("a fox")[0]
        wan.pipe.encode_prompt(None, prompt_embeds=embeds, do_classifier_free_guidance=False)
        assert wan.counters["prompt_cache.not_kept"] == 1
        wan.pipe.text_encoder.train()
        wan.pipe.encode_prompt("a fox")
        assert wan.counters["prompt_cache.not_kept"] == 2


def test_what_was_read_goes_with_its_pipeline() -> None:
    import gc

    before = len(_kept_prompts)
    rig = Rig(tiny_pipeline("wan2.1-1.3b"), families.family("wan2.1-1.3b"), "cpu")
    with on(rig):
        read(rig)
    assert len(_kept_prompts) == before + 1
    del rig
    gc.collect()
    assert len(_kept_prompts) == before


def test_the_host_gives_the_same_film_and_the_encoder_is_sent_for_new_prompts_only(wan: Rig) -> None:
    stock, _ = film(wan)
    with on(wan, "host"):
        assert torch.equal(film(wan)[0], stock) and torch.equal(film(wan)[0], stock)
    assert torch.equal(film(wan)[0], stock)


# --------------------------------------------------------------------------- when memory asks for it


def case(free_bytes: int = 2**40, kind: str = "cuda") -> Case:
    device = Device(kind=kind, name="a GPU", capability=(9, 0), free_bytes=free_bytes)
    machine = Machine(name="m", devices=(device,), cpu_count=1)
    family = families.family("wan2.1-14b")
    resolved, _ = resolve(Request(model=family.id, width=832, height=480, dtype="bfloat16"), family, device)
    return case_of(resolved, family, machine, device, load_spec(family))


def test_encoders_wait_on_the_host_only_where_that_makes_the_run_fit() -> None:
    host = PromptCache(mode="host")
    peaks = memory.peaks(case())
    without = memory.peaks(under(case(), [host]))
    assert without["text"] == peaks["text"]
    assert peaks["denoise"] - without["denoise"] == case().weights["text_encoder"]
    assert host.doubt(case()) == "everything fits on the device"
    between = (max(without.values()) + max(peaks.values())) // 2
    assert host.doubt(case(between)) is None
    assert "either" in str(host.doubt(case(max(without.values()) - 1)))
    assert "already" in str(host.doubt(case(between, kind="cpu")))
    assert "smallest part" in str(PromptCache(mode="keep").doubt(case(kind="cpu")))
    assert PromptCache(mode="keep").doubt(case()) is None
    assert "owner" in str(host.doubt(replace(case(between), scheduler="UniPC")))


def test_words() -> None:
    assert PromptCache.from_wish({"prompt_cache": "on"}).mode == "keep"
    assert [each.mode for each in PromptCache().choices(case())] == ["host", "keep"]
    with pytest.raises(BadInput, match="keep, host"):
        PromptCache.from_wish({"prompt_cache": "disk"})
