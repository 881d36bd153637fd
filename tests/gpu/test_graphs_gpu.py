"""On a CUDA device: real graphs make the same film, give their memory back, and a scheduler's step can be captured."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import undercrank
from undercrank.families import family
from undercrank.levers.cuda_graph import CudaGraph
from undercrank.levers.mirror import Mirror
from undercrank.records import LeverRefused
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline
from undercrank.undo import swap_attr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAN = "wan2.1-1.3b"


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tiny(name: str, scheduler: str | None = None) -> Any:
    pipe = tiny_pipeline(name, scheduler=scheduler).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def film(pipe: Any, steps: int = 4, **settings: Any) -> torch.Tensor:
    return pipe(**(tiny_inputs(pipe, steps=steps) | settings)).frames


def without_graphs(pipe: Any, steps: int = 4, **wishes: str) -> torch.Tensor:
    with undercrank.accelerate(pipe, cuda_graph="off", **wishes):
        return film(pipe, steps)


def complaints(run: Any) -> list[str]:
    return [f"{receipt.lever}: {complaint}" for receipt in run.receipts for complaint in receipt.complaints]


# --------------------------------------------------------------------------- the lever


@pytest.mark.parametrize(
    "name",
    [WAN, "cogvideox-2b", "ltx-video", "wan2.2-a14b", "hunyuanvideo", "hunyuanvideo-1.5-480p", "kandinsky5-lite"],
)
def test_the_film_is_the_same_and_so_is_the_second(name: str) -> None:
    pipe = tiny(name)
    steps = 8 if name == "wan2.2-a14b" else 4
    expected = without_graphs(pipe, steps)
    with undercrank.accelerate(pipe, cuda_graph="on") as run:
        for _ in range(2):
            assert torch.equal(expected, film(pipe, steps))
            assert complaints(run) == [] and run.rig.counters["cuda_graph.replays"] > 0
        held = next(receipt.bytes for receipt in run.receipts if receipt.lever == "cuda_graph")
        assert held > 0


@pytest.mark.parametrize("name", ["cogvideox-2b", "hunyuanvideo-1.5-480p"])
def test_over_compiled_blocks_twenty_steps_are_those_of_compiled_blocks_alone(name: str) -> None:
    pipe = tiny(name)
    with undercrank.accelerate(pipe, compile="on", cuda_graph="off"):
        alone = film(pipe, 20)
    with undercrank.accelerate(pipe, compile="on", cuda_graph="on") as run:
        for _ in range(2):
            assert torch.equal(alone, film(pipe, 20))
            assert complaints(run) == []


def test_two_sizes_take_turns() -> None:
    pipe = tiny(WAN)
    sizes = [{}, {"height": 32}]
    with undercrank.accelerate(pipe, cuda_graph="off"):
        expected = [film(pipe, **size) for size in sizes]
    with undercrank.accelerate(pipe, cuda_graph="on"):
        for _ in range(3):
            assert all(torch.equal(e, film(pipe, **size)) for e, size in zip(expected, sizes, strict=True))


def test_leaving_gives_the_memory_back() -> None:
    """From the second time on: the first one leaves cuBLAS its workspace of one more stream."""
    pipe = tiny(WAN)
    seen = []
    for _ in range(3):
        with undercrank.accelerate(pipe, cuda_graph="on"):
            film(pipe)
            inside = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[1] == seen[2] and seen[2][1] < inside


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_in_the_loop_the_next_film_is_right(at: int) -> None:
    pipe = tiny(WAN)
    expected = without_graphs(pipe)
    before = fingerprint(pipe)

    def fail(index: int) -> None:
        if index == at:
            raise ZeroDivisionError

    with undercrank.accelerate(pipe, cuda_graph="on") as run:
        run.rig.at_step.append(fail)
        with pytest.raises(ZeroDivisionError):
            film(pipe)
        run.rig.at_step.remove(fail)
        assert torch.equal(expected, film(pipe))
    assert differences(before, fingerprint(pipe)) == []


class Reads(nn.Module):
    """Reads a value from the device while `reads` is set, which CUDA refuses during a capture."""

    reads = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        if self.reads:
            found = found * float(x.sum().item() != 1e9)
        return self.linear(found)


def test_a_capture_that_fails_is_ended_and_the_next_one_works() -> None:
    model = Reads().eval().cuda()
    rig = Rig(SimpleNamespace(transformer=model), family(WAN), "cuda")
    rig.running = True
    x = torch.randn(4, 64, device="cuda")
    with CudaGraph().engage(rig):
        model(x)
        with pytest.raises(LeverRefused, match="Reads cannot be recorded"):
            model(x)
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.empty(2**28, device="cuda").zero_()  # the allocator works, on the ordinary pool
        model.reads = False
        for seed in range(3):
            y = torch.randn(4, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            assert torch.equal(model(y), model.linear(model.linear(y)))
        torch.cuda.synchronize()


# --------------------------------------------------------------------------- a scheduler's step


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("cogvideox-2b", "CogVideoXDDIMScheduler"),
        ("cogvideox-5b", "CogVideoXDPMScheduler"),
        ("ltx-video", "FlowMatchEulerDiscreteScheduler"),
        (WAN, "UniPCMultistepScheduler"),
    ],
)
def test_a_step_of_the_scheduler_is_captured_under_host_sync_and_replays_to_the_same_latents(
    name: str, scheduler: str
) -> None:
    pipe = tiny(name)
    assert type(pipe.scheduler).__name__ == scheduler
    seen: list[bool] = []
    original = pipe.scheduler.step

    with undercrank.accelerate(pipe, host_sync="on", cuda_graph="off"):
        film(pipe, 6)  # engages

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            own = pipe.scheduler
            seen.append(len(seen) != 3 or _captured_step_is_equal(own, args, kwargs))
            return type(own).step(own, *args, **kwargs)

        with swap_attr(pipe.scheduler, "step", step):
            film(pipe, 6)
    assert len(seen) >= 6 and all(seen)


def _captured_step_is_equal(scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Capture the step over buffers, give the buffers other values, replay: equal to the step called with those."""
    kwargs = kwargs | ({"generator": None} if "generator" in kwargs else {})  # a graph draws from the device's own
    plain = [isinstance(arg, torch.Tensor) and not isinstance(arg, Mirror) and arg.is_cuda for arg in args]
    buffers = tuple(arg.clone() if is_plain else arg for arg, is_plain in zip(args, plain, strict=True))
    warm, recorded, called = (copy.deepcopy(scheduler) for _ in range(3))

    def stepped(of: Any, given: tuple[Any, ...]) -> torch.Tensor:
        return type(of).step(of, *given, **kwargs)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stepped(warm, buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = stepped(recorded, buffers)
    for buffer, is_plain in zip(buffers, plain, strict=True):
        if is_plain and buffer.is_floating_point() and buffer.dim() > 1:
            buffer.normal_()
    torch.cuda.manual_seed(5)
    graph.replay()
    torch.cuda.manual_seed(5)
    expected = stepped(called, tuple(b.clone() if p else b for b, p in zip(buffers, plain, strict=True)))
    return torch.equal(expected, found)
