"""How much one call multiplies, and how fast this device multiplies at those shapes.

`work_of(call)` runs the call once and counts every matrix product, convolution and attention that torch is asked
for: on a meta device it costs nothing, on a real one it is an ordinary call. `rates(work, device, dtype)` then
measures the same shapes by themselves.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from undercrank.figures import Attention, Gemm, Rate, Rates, Work, floor_ms
from undercrank.rig import Rig
from undercrank.undo import swap_attr

__all__ = ["first_step", "floor_ms", "rates", "work_of"]

SQUARE = 8192
"Side of the matrix product that every device is also asked for."

HEAVY = 0.02
"A shape is worth measuring from this share of its kind's work on."

MOST_SHAPES = 5
SAMPLES, SAMPLE_MS, WARM_UP_MS = 15, 10.0, 30.0

SUSTAINED_SAMPLE_MS, SUSTAINED_WARM_UP_MS = 40.0, 500.0
"On a GPU: a chip at its power limit is faster for some milliseconds than in the minutes that a film takes."


# --------------------------------------------------------------------------- how much


def work_of(call: Callable[[], Any]) -> Work:
    """What one call multiplies. Its compiled code must be off: see `first_step`."""
    with counting() as seen:
        call()
    return seen.work()


@contextmanager
def counting() -> Iterator[Count]:
    count = Count()
    with _Operations(count), _Calls(count):
        yield count


class Count:
    """Shapes seen so far."""

    def __init__(self) -> None:
        self.gemms: Counter[tuple[int, ...]] = Counter()
        self.attentions: Counter[tuple[int, ...]] = Counter()
        self.conv_flops = 0
        self.inside_attention = False
        "An attention is counted whole: the products that it is made of where no kernel serves are not."

    def gemm(self, batch: int, m: int, n: int, k: int) -> None:
        if batch * m * n * k:  # an empty text is multiplied too
            self.gemms[batch, m, n, k] += 1

    def attention(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """query: B H L D; key: B H S D. Keys that several heads share are counted once for each head."""
        *batch, heads, length, depth = query.shape
        self.attentions[math.prod(batch), heads, length, key.shape[-2], depth] += 1

    def work(self) -> Work:
        gemms = [Gemm(batch=b, m=m, n=n, k=k, count=c) for (b, m, n, k), c in self.gemms.items()]
        attentions = [
            Attention(b=batch, h=heads, l=queries, s=keys, d=depth, count=c)
            for (batch, heads, queries, keys, depth), c in self.attentions.items()
        ]
        return Work(gemms=_heaviest(gemms), attentions=_heaviest(attentions), conv_flops=self.conv_flops)


def _heaviest(shapes: list[Any]) -> tuple[Any, ...]:
    return tuple(sorted(shapes, key=lambda shape: -shape.flops * shape.count))


class _Calls(TorchFunctionMode):
    """Sees attention as it is asked for, before torch chooses a kernel or takes it apart."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
        self._count.attention(query, key)
        with swap_attr(self._count, "inside_attention", True):
            return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees every operation that reaches a device."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = None if self._count.inside_attention else RULES.get(func._schema.name)
        if rule is None:
            with self:
                result = func.decompose(*args, **kwargs)  # what is made of other operations, under inference_mode
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if rule is not None:
            rule(self._count, args, result)
        return result


def _mm(count: Count, args: Any, result: Any, at: int = 0) -> None:
    (m, k), n = args[at].shape, args[at + 1].shape[-1]
    count.gemm(1, m, n, k)


def _bmm(count: Count, args: Any, result: Any, at: int = 0) -> None:
    (batch, m, k), n = args[at].shape, args[at + 1].shape[-1]
    count.gemm(batch, m, n, k)


