"""cuda_graph: what is recorded, when it may be replayed, and that nothing else changes.

Without a GPU the recorder is a tape of operations: it does them again on the same tensors with no Python code in
between, fills recorded results with NaN until they are replayed, and refuses to read a value, as CUDA does.
"""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from undercrank.audit import DEVICE, logical_device
from undercrank.engine import Engine, accelerate, family_of_pipeline
from undercrank.families import family
from undercrank.levers.compile import Compile
from undercrank.levers.cuda_graph import MOST, CudaGraph
from undercrank.levers.graphs import Buffer, Graphs
from undercrank.levers.host_sync import HostSync
from undercrank.levers.text_trim import TextTrim
from undercrank.levers.uploads import Uploads, _innermost
from undercrank.records import BadInput, Lever, LeverRefused, Request, Trace
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline, tiny_pipeline_of
from undercrank.undo import swap_attr

pytestmark = [
    # Mochi asks for an autocast that the CPU does not have, and runs without it.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Cosmos' UniPC with Karras sigmas hands a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
WAN = "wan2.1-1.3b"
TAPE = CudaGraph(recorder="tape")
TRACE = Trace(stage_s={}, step_ms=(), stalls=0)


def rig_of(name: str = WAN) -> Rig:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, family(name), "cpu")


def film(rig: Rig, steps: int = 3, **settings) -> torch.Tensor:
    inputs = tiny_inputs(rig.pipe, steps=steps) | settings
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**inputs).frames


def engaged(rig: Rig, *levers: Lever) -> ExitStack:
    stack = ExitStack()
    for lever in levers:
        stack.enter_context(lever.engage(rig))
    return stack


def counted(rig: Rig) -> tuple[int, int, int]:
    """Forwards that came past the lever; the first of their kind; replayed."""
    return tuple(rig.counters.get(f"cuda_graph.{what}", 0) for what in ("calls", "firsts", "replays"))


# --------------------------------------------------------------------------- the film


@pytest.mark.parametrize("name", ["cogvideox-2b", WAN, "wan2.2-a14b", "ltx-video", "hunyuanvideo"])
def test_the_film_is_the_same_and_the_second_one_is_all_replays(name: str) -> None:
    rig = rig_of(name)
    steps = 6 if len(rig.denoisers) == 2 else 3
    stock = film(rig, steps)
    with engaged(rig, TAPE):
        assert torch.equal(stock, film(rig, steps))
        calls, firsts, replays = counted(rig)
        assert calls == firsts + replays and 0 < firsts < replays
        assert TAPE.verify(rig, TRACE) == []
        assert torch.equal(stock, film(rig, steps))
        assert counted(rig) == (calls, 0, calls) and TAPE.verify(rig, TRACE) == []


@pytest.mark.parametrize(
    "name",
    [
        "hunyuanvideo-1.5-480p", "mochi", "kandinsky5-lite", "cosmos-2.5-2b",
        "skyreels-v2-14b-df", WAN,
    ],
)  # fmt: skip
def test_nothing_is_read_or_sent_while_recording_under_host_sync(name: str) -> None:
    """On the logical device, where host and device are told apart: the tape refuses what CUDA refuses."""
    stock = on_logical_device(name, ())[0]
    first, second = on_logical_device(name, (TAPE, HostSync()), films=2)
    assert torch.equal(stock, first) and torch.equal(stock, second)


@pytest.mark.parametrize("class_name", ["ChronoEditPipeline", "EasyAnimatePipeline", "HunyuanVideoFramepackPipeline"])
def test_what_a_forward_sends_is_sent_before_it_is_recorded(class_name: str) -> None:
    assert torch.equal(
        on_logical_device(class_name, ())[0], on_logical_device(class_name, (TAPE, HostSync()), films=2)[1]
    )


def on_logical_device(name: str, levers: tuple[Lever, ...], films: int = 1, **settings) -> list[torch.Tensor]:
    pipe = tiny_pipeline_of(name) if name.endswith("Pipeline") else tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family_of_pipeline(pipe), f"{DEVICE}:0")
    found = []
    with logical_device(pipe) as auditor, engaged(rig, *levers):
        for _ in range(films):
            result = film(rig, 4, **settings)
            found.append(auditor.to_cpu(result[0] if isinstance(result, list) else result))
            assert all(lever.verify(rig, TRACE) == [] for lever in levers if isinstance(lever, CudaGraph))
            assert not levers or rig.counters["cuda_graph.replays"] >= 3
    return found


