"""On a CUDA device: no stall under host_sync, the same film with and without, memory given back."""

from dataclasses import replace

import pytest
import torch

import undercrank
from undercrank.engine import Engine
from undercrank.levers import knobs
from undercrank.records import Request
from undercrank.testing import tiny_inputs, tiny_pipeline
from undercrank.trace import Event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OFF = dict.fromkeys(knobs(), "off")
ASKED = Request(prompt="a red ball rolls left", seed=1, device="cuda", num_inference_steps=6)


def test_flipbook_makes_the_same_film_with_no_stall() -> None:
    with Engine() as engine:
        engine.generate(ASKED)
        fast = engine.generate(replace(ASKED, wishes=(("host_sync", "on"),))).report
        stock = engine.generate(replace(ASKED, wishes=(("host_sync", "off"),))).report
    assert "host_sync" in [r.lever for r in fast.receipts] and not any(r.complaints for r in fast.receipts)
    assert fast.trace.stalls == 0 < stock.trace.stalls, fast.trace.stall_sites
    assert fast.frames_hash == stock.frames_hash


@pytest.mark.parametrize("name", ["cogvideox-2b", "wan2.1-1.3b"])
def test_nothing_in_the_loop_copies_back(name: str) -> None:
    """CUDA raises at any copy back between the second step and the end of the loop."""
    pipe = tiny_pipeline(name).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    film = lambda: pipe(**tiny_inputs(pipe, steps=8)).frames  # noqa: E731
    with torch.no_grad():
        stock = film()
        with undercrank.accelerate(pipe, **(OFF | {"host_sync": "on"})) as run:
            film()
            armed = [
                lambda index: torch.cuda.set_sync_debug_mode("error") if index == 1 else None,
                lambda error: torch.cuda.set_sync_debug_mode("default"),
            ]
            run.rig.at_step.append(armed[0])
            run.rig.at_end.append(armed[1])
            try:
                fast = film()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(stock, fast)


def test_closing_gives_the_memory_back() -> None:
    before = torch.cuda.memory_allocated()
    with Engine() as engine:
        engine.generate(ASKED)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("state", ["reading", "placing", "engaging", "warming"])
def test_a_load_that_fails_gives_the_devices_memory_back_while_its_error_is_kept(state: str) -> None:
    asked = replace(ASKED, wishes=(("host_sync", "on"),))

    def listener(event: Event) -> None:
        if event.loading is not None and event.loading.state == state:
            raise ZeroDivisionError(state)

    with Engine() as engine:
        engine.prepare(asked)  # the libraries' own workspaces are made once, and stay
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with Engine() as engine:
        with pytest.raises(ZeroDivisionError) as kept:
            engine.prepare(asked, listener=listener)
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert kept.value.args == (state,)
    assert all(b - a <= 64 * 2**20 for a, b in zip(before, after, strict=True)), (before, after)
