"""attention: every attention call goes to the chosen kernel or is counted with the reason why not; films stay."""

from __future__ import annotations

import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from undercrank.families import family
from undercrank.ledger import Ledger
from undercrank.levers import attention
from undercrank.levers.attention import KERNELS, Attention, Kernel, misfit, pick, route_graph, why_native
from undercrank.levers.compile import Compile
from undercrank.levers.cuda_graph import CudaGraph
from undercrank.levers.text_trim import TextTrim
from undercrank.planner import make_plan
from undercrank.records import BadInput, Decision, Device, LeverRefused, Machine, Measurement, Promise, Request, Status
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline
from undercrank.undo import swap_attr

pytestmark = [
    # Mochi asks for an autocast that the CPU does not have, and runs without it.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Cosmos' UniPC with Karras sigmas hands a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
WAN, HV15 = "wan2.1-1.3b", "hunyuanvideo-1.5-480p"
EACH = [
    WAN, HV15, "hunyuanvideo", "ltx-video", "ltx-2", "cogvideox-2b", "mochi", "cosmos-2.5-2b", "kandinsky5-lite",
    "skyreels-v2-1.3b",
]  # fmt: skip


def rig_of(name: str = WAN) -> Rig:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, family(name), "cpu")


def film(rig: Rig, *levers: Any) -> torch.Tensor:
    """With these levers on, each of which must be content afterwards."""
    with ExitStack() as stack, torch.no_grad():
        for lever in levers:
            stack.enter_context(lever.engage(rig))
        with rig.seams(), rig.call():
            frames = rig.pipe(**tiny_inputs(rig.pipe, steps=2)).frames
        for lever in levers:
            assert lever.verify(rig, None) == []
    return frames


def complaints(rig: Rig, lever: Attention) -> list[str]:
    with lever.engage(rig), torch.no_grad(), rig.seams(), rig.call():
        rig.pipe(**tiny_inputs(rig.pipe, steps=2))
        return lever.verify(rig, None)  # type: ignore[arg-type]


def seen(rig: Rig) -> Counter[str]:
    tally = attention._tallies[rig.pipe.transformer]
    return tally.run + sum(tally.traced.values(), Counter())


def error(stock: torch.Tensor, other: torch.Tensor) -> float:
    return float((stock - other).float().norm() / stock.float().norm())


def levers_for(name: str) -> list[Any]:
    return [*([TextTrim()] if name.startswith("hunyuan") else []), Attention()]


@contextmanager
def another_kernel(factor: float) -> Iterator[None]:
    """The flash kernel gives `factor` times what it should."""
    right = attention._operator("flash")
    wrong = lambda q, k, v, scale: right(q, k, v, scale) * factor  # noqa: E731
    attention._route_to.cache_clear()
    attention._routed.cache_clear()
    with patch.object(attention, "_operator", lambda name: wrong), patch.object(attention, "_try_out", lambda *_: None):
        yield
    attention._route_to.cache_clear()
    attention._routed.cache_clear()


# --------------------------------------------------------------------------- whole films


@pytest.mark.parametrize("name", EACH)
def test_the_film_is_stocks_and_the_kernel_ran(name: str) -> None:
    rig = rig_of(name)
    stock = film(rig)
    assert error(stock, film(rig, *levers_for(name))) < 1e-5
    assert seen(rig)["flash"] > 0 and set(seen(rig)) <= {"flash", "native: mask"}


