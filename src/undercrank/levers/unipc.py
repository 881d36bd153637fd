"""UniPC (arXiv 2302.04867, as in diffusers 0.42) with everything that the schedule alone decides computed once.

A stock step derives a hundred device scalars from two or three sigmas, uploads those sigmas one by one, and solves
a small linear system, for which the host waits. All of that depends on the schedule and the step only. Here the
same operations, in the same order, on the same device, are done once per schedule, before the loop; a step then
applies their results to the latents as stock does. A rehearsal compares both, bit by bit, on random numbers.

Imported inside host_sync's `engage` only, since it needs torch. Letters are the paper's and diffusers'.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from undercrank.levers.mirror import plain

KEPT_SCHEDULES = 8


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Of one update, predictor or corrector: scalars on the device, `rhos` a vector of the update's order."""

    of_x: torch.Tensor
    of_m0: torch.Tensor
    of_residual: torch.Tensor
    rks: tuple[torch.Tensor, ...]
    rhos: torch.Tensor


Known = dict[tuple[str, int, int], Coefficients]
"By (update, step index, order)."


class Schedules:
    """Coefficients of the schedules met so far."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._known: OrderedDict[tuple[Any, ...], Known | None] = OrderedDict()

    def of(self, scheduler: Any) -> Known | None:
        """For a scheduler whose timesteps have just been set; None: this UniPC computes something else than ours."""
        key = _schedule_key(scheduler)
        if key not in self._known:
            self._known[key] = rehearse(scheduler, self.device)
            if len(self._known) > KEPT_SCHEDULES:
                self._known.popitem(last=False)
        return self._known[key]


def is_unipc(cls: type) -> bool:
    """Stock UniPC: a subclass that overrides an update is left alone."""
    stock = diffusers.UniPCMultistepScheduler
    names = ("multistep_uni_p_bh_update", "multistep_uni_c_bh_update", "step", "_sigma_to_alpha_sigma_t")
    unwrapped = inspect.unwrap  # whoever only watches a step wraps it
    return issubclass(cls, stock) and all(unwrapped(getattr(cls, n)) is unwrapped(getattr(stock, n)) for n in names)


def rehearse(scheduler: Any, device: str) -> Known | None:
    """Run stock and ours over the whole schedule on the same random numbers; None unless they agree bit for bit."""
    known: Known = {}
    stock, ours = _plain_copy(scheduler), _plain_copy(scheduler)
    if stock.solver_p is not None:
        return None
    ours.__class__ = type("UniPC", (type(ours),), overrides(lambda _: known, device, missed=lambda: None))
    generator = torch.Generator("cpu").manual_seed(0)
    a = b = torch.randn((1, 2), generator=generator).to(device)
    for timestep in stock.timesteps:
        output = torch.randn((1, 2), generator=generator).to(device)
        a = stock.step(output, timestep, a, return_dict=False)[0]
        b = ours.step(output, timestep, b, return_dict=False)[0]
    if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
        return None
    _add_lower_orders(ours, known, device)
    return known


def _add_lower_orders(scheduler: Any, known: Known, device: str) -> None:
    """A run that begins within the schedule starts with low orders there, where the rehearsal had high ones."""
    for update, index, highest in list(known):
        for order in range(2, highest):
            if (update, index, order) not in known:
                known[update, index, order] = _derive(scheduler, device, update, index, order)


def overrides(
    known_of: Callable[[Any], Known | None], device: str, missed: Callable[[], None]
) -> dict[str, Callable[..., Any]]:
    """The two updates, for the body of a subclass. `known_of(scheduler)` None: stock's own update runs.

    missed: told of each linear system that was not known and is solved in the loop.
    """
    stock = diffusers.UniPCMultistepScheduler

    def coefficients(scheduler: Any, known: Known, update: str, order: int) -> Coefficients:
        key = (update, scheduler.step_index, order)
        if key not in known:
            if _solves(update, order):
                missed()
            known[key] = _derive(scheduler, device, *key)
        return known[key]

    def multistep_uni_p_bh_update(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        known = known_of(self)
        if known is None or args or set(kwargs) != {"model_output", "sample", "order"}:
            return stock.multistep_uni_p_bh_update(self, *args, **kwargs)
        c = coefficients(self, known, "predict", kwargs["order"])
        return _predicted(self, c, x=kwargs["sample"])

    def multistep_uni_c_bh_update(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        known = known_of(self)
        if known is None or args or set(kwargs) != {"this_model_output", "last_sample", "this_sample", "order"}:
            return stock.multistep_uni_c_bh_update(self, *args, **kwargs)
        c = coefficients(self, known, "correct", kwargs["order"])
        return _corrected(self, c, x=kwargs["last_sample"], model_t=kwargs["this_model_output"])

    return {
        "multistep_uni_p_bh_update": multistep_uni_p_bh_update,
        "multistep_uni_c_bh_update": multistep_uni_c_bh_update,
    }


# --------------------------------------------------------------------------- a step, given the coefficients


def _predicted(scheduler: Any, c: Coefficients, x: torch.Tensor) -> torch.Tensor:
    m0 = scheduler.model_outputs[-1]
    differences = _differences(scheduler, c, m0)
    residual: Any = 0 if differences is None else _mixed(c.rhos.to(x.dtype), differences)
    x_t = c.of_x * x - c.of_m0 * m0 - c.of_residual * residual
    return x_t.to(x.dtype)


def _corrected(scheduler: Any, c: Coefficients, x: torch.Tensor, model_t: torch.Tensor) -> torch.Tensor:
    m0, rhos = scheduler.model_outputs[-1], c.rhos.to(x.dtype)
    differences = _differences(scheduler, c, m0)
    residual: Any = 0 if differences is None else _mixed(rhos[:-1], differences)
    x_t = c.of_x * x - c.of_m0 * m0 - c.of_residual * (residual + rhos[-1] * (model_t - m0))
    return x_t.to(x.dtype)


def _differences(scheduler: Any, c: Coefficients, m0: torch.Tensor) -> torch.Tensor | None:
    """D1s of the paper, stacked along a new second axis: (B, K, ...)."""
    earlier = [scheduler.model_outputs[-(i + 2)] for i in range(len(c.rks))]
    pairs = zip(earlier, c.rks, strict=True)
    return torch.stack([(mi - m0) / rk for mi, rk in pairs], dim=1) if c.rks else None


def _mixed(rhos_K: torch.Tensor, differences_BK: torch.Tensor) -> torch.Tensor:
    return torch.einsum("k,bkc...->bc...", rhos_K, differences_BK)


# --------------------------------------------------------------------------- the coefficients


def _solves(update: str, order: int) -> bool:
    return order >= (2 if update == "correct" else 3)


def _derive(scheduler: Any, device: str, update: str, index: int, order: int) -> Coefficients:
    """Stock's own operations on the sigmas, in its order, on the device."""
    # The predictor goes from index to index + 1; the corrector has arrived at index and came from index - 1.
    target, source = (index + 1, index) if update == "predict" else (index, index - 1)
    alpha_t, sigma_t, lambda_t = _at(scheduler, device, target)
    alpha_s0, sigma_s0, lambda_s0 = _at(scheduler, device, source)
    h = lambda_t - lambda_s0
    rks = tuple((_at(scheduler, device, source - i)[2] - lambda_s0) / h for i in range(1, order))
    hh = -h if scheduler.predict_x0 else h
    h_phi_1 = torch.expm1(hh)
    B_h = hh if scheduler.config.solver_type == "bh1" else torch.expm1(hh)
    ratio, of_m0, of_residual = (
        (sigma_t / sigma_s0, alpha_t * h_phi_1, alpha_t * B_h)
        if scheduler.predict_x0
        else (alpha_t / alpha_s0, sigma_t * h_phi_1, sigma_t * B_h)
    )
    rhos = _rhos(update, order, rks, hh, h_phi_1, B_h, device)
    return Coefficients(of_x=ratio, of_m0=of_m0, of_residual=of_residual, rks=rks, rhos=rhos)


