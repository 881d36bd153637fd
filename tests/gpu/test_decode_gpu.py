"""On a CUDA device: films in chunks are the films, and frames encoded meanwhile make the same file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from undercrank import video
from undercrank.engine import Engine
from undercrank.families import family
from undercrank.levers.decode import Decode
from undercrank.levers.offload import _whole_while_called
from undercrank.records import Request
from undercrank.rig import Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def hunyuan() -> Any:
    widths = (128, 128, 64, 64, 32)
    return diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=widths, layers_per_block=1)


def wan() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, z_dim=16)


@pytest.mark.parametrize("mode", ["stream", "fused"])
@pytest.mark.parametrize(("build", "channels"), [(hunyuan, 4), (wan, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_film_in_chunks_is_the_film(mode: str, build: Any, channels: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vae = build().eval().requires_grad_(False).to("cuda", dtype)
    z = torch.randn(1, channels, 5, 9, 14, device="cuda").to(dtype)
    rig = Rig(SimpleNamespace(vae=vae), family("wan2.1-1.3b"), "cuda:0")
    with torch.no_grad():
        stock = vae.decode(z, return_dict=False)[0].float()
        with Decode(mode=mode).engage(rig):
            moved = vae.decode(z, return_dict=False)[0].float()
    assert rig.counters == {"decode.films": 1}
    bound = 0.05 if dtype is torch.bfloat16 else 0.01  # convolutions of float32 are in TF32
    assert float((stock - moved).norm() / stock.norm()) < bound


def test_a_vae_on_the_host_is_on_the_device_while_it_decodes() -> None:
    torch.manual_seed(0)
    vae = wan().eval().requires_grad_(False)
    z = torch.randn(1, 16, 3, 4, 6)
    with torch.no_grad(), _whole_while_called(vae, "cuda:0"):
        film = vae.decode(z, return_dict=False)[0]
        assert film.device.type == "cuda" and all(p.device.type == "cpu" for p in vae.parameters())
        assert torch.equal(film, vae.decode(z, return_dict=False)[0])
    assert "decode" not in vars(vae)


def test_a_clip_encoded_while_it_was_decoded_is_the_clip(tmp_path: Path) -> None:
    asked = Request(
        prompt="a red ball rolls left", seed=1, device="cuda", num_inference_steps=4, wishes=(("decode", "stream"),)
    )
    with Engine(encode_ahead=True) as engine:
        ahead = engine.generate(asked)
    assert ahead.encoded is not None
    files = [
        video.write_mp4(tmp_path / f"{name}.mp4", ahead.frames_FHWC, fps=ahead.fps, recipe={}, encoded=encoded)
        for name, encoded in (("ahead", ahead.encoded), ("after", None))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert np.array_equal(video.read_frames(files[0]), video.read_frames(files[1]))
