"""The auditor finds what would block on a real device, at its line, and leaves the pipeline as it was."""

import pytest
import torch

from undercrank.audit import DEVICE, logical_device, stalls, stalls_and_result
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline


class Bare:
    """A pipeline without parts: a place to run single operations on the device."""

    components: dict = {}


def causes(operation) -> list[str]:
    with logical_device(Bare()) as auditor:
        auditor.in_loop = lambda: True
        operation(torch.arange(4.0).to(DEVICE, non_blocking=True))
        return [site.cause for site in auditor.found(1).sites]


BLOCKING = {
    "scalar read": lambda x: x[0].item(),
    "data-dependent shape (nonzero)": lambda x: x.nonzero(),
    "boolean-mask indexing": lambda x: x[(x > 1)],
    "copy to the host": lambda x: x.cpu(),
    "upload": lambda x: torch.ones(2).to(x.device),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("cause", BLOCKING)
def test_what_blocks_is_found_with_its_cause(cause: str) -> None:
    assert cause in causes(BLOCKING[cause])


def test_a_tensor_made_from_a_list_on_the_device_is_an_upload() -> None:
    assert causes(lambda x: torch.tensor([1.0, 2.0], device=x.device)) == ["upload"]


def test_indexing_with_a_list_is_an_upload() -> None:
    assert "upload" in causes(lambda x: x[[0, 2]])


def test_what_does_not_block_is_not_counted() -> None:
    def work(x):
        y = (x * 2 + 1).view(2, 2) @ torch.zeros(2, 2, device=x.device)
        return y[0], x[1:3], torch.where(x > 1, x, -x), torch.ones(3).to(x.device, non_blocking=True)

    assert causes(work) == []


def test_the_line_is_named() -> None:
    with logical_device(Bare()) as auditor:
        auditor.in_loop = lambda: True
        x = torch.zeros(1).to(DEVICE, non_blocking=True)
        float(x)
        (site,) = auditor.found(1).sites
    assert site.file.endswith("test_audit.py") and site.line == test_the_line_is_named.__code__.co_firstlineno + 4


def test_a_read_planted_in_a_transformer_is_found(monkeypatch) -> None:
    from diffusers import WanTransformer3DModel

    forward = WanTransformer3DModel.forward

    def planted(self, hidden_states, *args, **kwargs):
        hidden_states.sum().item()
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(WanTransformer3DModel, "forward", planted)
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    found = stalls(pipe, tiny_inputs(pipe, steps=3), host_sync="auto")
    assert [(site.file.rsplit("/", 1)[-1], site.count) for site in found.sites] == [("test_audit.py", 6)]
    assert found.per_step == 2


def test_an_audited_run_computes_what_the_cpu_computes() -> None:
    pipe = tiny_pipeline("cogvideox-2b")
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        plain = pipe(**tiny_inputs(pipe, steps=3)).frames
    _, audited = stalls_and_result(pipe, tiny_inputs(pipe, steps=3))
    assert torch.allclose(plain, audited, atol=1e-4)


def test_the_audited_pipeline_is_left_as_it_was_found() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=2))
    before, kinds = fingerprint(pipe), {n: type(p) for n, p in pipe.transformer.named_parameters()}
    stalls(pipe, tiny_inputs(pipe, steps=2), host_sync="auto")
    assert {n: type(p) for n, p in pipe.transformer.named_parameters()} == kinds
    left = [d for d in differences(before, fingerprint(pipe)) if "scheduler" not in d]
    assert left == [], "the scheduler keeps what the run computed, as after any run"
