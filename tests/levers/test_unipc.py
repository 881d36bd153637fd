"""UniPC with known coefficients is UniPC, bit for bit, whatever its settings."""

import itertools

import diffusers
import pytest
import torch

from undercrank.families import family
from undercrank.levers.host_sync import HostSync
from undercrank.levers.unipc import is_unipc, rehearse
from undercrank.rig import Rig

KINDS = {
    "flow": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    "epsilon": {"prediction_type": "epsilon"},
    "v": {"prediction_type": "v_prediction", "use_karras_sigmas": True},
}
SETTINGS = list(itertools.product(KINDS, ["bh1", "bh2"], [1, 2, 3], [True, False]))


class Pipe:
    """A pipeline of nothing but a scheduler."""

    def __init__(self, scheduler):
        self.scheduler = scheduler


def film(scheduler, steps: int, dtype: torch.dtype = torch.float32, begin: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn((1, 4, 2, 3, 3), generator=generator).to(dtype)
    scheduler.set_timesteps(steps, device="cpu")
    scheduler.set_begin_index(begin)
    for timestep in scheduler.timesteps[begin:]:
        output = torch.randn(sample.shape, generator=generator).to(dtype)
        sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
    return sample


def under_the_lever(scheduler, *arguments, **more) -> tuple[torch.Tensor, dict[str, int]]:
    rig = Rig(Pipe(scheduler), family("wan2.1-1.3b"), "cpu")
    with HostSync().engage(rig), rig.call():
        return film(scheduler, *arguments, **more), rig.counters


def made(kind: str, solver: str, order: int, predict_x0: bool):
    return diffusers.UniPCMultistepScheduler(
        solver_type=solver, solver_order=order, predict_x0=predict_x0, **KINDS[kind]
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize(("kind", "solver", "order", "predict_x0"), SETTINGS)
def test_every_setting_gives_stocks_latents(kind: str, solver: str, order: int, predict_x0: bool) -> None:
    if kind == "flow" and not predict_x0:
        pytest.skip("stock takes no flow prediction without predict_x0")
    for steps in (1, 2, 5, 9):
        stock = film(made(kind, solver, order, predict_x0), steps)
        ours, counters = under_the_lever(made(kind, solver, order, predict_x0), steps)
        assert torch.equal(stock.nan_to_num(), ours.nan_to_num()), steps
        assert "host_sync.missed" not in counters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_gives_stocks_latents(dtype: torch.dtype) -> None:
    ours, _ = under_the_lever(made("flow", "bh2", 2, True), 8, dtype=dtype)
    assert ours.dtype == dtype and torch.equal(film(made("flow", "bh2", 2, True), 8, dtype=dtype), ours)


def test_a_run_that_begins_within_the_schedule_gives_stocks_latents() -> None:
    ours, counters = under_the_lever(made("flow", "bh2", 3, True), 9, begin=4)
    assert torch.equal(film(made("flow", "bh2", 3, True), 9, begin=4), ours) and "host_sync.missed" not in counters


def test_two_schedules_in_turn_do_not_mix() -> None:
    scheduler = made("flow", "bh2", 2, True)
    rig = Rig(Pipe(scheduler), family("wan2.1-1.3b"), "cpu")
    with HostSync().engage(rig):
        films = []
        for steps in (5, 9, 5):
            with rig.call():
                films.append(film(scheduler, steps))
    assert torch.equal(films[0], films[2]) and torch.equal(films[1], film(made("flow", "bh2", 2, True), 9))


def test_a_unipc_that_computes_something_else_is_left_to_itself() -> None:
    """Another release of diffusers may change an update: the rehearsal sees it, and stock's own step runs."""

    class Changed(diffusers.UniPCMultistepScheduler):
        def convert_model_output(self, *args, **kwargs):
            return super().convert_model_output(*args, **kwargs)

    class Overridden(diffusers.UniPCMultistepScheduler):
        def multistep_uni_p_bh_update(self, *args, **kwargs):
            return super().multistep_uni_p_bh_update(*args, **kwargs) + 1

    assert is_unipc(Changed) and not is_unipc(Overridden)
    ours, _ = under_the_lever(Overridden(**KINDS["flow"]), 5)
    assert torch.equal(film(Overridden(**KINDS["flow"]), 5), ours)


def test_the_rehearsal_refuses_what_it_cannot_reproduce(monkeypatch) -> None:
    scheduler = made("flow", "bh2", 2, True)
    scheduler.set_timesteps(5)
    assert rehearse(scheduler, "cpu")
    monkeypatch.setattr("undercrank.levers.unipc._mixed", lambda rhos, differences: differences[:, 0])
    assert rehearse(scheduler, "cpu") is None
    ours, _ = under_the_lever(scheduler, 5)
    assert torch.equal(film(made("flow", "bh2", 2, True), 5), ours)
