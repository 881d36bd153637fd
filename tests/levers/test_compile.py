"""compile: which blocks, how many graphs, how far from eager, and that nothing runs uncompiled unsaid.

Where the subject is not inductor itself, the compiler is torch's "eager": it captures the same graphs and runs them
as they are, so that structure is tested in seconds and results are equal to the bit.
"""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from torch import nn

from undercrank.engine import accelerate
from undercrank.families import FAMILIES, family
from undercrank.levers import compile as lever_file
from undercrank.levers.compile import Compile, repeated_blocks, worth_compiling
from undercrank.levers.text_trim import TextTrim
from undercrank.records import BadInput, Case, Device, LeverRefused, Machine, Promise, Record
from undercrank.rig import Rig
from undercrank.testing import PROMPT, differences, fingerprint, tiny_inputs, tiny_pipeline
from undercrank.undo import swap_item

pytestmark = [
    # Mochi asks for an autocast that the CPU does not have, and runs without it.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Cosmos' UniPC with Karras sigmas hands a tensor to numpy; numpy 2 wants another signature from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
WAN = "wan2.1-1.3b"
STRUCTURE = Compile(backend="eager")
"Captures graphs, compiles nothing."


def rig_of(name: str = WAN) -> Rig:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return Rig(pipe, family(name), "cpu")


def run(rig: Rig, steps: int = 2, **settings) -> torch.Tensor:
    inputs = tiny_inputs(rig.family, steps=steps)
    inputs |= {name: value for name, value in settings.items() if name in inputs}
    with rig.seams(), rig.call(), torch.no_grad():
        return rig.pipe(**inputs).frames


def graphs(rig: Rig) -> int:
    return rig.counters.get("compile.graphs", 0)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def case(kind: str = "cuda") -> Case:
    device = Device(kind=kind, name="a GPU" if kind == "cuda" else "a CPU")
    machine = Machine(name="a machine", devices=(device,), cpu_count=1)
    return Case(
        family=family(WAN), machine=machine, device=device, width=832, height=480, num_frames=81,
        num_inference_steps=50, guidance_scale=5.0, dtype="bfloat16",
    )  # fmt: skip


# --------------------------------------------------------------------------- words


@pytest.mark.parametrize(("word", "mode"), [("on", "parity"), ("parity", "parity"), ("plain", "plain"), ("max", "max")])
def test_a_word_chooses_the_mode(word: str, mode: str) -> None:
    assert Compile.from_wish({"compile": word}) == Compile(mode=mode)


def test_an_unknown_word_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="compile=fast: choose auto, off, on, parity, plain, max"):
        Compile.from_wish({"compile": "fast"})
    with pytest.raises(BadInput, match="compile=fast"):
        Compile.from_dict({"mode": "fast"})


def test_without_a_word_it_is_parity() -> None:
    assert Compile.from_wish({}) == Compile() and Compile().mode == "parity"


def test_it_promises_rounding_and_is_doubted_where_nothing_was_measured() -> None:
    assert Compile().promises(case()) is Promise.ROUNDING
    assert Compile().doubt(case()) is None and Compile.only_measured
    assert Compile().doubt(case("cpu")) == "compiling for the CPU takes longer than a clip"


def test_options_are_those_of_inductor_and_never_a_mode() -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    parity, plain, most = (lever_file._options(mode, False) for mode in ("parity", "plain", "max"))
    assert parity == {"emulate_precision_casts": True} and plain == {"emulate_precision_casts": False}
    assert most["emulate_precision_casts"] and most["max_autotune_pointwise"] and most["coordinate_descent_tuning"]
    assert not {name for name in most if "gemm" in name or "cudagraphs" in name}
    assert set(most) <= set(known)
    assert lever_file._options("parity", True)["compile_threads"] == 1


# --------------------------------------------------------------------------- which blocks


@pytest.mark.parametrize("name", [row.id for row in FAMILIES])
def test_the_blocks_of_every_family_are_found(name: str) -> None:
    """All that diffusers declares and the model has more than one of; nothing else where it declares them."""
    for denoiser in rig_of(name).denoisers:
        found = {type(block).__name__.replace("TokenReplace", "") for block in repeated_blocks(denoiser).values()}
        assert found
        declared = set(denoiser._repeated_blocks or ())
        names = [type(module).__name__ for module in denoiser.modules()]
        assert not declared or found == {kind for kind in declared if names.count(kind) > 1} or "i2v" in name
        assert not declared or found <= declared


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        ("AllegroTransformer3DModel", {"AllegroTransformerBlock"}),
        ("ConsisIDTransformer3DModel", {"ConsisIDBlock"}),
        ("SanaVideoTransformer3DModel", {"SanaVideoTransformerBlock"}),
        ("MochiTransformer3DModel", {"MochiTransformerBlock"}),
        ("CosmosTransformer3DModel", {"CosmosTransformerBlock"}),
    ],
)
def test_the_blocks_of_models_that_declare_none_are_found(model: str, blocks: set[str]) -> None:
    with torch.device("meta"):
        denoiser = getattr(diffusers, model)()
    found = {type(block).__name__ for block in repeated_blocks(denoiser).values()}
    assert blocks <= found


