"""Mochi's attention with the valid tokens of each prompt known: stock looks them up in every block of every forward.

`nonzero` (diffusers/models/attention_processor.py:1068) makes the host wait, and breaks a compiled block in two. Here
the positions come from the mask's host twin, once a generation; all else is stock's arithmetic in stock's order.

Imported inside host_sync's `engage` only, since it needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import MochiAttnProcessor2_0

from undercrank.levers.mirror import Mirror, is_captured_for_all
from undercrank.undo import swap_class

MASK = "encoder_attention_mask"


@dataclass(frozen=True, eq=False, kw_only=True)
class Places:
    """Of the valid tokens of each prompt. Equal to itself only: a graph captured with it serves no other."""

    of: list[torch.Tensor]


class Known:
    """The valid tokens of each prompt of the forward under way; None: stock's own look-up."""

    def __init__(self) -> None:
        self.places: Places | None = None

    def learn(self, kwargs: dict[str, Any]) -> None:
        given = kwargs.get(MASK)
        if not isinstance(given, Mirror) or given.memo is None:
            self.places = None
            return
        if "places" not in given.memo:
            given.memo["places"] = Places(of=[row.nonzero().on_device.flatten() for row in given.unbind(0)])
        self.places = given.memo["places"]


@contextmanager
def knowing(denoiser: Any, known: Known) -> Iterator[None]:
    """On: the attention of each block is told. Processors of another class are somebody's choice."""
    with ExitStack() as stack:
        cls = _told(known)
        for module in denoiser.modules():
            processor = getattr(module, "processor", None)
            if type(processor) is MochiAttnProcessor2_0:
                stack.enter_context(swap_class(processor, cls))
        yield


def _told(known: Known) -> type:
    """One subclass for all blocks, so that they stay equal for a compiler."""
    stock: Any = MochiAttnProcessor2_0

    def __call__(
        self: Any,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if known.places is None or is_captured_for_all(hidden_states.device):
            return stock.__call__(
                self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb=image_rotary_emb
            )
        query, key, value = _video(attn, hidden_states, image_rotary_emb)
        text = _text(attn, encoder_hidden_states)
        whole = query.size(2) + text[0].size(2)
        found = [
            _attended(prompt, places, (query, key, value), text, whole) for prompt, places in enumerate(known.places.of)
        ]
        both = torch.cat(found, dim=0).transpose(1, 2).flatten(2, 3)
        video, words = both.split_with_sizes((query.size(2), whole - query.size(2)), dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(words) if hasattr(attn, "to_add_out") else words

    body = {"__call__": __call__, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (stock,), body)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"Query, key and value: (batch, heads, tokens, width)."


def _video(attn: Any, hidden_states: torch.Tensor, angles: Any) -> Heads:
    query, key, value = (
        project(hidden_states).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
    )
    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    if angles is not None:
        query, key = _turned(query, *angles), _turned(key, *angles)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _text(attn: Any, encoder_hidden_states: torch.Tensor) -> Heads:
    query, key, value = (
        project(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    )
    query = query if attn.norm_added_q is None else attn.norm_added_q(query)
    key = key if attn.norm_added_k is None else attn.norm_added_k(key)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([(even * cos - odd * sin).to(x.dtype), (even * sin + odd * cos).to(x.dtype)], dim=-1).flatten(-2)


def _attended(prompt: int, places: torch.Tensor, video: Heads, text: Heads, whole: int) -> torch.Tensor:
    """One prompt's video and its valid text, padded to the length of the longest."""
    query, key, value = (
        torch.cat([v[prompt : prompt + 1], t[prompt : prompt + 1, :, places, :]], dim=2)
        for v, t in zip(video, text, strict=True)
    )
    found = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=False)
    return F.pad(found, (0, 0, 0, whole - found.size(2)))
