"""On a CUDA device: previews come without a stall, and the film stays the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from undercrank.engine import Engine
from undercrank.preview import Colours, Previewer
from undercrank.records import Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ASKED = Request(
    prompt="a red ball rolls left", seed=1, device="cuda", num_inference_steps=8, wishes=(("host_sync", "on"),)
)


def test_nobody_waits_for_a_preview() -> None:
    pictures: list[np.ndarray] = []
    previewer = Previewer(
        Colours.of("flipbook", Path("/nowhere")), lambda s, p: pictures.append(p), every_s=0.0, share=1e9
    )
    with Engine() as engine:
        engine.generate(ASKED)
        plain = engine.generate(ASKED).report
        watched = engine.generate(ASKED, on_latents=previewer.see).report
    assert watched.frames_hash == plain.frames_hash
    assert watched.trace.stalls == 0, watched.trace.stall_sites
    assert pictures and {(picture.dtype, picture.shape) for picture in pictures} == {(np.dtype(np.uint8), (16, 16, 3))}
    assert any(picture.std() > 5 for picture in pictures)
