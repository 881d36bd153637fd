"""Uploads in the loop: the same values, without a wait, and only where they are ours to send."""

import pytest
import torch

from undercrank.audit import DEVICE, logical_device
from undercrank.levers.uploads import WATCHED, Uploads, Watch, _innermost


class Bare:
    components: dict = {}


def sent(work) -> tuple[list[str], object, int]:
    """The stalls of `work(x)` under the mode, what it returned, on the host, and how many uploads were sent."""
    with logical_device(Bare()) as auditor:
        auditor.in_loop = lambda: True
        x = torch.arange(4.0).to(DEVICE, non_blocking=True)
        with Uploads(f"{DEVICE}:0") as mode:
            result = work(x)
        return [site.cause for site in auditor.found(1).sites], auditor.to_cpu(result), mode.cured


UPLOADS = {
    "to a device": lambda x: torch.arange(3.0).to(x.device),
    "to a device by name": lambda x: torch.arange(3.0).to(DEVICE),
    "to a device and a type": lambda x: torch.arange(3.0).to(x.device, torch.float16),
    "by keywords": lambda x: torch.arange(3.0).to(dtype=torch.bfloat16, device=x.device),
    "as another": lambda x: torch.arange(3.0).double().to(x),
    "a tensor of numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "a list of indices": lambda x: x[[0, -1]],
    "indices of the host": lambda x: x[torch.tensor([1, 1])],
    "indices among slices": lambda x: x.view(2, 2)[:, [1]],
}


@pytest.mark.parametrize("how", UPLOADS)
def test_nobody_waits_and_the_values_are_the_same(how: str) -> None:
    waits, result, cured = sent(UPLOADS[how])
    expected = UPLOADS[how](torch.arange(4.0)) if "to a device by name" not in how else torch.arange(3.0)
    assert waits == [] and cured == 1
    assert isinstance(result, torch.Tensor) and result.dtype == expected.dtype and torch.equal(result, expected)


OTHERS = {
    "a copy to the host": lambda x: x.to("cpu"),
    "a cast": lambda x: x.to(torch.float16),
    "weights of a module": lambda x: torch.nn.Linear(2, 2).to(x.device).weight,
    "one that does not wait": lambda x: torch.ones(1).to(x.device, non_blocking=True),
}


@pytest.mark.parametrize("how", OTHERS)
def test_anything_else_is_left_alone(how: str) -> None:
    assert sent(OTHERS[how])[2] == 0


def test_the_watch_ends_where_nothing_is_sent() -> None:
    watch = Watch("cuda")
    watch.start(10)
    for step in range(WATCHED):
        assert _innermost() is watch.mode
        watch.step(step)
    assert _innermost() is None


def test_the_watch_goes_on_where_something_was_sent_until_the_loop_ends() -> None:
    watch = Watch("cuda")
    watch.start(10)
    watch.mode.cured = 1
    watch.step(5)
    with watch.suspended():
        assert _innermost() is None
        with watch.suspended():
            assert _innermost() is None
    assert _innermost() is watch.mode
    watch.stop()
    watch.stop()
    assert _innermost() is None


def test_a_mode_on_top_of_ours_stays() -> None:
    watch, other = Watch("cuda"), Uploads("cuda")
    watch.start(10)
    with other:
        watch.stop()
        with watch.suspended():
            assert _innermost() is other
    watch.stop()
    assert _innermost() is None


def test_nothing_is_watched_on_the_cpu() -> None:
    watch = Watch("cpu")
    watch.start(3)
    assert _innermost() is None


def test_a_forward_in_another_thread_is_watched_for_as_long_as_it_takes() -> None:
    watch = Watch("cuda")
    with watch.during():
        assert _innermost() is watch.mode and watch.is_here()
        with watch.suspended():
            assert _innermost() is None
    assert _innermost() is None
    with pytest.raises(ZeroDivisionError), watch.during():
        1 / 0  # noqa: B018
    assert _innermost() is None
    with Watch("cpu").during():
        assert _innermost() is None