@pytest.mark.parametrize("name", [WAN, HV15, "cogvideox-2b", "mochi"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_run_the_kernel_too(name: str, backend: str) -> None:
    rig = rig_of(name)
    stock = film(rig)
    compiled = Compile(backend=backend)
    assert error(stock, film(rig, *levers_for(name), compiled)) < 1e-5
    assert sum(attention._tallies[rig.pipe.transformer].traced["flash"].values()) >= 2
    graphs = rig.counters["compile.graphs"]
    assert error(stock, film(rig, *levers_for(name), compiled)) < 1e-5
    assert graphs and not rig.counters.get("compile.graphs"), "entering again compiles nothing"


@pytest.mark.parametrize("levers", [(), (Compile(backend="eager"),)], ids=["eager", "compiled"])
def test_it_is_the_kernels_result_that_goes_into_the_film(levers: tuple[Any, ...]) -> None:
    rig = rig_of()
    stock = film(rig)
    with another_kernel(0.5):
        assert error(stock, film(rig, Attention(), *levers)) > 1e-3


def test_code_compiled_without_the_lever_is_not_taken_with_it() -> None:
    """And the other way round: each has its own, and neither counts as compiled twice."""
    rig, compiled = rig_of(), Compile(backend="eager")
    stock = film(rig, compiled)
    with another_kernel(0.5):
        assert error(stock, film(rig, Attention(), compiled)) > 1e-3
    assert torch.equal(stock, film(rig, compiled))


def test_two_threads_have_two_kernels() -> None:
    """Each run is told apart by its result: one thread's kernel is torch's, the other's gives half of it."""
    tensors = torch.randn(3, 1, 2, 64, 16)
    stock, right = scaled_dot_product_attention(*tensors), attention._operator("flash")
    attention._route_to.cache_clear()
    with patch.object(attention, "_operator", lambda name: lambda q, k, v, scale: right(q, k, v, scale) / 2):
        halved = attention._route_to("flash")
    attention._route_to.cache_clear()
    inside, wrong = threading.Barrier(2), []

    def work(factor: float, route: Any) -> None:
        with route() if route else ExitStack():
            inside.wait()
            for _ in range(50):
                if not torch.allclose(scaled_dot_product_attention(*tensors), stock * factor):
                    wrong.append(factor)
            inside.wait()

    threads = [threading.Thread(target=work, args=each) for each in ((0.5, halved), (1.0, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_processors_keep_the_signature_that_diffusers_asks_for() -> None:
    """Its Attention drops what the signature does not name, and rotary embeddings would be lost."""
    import inspect

    rig = rig_of("cogvideox-2b")
    before = [inspect.signature(each.__call__) for each in attention._processors(rig.pipe.transformer)]
    with Attention().engage(rig):
        assert before == [inspect.signature(each.__call__) for each in attention._processors(rig.pipe.transformer)]


@pytest.mark.parametrize("name", [WAN, "cogvideox-2b"])
def test_a_recorded_forward_replays_the_kernel_and_verify_knows_it(name: str) -> None:
    """In the second film no attention is called by Python any more."""
    rig, tape = rig_of(name), CudaGraph(recorder="tape")
    stock = film(rig)
    with Attention().engage(rig), tape.engage(rig), torch.no_grad():
        for _ in range(2):
            with rig.seams(), rig.call():
                frames = rig.pipe(**tiny_inputs(rig.pipe, steps=3)).frames
            assert Attention().verify(rig, None) == []  # type: ignore[arg-type]
    assert not attention._tallies[rig.pipe.transformer].run
    with rig.seams(), rig.call(), torch.no_grad():
        stock = rig.pipe(**tiny_inputs(rig.pipe, steps=3)).frames
    assert error(stock, frames) < 1e-5


def test_names_and_weights_are_untouched() -> None:
    transformer = rig_of().pipe.transformer
    names = [*transformer.state_dict()], [*transformer.attn_processors]
    with Attention().engage(rig_of()):
        assert names == ([*transformer.state_dict()], [*transformer.attn_processors])


# --------------------------------------------------------------------------- what verify says


def test_masked_calls_alone_are_no_effect() -> None:
    """HunyuanVideo without text_trim masks every call."""
    (complaint,) = complaints(rig_of(HV15), Attention())
    assert "mask" in complaint and "no effect" in complaint


def test_a_plain_call_that_stayed_with_torch_is_told_of() -> None:
    rig = rig_of()
    plain = attention.why_native
    calls = iter(range(1000))
    with patch.object(attention, "why_native", lambda *a: plain(*a) or ("head dim 7" if next(calls) == 3 else None)):
        assert complaints(rig, Attention()) == ["1 attention calls stayed with torch's own kernel: head dim 7"]


def test_masks_are_heeded_beside_calls_without() -> None:
    assert complaints(rig_of("ltx-video"), Attention()) == []


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash3", "flash4", "sage"])
def test_a_kernel_that_is_not_for_a_cpu_is_refused_and_nothing_is_touched(name: str) -> None:
    rig = rig_of()
    before = fingerprint(rig.pipe)
    with pytest.raises(LeverRefused, match=f"{name} does not run on cpu: there choose flash"):
        with Attention(kernel=name).engage(rig):
            pass
    assert differences(before, fingerprint(rig.pipe)) == []


def test_another_backend_of_diffusers_is_refused() -> None:
    rig = rig_of()
    processor = next(attention._processors(rig.pipe.transformer))
    with swap_attr(processor, "_attention_backend", "_native_math"):
        with pytest.raises(LeverRefused, match="_native_math of diffusers"), Attention().engage(rig):
            pass


def test_blocks_that_are_compiled_already_are_refused() -> None:
    rig = rig_of()
    with Compile(backend="eager").engage(rig), pytest.raises(LeverRefused, match="compiled already"):
        with Attention().engage(rig):
            pass


def test_a_denoiser_without_processors_is_refused() -> None:
    rig = rig_of()
    with patch.object(attention, "_processors", lambda denoiser: iter(())):
        with pytest.raises(LeverRefused, match="no attention processors"), Attention().engage(rig):
            pass


def test_a_kernel_that_is_wrong_here_is_refused() -> None:
    right = attention._operator("flash")
    with patch.object(attention, "_operator", lambda name: lambda q, k, v, scale: right(q, k, v, scale) * 1.1):
        with pytest.raises(LeverRefused, match="flash is off by 0.1"), Attention().engage(rig_of()):
            pass


def test_a_kernel_that_fails_here_is_refused() -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no kernel image is available\nmore")

    with patch.object(attention, "_operator", lambda name: fails):
        with pytest.raises(LeverRefused, match="flash does not run here: no kernel image is available$"):
            with Attention().engage(rig_of()):
                pass


@pytest.mark.parametrize("word", ["native", "xformers", "best "])
def test_an_unknown_kernel_is_bad_input(word: str) -> None:
    with pytest.raises(BadInput, match="choose auto, off, on, cudnn, flash"):
        Attention.from_wish({"attention_backend": word})


# --------------------------------------------------------------------------- the table


def call(**changed: Any) -> dict[str, Any]:
    query = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")
    return {"query": query, "key": query, "value": query, **changed}


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


WIDE, ODD = shaped(1, 2, 8, 136), shaped(1, 2, 8, 60)
CUDNN = next(row for row in KERNELS if row.name == "cudnn")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"attn_mask": shaped(8, 8)}, "mask"),
        ({"is_causal": True}, "causal"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"query": shaped(1, 2, 8, 64).requires_grad_()}, "gradient"),
        ({"query": shaped(2, 8, 64)}, "not of four dimensions"),
        ({"key": shaped(1, 1, 8, 64), "value": shaped(1, 1, 8, 64)}, "head groups"),
        ({"key": shaped(1, 2, 0, 64), "value": shaped(1, 2, 0, 64)}, "empty"),
        ({"query": shaped(1, 2, 8, 64, dtype=torch.float32)}, "dtype float32"),
        ({"value": shaped(1, 2, 8, 64, dtype=torch.float16)}, "mixed dtypes"),
        ({"value": shaped(1, 2, 8, 32)}, "head dims that differ"),
        ({"query": WIDE, "key": WIDE, "value": WIDE}, "head dim 136"),
        ({"query": ODD, "key": ODD, "value": ODD}, "head dim 60"),
        ({"key": shaped(1, 2, 64, 8).transpose(2, 3)}, "head dim not contiguous"),
        ({"key": shaped(1, 2, 300, 64), "value": shaped(1, 2, 300, 64), "scale": 0.1}, None),
    ],
)
def test_which_calls_a_kernel_takes(changed: dict[str, Any], reason: str | None) -> None:
    assert why_native(CUDNN, call(**changed)) == reason


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "best"),
    [
        ("cuda", (9, 0), "bfloat16", "cudnn"),
        ("cuda", (10, 0), "float16", "cudnn"),
        ("cuda", (8, 6), "bfloat16", "flash"),
        ("cuda", (7, 5), "float16", "efficient"),
        ("cuda", (9, 0), "float32", "efficient"),
        ("cpu", (0, 0), "float32", "flash"),
        ("cpu", (0, 0), "bfloat16", "flash"),
    ],
)
def test_which_kernel_is_the_best(kind: str, capability: tuple[int, int], dtype: str, best: str) -> None:
    picked = pick("best", kind, capability, dtype)
    assert isinstance(picked, Kernel) and picked.name == best


