"""Weight formats of fewer bits: what each is and needs, which layers take it, and how a loaded component gets it.

torchao comes in here only, for the block formats whose packing and kernels are its own. The rest is `fewbits.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from undercrank.records import LeverRefused, LoadSpec, Record
from undercrank.rig import DENOISERS

TORCHAO = 'pip install "torchao>=0.18,<0.19"'
"It needs no other package, and leaves torch as it is."


@dataclass(frozen=True, kw_only=True)
class Format(Record):
    """One way to keep a component's weights."""

    kind: str
    "int8, float8, mxfp8, nvfp4: how a value is stored. layerwise: float8 without scales, by diffusers' own hooks."
    bytes_per_value: float = 1.1
    "With scales, and with the layers that stay dense."
    multiplies: bool = False
    "Activations are quantised too, and the products are those of the narrow type."
    only: tuple[str, ...] = ()
    "How words in the names of the layers that take it begin; empty: all that may."
    capability: tuple[int, int] | None = None
    "The least of a GPU."
    on_cpu: bool = True
    needs_torchao: bool = False


FEED_FORWARD = ("ff", "feed_forward", "mlp")

FORMATS: Mapping[tuple[str, str], Format] = {
    ("transformer", "int8"): Format(kind="int8"),
    ("transformer", "fp8"): Format(kind="float8", multiplies=True, capability=(8, 9)),
    ("transformer", "fp8_ffn"): Format(kind="float8", multiplies=True, capability=(8, 9), only=FEED_FORWARD),
    ("transformer", "mxfp8"): Format(
        kind="mxfp8", multiplies=True, capability=(10, 0), on_cpu=False, needs_torchao=True
    ),
    ("transformer", "nvfp4"): Format(
        kind="nvfp4", bytes_per_value=0.7, multiplies=True, capability=(10, 0), on_cpu=False, needs_torchao=True
    ),
    ("text_encoder", "int8"): Format(kind="int8"),
    ("text_encoder", "fp8"): Format(kind="float8"),
    ("text_encoder", "fp8_dynamic"): Format(kind="float8", multiplies=True, capability=(8, 9)),
    ("vae", "fp8"): Format(kind="layerwise"),
}
"By role of the component and the word that asks for it."

ROLES = ("transformer", "text_encoder", "vae")

DENSE = ("embed", "norm", "modulation", "adaln", "time", "proj_in", "proj_out", "caption", "refiner", "lm_head", "wo")
"""Words in the names of layers that stay dense in any format: a layer that makes a scale or a shift for a whole block
moves every value after it, and is read once a step. T5 casts activations to the type that it finds in `wo`."""

TEXT_STREAM = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context")
"""Layers of a stream of text tokens: few rows, none for an empty text. Where activations are quantised they stay dense:
there is nothing to gain, and kernels of narrow types have rules about few rows."""

LEAST_FEATURES = {False: 512, True: 128}
"""Layers with fewer inputs or outputs stay dense: casting costs more than the product saves. True: for a family with
the trait `narrow`, which has no wide ones."""

ALIGNMENT = 16
"What every narrow product asks of both sides of a weight."


def role_of(component: str) -> str | None:
    """transformer, text_encoder or vae; None: a component that keeps its weights."""
    if component in DENOISERS:
        return "transformer"
    role = component.removesuffix("_2").removesuffix("_3")
    return role if role in ROLES else None


def form_of(component: str, load: LoadSpec) -> Format | None:
    """The format that a load asks for a component; None: that of its dtype."""
    role = role_of(component)
    word = dict(load.formats).get(role) if role else None
    return FORMATS[role, word] if role and word else None


def layers(part: Any, form: Format, *, narrow: bool) -> dict[str, Any]:
    """The linear layers of a component that take a format, by name."""
    from torch import nn

    least = LEAST_FEATURES[narrow]
    return {
        name: layer
        for name, layer in part.named_modules()
        if type(layer) is nn.Linear
        and min(layer.in_features, layer.out_features) >= least
        and not _stays_dense(name, form)
        and not (form.multiplies and (layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT))
    }