EASYANIMATE = {"in_channels": 4, "out_channels": 4, "patch_size": 2}
LATTE = {**EASYANIMATE, "sample_size": 8, "caption_channels": 8, "num_layers": 2}
FRAMEPACK = {"TransformerBlock", "SingleTransformerBlock", "IndividualTokenRefinerBlock"}


@pytest.mark.parametrize(
    ("model", "options", "blocks"),
    [
        ("EasyAnimateTransformer3DModel", EASYANIMATE, {"EasyAnimateTransformerBlock"}),
        ("LatteTransformer3DModel", LATTE, {"BasicTransformerBlock"}),
        ("HunyuanVideoFramepackTransformer3DModel", {}, {f"HunyuanVideo{kind}" for kind in FRAMEPACK}),
    ],
)
def test_they_are_found_in_models_that_need_a_few_numbers(model: str, options: dict, blocks: set[str]) -> None:
    with torch.device("meta"):
        denoiser = getattr(diffusers, model)(**options)
    assert {type(block).__name__ for block in repeated_blocks(denoiser).values()} == blocks


def test_the_blocks_of_a_unet_are_found_inside_its_stages() -> None:
    with torch.device("meta"):
        unet = diffusers.UNetSpatioTemporalConditionModel()
    found = {type(block).__name__ for block in repeated_blocks(unet).values()}
    assert found == {"TransformerSpatioTemporalModel", "SpatioTemporalResBlock"}


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_only_lists_of_equal_modules_with_children_count_and_the_outermost_of_them() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList([Unit(), Unit()])

    model = nn.Module()
    model.outer = nn.ModuleList([Outer(), Outer()])
    model.leaves = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.mixed = nn.ModuleList([Unit(), nn.Identity()])
    model.single = nn.ModuleList([Unit()])
    model.sequence = nn.Sequential(Unit(), Unit())
    assert list(repeated_blocks(model)) == ["outer.0", "outer.1"]


def test_a_class_whose_blocks_hold_next_to_no_weights_stays_eager() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

    blocks = {"refiner.0": Unit(), "refiner.1": Unit(), **{f"blocks.{i}": Large() for i in range(4)}}
    assert list(worth_compiling(blocks)) == [f"blocks.{i}" for i in range(4)]
    assert list(worth_compiling({name: blocks[name] for name in list(blocks)[:3]})) == list(blocks)[:3]


@pytest.mark.parametrize("name", ["HunyuanVideo15Transformer3DModel", "HunyuanVideoTransformer3DModel"])
def test_at_full_size_a_refiner_of_the_text_is_such_a_class(name: str) -> None:
    with torch.device("meta"):
        denoiser = getattr(diffusers, name)()
    left = repeated_blocks(denoiser).keys() - worth_compiling(repeated_blocks(denoiser)).keys()
    assert left == {f"context_embedder.token_refiner.refiner_blocks.{i}" for i in range(2)}


def test_a_model_without_such_blocks_is_refused_by_its_name() -> None:
    rig = Rig(SimpleNamespace(transformer=Unit()), family(WAN), "cpu")
    with pytest.raises(LeverRefused, match="Unit has no list of equal blocks"), STRUCTURE.engage(rig):
        pass


# --------------------------------------------------------------------------- how many graphs

KINDS = [
    *(WAN, "skyreels-v2-1.3b", "hunyuanvideo-1.5-480p", "ltx-video", "cosmos-2.5-2b", "mochi", "kandinsky5-lite"),
    *("cogvideox-2b", "hunyuanvideo"),
]
"One family of each kind of denoiser; LTX-2 has a test of its own."


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_denoiser_is_captured_whole_and_sizes_add_one_round_of_graphs(name: str) -> None:
    """Sizes A, B, C, A, B, C: the first has code of its own, the second makes the code of every further one."""
    rig = rig_of(name)
    multiple = rig.family.size_multiple
    stock = run(rig)
    sizes = [{}, {"width": 64 + 2 * multiple}, {"width": 64 + 4 * multiple, "height": 64 + 2 * multiple}]
    counts = []
    with STRUCTURE.engage(rig):
        for index, size in enumerate(2 * sizes):
            film = run(rig, **size)
            counts.append(graphs(rig))
            assert index or torch.equal(film, stock)
            assert STRUCTURE.verify(rig, None) == []
    assert 1 <= counts[0] <= 4 and counts[1] <= 4 and counts[2:] == [0, 0, 0, 0], counts


