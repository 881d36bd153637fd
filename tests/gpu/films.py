"""Films of one pipeline under some levers, and what was seen of each."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from undercrank.records import Lever
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs
from undercrank.trace import Tracer


@dataclass(frozen=True, kw_only=True)
class Film:
    latents: torch.Tensor
    counters: dict[str, int]
    stall_sites: dict[str, int]


def films(rig: Rig, *levers: Lever, count: int) -> list[Film]:
    """So many runs of four steps, one after the other, under the same levers."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(rig.seams())
        for lever in levers:
            stack.enter_context(lever.engage(rig))
        for _ in range(count):
            tracer = Tracer(rig)
            with rig.call(), tracer.watching(), torch.no_grad():
                latents = rig.pipe(**tiny_inputs(rig.pipe, steps=4) | {"output_type": "latent"}).frames
            seen = dict(rig.counters), tracer.trace().stall_sites
            found.append(Film(latents=latents.cpu(), counters=seen[0], stall_sites=seen[1]))
    return found