def _stays_dense(name: str, form: Format) -> bool:
    words = name.split(".")
    dense = DENSE + TEXT_STREAM if form.multiplies else DENSE
    if any(word == mark or (len(mark) > 2 and mark in word) for word in words for mark in dense):
        return True
    return bool(form.only) and not any(word.startswith(form.only) for word in words)


def convert(part: Any, component: str, form: Format, *, device: str, narrow: bool = False) -> None:
    """Give a component that lies on the host its format, and put the converted layers on the device.

    Layer by layer, so that the device never holds the dense weights. Raises LeverRefused if a layer that should
    take the format cannot: a component is in its format, or nothing is loaded.
    """
    if form.kind == "layerwise":
        _layerwise(part, component)
        return
    chosen = layers(part, form, narrow=narrow)
    if not chosen:
        raise LeverRefused(f"quantize: {component} ({type(part).__name__}) has no layer that would take {form.kind}")
    for done, (name, layer) in enumerate(chosen.items()):
        with _whole(component, name, form, f"{done} of {len(chosen)} layers"):
            if form.needs_torchao:
                _by_torchao(layer.to(device), form)
            else:
                _by_us(part, name, layer, form, device)
    if missing := len(chosen) - len(converted(part)):
        raise LeverRefused(f"quantize: {missing} of {len(chosen)} layers of {component} did not take {form.kind}")


def converted(part: Any) -> list[str]:
    """Names of the layers of a component that are in a format of fewer bits."""
    return [name for name, layer in part.named_modules() if _is_converted(layer)]


def _is_converted(layer: Any) -> bool:
    from torch import nn

    from undercrank.levers.fewbits import FewBits

    packed = isinstance(layer, nn.Linear) and type(layer.weight.data).__module__.startswith("torchao.")
    cast = hasattr(layer, "_diffusers_hook") and layer._diffusers_hook.get_hook("layerwise_casting") is not None
    return isinstance(layer, FewBits) or packed or cast


@contextmanager
def _whole(component: str, name: str, form: Format, so_far: str) -> Iterator[None]:
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, LeverRefused):
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise LeverRefused(
            f"quantize: {component}.{name} cannot be kept in {form.kind} ({first[:160]}); {so_far} were converted, and "
            "half of a model is not loaded: leave the format out"
        ) from error


def _by_us(part: Any, name: str, layer: Any, form: Format, device: str) -> None:
    from undercrank.levers.fewbits import FewBits, FewBitsProduct

    cls = FewBitsProduct if form.multiplies else FewBits
    parent, _, child = name.rpartition(".")
    part.get_submodule(parent).register_module(child, cls.of(layer, form.kind, device))


def _by_torchao(layer: Any, form: Format) -> None:
    """mxfp8 and nvfp4: blocks of 32 and 16 values with a scale each, for GPUs that multiply them."""
    from torchao.prototype.mx_formats import (
        MXDynamicActivationMXWeightConfig,
        NVFP4DynamicActivationNVFP4WeightConfig,
    )
    from torchao.quantization import quantize_

    config = MXDynamicActivationMXWeightConfig if form.kind == "mxfp8" else NVFP4DynamicActivationNVFP4WeightConfig
    quantize_(layer, config(), filter_fn=lambda module, _: module is layer)


def _layerwise(part: Any, component: str) -> None:
    """Convolutions too: stored in float8, cast to the component's own type for the length of each call."""
    import torch

    if not hasattr(part, "enable_layerwise_casting"):
        raise LeverRefused(f"quantize: {component} ({type(part).__name__}) cannot be cast layer by layer")
    part.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=part.dtype)
    if not converted(part):
        raise LeverRefused(f"quantize: no layer of {component} ({type(part).__name__}) took fp8")
