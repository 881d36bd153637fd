"""decode: the film in chunks is the film, and the VAE is as it was afterwards."""

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan

from undercrank.families import family
from undercrank.levers.causal import CausalConv, How, decoder_of
from undercrank.levers.decode import STREAMED, Decode
from undercrank.records import BadInput, Case, Device, Machine, Trace
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline


def hunyuan() -> Any:
    """Widths that rise and fall, so that every way to repeat channels is taken; one block has a shortcut of its own."""
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(32, 64, 32, 32, 32), layers_per_block=1
    )


def wan() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1, z_dim=16)


def wan_residual() -> Any:
    return diffusers.AutoencoderKLWan(
        z_dim=16, base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_spatial=16, temperal_downsample=[False, True, True],
    )  # fmt: skip


KINDS = {"hunyuan": hunyuan, "wan": wan, "wan residual": wan_residual}
FLOAT64_BOUND, FLOAT32_BOUND, BFLOAT16_BOUND = 1e-13, 2e-5, 0.03
"""Largest difference of one value of random weights' films, which reach 1 and more. It shrinks with the dtype: what
differs is the rounding of sums. Norms over few channels near zero, as in these tiny VAEs, enlarge it."""


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def vae(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return KINDS[request.param]().eval().requires_grad_(False)


@pytest.fixture
def double(vae: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In float64, where what is no rounding shows. Wan's enlarging passes through float32 as shipped, in any dtype."""
    monkeypatch.setattr(autoencoder_kl_wan.WanUpsample, "forward", torch.nn.Upsample.forward)
    return vae.double()


def latents(vae: Any, frames: int, rows: int = 3, columns: int = 5, batch: int = 1) -> torch.Tensor:
    channels = vae.config.latent_channels if "latent_channels" in vae.config else vae.config.z_dim
    generator = torch.Generator().manual_seed(7)
    return torch.randn(batch, channels, frames, rows, columns, generator=generator).to(vae.dtype)


def whole(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """As shipped, one film at a time: HunyuanVideo-1.5's refuses a batch."""
    return torch.cat([vae.decode(film, return_dict=False)[0] for film in z.split(1)])


def streamed(vae: Any, z: torch.Tensor, **how: Any) -> torch.Tensor:
    decoder = decoder_of(vae, How(**how))
    assert decoder is not None
    return torch.cat(list(decoder.chunks(z)), dim=2)


def rig_of(vae: Any) -> Rig:
    return Rig(SimpleNamespace(vae=vae), family("wan2.1-1.3b"), "cpu")


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_a_film_in_chunks_is_the_film(double: Any, frames: int) -> None:
    z = latents(double, frames)
    assert largest(streamed(double, z), whole(double, z)) < FLOAT64_BOUND


@pytest.mark.parametrize(
    "how", [{"latent_frames": 2}, {"latent_frames": 3, "channels_last": False}, {"latent_frames": 99}], ids=str
)
def test_neither_the_length_of_chunks_nor_the_layout_changes_the_film(double: Any, how: dict[str, Any]) -> None:
    z = latents(double, 6, rows=4, columns=2)
    assert largest(streamed(double, z, **how), whole(double, z)) < FLOAT64_BOUND


def test_films_of_a_batch_are_decoded_each_for_itself(double: Any) -> None:
    z = latents(double, 3, batch=2)
    assert largest(streamed(double, z), whole(double, z)) < FLOAT64_BOUND


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32_BOUND), (torch.bfloat16, BFLOAT16_BOUND)])
def test_in_fewer_bits_a_value_moves_by_few_of_its_steps(vae: Any, dtype: torch.dtype, bound: float) -> None:
    vae = vae.to(dtype)
    z = latents(vae, 6)
    assert largest(streamed(vae, z), whole(vae, z)) <= bound


def test_a_later_frame_changes_no_earlier_chunk(vae: Any) -> None:
    z = latents(vae, 4)
    other = torch.cat([z[:, :, :3], -z[:, :, 3:]], dim=2)
    films = streamed(vae, z), streamed(vae, other)
    assert torch.equal(films[0][:, :, :9], films[1][:, :, :9]) and not torch.equal(*films)


def test_chunks_come_one_latent_frame_at_a_time_after_the_first_two(vae: Any) -> None:
    decoder = decoder_of(vae, How())
    assert decoder is not None
    assert [chunk.shape[2] for chunk in decoder.chunks(latents(vae, 4))] == [5, 4, 4]