@pytest.mark.parametrize(
    ("name", "kind", "capability", "dtype", "reason"),
    [
        ("flash3", "cuda", (8, 9), "bfloat16", "needs a GPU of capability 9.x, this is 8.9"),
        ("flash3", "cuda", (10, 0), "bfloat16", "needs a GPU of capability 9.x"),
        ("cudnn", "cuda", (7, 5), "float16", "needs a GPU of capability 8.0 or later"),
        ("cudnn", "cuda", (9, 0), "float32", "takes bfloat16, float16, and the model runs in float32"),
        ("flash", "mps", (0, 0), "float16", "does not run on mps"),
        ("best", "mps", (0, 0), "float16", "no kernel of the table takes float16 on mps"),
    ],
)
def test_what_is_not_for_this_device(
    name: str, kind: str, capability: tuple[int, int], dtype: str, reason: str
) -> None:
    assert reason in str(pick(name, kind, capability, dtype))


def test_every_row_can_be_used_somewhere() -> None:
    assert set(attention.OPERATORS) == {row.name for row in KERNELS}
    for row in KERNELS:
        assert misfit(row, "cuda", (9, 0), "bfloat16") is None
        assert bool(row.package) == bool(row.module) == bool(row.install)


def test_a_graph_keeps_its_masked_calls() -> None:
    graphs: list[Any] = []

    def both(q: Any, mask: Any) -> Any:
        plain = scaled_dot_product_attention(q, q, value=q, scale=0.3)
        return plain + scaled_dot_product_attention(q, q, q, mask)

    row = next(row for row in KERNELS if row.name == "flash")
    tensors = torch.randn(1, 2, 32, 16), torch.randn(32, 32)
    torch.compile(both, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)(*tensors)
    (graph,) = graphs
    assert route_graph(graph, row) == {"flash": 1, "native: mask": 1}
    assert torch.allclose(graph(*tensors)[0], both(*tensors), atol=1e-6)
    assert len(graph.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)) == 1


