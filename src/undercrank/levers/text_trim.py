"""text_trim: attention sees the prompt, not its padding.

Does: a prompt fills 10 to 200 of the 1000 + 256 places that HunyuanVideo-1.5 keeps for text, and text-to-video leaves
its 729 places for a picture empty. Stock carries the empty places through every block and masks them: 1.5 by a
boolean mask over all pairs of tokens, built anew in each block; HunyuanVideo 1.0 by a mask over the keys. Here each
text is cut to its longest valid prompt before the forward, and attention is given no mask, so that the fast kernels,
which take none, apply. In a batch of prompts of different lengths a mask over the keys stays.

Promises: ROUNDING. Padding was masked, so nothing that is kept ever saw it; what moves is the order of sums.

Costs: one read of the masks from the device for each branch, in the first step of a generation. Each prompt's length
is a shape of its own.

Measured: HunyuanVideo-1.5 on one H200, one forward: 4195 ms and 1490 ms at 720p, 1140 ms and 474 ms at 480p, 33
frames; relative error against stock 5.0e-3, where stock's own against float32 is 1.7e-2. See docs/evidence.md.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercrank import families, memory
from undercrank.records import Case, Lever, LeverRefused, Promise, Trace
from undercrank.tensors import version_of
from undercrank.undo import appended, subclass, swap_attr, swap_class, swap_item

if TYPE_CHECKING:
    from undercrank.rig import Rig

PROVEN = frozenset(
    {
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "HunyuanVideoPipeline",
        "HunyuanVideoImageToVideoPipeline",
    }
)
"Pipeline classes whose blocks mask padding; the tests compare their latents with the lever on and off."

ALREADY = "its attention leaves padding out already"
SMALL = "its only mask is over the text keys of its cross-attention"
WHY_NOT = {
    "MochiPipeline": ALREADY,
    "LTXPipeline": SMALL,
    "LTXImageToVideoPipeline": SMALL,
    "LTX2Pipeline": SMALL,
    "LTX2ImageToVideoPipeline": SMALL,
}
"Pipeline classes that do something about padding, and need no help."

DENOISERS = frozenset({"HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"})
"Classes whose forward takes texts and masks by the names below."

TEXTS = {
    "encoder_hidden_states": "encoder_attention_mask",
    "encoder_hidden_states_2": "encoder_attention_mask_2",
}
"The texts that a forward is given, the main one first, and the mask of each."

PICTURE = "image_embeds"
"What HunyuanVideo-1.5 sees of a picture; all zero means that there is none, and then all of it is padding."


TRIM = "_undercrank_trim"
"Where a processor under the lever finds the cut of the forward it is in."


@dataclass(frozen=True, kw_only=True)
class TextTrim(Lever):
    name = "text_trim"
    summary = "attention sees the prompt, not its padding"
    spares_memory = True  # no mask over all pairs of tokens: 41 GiB of HunyuanVideo-1.5's 121 frames at 720p

    def promises(self, case: Case) -> Promise:
        return Promise.ROUNDING

    def lacks(self, case: Case) -> str | None:
        """Of a pipeline that is in no table nothing is known here: `engage` looks at its denoiser."""
        pipeline = case.family.pipeline
        if pipeline in WHY_NOT:
            return f"nothing to gain in {pipeline}: {WHY_NOT[pipeline]}"
        if pipeline not in PROVEN and families.of_pipeline(pipeline):
            return f"{pipeline} masks no padding in its blocks"
        return None

    def doubt(self, case: Case) -> str | None:
        """No doubt about the CPU: it is as right there, and was measured faster."""
        pipeline = case.family.pipeline
        return None if pipeline in PROVEN else f"{pipeline} is not known to mask padding in its blocks"

    def works(self, case: Case) -> Mapping[str, int]:
        if case.family.pipeline not in PROVEN or not case.working:
            return case.working
        return {**case.working, "denoise": memory.denoise_bytes(case, is_masked=False)}

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _trimmed_texts(rig)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        complaints = []
        if not rig.counters.get("text_trim.forwards"):
            complaints.append("no forward was given trimmed texts: no effect")
        if rig.counters.get("text_trim.strangers"):
            complaints.append("no attention processor of the model is one that this lever knows: masks are still built")
        return complaints


@contextmanager
def _trimmed_texts(rig: Rig) -> Iterator[None]:
    """On: each denoiser trims its texts, and its attention passes no mask. Off: as they were."""
    if strange := [type(each).__name__ for each in rig.denoisers if type(each).__name__ not in DENOISERS]:
        raise LeverRefused(f"text_trim: {', '.join(strange)} masks no text that it could trim: leave it out")
    with ExitStack() as stack:
        for denoiser in rig.denoisers:
            trim = _Trim(rig, denoiser)
            stack.enter_context(swap_attr(denoiser, "forward", trim.forward))
            stack.enter_context(appended(rig.at_end, trim.forget))
            for processor in _processors(denoiser):
                stack.enter_context(swap_attr(processor, TRIM, trim))
                stack.enter_context(swap_class(processor, _unmasked(processor.__class__)))
                trim.processors += 1
        yield


# --------------------------------------------------------------------------- what to keep


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How many leading tokens are kept of each argument of a forward; `whole`: none of those is padding."""

    kept: dict[str, int]
    whole: bool

    def apply(self, call: dict[str, Any]) -> dict[str, Any]:
        """The same arguments, shorter. Views, not copies: a caller that refills its tensors is followed."""
        return call | {name: call[name][:, :count] for name, count in self.kept.items()}


