"""Causal video decoders, run over a film that comes in chunks: each convolution keeps the last frames that it saw.

In a causal decoder a frame depends on itself and on frames before it, so that chunk after chunk gives what the whole
film at once gives, with the same weights and the same sums; only the kernels that a library chooses for other sizes may
round them in another order. Nothing overlaps, nothing is blended: there is no seam.

`HunyuanDecoder` runs AutoencoderKLHunyuanVideo15, which diffusers 0.42.1 runs whole, and whose attention is given a
mask over all pairs of places, filled row by row. `WanDecoder` runs AutoencoderKLWan, which diffusers runs in chunks of
one latent frame. Shapes: latents z_BCTHW; films BCFHW in -1..1, as the model's own `decode` returns them.

Imported inside the lever's `engage` only, since it needs torch.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch.nn import functional

from undercrank.undo import swap_env

HISTORY = 2
"Frames that a causal convolution of three sees besides its own."


@dataclass(frozen=True, kw_only=True)
class How:
    """How chunks are computed; none of it changes what is computed."""

    latent_frames: int = 1
    "Of a chunk. The first chunk has one more: a first frame is decoded to one frame, every other one to several."
    channels_last: bool = True
    "Activations lie pixel by pixel, as the tensor cores of a GPU read them."
    fused: bool = False
    "Normalisation and activation are one compiled kernel, that rounds where the eager ones do."


def decoder_of(vae: Any, how: How) -> Decoder | None:
    """A decoder for one film of this VAE; None: it is of another kind, or under hooks that must see its calls."""
    kind = DECODERS.get(type(vae).__name__)
    return kind(vae, how) if kind and not any(_has_hook(m, kind.hooks) for m in vae.decoder.modules()) else None


def _has_hook(module: Any, names: tuple[str, ...]) -> bool:
    registry = vars(module).get("_diffusers_hook")
    return registry is not None and any(registry.get_hook(name) is not None for name in names)


class Decoder:
    """One film on its way through a decoder. Its convolutions' last frames live as long as it does."""

    hooks: tuple[str, ...] = ("group_offloading",)
    "Of diffusers, that it cannot pass: they move the weights of a block that is called as a whole."

    def __init__(self, vae: Any, how: How) -> None:
        self.vae, self.how = vae, how
        self._layers: dict[Any, CausalConv] = {}
        self._is_last = False

    def chunks(self, z_BCTHW: Any) -> Iterator[Any]:
        """Frames BCFHW, chunk by chunk, in order."""
        layout = torch.channels_last_3d if self.how.channels_last else torch.contiguous_format
        middle = self._before(z_BCTHW.contiguous(memory_format=layout))
        begins = [0, *range(1 + self.how.latent_frames, middle.shape[2], self.how.latent_frames), middle.shape[2]]
        for begin, end in itertools.pairwise(begins):
            self._is_last = end == middle.shape[2]
            yield self._after(middle[:, :, begin:end], is_first=begin == 0)

    def as_returned(self, film_BCFHW: Any, *args: Any, **kwargs: Any) -> Any:
        """The film in the form in which the model's own `_decode` returns it."""
        return film_BCFHW

    def _before(self, z: Any) -> Any:
        """What is small enough to be done for the whole film at once."""
        raise NotImplementedError

    def _after(self, x: Any, *, is_first: bool) -> Any:
        raise NotImplementedError

    def _conv(self, layer: Any, x: Any, norm: Any = None) -> Any:
        """A causal convolution of x, or of its normalised and activated values, which are computed in place for it."""
        if layer not in self._layers:
            self._layers[layer] = self._causal(layer)
        fill = (lambda out: out.copy_(x)) if norm is None else (lambda out: self._norm_silu(norm, x, out))
        return self._layers[layer](x, fill, is_last=self._is_last, channels_last=self.how.channels_last)

    def _causal(self, layer: Any) -> CausalConv:
        raise NotImplementedError

    def _norm_silu(self, norm: Any, x: Any, out: Any) -> None:
        if self.how.fused:
            layered = x.contiguous(memory_format=torch.channels_last_3d)
            for each, place in zip(_pixels(layered), _pixels(out), strict=True):
                _fused(norm, each, place)
            return
        for frame in range(x.shape[2]):  # one by one: the values in between are float32, and as many
            out[:, :, frame : frame + 1] = functional.silu(norm(x[:, :, frame : frame + 1]))


