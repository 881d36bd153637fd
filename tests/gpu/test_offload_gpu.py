"""On a CUDA device, where blocks are sent for by a stream: the same film, and no other lever is lost on the way."""

from contextlib import ExitStack

import pytest
import torch

from undercrank.families import family
from undercrank.levers.compile import Compile
from undercrank.levers.host_sync import HostSync
from undercrank.levers.offload import Offload
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.records import Lever
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SKIPPING = StepCache(cache="mask", mask="1101")


def films(rig: Rig, *levers: Lever) -> list[tuple[torch.Tensor, dict[str, int]]]:
    """Latents of two runs under these levers, and what they counted."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(rig.seams())
        for lever in levers:
            stack.enter_context(lever.engage(rig))
        for _ in range(2):
            inputs = tiny_inputs(rig.pipe, steps=4) | {"output_type": "latent"}
            with rig.call(), torch.no_grad():
                latents = rig.pipe(**inputs).frames
            found.append((latents.cpu(), dict(rig.counters)))
    return found


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
    resident = films(rig, *levers)
    pipe.to("cpu")
    before = fingerprint(pipe)
    for (there, acted), (here, counted) in zip(films(rig, Offload(mode=mode), *levers), resident, strict=True):
        assert torch.equal(there, here) and acted == counted
    assert [each for each in differences(before, fingerprint(pipe)) if " tensor: " not in each] == []  # moved


def test_compiled_blocks_of_a_denoiser_that_comes_whole_make_the_film_of_a_resident_one() -> None:
    pipe = tiny_pipeline("hunyuanvideo-1.5-480p").to("cuda")
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family("hunyuanvideo-1.5-480p"), "cuda:0")
    levers = (TextTrim(), Compile(), HostSync())
    resident = films(rig, *levers)
    pipe.to("cpu")
    for (there, acted), (here, _) in zip(films(rig, Offload(mode="model"), *levers), resident, strict=True):
        assert torch.equal(there, here)
        assert acted["compile.executed"] == acted["compile.calls"] > 0 and not acted.get("compile.again")