def test_ltx_2_which_calls_its_blocks_in_three_forms_stays_below_the_limit_of_variants() -> None:
    rig = rig_of("ltx-2")
    with STRUCTURE.engage(rig):
        counts = []
        for frames in (9, 17, 25, 9):
            run(rig, num_frames=frames)
            counts.append(graphs(rig))
            assert STRUCTURE.verify(rig, None) == []
    assert 3 <= counts[0] <= 4 and counts[2:] == [0, 0], counts


def test_all_equal_blocks_share_one_graph_and_every_call_runs_inside_it() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig):
        run(rig, steps=3)
        assert graphs(rig) == 1
        assert rig.counters["compile.calls"] == rig.counters["compile.executed"] == 3 * 3 * 2  # blocks, steps, branches
        assert rig.counters["compile.ms"] > 0
        run(rig)
        assert graphs(rig) == 0


def test_other_numbers_of_frames_add_nothing_once_a_second_size_has_run() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig):
        counts = []
        for frames in (5, 9, 13, 17, 5):
            run(rig, num_frames=frames)
            counts.append(graphs(rig))
    assert counts == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("name", [WAN, "kandinsky5-lite"])
def test_twelve_prompts_of_different_length_compile_nothing_after_the_first(name: str) -> None:
    """Wan pads its texts to one length; Kandinsky's blocks see the text as long as it is."""
    rig = rig_of(name)
    with STRUCTURE.engage(rig):
        counts = []
        for words in range(1, 13):
            run(rig, steps=1, prompt=" ".join([PROMPT] * words))
            counts.append(graphs(rig))
            assert STRUCTURE.verify(rig, None) == []
    assert counts[0] >= 1 and sum(counts) <= 2 and counts[2:] == [0] * 10, counts


def test_texts_trimmed_to_many_lengths_compile_nothing_after_the_second() -> None:
    rig = rig_of("hunyuanvideo-1.5-480p")
    with TextTrim().engage(rig):
        stock = run(rig)
        with STRUCTURE.engage(rig):
            assert torch.equal(run(rig), stock)
            counts = [graphs(rig)]
            for words in range(1, 7):
                run(rig, steps=1, prompt=" ".join([PROMPT] * words))
                counts.append(graphs(rig))
                assert STRUCTURE.verify(rig, None) == []
    assert counts[2:] == [0] * 5 and sum(counts) <= 2, counts


def test_a_caller_in_inference_mode_gets_as_few_graphs() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig), torch.inference_mode():
        counts = []
        for width in (64, 96, 128, 64):
            run(rig, steps=1, width=width)
            counts.append(graphs(rig))
            assert STRUCTURE.verify(rig, None) == []
    assert sum(counts) <= 4 and counts[2:] == [0, 0], counts


def wan_of_width(ffn_dim: int) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=8, freq_dim=16,
        ffn_dim=ffn_dim, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip


@torch.no_grad()
def forward(model: nn.Module) -> torch.Tensor:
    noise = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return model(noise, torch.tensor([500]), torch.ones(1, 6, 8)).sample


def test_twelve_checkpoints_of_one_class_all_run_compiled() -> None:
    """Dynamo allows eight variants of a piece of code; the ninth model must not run uncompiled."""
    models = [wan_of_width(16 + 8 * index) for index in range(12)]
    for model in models:
        rig = Rig(SimpleNamespace(transformer=model), family(WAN), "cpu")
        stock = forward(model)
        with STRUCTURE.engage(rig):
            assert torch.equal(forward(model), stock)
        assert graphs(rig) == 1 and STRUCTURE.verify(rig, None) == []


def test_both_experts_are_compiled() -> None:
    rig = rig_of("wan2.2-a14b")
    with STRUCTURE.engage(rig):
        run(rig, steps=4)
        for expert in rig.denoisers:
            assert lever_file._programs[expert][(STRUCTURE,)].graphs == 1
        assert graphs(rig) == 2 and STRUCTURE.verify(rig, None) == []


def test_leaving_and_entering_again_compiles_nothing() -> None:
    rig = rig_of()
    films = []
    for _ in range(3):
        with STRUCTURE.engage(rig):
            films.append(run(rig))
    assert graphs(rig) == 0 and torch.equal(films[0], films[2])
    assert lever_file._programs[rig.pipe.transformer][(STRUCTURE,)].graphs == 1