# --------------------------------------------------------------------------- kernels of other packages


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("flash3", "flash_attn_interface", "flash_attn_func"), ("flash4", "flash_attn.cute", "flash_attn_func"),
     ("sage", "sageattention", "sageattn")],
)  # fmt: skip
def test_a_package_is_called_in_its_own_layout_and_compiled_around(name: str, module: str, function: str) -> None:
    def theirs(q: Any, k: Any, v: Any, tensor_layout: str = "NHD", **call: Any) -> Any:
        assert tensor_layout == "NHD"
        scale = call.get("softmax_scale", call.get("sm_scale"))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        return (out, None) if name == "flash4" else out

    stand_in = types.ModuleType(module)
    setattr(stand_in, function, theirs)
    parents = {module.split(".")[0]: types.ModuleType(module.split(".")[0])} if "." in module else {}
    with patch.dict(sys.modules, {**parents, module: stand_in}):
        operator = attention.OPERATORS[name]()
    q, k, v = torch.randn(3, 1, 2, 24, 16)
    stock = scaled_dot_product_attention(q, k, v, scale=0.2)
    assert torch.allclose(operator(q, k, v, 0.2), stock, atol=1e-6)
    compiled = torch.compile(lambda *a: operator(*a) * 2, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v, 0.2), stock * 2, atol=1e-6)


# --------------------------------------------------------------------------- the plan


def decision(
    capability: tuple[int, int] = (9, 0), rows: tuple[Measurement, ...] = (), packages: Any = None, **asked: Any
) -> Decision:
    wish = asked.pop("wish", None)
    device = Device(kind="cuda", name="a GPU", capability=capability, total_bytes=2**40, free_bytes=2**40)
    machine = Machine(name="a machine", devices=(device,), cpu_count=1, packages=packages or {})
    request = Request(model=WAN, prompt="x", wishes=(("attention_backend", wish),) if wish else (), **asked)
    made = make_plan(request, family=family(WAN), machine=machine, ledger=Ledger(rows))
    return next(each for each in made.decisions if each.lever == "attention")


def row(gain: float) -> Measurement:
    return Measurement(
        id="one", family=WAN, lever="attention", source="measured", machine="a machine", device="a GPU", versions={},
        width=832, height=480, num_frames=81, num_inference_steps=50, dtype="bfloat16", n=5, gain=gain,
    )  # fmt: skip


def test_auto_waits_for_a_measured_gain() -> None:
    assert decision().status is Status.DECLINED and "unmeasured on a GPU" in decision().reason
    assert "attention_backend=on" in decision().reason
    assert decision(rows=(row(1.3),)).status is Status.APPLIED
    assert decision(rows=(row(1.0),)).status is Status.DECLINED


def test_on_and_a_name_are_applied_where_they_fit() -> None:
    assert decision(wish="on").promise is Promise.ROUNDING
    assert decision(wish="cudnn").status is Status.APPLIED
    with pytest.raises(LeverRefused, match="attention_backend=cudnn: cudnn needs a GPU of capability 8.0"):
        decision((7, 5), wish="cudnn")


@pytest.mark.parametrize(("name", "line"), [(row.name, row.install) for row in KERNELS if row.package])
def test_a_missing_package_is_refused_with_the_line_that_installs_it(name: str, line: str) -> None:
    with pytest.raises(LeverRefused) as caught:
        decision(wish=name)
    assert str(caught.value).endswith(line) and "pip install" in line
    package = next(row.package for row in KERNELS if row.name == name)
    assert decision(wish=name, packages={package: "1"}).status is Status.APPLIED


def test_sage_is_lossy_and_refused_under_exact() -> None:
    assert decision(wish="sage", packages={"sageattention": "2.2.0"}).promise is Promise.LOSSY
    with pytest.raises(LeverRefused, match="exact"):
        decision(wish="sage", packages={"sageattention": "2.2.0"}, fidelity="exact")
