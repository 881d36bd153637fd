"""Every scheduler under host_sync, alone on the logical device: no stall in a step, no bit moved."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers import scheduling_consistency_decoder

from undercrank.audit import DEVICE, Stalls, logical_device
from undercrank.families import family
from undercrank.levers.host_sync import HostSync
from undercrank.rig import Rig

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SVD = {"timestep_type": "continuous", "prediction_type": "v_prediction", "use_karras_sigmas": True,
       "sigma_min": 0.002, "sigma_max": 700.0}  # fmt: skip
NOISE = {"eta": 1.0}
"How much of the variance of a step is drawn anew: settings of `step`."

# name: (class, its settings, steps, settings of `step`)
KINDS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "consistency_decoder": ("ConsistencyDecoderScheduler", {}, 2, {}),
    "ddim": ("DDIMScheduler", {}, 20, {}),
    "ddim, noise": ("DDIMScheduler", {"timestep_spacing": "trailing"}, 20, NOISE),
    "ddim_cogvideox": ("CogVideoXDDIMScheduler", {"prediction_type": "v_prediction"}, 20, {}),
    "ddim_inverse": ("DDIMInverseScheduler", {}, 20, {}),
    "ddim_parallel": ("DDIMParallelScheduler", {}, 20, {}),
    "ddim_parallel, noise": ("DDIMParallelScheduler", {}, 20, NOISE),
    "ddpm": ("DDPMScheduler", {}, 20, {}),
    "ddpm, learned": ("DDPMScheduler", {"variance_type": "fixed_large"}, 20, {}),
    "ddpm_parallel": ("DDPMParallelScheduler", {}, 20, {}),
    "dpm_cogvideox": ("CogVideoXDPMScheduler", {"prediction_type": "v_prediction"}, 20, {}),
    "lcm": ("LCMScheduler", {}, 8, {}),
    "repaint": ("RePaintScheduler", {}, 20, {}),
    "repaint, noise": ("RePaintScheduler", {"eta": 1.0}, 20, {}),
    "tcd": ("TCDScheduler", {}, 8, {"eta": 0.0}),
    "tcd, noise": ("TCDScheduler", {}, 8, {"eta": 0.3}),
    "unclip": ("UnCLIPScheduler", {}, 20, {}),
    "unipc": ("UniPCMultistepScheduler", {}, 20, {}),
    "unipc, flow": ("UniPCMultistepScheduler", FLOW, 20, {}),
    "unipc, order 3": ("UniPCMultistepScheduler", {**FLOW, "solver_order": 3}, 20, {}),
    "flow_map_euler": ("FlowMapEulerDiscreteScheduler", {}, 8, {}),
    "flow_match_euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 5.0}, 20, {}),
    "flow_match_euler, stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, 20, {}),
    "flow_match_heun": ("FlowMatchHeunDiscreteScheduler", {}, 10, {}),
    "flow_match_lcm": ("FlowMatchLCMScheduler", {}, 8, {}),
    "ltx_euler_ancestral_rf": ("LTXEulerAncestralRFScheduler", {}, 8, {}),
    "euler": ("EulerDiscreteScheduler", {}, 20, {}),
    "euler, svd": ("EulerDiscreteScheduler", SVD, 20, {}),
    "euler, churn": ("EulerDiscreteScheduler", {}, 20, {"s_churn": 5.0}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}, 20, {}),
    "edm_euler": ("EDMEulerScheduler", {}, 20, {}),
    "edm_dpmsolver": ("EDMDPMSolverMultistepScheduler", {}, 20, {}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {}, 20, {}),
    "dpmsolver++, flow": ("DPMSolverMultistepScheduler", FLOW, 20, {}),
    "dpmsolver++, sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, 20, {}),
    "dpmsolver++, order 3": ("DPMSolverMultistepScheduler", {"solver_order": 3}, 20, {}),
    "dpmsolver_inverse": ("DPMSolverMultistepInverseScheduler", {}, 20, {}),
    "dpmsolver_singlestep": ("DPMSolverSinglestepScheduler", {}, 20, {}),
    "deis": ("DEISMultistepScheduler", {}, 20, {}),
    "heun": ("HeunDiscreteScheduler", {}, 10, {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}, 10, {}),
    "kdpm2_ancestral": ("KDPM2AncestralDiscreteScheduler", {}, 10, {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}, 20, {}),
    "ipndm": ("IPNDMScheduler", {}, 20, {}),
    "sasolver": ("SASolverScheduler", {}, 20, {}),
    "scm": ("SCMScheduler", {}, 2, {}),
}  # fmt: skip
SHAPE = (1, 4, 2, 3, 3)

pytestmark = [
    # Schedulers that hand tensors to numpy; numpy 2 wants other signatures from torch.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]


class Bar(contextlib.nullcontext):
    def __enter__(self) -> Bar:
        return self

    def update(self, n: int = 1) -> None:
        pass


class Pipe:
    """A pipeline of nothing but a scheduler and the bar around its loop."""

    components: dict[str, Any] = {}

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def progress_bar(self, iterable=None, total=None):
        return Bar()

    def __call__(self, steps: int, device: str, settings: dict[str, Any]) -> torch.Tensor:
        """What pipelines do, with noise for a model; the CPU's generator draws every bit of it."""
        scheduler, generator = self.scheduler, torch.Generator().manual_seed(0)
        sample = torch.randn(SHAPE, generator=generator).to(device)
        takes = inspect.signature(scheduler.set_timesteps).parameters
        scheduler.set_timesteps(steps, **({"device": device} if "device" in takes else {}))
        sample, earlier = sample * getattr(scheduler, "init_noise_sigma", 1.0), None
        if "generator" in inspect.signature(scheduler.step).parameters:
            settings = {"generator": generator, **settings}
        timesteps = scheduler.timesteps[:-1] if type(scheduler).__name__ == "SCMScheduler" else scheduler.timesteps
        with self.progress_bar(total=len(timesteps)) as bar:
            for i, t in enumerate(timesteps):
                given = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
                output = torch.randn(SHAPE, generator=generator).to(device, non_blocking=True) + 0.1 * given
                sample, earlier = self._step(i, t, output, sample, earlier, settings)
                bar.update()
        return sample

    def _step(self, i: int, t: Any, output: Any, sample: Any, earlier: Any, settings: Any) -> tuple[Any, Any]:
        scheduler = self.scheduler
        if isinstance(scheduler, diffusers.CogVideoXDPMScheduler):
            before = scheduler.timesteps[i - 1] if i else None
            return scheduler.step(output, earlier, t, before, sample, return_dict=False, **settings)
        if isinstance(scheduler, diffusers.RePaintScheduler):
            return scheduler.step(output, t, sample, sample, torch.ones_like(sample), **settings).prev_sample, None
        return scheduler.step(output, t, sample, return_dict=False, **settings)[0], None