def _linear(count: Count, args: Any, result: Any) -> None:
    n, k = args[1].shape
    count.gemm(1, args[0].numel() // k, n, k)


def _convolution(count: Count, args: Any, result: Any) -> None:
    """Each value of the output (of the input where it is transposed) meets a whole kernel."""
    source, weight, is_transposed = args[0], args[1], len(args) > 6 and args[6]
    places = source.numel() if is_transposed else result.numel()
    count.conv_flops += 2 * places * math.prod(weight.shape[1:])


def _heads_first(count: Count, args: Any, result: Any) -> None:
    count.attention(args[0], args[1])


def _heads_third(count: Count, args: Any, result: Any) -> None:
    count.attention(args[0].transpose(1, 2), args[1].transpose(1, 2))


RULES: dict[str, Callable[[Count, Any, Any], None]] = {
    "aten::mm": _mm,
    "aten::_int_mm": _mm,
    "aten::_scaled_mm": _mm,
    "aten::addmm": lambda count, args, result: _mm(count, args, result, at=1),
    "aten::_addmm_activation": lambda count, args, result: _mm(count, args, result, at=1),
    "aten::bmm": _bmm,
    "aten::baddbmm": lambda count, args, result: _bmm(count, args, result, at=1),
    "aten::linear": _linear,
    "aten::mkldnn_linear": _linear,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::scaled_dot_product_attention": _heads_first,
    "aten::_scaled_dot_product_cudnn_attention": _heads_first,
    "aten::_scaled_dot_product_flash_attention": _heads_first,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _heads_first,
    "aten::_scaled_dot_product_efficient_attention": _heads_first,
    "aten::_scaled_dot_product_fused_attention_overrideable": _heads_first,
    "aten::_scaled_dot_product_attention_math": _heads_first,
    "flash_attn::_flash_attn_forward": _heads_third,
    "flash_attn_3::_flash_attn_forward": _heads_third,
    "flash_attn_3::fwd": _heads_third,
}
"Operation -> how its work is read from its arguments."


@contextmanager
def first_step(rig: Rig) -> Iterator[list[Work]]:
    """The work of each forward in the first step of the runs in this block.

    Levers must be on before, and stay on: they are counted as they are. Compiled code is stepped around meanwhile,
    since it shows no operations: it does the same work.
    """
    works: list[Work] = []

    def count(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if rig.step_index:
            return forward(*args, **kwargs)
        with counting() as seen:
            result = forward(*args, **kwargs)
        works.append(seen.work())
        return result

    with ExitStack() as stack:
        for denoiser in rig.denoisers:
            for module in denoiser.modules():
                if module._compiled_call_impl is not None:
                    stack.enter_context(swap_attr(module, "_compiled_call_impl", None))
        stack.enter_context(around_forwards(rig, count))
        yield works


@contextmanager
def around_forwards(rig: Rig, wrapper: Callable[..., Any]) -> Iterator[None]:
    """`wrapper(forward, *args, **kwargs)` in place of each denoiser's forward, outside of whatever is there already."""
    with ExitStack() as stack:
        for denoiser in rig.denoisers:
            forward = denoiser.forward

            @functools.wraps(forward)  # pipelines inspect its signature
            def wrapped(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
                return wrapper(_forward, *args, **kwargs)

            stack.enter_context(swap_attr(denoiser, "forward", wrapped))
        yield


# --------------------------------------------------------------------------- how fast


def rates(work: Work, device: str, dtype: str, *, square: int = SQUARE, samples: int = SAMPLES) -> Rates:
    """Measure matrix products and attention kernels at the heavy shapes of the work, and one large square product."""
    shapes = [*_heavy(work.gemms), Gemm(batch=1, m=square, n=square, k=square)]
    with torch.no_grad():
        gemm = tuple(_gemm_rate(shape, device, dtype, samples) for shape in shapes)
        attention, refused = _attention_rates(_heavy(work.attentions), device, dtype, samples)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return Rates(device=name, dtype=dtype, gemm=gemm, attention=attention, refused=refused)


def _heavy(shapes: tuple[Any, ...]) -> list[Any]:
    total = sum(shape.flops * shape.count for shape in shapes)
    return [shape for shape in shapes if shape.flops * shape.count >= HEAVY * total][:MOST_SHAPES]


def _gemm_rate(shape: Gemm, device: str, dtype: str, samples: int) -> Rate:
    """Random values: a chip is faster on zeros, which switch fewer of its wires."""
    left = _random((shape.batch, shape.m, shape.k), device, dtype)
    right = _random((shape.batch, shape.n, shape.k), device, dtype).transpose(1, 2)
    if shape.batch == 1:
        left, right = left[0], right[0]
    product = torch.mm if shape.batch == 1 else torch.bmm
    return _rate("gemm", shape, _sample_ms(lambda: product(left, right), device, samples))


def _attention_rates(
    shapes: list[Attention], device: str, dtype: str, samples: int
) -> tuple[tuple[Rate, ...], dict[str, str]]:
    found, refused = [], {}
    for shape in shapes:
        query = _random((shape.b, shape.h, shape.l, shape.d), device, dtype)
        key, value = (_random((shape.b, shape.h, shape.s, shape.d), device, dtype) for _ in range(2))
        for name, kernel in _attention_kernels(device).items():
            try:
                ms = _sample_ms(lambda: kernel(query, key, value), device, samples)  # noqa: B023  (called at once)
            except (RuntimeError, NotImplementedError) as error:
                refused[f"{name} {shape.in_words()}"] = str(error).strip().partition("\n")[0][:200]
            else:
                found.append(_rate(name, shape, ms))
    return tuple(found), refused


def _attention_kernels(device: str) -> dict[str, Callable[..., Any]]:
    """By the operations themselves: torch's own choice of a kernel is a setting of the whole process."""
    aten = torch.ops.aten
    if not device.startswith("cuda"):
        return {"flash for the CPU": aten._scaled_dot_product_flash_attention_for_cpu}
    return {
        "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, False),
        "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v),
        "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, False),
    }


def _random(shape: tuple[int, ...], device: str, dtype: str) -> torch.Tensor:
    """From a generator of its own: measuring draws nothing from the global one."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, dtype))


def _rate(kernel: str, shape: Gemm | Attention, sample_ms: list[float]) -> Rate:
    tflops = [shape.flops / ms / 1e9 for ms in sample_ms]
    return Rate(
        kernel=kernel,
        shape=shape.in_words(),
        tflops=statistics.median(tflops),
        low=min(tflops),
        high=max(tflops),
        n=len(tflops),
    )


def _sample_ms(call: Callable[[], Any], device: str, samples: int) -> list[float]:
    """Milliseconds of one call, `samples` times, each over as many calls as fill a sample, after a warm-up."""
    is_gpu = device.startswith("cuda")
    sample_ms, warm_up_ms = (SUSTAINED_SAMPLE_MS, SUSTAINED_WARM_UP_MS) if is_gpu else (SAMPLE_MS, WARM_UP_MS)
    call()
    once = max(_time_ms(call, device, 1), 1e-3)
    _time_ms(call, device, max(1, math.ceil(warm_up_ms / once)))
    calls = max(1, math.ceil(sample_ms / once))
    return [_time_ms(call, device, calls) / calls for _ in range(samples)]


def _time_ms(call: Callable[[], Any], device: str, calls: int) -> float:
    if not device.startswith("cuda"):
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begun) * 1000
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