def test_compiled_code_does_not_keep_a_denoiser_alive() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig):
        run(rig, steps=1)
    there = weakref.ref(rig.pipe.transformer)
    del rig
    gc.collect()
    assert there() is None


# --------------------------------------------------------------------------- what it leaves alone


def test_names_seen_from_outside_are_as_before_while_it_is_on() -> None:
    rig = rig_of()
    model = rig.pipe.transformer
    keys, processors, kind = list(model.state_dict()), list(model.attn_processors), type(model.blocks[0])
    with STRUCTURE.engage(rig):
        run(rig, steps=1)
        assert list(model.state_dict()) == keys and list(model.attn_processors) == processors
        assert type(model.blocks[0]) is kind


def test_a_copy_made_while_it_is_on_is_a_plain_model() -> None:
    import copy

    rig = rig_of()
    with STRUCTURE.engage(rig):
        twin = copy.deepcopy(rig.pipe.transformer)
    assert all(block._compiled_call_impl is None for block in twin.blocks)


# --------------------------------------------------------------------------- what it refuses


def test_a_block_that_cannot_be_compiled_whole_is_an_error_that_names_it_and_leaves_no_trace() -> None:
    rig = rig_of()
    run(rig)
    block = rig.pipe.transformer.blocks[1]
    block.ffn.forward = torch.compiler.disable(block.ffn.forward)
    before = fingerprint(rig.pipe)
    told = r"WanTransformerBlock \(blocks\.1\) cannot be compiled whole: .*compile=off"
    with pytest.raises(LeverRefused, match=told):
        with STRUCTURE.engage(rig):
            run(rig)
    assert [each for each in differences(before, fingerprint(rig.pipe)) if "compile" in each] == []


def test_a_forward_hook_is_refused_before_it_could_be_passed_over() -> None:
    """Dynamo would serve the hooked block by the graph of its unhooked neighbours."""
    rig = rig_of()
    run(rig, steps=1)
    with STRUCTURE.engage(rig):
        run(rig, steps=1)
        handle = rig.pipe.transformer.blocks[1].ffn.register_forward_hook(lambda *_: None)
        with pytest.raises(LeverRefused, match=r"WanTransformer3DModel\.blocks\.1\.ffn has a forward hook"):
            run(rig, steps=1)
    with pytest.raises(LeverRefused, match="has a forward hook"), STRUCTURE.engage(rig):
        pass
    handle.remove()
    with STRUCTURE.engage(rig):
        run(rig, steps=1)


def test_a_forward_that_is_swapped_while_it_is_on_is_called() -> None:
    """As diffusers' own hooks do it; the code of the neighbours does not serve this block."""
    rig = rig_of()
    with STRUCTURE.engage(rig):
        plain = run(rig)
        block = rig.pipe.transformer.blocks[1]
        block.ffn.forward = lambda hidden_states: torch.zeros_like(hidden_states)
        assert not torch.equal(run(rig), plain)
        del block.ffn.forward
        assert torch.equal(run(rig), plain)


def test_skip_layer_guidance_which_hooks_blocks_in_every_step_is_followed() -> None:
    rig = rig_of("hunyuanvideo-1.5-480p")
    kind = type(rig.pipe.transformer.transformer_blocks[0])
    layers = LayerSkipConfig(indices=[1], fqn="transformer_blocks")
    rig.pipe.guider = diffusers.SkipLayerGuidance(
        guidance_scale=4.0, skip_layer_config=layers, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    )
    with swap_item(TransformerBlockRegistry._registry, kind, TransformerBlockMetadata(0, 1, _cls=kind)):
        stock = run(rig)
        with STRUCTURE.engage(rig):
            assert torch.equal(run(rig), stock) and torch.equal(run(rig), stock)
            assert graphs(rig) == 0


def test_an_error_of_the_device_is_passed_on_as_it_is() -> None:
    out = torch.OutOfMemoryError("no memory")
    assert lever_file._explained(out, "blocks.0", Unit()) is out
    failed = torch._dynamo.exc.BackendCompilerFailed(STRUCTURE, out, None)
    assert lever_file._explained(failed, "blocks.0", Unit()) is out


def test_a_model_that_is_compiled_already_is_refused() -> None:
    rig = rig_of()
    rig.pipe.transformer.compile(backend="eager")
    with pytest.raises(LeverRefused, match="WanTransformer3DModel is compiled already"), STRUCTURE.engage(rig):
        pass
    rig = rig_of()
    rig.pipe.transformer.compile_repeated_blocks(backend="eager")
    with pytest.raises(LeverRefused, match=r"WanTransformer3DModel\.blocks\.0 is compiled"), STRUCTURE.engage(rig):
        pass
    rig = rig_of()
    rig.pipe.transformer = torch.compile(rig.pipe.transformer, backend="eager")
    with pytest.raises(LeverRefused, match="is compiled already"), STRUCTURE.engage(rig):
        pass