class CausalConv:
    """One convolution over chunks. Its input is laid out with the frames before it and its edges around it, once."""

    def __init__(self, conv: Callable[[Any], Any], *, edge: int, replicate: bool) -> None:
        """conv: the layer without its padding in time. edge: pixels around the frame that are padded here; replicate:
        with the nearest ones, and time with the first frame; else zeros."""
        self._conv, self._edge, self._replicate = conv, edge, replicate
        self._seen: Any = None

    def __call__(self, x: Any, fill: Callable[[Any], Any], *, is_last: bool, channels_last: bool) -> Any:
        batch, channels, frames, rows, columns = x.shape
        edge = self._edge
        room = torch.empty(
            (batch, channels, HISTORY + frames, rows + 2 * edge, columns + 2 * edge),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format,
        )
        now = room[:, :, HISTORY:]
        fill(now[..., edge : edge + rows, edge : edge + columns])
        if edge:
            self._pad_edges(now, rows, columns)
        room[:, :, :HISTORY] = self._before(now)
        self._seen = None if is_last else room[:, :, -HISTORY:].clone()
        return self._conv(room)

    def _before(self, now: Any) -> Any:
        if self._seen is not None:
            return self._seen
        return now[:, :, :1] if self._replicate else 0.0

    def _pad_edges(self, now: Any, rows: int, columns: int) -> None:
        """Rows first, then columns over the full height: the corners are those of the nearest pixel."""
        edge = self._edge
        assert self._replicate
        inner = slice(edge, edge + columns)
        now[..., :edge, inner] = now[..., edge : edge + 1, inner]
        now[..., edge + rows :, inner] = now[..., edge + rows - 1 : edge + rows, inner]
        now[..., :edge] = now[..., edge : edge + 1]
        now[..., edge + columns :] = now[..., edge + columns - 1 : edge + columns]


# --------------------------------------------------------------------------- HunyuanVideo-1.5