def find_cut(call: dict[str, Any]) -> Cut:
    """Reads the masks from the device, all at once: it waits for the device a single time."""
    import torch

    texts = {text: mask for text, mask in TEXTS.items() if call.get(mask) is not None}
    picture = call.get(PICTURE)
    bits = [call[mask].bool() for mask in texts.values()]
    if picture is not None:  # stock asks this of the whole batch, and so do we
        bits.append((picture != 0).any().expand(len(bits[0]), 1))
    rows = torch.cat(bits, dim=1).cpu().tolist()

    kept: dict[str, int] = {}
    valid, places, start = [0] * len(rows), 0, 0
    for text, mask in texts.items():
        end = start + call[mask].shape[1]
        # One place of the main text stays in any case: the model's own refiner cannot do with none.
        count = max(_used(row[start:end]) for row in rows) or int(not kept)
        kept |= {text: count, mask: count}
        valid = [n + sum(row[start:end]) for n, row in zip(valid, rows, strict=True)]
        places, start = places + count, end
    if picture is not None and not rows[0][-1]:
        kept[PICTURE] = 0
    return Cut(kept=kept, whole=all(n == places for n in valid))


def _used(row: list[bool]) -> int:
    """Up to and with the last valid token: what lies before it is kept, holes too, since 1.0 counts places."""
    return max((place for place, valid in enumerate(row, start=1) if valid), default=0)


# --------------------------------------------------------------------------- one denoiser


class _Trim:
    """One denoiser's forward with trimmed texts, and what its attention has to know of the forward under way."""

    def __init__(self, rig: Rig, denoiser: Any) -> None:
        self.rig = rig
        self.processors = 0
        "Attention processors under the lever."
        self.cut: Cut | None = None
        "Of the forward under way; None: outside of one, attention is stock's."
        self._names = list(inspect.signature(type(denoiser).forward).parameters)[1:]
        self._stock = _forward_of(denoiser)
        self._known: deque[tuple[list[tuple[Any, int]], Cut]] = deque(maxlen=4)  # texts that change are not hoarded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.rig.running:
            return self._stock(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        self.cut = self._cut_of(call)
        self.rig.count("text_trim.forwards")
        if not self.processors:
            self.rig.count("text_trim.strangers")
        try:
            with swap_item(self.rig.program, "text_trim.whole", self.cut.whole):
                return self._stock(**self.cut.apply(call))
        finally:
            self.cut = None

    def forget(self, error: BaseException | None) -> None:
        """At the end of a run: a generation's tensors are not kept alive."""
        self._known.clear()

    def _cut_of(self, call: dict[str, Any]) -> Cut:
        """Known by the very tensors of the call: each branch gives the same ones in every step."""
        given = [(call.get(name), version_of(call.get(name))) for name in (*TEXTS.values(), PICTURE)]
        for known, cut in self._known:
            if all(a is b and v == w for (a, v), (b, w) in zip(known, given, strict=True)):
                return cut
        self._known.append((given, cut := find_cut(call)))
        self.rig.count("text_trim.reads")
        return cut


def _forward_of(denoiser: Any) -> Callable[..., Any]:
    """The forward beneath ours: a hook's on the instance, or else that of the class, whatever it is by then."""
    own: Callable[..., Any] | None = vars(denoiser).get("forward")
    return own or (lambda *args, **kwargs: type(denoiser).forward(denoiser, *args, **kwargs))


# --------------------------------------------------------------------------- attention


def _processors(denoiser: Any) -> Iterator[Any]:
    """The attention processors that add masks, each once; those of other classes are somebody's choice."""
    from diffusers.models.transformers import transformer_hunyuan_video as v1_0
    from diffusers.models.transformers import transformer_hunyuan_video15 as v1_5

    known = (v1_0.HunyuanVideoAttnProcessor2_0, v1_5.HunyuanVideo15AttnProcessor2_0)
    for module in denoiser.modules():
        processor = getattr(module, "processor", None)
        if type(processor) in known:
            yield processor


@functools.cache
def _unmasked(cls: Any) -> type:
    """A subclass of the processor's class that attends without a mask where nothing is left to mask.

    One for all blocks, kept: a compiler takes blocks for alike only while their processors are of one class.
    """
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0 as Plain

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """1.5's own arithmetic is 1.0's, but for the mask that it builds whatever it is given."""
        trim = self._undercrank_trim
        if trim.cut is None:
            return cls.__call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        mask = None if trim.cut.whole else _over_keys(attention_mask, hidden_states.shape[1])
        return Plain.__call__(self, attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)

    return subclass(cls, __call__=__call__)


def _over_keys(mask: Any, video_tokens: int) -> Any:
    """(batch, 1, 1, all tokens): 1.0 hands it over like that; 1.5 a mask of its texts, (batch, tokens)."""
    if mask.ndim == 4:
        return mask
    from torch.nn.functional import pad

    return pad(mask.bool(), (video_tokens, 0), value=True)[:, None, None]