def test_blocks_under_a_cache_of_diffusers_are_refused_with_the_remedy() -> None:
    rig = rig_of()
    rig.pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(LeverRefused, match=r"blocks\.0 runs under a hook.*remove the hook"), STRUCTURE.engage(rig):
        pass


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lever_file.shutil, "which", lambda name: None)
    with pytest.raises(LeverRefused, match="no C\\+\\+ compiler here.*install g\\+\\+"):
        Compile().engage(rig_of()).__enter__()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    rig = rig_of()
    rig.device = "cuda:0"
    with pytest.raises(LeverRefused, match="needs Triton"):
        Compile().engage(rig).__enter__()


# --------------------------------------------------------------------------- what verify says


def complaints(rig: Rig) -> str:
    return " ".join(STRUCTURE.verify(rig, None))


def test_it_says_when_code_for_a_known_shape_is_compiled_again() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig):
        run(rig, steps=1)
        torch._dynamo.reset()  # somebody else throws all compiled code away
        run(rig, steps=1)
    assert complaints(rig) == "blocks were compiled again 1 times for shapes that they had been compiled for"


def test_at_the_limit_of_variants_it_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of()
    stock = run(rig, steps=1)
    with torch._dynamo.config.patch(recompile_limit=1), STRUCTURE.engage(rig):
        for width in (96, 128, 64):
            film = run(rig, steps=1, width=width)
            if width == 128:
                assert "limit of variants was reached 1 times" in complaints(rig)
    assert torch.equal(film, stock) and rig.counters["compile.executed"] == rig.counters["compile.calls"]


def test_it_says_when_blocks_run_outside_compiled_code() -> None:
    rig = rig_of()
    with STRUCTURE.engage(rig), torch.compiler.set_stance("force_eager"):
        run(rig, steps=1)
    assert complaints(rig) == "6 of 6 calls of blocks ran outside compiled code"


# --------------------------------------------------------------------------- inductor itself


@pytest.mark.slow
def test_in_float32_the_compiled_film_is_the_stock_one_up_to_rounding() -> None:
    """A second family: every test of the contract compiles Wan."""
    rig = rig_of("hunyuanvideo-1.5-480p")
    stock = run(rig, steps=3)
    with Compile().engage(rig):
        assert distance(run(rig, steps=3), stock) < 1e-5
        assert Compile().verify(rig, None) == []
    assert torch.equal(run(rig, steps=3), stock)


@pytest.mark.slow
def test_in_bfloat16_parity_stays_nearer_to_eager_than_plain_and_no_flag_of_torch_moves() -> None:
    from torch._inductor import config

    pipe = tiny_pipeline(WAN).to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family(WAN), "cpu")
    stock = run(rig, steps=6)
    far = {}
    for mode in ("parity", "plain", "parity"):
        with Compile(mode=mode).engage(rig):
            far[mode] = distance(run(rig, steps=6), stock)
            assert config.emulate_precision_casts is False
    assert far["parity"] < far["plain"] / 2, far
    assert far["plain"] < 0.05, far


@pytest.mark.slow
def test_it_is_the_same_code_as_torch_compile_with_these_options_makes() -> None:
    rig = rig_of()
    with Compile().engage(rig):
        ours = run(rig)
    rig = rig_of()
    for block in rig.pipe.transformer.blocks:
        block.compile(fullgraph=True, options={"emulate_precision_casts": True, "compile_threads": 1})
    assert torch.equal(ours, run(rig))


@pytest.mark.slow
def test_asked_for_by_name_it_works_around_a_pipeline_at_hand() -> None:
    rig = rig_of()
    before = run(rig)
    with accelerate(rig.pipe, compile="on", host_sync="off") as made, torch.no_grad():
        film = rig.pipe(**tiny_inputs(rig.family, steps=2)).frames
    receipt = next(receipt for receipt in made.receipts if receipt.lever == "compile")
    assert receipt.complaints == () and distance(film, before) < 1e-5
    assert torch.equal(run(rig), before)


def test_it_travels_as_json() -> None:
    assert Record.to_dict(Compile(mode="max")) == {"mode": "max", "backend": "inductor"}
    with contextlib.suppress(BadInput):
        Compile.from_dict({"mode": "max", "other": 1})
        pytest.fail("an unknown field was read")
