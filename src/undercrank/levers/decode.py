"""decode: latents become frames chunk by chunk, in a fraction of the memory.

Does: HunyuanVideo-1.5's VAE decodes a film whole, and gives its attention a mask over all pairs of places that it
fills row by row; Wan's decodes one latent frame at a time. Both are causal: a frame depends on no later one. Here each
convolution keeps the last two frames that it saw and goes on with the next chunk from there; attention is asked frame
by frame and needs no mask; a convolution's input is written once, with its edges, in the layout that tensor cores
read. `fused` compiles normalisation and activation into one kernel besides.

Promises: ROUNDING. The same weights and the same sums; libraries may add in another order for other sizes. Nothing
overlaps and nothing is blended, so there is no seam.

Costs: the last frames of every convolution, held for the length of a decode; under `fused` seconds of compiling, once.

Measured: see `docs/levers/decode.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from undercrank import families, memory
from undercrank.records import BadInput, Case, Lever, Promise, Trace
from undercrank.undo import swap_attr

if TYPE_CHECKING:
    from undercrank.rig import Rig

MODES = ("stream", "fused")

STREAMED = memory.WAN_VAE | {"HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"}
"Pipeline classes whose VAE is one of the two."

BY_CHUNKS = "undercrank_decode_by_chunks"
"Name of the function that takes the place of the VAE's own."


@dataclass(frozen=True, kw_only=True)
class Decode(Lever):
    name = "decode"
    summary = "latents become frames chunk by chunk"

    mode: str = "stream"
    latent_frames: int = 1
    channels_last: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadInput(f"decode={self.mode}: choose auto, off, {', '.join(MODES)}", field="decode")

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        mode = wishes.get("decode", "on")
        return cls(mode="stream" if mode == "on" else mode)

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("decode", mode),) for mode in MODES)

    @property
    def setting(self) -> str:
        return self.mode

    def promises(self, case: Case) -> Promise:
        return Promise.ROUNDING

    def lacks(self, case: Case) -> str | None:
        """Of a pipeline that is in no table nothing is known here: `engage` looks at its VAE."""
        pipeline = case.family.pipeline
        if pipeline not in STREAMED and families.of_pipeline(pipeline):
            return f"the VAE of {pipeline} is not one that is decoded in chunks here: it decodes as it does"
        return None

    def doubt(self, case: Case) -> str | None:
        if case.family.pipeline not in STREAMED:
            return f"the VAE of {case.family.pipeline} is not known here"
        if case.device.kind == "cpu":
            return "memory is what it saves, and a CPU has enough"
        return None

    def works(self, case: Case) -> Mapping[str, int]:
        if case.family.pipeline not in STREAMED or not case.working:
            return case.working
        return {**case.working, "decode": memory.decode_bytes(case, memory.STREAM)}

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _by_chunks(rig, self)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        complaints = []
        if getattr(vars(rig.pipe.vae).get("_decode"), "__name__", "") != BY_CHUNKS:
            complaints.append("the VAE decodes as it always did: no effect")
        if rig.counters.get("decode.strangers"):
            complaints.append("the VAE is of a kind, or under hooks, that chunks cannot pass: it decoded whole")
        return complaints


@contextmanager
def _by_chunks(rig: Rig, lever: Decode) -> Iterator[None]:
    """On: `vae._decode`, which `decode` calls for a film or a slice of a batch, goes chunk by chunk. Off: as it was."""
    vae = rig.pipe.vae
    whole = vae._decode

    def decode(z_BCTHW: Any, *args: Any, **kwargs: Any) -> Any:
        return _decoded(rig, lever, whole, z_BCTHW, *args, **kwargs)

    decode.__name__ = BY_CHUNKS
    with swap_attr(vae, "_decode", decode):
        yield


def _decoded(rig: Rig, lever: Decode, whole: Callable[..., Any], z_BCTHW: Any, *args: Any, **kwargs: Any) -> Any:
    """Through chunks, in the form that `whole` would have returned it."""
    import torch

    from undercrank.levers.causal import How, decoder_of

    vae = rig.pipe.vae
    how = How(latent_frames=lever.latent_frames, channels_last=lever.channels_last, fused=lever.mode == "fused")
    decoder = None if vae.use_tiling or torch.is_grad_enabled() else decoder_of(vae, how)
    if decoder is None:
        rig.count("decode.strangers")
        return whole(z_BCTHW, *args, **kwargs)
    film_BCFHW = torch.cat(list(_told(rig, decoder.chunks(z_BCTHW))), dim=2).contiguous()
    rig.count("decode.films", z_BCTHW.shape[0])
    return decoder.as_returned(film_BCFHW, *args, **kwargs)


def _told(rig: Rig, chunks_BCFHW: Iterator[Any]) -> Iterator[Any]:
    """Chunk by chunk, and each to whoever wants it before the next one is computed."""
    for chunk in chunks_BCFHW:
        for callback in list(rig.at_frames):
            callback(chunk)
        yield chunk
