"""quantize: fewer bits where they may be, none where they must not, and a component is in its format or not loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from undercrank import families
from undercrank.ledger import Ledger, read_ledger
from undercrank.levers import formats
from undercrank.levers.compile import Compile, repeated_blocks
from undercrank.levers.fewbits import FewBits, FewBitsProduct, by_row
from undercrank.levers.formats import FORMATS, converted, layers
from undercrank.levers.quantize import Quantize
from undercrank.load import load
from undercrank.planner import load_spec, make_plan, unproven_loss
from undercrank.records import (
    BadInput,
    Device,
    Fidelity,
    LeverRefused,
    LoadSpec,
    Machine,
    Measurement,
    Plan,
    Request,
    Status,
)
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline

HOPPER = Device(kind="cuda", name="an H200", capability=(9, 0), free_bytes=139 << 30)
BLACKWELL = replace(HOPPER, name="a B200", capability=(10, 0))
CPU = Device(kind="cpu", name="Processor", free_bytes=48 << 30)
HUNYUAN = "hunyuanvideo-1.5-720p"


def plan(model: str = HUNYUAN, device: Device = HOPPER, ledger: Ledger | None = None, **more: Any) -> Plan:
    wishes = tuple(more.pop("wishes", {}).items())
    packages = more.pop("packages", {})
    machine = Machine(name="m", devices=(device,), cpu_count=1, packages=packages)
    request = Request(prompt="a fox", model=model, wishes=wishes, **more)
    return make_plan(request, family=families.family(model), machine=machine, ledger=ledger or Ledger())


def decided(made: Plan) -> Any:
    return next(each for each in made.decisions if each.lever == "quantize")


def linear(rows: int = 512, columns: int = 512, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)


EACH = pytest.mark.parametrize(
    ("cls", "kind", "bound"),
    [(FewBits, "int8", 0.01), (FewBits, "float8", 0.03), (FewBitsProduct, "float8", 0.05)],
    ids=["int8", "float8", "float8 product"],
)


# --------------------------------------------------------------------------- the layers


@EACH
def test_the_output_is_near_the_dense_layers(cls: Any, kind: str, bound: float) -> None:
    layer, x = linear(), torch.randn(3, 70, 512)
    few = cls.of(layer, kind, "cpu")(x)
    assert few.shape == (3, 70, 512) and 0 < ((few - layer(x)).norm() / layer(x).norm()).item() < bound


@EACH
def test_rows_of_zeros_give_zeros(cls: Any, kind: str, bound: float) -> None:
    layer = linear(dtype=torch.bfloat16)
    layer.weight[3], layer.bias[3] = 0, 0
    x = torch.randn(16, 512, dtype=torch.bfloat16)
    x[5] = 0
    y = cls.of(layer, kind, "cpu")(x)
    assert torch.isfinite(y).all() and (y[:, 3] == 0).all() and torch.equal(y[5], layer.bias)


@EACH
def test_to_another_dtype_moves_what_is_computed_with_and_keeps_what_is_stored(
    cls: Any, kind: str, bound: float
) -> None:
    few, x = cls.of(linear(), kind, "cpu"), torch.randn(8, 512)
    expected, values = few(x), few.values.clone()
    moved = few.to(torch.bfloat16)
    assert moved.values.dtype is values.dtype and torch.equal(moved.values.float(), values.float())
    assert moved.scale.dtype is torch.float32 and moved.bias.dtype is torch.bfloat16
    assert torch.allclose(moved(x.bfloat16()).float(), expected, atol=0.05)
    assert torch.equal(moved.to(torch.float16).values.float(), values.float())


@pytest.mark.parametrize(("count", "given"), [(60, 64), (7, 16), (1, 16), (64, 64), (72, 72)])
def test_a_product_is_never_given_a_number_of_rows_that_kernels_refuse(count: int, given: int) -> None:
    """60 rows of text with row-wise scales were refused by cuBLAS on an H200; multiples of 8 run."""
    seen = []
    stock = torch._scaled_mm

    def spy(values: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        seen.append(values.shape[0])
        return stock(values, *args, **more)

    with patch.object(torch, "_scaled_mm", spy):
        y = FewBitsProduct.of(linear(), "float8", "cpu")(torch.randn(1, count, 512))
    assert seen == [given] and y.shape == (1, count, 512)


def test_a_product_is_given_whole_rows_however_the_input_lies() -> None:
    """HunyuanVideo-1.5's tokens lie by columns, as its first convolution made them; CUDA refuses such a product."""
    seen = []
    stock = torch._scaled_mm

    def spy(values: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        seen.append(values.is_contiguous())
        return stock(values, *args, **more)

    few, x = FewBitsProduct.of(linear(), "float8", "cpu"), torch.randn(1, 512, 32).transpose(1, 2)
    with patch.object(torch, "_scaled_mm", spy):
        assert torch.equal(few(x), few(x.contiguous()))
    assert seen == [True, True]


def test_an_empty_text_is_no_product() -> None:
    few = FewBitsProduct.of(linear(), "float8", "cpu")
    assert few(torch.zeros(1, 0, 512)).shape == (1, 0, 512)


def test_weights_of_half_precision_keep_scales_that_it_could_not_hold() -> None:
    layer = linear(dtype=torch.float16)
    layer.weight.mul_(1e-3)
    few, x = FewBits.of(layer, "float8", "cpu"), torch.randn(4, 512, dtype=torch.float16)
    assert ((few(x) - layer(x)).norm() / layer(x).norm()).item() < 0.03


def test_the_rounding_is_torchaos() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    for kind, config in (("int8", torchao.Int8WeightOnlyConfig()), ("float8", torchao.Float8WeightOnlyConfig())):
        theirs = nn.Sequential(linear())
        torchao.quantize_(theirs, config)
        ours, _ = by_row(linear().weight, formats_type(kind))
        furthest = (ours.float() - theirs[0].weight.qdata.float()).abs().max()
        assert furthest == 0 if kind == "float8" else furthest <= 1  # torchao divides by 127.5


def formats_type(kind: str) -> torch.dtype:
    from undercrank.levers.fewbits import TYPES

    return TYPES[kind]


# --------------------------------------------------------------------------- which layers


class Block(nn.Module):
    """Names as HunyuanVideo-1.5's blocks have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({"linear": nn.Linear(width, 6 * width)})
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in ("to_q", "add_q_proj", "to_add_out")})
        self.ff = nn.ModuleDict({"proj": nn.Linear(width, 4 * width)})
        self.ff_context = nn.ModuleDict({"proj": nn.Linear(width, 4 * width)})


def model(width: int = 512) -> nn.Module:
    return nn.ModuleDict(
        {
            "time_embed": nn.Linear(width, width),
            "proj_out": nn.Linear(width, 512),
            "blocks": nn.ModuleList([Block(width)]),
            "wo": nn.Linear(width, width),
        }
    ).requires_grad_(False)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("int8", {"attn.to_q", "attn.add_q_proj", "attn.to_add_out", "ff.proj", "ff_context.proj"}),
        ("fp8", {"attn.to_q", "ff.proj"}),
        ("fp8_ffn", {"ff.proj"}),
    ],
)
def test_modulation_embeddings_and_texts_in_products_stay_dense(word: str, expected: set[str]) -> None:
    found = layers(model(), FORMATS["transformer", word], narrow=False)
    assert set(found) == {f"blocks.0.{name}" for name in expected}


def test_layers_below_512_features_stay_dense_but_in_a_narrow_model() -> None:
    assert not layers(model(496), FORMATS["transformer", "fp8"], narrow=False)
    assert layers(model(496), FORMATS["transformer", "fp8"], narrow=True)
    assert not layers(model(112), FORMATS["transformer", "fp8"], narrow=True)
    assert not layers(model(520), FORMATS["transformer", "fp8"], narrow=False), "520 is no multiple of 16"
    assert layers(model(520), FORMATS["transformer", "int8"], narrow=False)


def test_a_component_of_which_a_layer_cannot_be_converted_is_not_loaded() -> None:
    part = model()
    part.blocks[0].ff.proj.weight[0, 0] = float("nan")
    with pytest.raises(LeverRefused, match=r"blocks.0.ff.proj .*not finite.* 1 of 2 layers were converted"):
        formats.convert(part, "transformer", FORMATS["transformer", "fp8"], device="cpu")


def test_a_layer_that_silently_stays_dense_fails_the_load() -> None:
    with patch.object(formats, "_by_us"), pytest.raises(LeverRefused, match="2 of 2 layers .* did not take"):
        formats.convert(model(), "transformer", FORMATS["transformer", "fp8"], device="cpu")


def test_a_component_without_a_layer_that_may_is_refused() -> None:
    with pytest.raises(LeverRefused, match="has no layer that would take"):
        formats.convert(model(64), "transformer", FORMATS["transformer", "fp8"], device="cpu")


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_a_block_format_that_torchao_refuses_here_is_not_loaded(word: str) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(LeverRefused, match=rf"to_q cannot be kept in {word} .*; 0 of 2 layers were converted"):
        formats.convert(model(), "transformer", FORMATS["transformer", word], device="cpu")


# --------------------------------------------------------------------------- the load


def loaded(**words: str) -> Any:
    row = families.family("flipbook")
    spec = load_spec(row)
    return load(Quantize(**words).configure(spec), row)


@pytest.mark.parametrize("role", ["transformer", "text_encoder", "vae"])
def test_only_the_named_component_is_given_the_format(role: str) -> None:
    with loaded(**{role: "fp8"}) as found:
        pipe = found.rig.pipe
        assert [name for name in ("transformer", "text_encoder", "vae") if converted(getattr(pipe, name))] == [role]
        assert getattr(pipe, role).dtype is torch.float32


def test_the_encoder_keeps_the_layer_whose_type_it_casts_activations_to() -> None:
    with loaded(text_encoder="fp8") as found:
        names = converted(found.rig.pipe.text_encoder)
    assert names and not any(name.endswith(".wo") for name in names)


def test_dense_weights_are_never_together_on_the_device() -> None:
    """Each layer is converted before the component is placed."""
    placed = []
    stock = nn.Module._apply

    def spy(module: nn.Module, *args: Any, **more: Any) -> nn.Module:
        if hasattr(module, "blocks"):
            placed.append(bool(converted(module)))
        return stock(module, *args, **more)

    with patch.object(nn.Module, "_apply", spy), loaded(transformer="int8"):
        assert placed and placed[-1]


# --------------------------------------------------------------------------- what is asked


def test_each_knob_speaks_for_its_component_alone() -> None:
    made = plan(wishes={"transformer_quant": "off", "text_encoder_quant": "int8"})
    assert made.load.formats == (("text_encoder", "int8"),) and decided(made).status is Status.APPLIED
    assert decided(made).chosen == "text_encoder=int8"


def test_off_for_all_is_off() -> None:
    off = dict.fromkeys(Quantize.knobs, "off")
    assert decided(plan(wishes=off)).reason == "asked for off" and plan(wishes=off).load.formats == ()


def test_off_for_one_is_honoured_by_what_decides_for_the_others() -> None:
    ledger = Ledger([row(setting="vae=fp8", verdict="allowed", gain=None)])
    assert plan(ledger=ledger, fidelity="quality").load.formats == (("vae", "fp8"),)
    assert plan(ledger=ledger, fidelity="quality", wishes={"vae_quant": "off"}).load.formats == ()
    assert plan(ledger=ledger, fidelity="quality", wishes={"transformer_quant": "off"}).load.formats != ()


@pytest.mark.parametrize("knob", Quantize.knobs)
def test_an_unknown_format_is_refused_with_those_there_are(knob: str) -> None:
    with pytest.raises(BadInput, match="choose auto, off, .*fp8") as refused:
        plan(wishes={knob: "int3"})
    assert refused.value.field == knob


@pytest.mark.parametrize(
    ("device", "word", "match"),
    [
        (CPU, "nvfp4", "needs a GPU that multiplies nvfp4"),
        (HOPPER, "mxfp8", "capability 10.0 or later"),
        (replace(HOPPER, capability=(8, 0)), "fp8", "capability 8.9 or later, .*: choose int8"),
        (BLACKWELL, "nvfp4", r'pip install "torchao>=0.18,<0.19"'),
    ],
)
def test_a_format_that_cannot_be_had_here_is_refused_with_the_remedy(device: Device, word: str, match: str) -> None:
    with pytest.raises(LeverRefused, match=match) as refused:
        plan("wan2.1-14b", device, wishes={"transformer_quant": word})
    assert refused.value.exit_code == 3


def row(**fields: Any) -> Measurement:
    return Measurement(**{
        "id": "r", "family": HUNYUAN, "lever": "quantize", "source": "measured", "machine": "m", "device": HOPPER.name,
        "versions": {}, "width": 1280, "height": 720, "num_frames": 33, "num_inference_steps": 30,
        "dtype": "bfloat16", "n": 3, "gain": 1.2, "distances": {"lpips": 0.04}, "floor": {"lpips": 0.045},
    } | fields)  # fmt: skip


def test_without_a_row_nothing_is_quantised() -> None:
    for fidelity in ("exact", "faithful", "fast"):
        assert plan(fidelity=fidelity).load.formats == ()


def test_the_shipped_rows_decide_for_hunyuanvideo() -> None:
    """The text encoder stays dense, the denoiser too, and the VAE takes fp8 where the word allows it."""
    made = plan(ledger=read_ledger(), device=BLACKWELL, packages={"torchao": "0.18.0"}, fidelity="quality")
    assert made.load.formats == (("vae", "fp8"),)
    assert "published-hunyuanvideo-1.5-720p-quantize-vae" in decided(made).evidence
    assert plan(ledger=read_ledger(), fidelity="faithful").load.formats == ()


def test_what_was_denied_is_refused_by_its_measurement_unless_that_is_allowed() -> None:
    given: Any = {"ledger": read_ledger(), "device": BLACKWELL, "packages": {"torchao": "0.18.0"}}
    wishes = {"transformer_quant": "mxfp8"}
    with pytest.raises(
        LeverRefused, match=r"denied by what was measured: 1.00x, lpips 0.37 on .*mxfp8.*--allow-denied"
    ):
        plan(wishes=wishes, **given)
    made = plan(wishes=wishes, allow_denied=True, **given)
    assert made.load.formats == (("transformer", "mxfp8"),)
    assert "although denied by what was measured" in decided(made).reason
    assert decided(made).evidence == ("published-hunyuanvideo-1.5-720p-quantize-mxfp8",)
    with pytest.raises(LeverRefused, match="denied"):
        plan(wishes=wishes | {"vae_quant": "fp8"}, **given)
    assert plan("wan2.1-14b", wishes=wishes, **given).load.formats == (("transformer", "mxfp8"),)


def test_explicit_schemes_that_were_only_declined_are_honoured() -> None:
    made = plan(ledger=read_ledger(), wishes={"text_encoder_quant": "fp8", "transformer_quant": "fp8"})
    assert dict(made.load.formats) == {"transformer": "fp8", "text_encoder": "fp8"}


def test_a_denied_setting_is_never_chosen_by_itself() -> None:
    rows = [row(setting="transformer=fp8"), row(setting="transformer=fp8", verdict="denied", id="d")]
    assert plan(ledger=Ledger(rows[:1])).load.formats == (("transformer", "fp8"),)
    assert plan(ledger=Ledger(rows)).load.formats == ()


def test_a_row_that_denies_says_so_under_every_word() -> None:
    case: Any = None
    for word in Fidelity:
        denial = unproven_loss((row(verdict="denied"),), word, case)
        assert denial and denial.startswith("denied by what was measured: 1.20x, lpips 0.04")


def test_a_pipeline_that_came_loaded_is_too_late() -> None:
    from undercrank.engine import accelerate

    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    with accelerate(pipe) as run, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=1))
    assert run.plan and "quantize" not in {lever.name for lever in run.plan.levers}
    with pytest.raises(LeverRefused, match="already loaded"):
        with accelerate(pipe, transformer_quant="fp8"), torch.no_grad():
            pipe(**tiny_inputs(pipe, steps=1))


def test_the_load_that_is_asked_for_survives_json() -> None:
    spec = replace(load_spec(families.family("flipbook")), formats=(("transformer", "fp8"), ("vae", "fp8")))
    assert LoadSpec.from_json(spec.to_json()) == spec


# --------------------------------------------------------------------------- compiled


SIZES = {
    "wan2.1-1.3b": {"attention_head_dim": 16, "ffn_dim": 64},
    HUNYUAN: {"num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 2, "rope_axes_dim": (4, 6, 6)},
}


def compiled_blocks(family: str, word: str) -> tuple[Rig, int]:
    """After two steps through compiled blocks; and how many blocks there are."""
    pipe = tiny_pipeline(family)
    pipe.set_progress_bar_config(disable=True)
    sizes = dict(pipe.transformer.config) | SIZES[family]
    pipe.register_modules(transformer=type(pipe.transformer).from_config(sizes).requires_grad_(False))
    if word != "dense":
        with patch.multiple(formats, LEAST_FEATURES={False: 16, True: 16}):
            formats.convert(pipe.transformer, "transformer", FORMATS["transformer", word], device="cpu")
    rig = Rig(pipe, families.family(family), "cpu")
    with rig.seams(), Compile(backend="aot_eager").engage(rig), rig.call(), torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=2))
    return rig, len(repeated_blocks(pipe.transformer))


@pytest.mark.parametrize("family", SIZES)
def test_equal_quantised_blocks_share_one_graph_as_dense_ones_do(family: str) -> None:
    dense, blocks = compiled_blocks(family, "dense")
    for word in ("int8", "fp8"):
        rig, _ = compiled_blocks(family, word)
        assert blocks >= 2 and rig.counters["compile.graphs"] == dense.counters["compile.graphs"] <= 2
        assert rig.counters["compile.executed"] == rig.counters["compile.calls"] >= 2 * blocks
        assert "compile.again" not in rig.counters and "compile.renewed" not in rig.counters


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what Python is about to drop
def test_inductor_compiles_layers_that_quantise_one_input() -> None:
    """A largest value kept in bfloat16 made it declare one variable for each layer that reads the input."""
    from torch._inductor.utils import fresh_cache

    layers = [FewBitsProduct.of(linear(dtype=torch.bfloat16), "float8", "cpu") for _ in range(3)]
    x = torch.randn(1, 512, 32, dtype=torch.bfloat16).transpose(1, 2)

    def together(x: torch.Tensor) -> torch.Tensor:
        return layers[0](x) + layers[1](x) + layers[2](x)

    with fresh_cache():
        compiled = torch.compile(together, fullgraph=True, options={"emulate_precision_casts": True})(x)
    assert torch.allclose(compiled.float(), together(x).float(), atol=0.1, rtol=0.02)


def test_a_stock_film_has_no_component_in_fewer_bits() -> None:
    """Whatever rows would allow under its fidelity word."""
    from undercrank.rounding import stock

    ledger, machine = Ledger([row(setting="vae=fp8")]), Machine(name="m", devices=(HOPPER,), cpu_count=1)
    asked, row_of = Request(model=HUNYUAN), families.family(HUNYUAN)
    assert make_plan(asked, family=row_of, machine=machine, ledger=ledger).load.formats
    assert not make_plan(stock(asked), family=row_of, machine=machine, ledger=ledger).load.formats


def test_each_format_is_another_checkpoint_to_a_cache_that_measured_one() -> None:
    from undercrank.levers.programs import checkpoint

    parts = [model() for _ in range(4)]
    for part in parts:
        part.load_state_dict(parts[0].state_dict())
    formats.convert(parts[1], "transformer", FORMATS["transformer", "int8"], device="cpu")
    formats.convert(parts[2], "transformer", FORMATS["text_encoder", "fp8"], device="cpu")
    assert len({checkpoint(part) for part in parts}) == 3