@pytest.mark.parametrize("name", ["hunyuanvideo-1.5-480p", "hunyuanvideo"])
def test_with_trimmed_texts_each_length_has_a_graph_of_its_own(name: str) -> None:
    """Prompts of other lengths, and a batch of two that keeps a mask, are other programs."""
    long = 'a red ball says "hello there" to a blue cube'
    more = {"prompt": [long, "x"], "negative_prompt": ["", "y"]}
    texts = [{"prompt": "x"}, {"prompt": long}, more, {"prompt": "x"}]
    levers = (TextTrim(), TAPE, HostSync())
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family(name), f"{DEVICE}:0")
    with logical_device(pipe) as auditor:
        with engaged(rig, TextTrim(), HostSync()):
            plain = [auditor.to_cpu(film(rig, 3, **text)) for text in texts]
        with engaged(rig, *levers):
            for text, expected in zip(texts, plain, strict=True):
                assert torch.equal(expected, auditor.to_cpu(film(rig, 3, **text)))
                assert rig.counters["cuda_graph.replays"] and TAPE.verify(rig, TRACE) == []


def test_a_model_bound_to_its_prompt_runs_as_it_is_without_host_sync_and_says_so() -> None:
    rig = rig_of("hunyuanvideo-1.5-480p")
    stock = film(rig)
    with engaged(rig, TAPE):
        assert torch.equal(stock, film(rig))
        assert counted(rig)[1:] == (0, 0)
        (complaint,) = TAPE.verify(rig, TRACE)
    assert complaint.startswith("6 of 6 forwards ran as they are: HunyuanVideo15Transformer3DModel selects tokens")


def test_no_graph_of_a_model_bound_to_its_prompt_outlives_its_film() -> None:
    rig = rig_of("mochi")
    with engaged(rig, TAPE, HostSync()):
        kept = next(each.__self__ for each in rig.at_end if isinstance(getattr(each, "__self__", None), Graphs))
        film(rig)
        assert kept.buffer_bytes == 0
        first = counted(rig)
        film(rig)
        assert counted(rig) == first == (3, 1, 2) and rig.counters["cuda_graph.bytes"] > 0


def test_two_sizes_take_turns_each_with_its_own_graphs() -> None:
    rig = rig_of()
    sizes = [{}, {"height": 32}]
    stock = [film(rig, **size) for size in sizes]
    with engaged(rig, TAPE):
        for again in range(3):
            for size, expected in zip(sizes, stock, strict=True):
                assert torch.equal(expected, film(rig, **size))
                assert counted(rig)[1] == (0 if again else 2)


# --------------------------------------------------------------------------- with compiled blocks


def test_compiled_blocks_are_recorded_and_their_check_stays_content() -> None:
    compiled = Compile(backend="eager")
    rig = rig_of()
    with engaged(rig, compiled):
        alone = film(rig)
        blocks = rig.counters["compile.calls"]
    with engaged(rig, compiled, TAPE):
        for _ in range(2):
            assert torch.equal(alone, film(rig))
            assert rig.counters["compile.calls"] == rig.counters["compile.executed"] == blocks
            assert compiled.verify(rig, TRACE) == [] and TAPE.verify(rig, TRACE) == []


def test_a_compiled_block_sees_no_mode_of_ours() -> None:
    """A compiler would trace it, and compile the block again for it."""
    rig = rig_of()
    block, seen = rig.pipe.transformer.blocks[0], []
    with swap_attr(block, "_compiled_call_impl", lambda *args: seen.append(_innermost())), engaged(rig, TAPE):
        with Uploads("cuda:0") as outer, Uploads("cuda:0") as inner:
            block()
            assert _innermost() is inner
        assert outer is not inner and _innermost() is None
        assert seen == [None]


# --------------------------------------------------------------------------- one model, by hand


class Doubler(nn.Module):
    """Counts how often its Python code runs; returns its argument's double, and what it was told."""

    ran = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.ran += 1
        return x * 2 * scale, x.sum() + 0


class OnlyDenoiser:
    """As much of a pipeline as a rig needs."""

    def __init__(self) -> None:
        self.transformer = Doubler().eval()
        self.scheduler = SimpleNamespace()


@pytest.fixture
def rig() -> Rig:
    made = Rig(OnlyDenoiser(), family(WAN), "cpu")
    made.running = True
    return made


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_a_third_call_runs_no_python_code_of_the_model(rig: Rig) -> None:
    with engaged(rig, TAPE):
        for value in (1.0, 2.0, 3.0, 4.0):
            double, total = rig.pipe.transformer(torch.full((3,), value))
            assert double.tolist() == [2 * value] * 3 and total == 3 * value
        assert rig.pipe.transformer.ran == 2 and counted(rig) == (4, 1, 3)


