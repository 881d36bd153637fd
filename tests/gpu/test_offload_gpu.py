"""On a CUDA device, where blocks are sent for by a stream: the same film, and no other lever is lost on the way."""

import pytest
import torch

from tests.gpu.films import films
from undercrank.families import family
from undercrank.levers.compile import Compile
from undercrank.levers.host_sync import HostSync
from undercrank.levers.offload import Offload
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.records import Lever
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SKIPPING = StepCache(cache="mask", mask="1101")


@pytest.mark.parametrize("mode", ["group", "model"])
@pytest.mark.parametrize(
    ("name", "levers"),
    [
        ("hunyuanvideo-1.5-480p", (TextTrim(), HostSync())),
        ("hunyuanvideo-1.5-480p", (TextTrim(), SKIPPING, HostSync())),
        ("wan2.1-1.3b", (SKIPPING, HostSync())),
        ("cogvideox-2b", (HostSync(),)),
    ],
)
def test_the_film_is_that_of_the_resident_model_and_the_other_levers_act(
    name: str, levers: tuple[Lever, ...], mode: str
) -> None:
    pipe = tiny_pipeline(name).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family(name), "cuda:0")
    resident = films(rig, *levers, count=2)
    pipe.to("cpu")
    before = fingerprint(pipe)
    for moved, stayed in zip(films(rig, Offload(mode=mode), *levers, count=2), resident, strict=True):
        assert torch.equal(moved.latents, stayed.latents) and moved.counters == stayed.counters
    assert [each for each in differences(before, fingerprint(pipe)) if " tensor: " not in each] == []  # moved


def test_compiled_blocks_of_a_denoiser_that_comes_whole_make_the_film_of_a_resident_one() -> None:
    pipe = tiny_pipeline("hunyuanvideo-1.5-480p").to("cuda")
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family("hunyuanvideo-1.5-480p"), "cuda:0")
    levers = (TextTrim(), Compile(), HostSync())
    resident = films(rig, *levers, count=2)
    pipe.to("cpu")
    for moved, stayed in zip(films(rig, Offload(mode="model"), *levers, count=2), resident, strict=True):
        assert torch.equal(moved.latents, stayed.latents)
        seen = moved.counters
        assert seen["compile.executed"] == seen["compile.calls"] > 0 and not seen.get("compile.again")