def test_a_decoder_keeps_no_frames_after_its_last_chunk(vae: Any) -> None:
    decoder = decoder_of(vae, How())
    assert decoder is not None
    chunks = decoder.chunks(latents(vae, 3))
    next(chunks)
    layers: list[CausalConv] = list(decoder._layers.values())
    assert any(layer._seen is not None for layer in layers)
    list(chunks)
    assert all(layer._seen is None for layer in layers)


@pytest.mark.parametrize("kind", ["hunyuan", "wan"])
def test_fused_is_the_same_film(kind: str) -> None:
    torch.manual_seed(0)
    vae = KINDS[kind]().eval().requires_grad_(False)
    z = latents(vae, 3)
    assert largest(streamed(vae, z, fused=True), whole(vae, z)) < FLOAT32_BOUND


def test_the_lever_decodes_through_chunks_and_returns_what_decode_returns(vae: Any) -> None:
    z, rig = latents(vae, 3), rig_of(vae)
    stock = whole(vae, z)
    with Decode().engage(rig), torch.no_grad():
        plain, named = vae.decode(z, return_dict=False)[0], vae.decode(z).sample
    assert torch.equal(plain, named) and largest(plain, stock) < FLOAT32_BOUND
    assert rig.counters == {"decode.films": 2}
    assert torch.equal(whole(vae, z), stock)


def test_a_tiling_that_somebody_has_turned_on_is_kept_and_told(vae: Any) -> None:
    z, rig = latents(vae, 2), rig_of(vae)
    vae.use_tiling = True
    stock = whole(vae, z)
    with Decode().engage(rig), torch.no_grad():
        assert torch.equal(whole(vae, z), stock)
        assert any("decoded whole" in text for text in Decode().verify(rig, Trace(stage_s={}, step_ms=(), stalls=0)))


def test_a_vae_that_is_moved_layer_by_layer_decodes_as_it_does(vae: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(vae, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    assert decoder_of(vae, How()) is None


def test_weights_in_float8_are_decoded_by_chunks_where_layers_are_called_and_as_shipped_where_not() -> None:
    for build, is_streamed in ((hunyuan, True), (wan, False)):
        torch.manual_seed(0)
        vae = build().eval().requires_grad_(False).to(torch.bfloat16)
        vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        assert (decoder_of(vae, How()) is not None) is is_streamed
        z, rig = latents(vae, 3).to(torch.bfloat16), rig_of(vae)
        stock = whole(vae, z)
        with Decode().engage(rig), torch.no_grad():
            assert largest(whole(vae, z), stock) <= BFLOAT16_BOUND
        assert rig.counters == ({"decode.films": 1} if is_streamed else {"decode.strangers": 1})


def test_the_pipeline_shows_the_film_that_it_showed() -> None:
    pipe = tiny_pipeline("hunyuanvideo-1.5-480p")
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family("hunyuanvideo-1.5-480p"), "cpu")
    inputs = tiny_inputs(pipe, steps=2) | {"output_type": "pt"}
    with torch.no_grad():
        stock = pipe(**inputs).frames
        with Decode().engage(rig), rig.seams(), rig.call():
            moved = pipe(**tiny_inputs(pipe, steps=2) | {"output_type": "pt"}).frames
    assert largest(stock, moved) < FLOAT32_BOUND and rig.counters["decode.films"] == 1


def case(name: str, kind: str = "cuda") -> Case:
    device = Device(kind=kind, name="a device", capability=(9, 0))
    machine = Machine(name="a machine", devices=(device,), cpu_count=1)
    row = family(name)
    return Case(
        family=row, machine=machine, device=device, width=row.width, height=row.height, num_frames=row.num_frames,
        num_inference_steps=20, guidance_scale=5.0, dtype="bfloat16",
    )  # fmt: skip


def test_it_is_for_causal_vaes_and_for_gpus() -> None:
    assert Decode().lacks(case("hunyuanvideo-1.5-720p")) is None and Decode().doubt(case("wan2.1-14b")) is None
    assert "decodes as it does" in str(Decode().lacks(case("ltx-video")))
    assert Decode().doubt(case("wan2.1-14b", kind="cpu"))


def test_the_classes_in_its_table_have_a_vae_that_it_knows() -> None:
    for name in ("wan2.1-1.3b", "wan2.2-ti2v-5b", "hunyuanvideo-1.5-480p", "skyreels-v2-1.3b", "cosmos-2.5-2b"):
        assert family(name).pipeline in STREAMED
        assert decoder_of(tiny_pipeline(name).vae, How()) is not None


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(BadInput, match="stream, fused"):
        Decode.from_wish({"decode": "tiles"})
    assert Decode.from_wish({"decode": "on"}) == Decode() and Decode.from_wish({"decode": "fused"}).mode == "fused"