class HunyuanDecoder(Decoder):
    """conv_in and the middle block see the whole film: it is small there, and attention wants all earlier frames."""

    def _before(self, z: Any) -> Any:
        decoder = self.vae.decoder
        self._is_last = True
        x = self._conv(decoder.conv_in, z) + z.repeat_interleave(repeats=decoder.repeat, dim=1)
        first, *rest = decoder.mid_block.resnets
        x = self._resnet(first, x)
        for attention, resnet in zip(decoder.mid_block.attentions, rest, strict=True):
            x = self._resnet(resnet, x if attention is None else _causal_attention(attention, x))
        return x

    def _after(self, x: Any, *, is_first: bool) -> Any:
        decoder = self.vae.decoder
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x)
            for upsampler in block.upsamplers or ():
                x = self._upsample(upsampler, x, is_first)
        return self._conv(decoder.conv_out, x, decoder.norm_out)

    def _causal(self, layer: Any) -> CausalConv:
        assert layer.pad_mode == "replicate"
        return CausalConv(layer.conv, edge=layer.time_causal_padding[0], replicate=True)

    def _resnet(self, block: Any, x: Any) -> Any:
        h = self._conv(block.conv1, x, block.norm1)
        h = self._conv(block.conv2, h, block.norm2)
        return h.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))

    def _upsample(self, layer: Any, x: Any, is_first: bool) -> Any:
        """Channels become pixels (and frames); the shortcut repeats channels of x. One pass over both.

        A film's first frame stays one frame: half of its channels are for the frame that is not there.
        """
        h = self._conv(layer.conv, x)
        frames_of = 2 if layer.add_temporal_upsample else 1
        batch, packed, frames, rows, columns = h.shape
        alone = is_first and frames_of == 2
        out = torch.empty(
            (batch, packed // (frames_of * 4), frames_of * frames - alone, rows * 2, columns * 2),
            dtype=h.dtype,
            device=h.device,
            memory_format=torch.channels_last_3d if self.how.channels_last else torch.contiguous_format,
        )
        if alone:
            _unpack(h[:, :, :1], x[:, :, :1], out[:, :, :1], 1)
            h, x = h[:, :, 1:], x[:, :, 1:]
        if h.shape[2]:
            _unpack(h, x, out[:, :, int(alone) :], frames_of)
        return out


def _unpack(h: Any, x: Any, out: Any, frames_of: int) -> None:
    """out = rearranged h + rearranged x, whose channels are repeated; where h has more channels, its first ones.

    h: (B, r*2*2*K, f, h, w); x: (B, r*2*2*S, f, h, w); out: (B, C, r*f, 2h, 2w) with C <= K, a multiple of S.
    """
    batch, channels, _, _, _ = out.shape
    _, packed, frames, rows, columns = h.shape
    parts = (batch, frames_of, 2, 2)
    sources = x.shape[1] // (frames_of * 4)
    places = out.view(batch, channels, frames, frames_of, rows, 2, columns, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    own = h.view(*parts, packed // (frames_of * 4), frames, rows, columns)[:, :, :, :, :channels]
    grouped = (sources, channels // sources)
    torch.add(
        own.unflatten(4, grouped),
        x.view(*parts, sources, 1, frames, rows, columns).expand(-1, -1, -1, -1, -1, grouped[1], -1, -1, -1),
        out=places.unflatten(4, grouped),
    )


def _causal_attention(block: Any, x: Any) -> Any:
    """Each frame sees itself and those before it: one call a frame, whose keys end there, takes no mask.

    Stock asks one call for all, with a mask of (places of the film) squared.
    """
    batch, channels, frames, rows, columns = x.shape
    h = block.norm(x)
    query, key, value = (
        layer(h).permute(0, 2, 3, 4, 1).reshape(batch, 1, frames * rows * columns, channels)
        for layer in (block.to_q, block.to_k, block.to_v)
    )
    out, places = torch.empty_like(query), rows * columns
    for end in range(places, frames * places + 1, places):
        now = slice(end - places, end)
        out[:, :, now] = functional.scaled_dot_product_attention(query[:, :, now], key[:, :, :end], value[:, :, :end])
    seen = out.squeeze(1).view(batch, frames, rows, columns, channels).permute(0, 4, 1, 2, 3)
    return block.proj_out(seen).add_(x)


# --------------------------------------------------------------------------- Wan


class WanDecoder(Decoder):
    """Everything in chunks: its attention looks at one frame at a time. Its convolutions are given their input padded,
    which their own forward would pad again: their weights are used, not their forward."""

    hooks = ("group_offloading", "layerwise_casting")

    def as_returned(self, film_BCFHW: Any, return_dict: bool = True) -> Any:
        return DecoderOutput(sample=film_BCFHW) if return_dict else (film_BCFHW,)

    def _before(self, z: Any) -> Any:
        return self.vae.post_quant_conv(z)

    def _after(self, x: Any, *, is_first: bool) -> Any:
        decoder = self.vae.decoder
        x = self._conv(decoder.conv_in, x)
        first, *rest = decoder.mid_block.resnets
        x = self._resnet(first, x)
        for attention, resnet in zip(decoder.mid_block.attentions, rest, strict=True):
            x = self._resnet(resnet, x if attention is None else attention(x))
        for block in decoder.up_blocks:
            x = self._up(block, x, is_first)
        x = self._conv(decoder.conv_out, x, decoder.norm_out)
        if self.vae.config.patch_size is not None:
            x = _unpatch(x, self.vae.config.patch_size)
        return x.clamp_(min=-1.0, max=1.0)

    def _causal(self, layer: Any) -> CausalConv:
        left, right, top, bottom, before, after = layer._padding
        assert (left, top, before, after) == (right, bottom, HISTORY, 0)
        return CausalConv(
            lambda room: functional.conv3d(room, layer.weight, layer.bias, padding=(0, top, left)),
            edge=0,
            replicate=False,
        )

    def _resnet(self, block: Any, x: Any) -> Any:
        h = self._conv(block.conv1, x, block.norm1)
        h = self._conv(block.conv2, h, block.norm2)
        return h.add_(block.conv_shortcut(x))

    def _up(self, block: Any, x: Any, is_first: bool) -> Any:
        """A block of Wan 2.1, or of 2.2's residual VAE, which adds what came in to what goes out."""
        h = x
        for resnet in block.resnets:
            h = self._resnet(resnet, h)
        upsampler = getattr(block, "upsampler", None) or next(iter(getattr(block, "upsamplers", None) or ()), None)
        if upsampler is not None:
            h = self._upsample(upsampler, h, is_first)
        shortcut = getattr(block, "avg_shortcut", None)
        return h if shortcut is None else h.add_(shortcut(x, first_chunk=is_first))

    def _upsample(self, layer: Any, x: Any, is_first: bool) -> Any:
        """Twice as many frames, but of the film's first one; twice as many rows and columns.

        Nearest neighbours are copies in any dtype: stock makes them in float32.
        """
        if layer.mode == "upsample3d":
            x = self._more_frames(layer.time_conv, x, is_first)
        batch, channels, frames, rows, columns = x.shape
        flat = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, rows, columns)
        wide = functional.interpolate(flat, scale_factor=(2.0, 2.0), mode="nearest-exact")
        return layer.resample[1](wide).unflatten(0, (batch, frames)).permute(0, 2, 1, 3, 4)

    def _more_frames(self, conv: Any, x: Any, is_first: bool) -> Any:
        """The convolution in time begins with the film's second frame, and knows nothing of the first one."""
        later = x[:, :, 1:] if is_first else x
        if not later.shape[2]:
            return x
        batch, channels, frames, rows, columns = later.shape
        pairs = self._conv(conv, later).view(batch, 2, channels, frames, rows, columns)
        doubled = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        return torch.cat([x[:, :, :1], doubled], dim=2) if is_first else doubled


def _unpatch(x: Any, size: int) -> Any:
    """Channels become pixels: (B, C*size*size, F, h, w) -> (B, C, F, h*size, w*size)."""
    batch, packed, frames, rows, columns = x.shape
    x = x.reshape(batch, packed // size**2, size, size, frames, rows, columns).permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(batch, packed // size**2, frames, rows * size, columns * size)


DECODERS: dict[str, type[Decoder]] = {"AutoencoderKLHunyuanVideo15": HunyuanDecoder, "AutoencoderKLWan": WanDecoder}
"By the class of the VAE."


# --------------------------------------------------------------------------- one kernel for norm and activation

LEFT_BY_INDUCTOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"A variable that inductor sets for the loading of a library, and leaves behind."

_kernels: dict[tuple[int, Any, str], Callable[..., None]] = {}
"Compiled code stays for the process, as that of the compile lever does for its denoiser. It holds no weights."


def _pixels(x_BCFHW: Any) -> list[Any]:
    """Each film of a batch as frames of pixels, FHWC; not as views, whose base dynamo would guard."""
    return [film.permute(1, 2, 3, 0).detach() for film in x_BCFHW]


def _fused(norm: Any, x_FHWC: Any, out_FHWC: Any) -> None:
    """The norm and SiLU of x, written to its place. At dynamo's limit of variants, begin anew."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    key = (norm.gamma.shape[0], x_FHWC.dtype, x_FHWC.device.type)
    with swap_env(LEFT_BY_INDUCTOR, ""):
        try:
            _kernel(key)(x_FHWC, norm.gamma, norm.scale, out_FHWC)
        except FailOnRecompileLimitHit:
            del _kernels[key]
            _kernel(key)(x_FHWC, norm.gamma, norm.scale, out_FHWC)


_numbers = itertools.count()


def _kernel(key: tuple[int, Any, str]) -> Callable[..., None]:
    """One callable for each width, under a code object of its own: dynamo allows each eight variants."""
    if key not in _kernels:
        code = _norm_silu_into.__code__.replace(co_name=f"norm_silu_{next(_numbers)}")
        body = types.FunctionType(code, _norm_silu_into.__globals__, code.co_name)
        options: dict[str, Any] = {"emulate_precision_casts": True}
        if key[2] == "cpu":
            options["compile_threads"] = 1
        _kernels[key] = torch.compile(body, fullgraph=True, dynamic=True, options=options)
    return _kernels[key]


def _norm_silu_into(x: Any, gamma: Any, scale: float, out: Any) -> None:
    """RMS norm over channels, times gamma, then SiLU; rounded where diffusers' own modules round."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    normalized = functional.normalize(wide, dim=-1).to(x.dtype)
    out.copy_(functional.silu(normalized * scale * gamma.view(-1) + 0.0))