def scheduler_class(name: str) -> Any:
    return getattr(diffusers, name, None) or getattr(scheduling_consistency_decoder, name)


def run(kind: str, lever: bool) -> tuple[torch.Tensor, Stalls]:
    name, config, steps, settings = KINDS[kind]
    pipe = Pipe(scheduler_class(name)(**config))
    rig = Rig(pipe, family("wan2.1-1.3b"), f"{DEVICE}:0")
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        auditor = stack.enter_context(logical_device(pipe))
        stack.enter_context(rig.seams())
        auditor.in_loop = lambda: rig.running
        if lever:
            stack.enter_context(HostSync().engage(rig))
        with rig.call(), torch.no_grad():
            sample = auditor.to_cpu(pipe(steps, f"{DEVICE}:0", settings))
        return sample, auditor.found(rig.total_steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_never_waits_and_gives_stocks_latents(kind: str) -> None:
    stock, before = run(kind, lever=False)
    ours, after = run(kind, lever=True)
    assert after.in_loop == 0, (before.in_loop, after.sites)
    assert before.in_loop > 0 and torch.equal(stock.nan_to_num(), ours.nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_is_left_as_stock_leaves_it(kind: str) -> None:
    from undercrank.levers.mirror import Mirror

    name, config, steps, settings = KINDS[kind]
    stock, ours = (Pipe(scheduler_class(name)(**config)) for _ in range(2))
    rig = Rig(ours, family("wan2.1-1.3b"), "cpu")
    torch.manual_seed(1)
    first = stock(steps, "cpu", settings)
    torch.manual_seed(1)
    with rig.seams(), HostSync().engage(rig), rig.call():
        second = ours(steps, "cpu", settings)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert type(ours.scheduler) is type(stock.scheduler)
    assert {k: type(v) for k, v in vars(ours.scheduler).items()} == {
        k: type(v) for k, v in vars(stock.scheduler).items()
    }
    assert not any(isinstance(item, Mirror) for v in vars(ours.scheduler).values() if isinstance(v, list) for item in v)