def test_no_result_that_is_held_is_overwritten(rig: Rig) -> None:
    with engaged(rig, TAPE):
        held = [rig.pipe.transformer(torch.full((2,), float(n)))[0] for n in range(6)]
    assert [h.tolist() for h in held] == [[2.0 * n] * 2 for n in range(6)]


def test_a_callers_tensor_is_read_when_it_is_given_and_never_written(rig: Rig) -> None:
    x = torch.ones(2)
    with engaged(rig, TAPE):
        for n in range(4):
            x.fill_(n)
            assert rig.pipe.transformer(x)[0].tolist() == [2.0 * n] * 2 and x.tolist() == [n, n]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x[:1],), {}),
        lambda x: ((x.double(),), {}),
        lambda x: ((x.flip(0).T,), {}),
        lambda x: ((x,), {"scale": 2.0}),
        lambda x: ((x,), {"scale": 1}),
        lambda x: ((), {"x": x}),
        lambda x: ((x,), {"more": {"a": [x]}}),
    ],
    ids=["shape", "dtype", "strides", "a number", "its type", "by name", "another tensor"],
)
def test_another_kind_of_call_is_told_apart(rig: Rig, other) -> None:
    x = torch.arange(9.0).reshape(3, 3)
    args, kwargs = other(x)
    expected = Doubler()(*args, **kwargs)
    with engaged(rig, TAPE):
        for _ in range(3):
            rig.pipe.transformer(x, scale=1.0)
        for _ in range(3):
            assert torch.equal(rig.pipe.transformer(*args, **kwargs)[0], expected[0])
        assert counted(rig) == (6, 2, 4)


def test_branches_and_programs_are_told_apart(rig: Rig) -> None:
    x = torch.ones(2)
    with engaged(rig, TAPE):
        for branch, program in (("cond", "full"), ("uncond", "full"), ("cond", "skip")) * 3:
            rig._here.branch, rig.program["step_cache.program"] = branch, program
            rig.pipe.transformer(x)
        assert counted(rig) == (9, 3, 6)


def test_a_value_that_changes_at_each_step_is_complained_of(rig: Rig) -> None:
    with engaged(rig, TAPE):
        for step in range(12):
            rig.pipe.transformer(torch.ones(2), scale=float(step))
        (complaint,) = TAPE.verify(rig, TRACE)
    assert complaint == "arguments change too often: 12 of 12 forwards were the first of their kind"


def test_an_argument_that_cannot_be_compared_is_not_recorded_and_complained_of(rig: Rig) -> None:
    with engaged(rig, TAPE):
        for _ in range(3):
            rig.pipe.transformer(torch.ones(2), told=object())
        assert TAPE.verify(rig, TRACE) == ["3 of 3 forwards ran as they are: an argument is a object"]


def test_only_the_newest_graphs_are_kept(rig: Rig) -> None:
    with engaged(rig, TAPE):
        for n in range(MOST + 2):
            for _ in range(2):
                rig.pipe.transformer(torch.ones(n + 1))
        assert rig.counters["cuda_graph.dropped"] == 2
        assert f"2 graphs were thrown away for newer ones: a denoiser keeps {MOST}" in TAPE.verify(rig, TRACE)
        rig.counters.clear()
        rig.pipe.transformer(torch.ones(MOST + 2))
        assert counted(rig) == (1, 0, 1)


def test_outside_a_loop_and_with_gradients_nothing_is_recorded(rig: Rig) -> None:
    with engaged(rig, TAPE):
        rig.running = False
        for _ in range(3):
            rig.pipe.transformer(torch.ones(2))
        assert counted(rig) == (0, 0, 0) and TAPE.verify(rig, TRACE) == ["no forward came past it: no effect"]
        rig.running = True
        with torch.enable_grad():
            rig.pipe.transformer(torch.ones(2, requires_grad=True))[0].sum().backward()
        assert counted(rig) == (1, 0, 0)


def test_a_forward_that_reads_a_value_is_refused_by_name(rig: Rig) -> None:
    class Reads(Doubler):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    rig.pipe.transformer = Reads().eval()
    with engaged(rig, TAPE):
        rig.pipe.transformer(torch.ones(2))
        with pytest.raises(LeverRefused, match="Reads cannot be recorded: .*leave it out with cuda_graph=off"):
            rig.pipe.transformer(torch.ones(2))