def _at(scheduler: Any, device: str, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """alpha, sigma and lambda of the paper at an index of the schedule."""
    alpha, sigma = scheduler._sigma_to_alpha_sigma_t(plain(scheduler.sigmas)[index].to(device))
    return alpha, sigma, torch.log(alpha) - torch.log(sigma)


def _rhos(
    update: str,
    order: int,
    rks: tuple[torch.Tensor, ...],
    hh: torch.Tensor,
    h_phi_1: torch.Tensor,
    B_h: torch.Tensor,
    device: str,
) -> torch.Tensor:
    """The weights of the differences: one half where the order is lowest, else the solution of R rho = b."""
    if not _solves(update, order):
        return torch.ones(1, device=device) * 0.5
    steps = torch.stack([*rks, torch.ones((), device=device)])
    R, b, factorial, h_phi_k = [], [], 1, h_phi_1 / hh - 1
    for i in range(1, order + 1):
        R.append(torch.pow(steps, i - 1))
        b.append(h_phi_k * factorial / B_h)
        factorial *= i + 1
        h_phi_k = h_phi_k / hh - 1 / factorial
    matrix, right = torch.stack(R), torch.stack(b)
    if update == "predict":
        matrix, right = matrix[:-1, :-1], right[:-1]
    return torch.linalg.solve(matrix, right)


def _plain_copy(scheduler: Any) -> Any:
    """The scheduler of its own class, from the start of its schedule, with plain tensors: what stock would run."""
    twin = copy.copy(scheduler)
    twin.__class__ = type(scheduler).__mro__[1] if "_known" in vars(type(scheduler)) else type(scheduler)
    for name, value in list(vars(twin).items()):
        value = [plain(item) for item in value] if isinstance(value, list) else value
        object.__setattr__(twin, name, plain(value))
    twin._begin_index, twin._step_index = 0, None
    return twin


def _schedule_key(scheduler: Any) -> tuple[Any, ...]:
    config = sorted((key, repr(value)) for key, value in dict(scheduler.config).items())
    return tuple(scheduler.timesteps.tolist()), tuple(scheduler.sigmas.tolist()), tuple(config)
