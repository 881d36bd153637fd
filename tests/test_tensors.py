"""A tensor's version grows when somebody writes into it."""

import torch

from undercrank.tensors import version_of


def test_a_write_is_seen_and_a_read_is_not() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    assert version_of(tensor + 1) == version_of(tensor) == before
    tensor.add_(1)
    assert version_of(tensor) > before


def test_none_and_tensors_of_inference_mode_have_none() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert version_of(tensor) == version_of(None) == 0
