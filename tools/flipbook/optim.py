"""What all three trainings share: Muon with AdamW beside it, a schedule on the clock, and an average of the weights."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class Clock:
    """Progress from 0 to 1 over a number of seconds, or of iterations where a fixed number is wanted instead."""

    def __init__(self, seconds: float, iterations: int | None = None):
        self.seconds, self.iterations = seconds, iterations
        self.started = self.reported = time.time()
        self.iteration = 0

    @property
    def elapsed(self) -> float:
        return time.time() - self.started

    @property
    def progress(self) -> float:
        done = self.iteration / self.iterations if self.iterations else self.elapsed / self.seconds
        return min(done, 1.0)

    def restart(self) -> None:
        """Start over, after a compilation for example, so that it does not count as training."""
        self.started = time.time()

    def tick(self) -> None:
        self.iteration += 1

    def time_to_report(self, every: float = 10.0) -> bool:
        if time.time() - self.reported < every:
            return False
        self.reported = time.time()
        return True


def schedule(clock: Clock, warm_up: int, decay_from: float) -> float:
    """Linear warm-up over iterations, then flat, then linear to zero from the fraction ``decay_from`` on."""
    rise = min(1.0, (clock.iteration + 1) / max(warm_up, 1))
    fall = min(1.0, (1 - clock.progress) / max(1 - decay_from, 1e-6))
    return rise * fall


@torch.no_grad()
def orthogonalise(matrices_KMN: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearly the closest orthogonal matrix to each: the Newton-Schulz steps of Muon (Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices_KMN.shape[1] > matrices_KMN.shape[2]
    x = (matrices_KMN.transpose(1, 2) if tall else matrices_KMN).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class MuonAdamW:
    """Muon on ``matrices``, AdamW on ``others``, one learning rate for both.

    Muon's step is scaled to the size AdamW's usually has (0.2 of the learning rate per weight), after
    "Muon is Scalable for LLM Training" (Liu et al., 2025).  Matrices of one shape are handled as one batch.
    """

    def __init__(self, matrices, others, weight_decay: float = 0.01, momentum: float = 0.95, muon_gain: float = 1.0):
        self.groups = defaultdict(list)
        for weight in matrices:
            self.groups[weight.flatten(1).shape].append(weight)
        self.momenta = {shape: None for shape in self.groups}
        self.weight_decay, self.momentum, self.muon_gain = weight_decay, momentum, muon_gain
        others = list(others)
        fused = others[0].is_cuda
        self.adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused)
        self.weights = [w for group in self.groups.values() for w in group] + others

    @torch.no_grad()
    def step(self, rate: float, clip: float = 1.0) -> torch.Tensor:
        size = torch.nn.utils.clip_grad_norm_(self.weights, clip)
        for shape, weights in self.groups.items():
            self._muon_step(shape, weights, rate * self.muon_gain)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        for weight in self.weights:
            weight.grad = None
        return size

    def _muon_step(self, shape, weights, rate: float) -> None:
        gradients = torch.stack([(torch.zeros_like(w) if w.grad is None else w.grad).flatten(1) for w in weights])
        if self.momenta[shape] is None:
            self.momenta[shape] = torch.zeros_like(gradients)
        momentum = self.momenta[shape].lerp_(gradients, 1 - self.momentum)
        update = orthogonalise(gradients.lerp(momentum, self.momentum)).to(gradients.dtype)
        torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
        updates = [u.view_as(w) for u, w in zip(update.unbind(), weights, strict=True)]
        torch._foreach_add_(weights, updates, alpha=-rate * 0.2 * max(shape) ** 0.5)


class Average:
    """An exponential moving average of weights, quicker at first."""

    def __init__(self, weights, decay: float = 0.999):
        self.weights, self.decay, self.count = list(weights), decay, 0
        self.average = [w.detach().clone() for w in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        keep = min(self.decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(self.average, [w.detach() for w in self.weights], 1 - keep)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average; call twice to come back."""
        for weight, average in zip(self.weights, self.average, strict=True):
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
