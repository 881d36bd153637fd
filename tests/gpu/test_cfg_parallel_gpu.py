"""On CUDA, both branches on one device: in two streams at once, the same film, and neither thread waits."""

import diffusers
import pytest
import torch

from tests.gpu.films import films
from undercrank.families import family
from undercrank.levers.cfg_parallel import CfgParallel
from undercrank.levers.host_sync import HostSync
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.records import Lever
from undercrank.rig import Rig
from undercrank.testing import differences, fingerprint, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        ("wan2.1-1.3b", ()),
        ("wan2.1-1.3b", (StepCache(cache="mask", mask="1101"),)),
        ("hunyuanvideo-1.5-480p", (TextTrim(),)),
        ("hunyuanvideo-1.5-480p", ()),
    ],
)
def test_two_streams_make_the_film_of_one_and_no_thread_waits(name: str, levers: tuple[Lever, ...]) -> None:
    pipe = tiny_pipeline(name).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe, "guider"):
        pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=6.0)
    rig = Rig(pipe, family(name), "cuda:0")
    apart = films(rig, *levers, HostSync(), count=3)
    before = fingerprint(pipe)
    at_once = films(rig, CfgParallel(device="cuda:0"), *levers, HostSync(), count=3)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(apart, at_once, strict=True))
    assert rig.counters["cfg_parallel.together"] > 0
    assert at_once[-1].stall_sites == apart[-1].stall_sites == {}
    assert differences(before, fingerprint(pipe)) == []