def test_other_weights_or_adapters_are_recorded_anew() -> None:
    rig = rig_of()
    with engaged(rig, TAPE):
        film(rig)
        weight = rig.pipe.transformer.proj_out.weight
        weight.data = weight.data * 2
        moved = film(rig)
        assert counted(rig)[1] == 2
    assert torch.equal(moved, film(rig))


# --------------------------------------------------------------------------- refused, failed, left


def test_without_cuda_it_is_refused_with_the_reason() -> None:
    with pytest.raises(LeverRefused, match="needs CUDA, and cpu has none"):
        engaged(rig_of(), CudaGraph())
    pipe = tiny_pipeline(WAN)
    with pytest.raises(LeverRefused, match="needs a GPU of capability 7.0 or later"), accelerate(pipe, cuda_graph="on"):
        pipe(**tiny_inputs(WAN, steps=2))


def test_words() -> None:
    assert CudaGraph.from_wish({"cuda_graph": "on"}) == CudaGraph()
    with pytest.raises(BadInput, match="cuda_graph=max"):
        CudaGraph.from_wish({"cuda_graph": "max"})
    with pytest.raises(BadInput, match="choose cuda, tape"):
        CudaGraph(recorder="disk")


def test_a_model_in_training_and_one_compiled_whole_are_refused(rig: Rig) -> None:
    rig.pipe.transformer.train()
    with pytest.raises(LeverRefused, match="training mode"):
        engaged(rig, TAPE)
    rig.pipe.transformer.eval().compile(backend="eager")
    with pytest.raises(LeverRefused, match="compiled as a whole"):
        engaged(rig, TAPE)


@pytest.mark.parametrize("how", ["torch", "diffusers"])
def test_a_hook_inside_is_refused_since_no_replay_would_call_it(how: str) -> None:
    rig = rig_of()
    if how == "torch":
        rig.pipe.transformer.blocks[0].register_forward_hook(lambda *_: None)
    else:
        from diffusers import FirstBlockCacheConfig

        rig.pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with engaged(rig, TAPE), pytest.raises(LeverRefused, match="runs under a hook"):
        film(rig)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_a_first_call_a_recording_or_a_replay_leaves_no_trace(at: int) -> None:
    rig = rig_of()
    stock = film(rig)
    before = fingerprint(rig.pipe)
    with engaged(rig, TAPE):

        def fail(index: int) -> None:
            if index == at:
                raise ZeroDivisionError

        rig.at_step.append(fail)
        with pytest.raises(ZeroDivisionError):
            film(rig)
        rig.at_step.remove(fail)
        assert torch.equal(stock, film(rig))
    assert differences(before, fingerprint(rig.pipe)) == []


def test_an_exception_while_recording_lets_the_next_run_record(rig: Rig) -> None:
    class Fails(Doubler):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ran += 1
            if self.fails and self.ran == 2:
                raise ZeroDivisionError
            return x * 2

    rig.pipe.transformer = Fails().eval()
    with engaged(rig, TAPE):
        rig.pipe.transformer(torch.ones(2))
        with pytest.raises(ZeroDivisionError):
            rig.pipe.transformer(torch.ones(2))
        assert [rig.pipe.transformer(torch.full((2,), n)).tolist() for n in (1.0, 2.0)] == [[2, 2], [4, 4]]
        assert counted(rig) == (4, 1, 2)


def test_the_bytes_of_its_buffers_are_in_the_receipt() -> None:
    pipe = tiny_pipeline(WAN)
    pipe.set_progress_bar_config(disable=True)
    with Engine(pipe=pipe) as engine:
        asked = Request(model=WAN, width=64, height=64, num_frames=5, num_inference_steps=3, guidance_scale=5.0)
        plan = replace(engine.plan_live(asked, strict=False), levers=(TAPE,))
        engine.move_to(plan)
        with torch.no_grad():
            _, _, receipts = engine.run(plan, lambda: pipe(**tiny_inputs(WAN, steps=3)))
    assert receipts[0].lever == "cuda_graph" and receipts[0].bytes > 0 and not receipts[0].complaints


def test_a_buffer_keeps_the_strides_of_what_it_stands_for() -> None:
    for like in (torch.arange(6.0).reshape(2, 3).T, torch.ones(1).expand(4), torch.ones(2, 1, 3).expand(2, 5, 3)):
        buffer = Buffer(like)
        buffer.fill(like)
        assert buffer.tensor.stride() == like.stride() and torch.equal(buffer.tensor, like)
