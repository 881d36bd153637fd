"""Two-sided tensors: what they answer from the host, and when they step aside."""

import copy
import pickle

import pytest
import torch

from undercrank.levers.mirror import Mirror, mask, mirror, plain


@pytest.fixture
def twin() -> Mirror:
    """Twins of different values, so that a test sees which of them answered: device 100.., host 0..."""
    return Mirror(torch.arange(100, 110), torch.arange(0, 10), leads_on_host=False)


def test_scalar_reads_are_answered_by_the_host(twin: Mirror) -> None:
    assert int(twin[3]) == 3 and twin[4].item() == 4 and twin.tolist()[:2] == [0, 1]


def test_a_host_table_is_indexed_by_the_host_twin(twin: Mirror) -> None:
    assert torch.arange(50)[twin[7]].item() == 7


def test_comparisons_branch_on_the_host(twin: Mirror) -> None:
    assert bool(twin[5] < 50) and not bool(twin[5] >= 50)


def test_nonzero_finds_positions_on_the_host(twin: Mirror) -> None:
    assert (twin == 6).nonzero().item() == 6


def test_arithmetic_keeps_both_sides(twin: Mirror) -> None:
    half = (twin[8] - 2) / 2
    assert isinstance(half, Mirror) and half.item() == 3.0 and plain(half).item() == 53.0


def test_values_used_with_other_tensors_come_from_the_device(twin: Mirror) -> None:
    mixed = torch.ones(10) * twin
    assert type(mixed) is torch.Tensor and mixed[0].item() == 100


def test_expand_gives_a_plain_device_tensor(twin: Mirror) -> None:
    timestep = twin[0].expand(2)
    assert type(timestep) is torch.Tensor and timestep.tolist() == [100, 100]


def test_inexact_functions_are_not_answered_by_the_twin() -> None:
    value = Mirror(torch.tensor(2.0), torch.tensor(3.0), leads_on_host=False)
    assert type(torch.log(value)) is torch.Tensor and torch.log(value) == torch.log(torch.tensor(2.0))


def test_slices_and_iteration_stay_two_sided(twin: Mirror) -> None:
    assert [int(t) for t in twin[2:5]] == [2, 3, 4]


def test_a_copy_and_a_deep_copy_keep_their_kind(twin: Mirror) -> None:
    assert isinstance(copy.deepcopy(twin), Mirror)
    assert type(pickle.loads(pickle.dumps(twin))) is torch.Tensor


def test_a_cast_keeps_both_sides(twin: Mirror) -> None:
    cast = twin.to(torch.float32)
    assert isinstance(cast, Mirror) and cast.on_host.dtype == cast.on_device.dtype == torch.float32


def test_mirroring_twice_is_mirroring_once() -> None:
    once = mirror(torch.arange(3), "cpu")
    assert mirror(once, "cpu") is once


def test_a_compiled_function_takes_one() -> None:
    value = mirror(torch.arange(3.0), "cpu")
    double = torch.compile(lambda t, x: x * (t.expand(3) / 10), backend="eager", fullgraph=True)
    assert torch.equal(double(value[2], torch.ones(3)), torch.full((3,), 0.2))


# --------------------------------------------------------------------------- masks, joins, writes


def test_a_list_of_timesteps_becomes_a_tensor(twin: Mirror) -> None:
    assert torch.tensor([twin[3]] * 2).tolist() == [3, 3] and torch.tensor([twin[3] / 2]).item() == 1.5


def test_rounding_and_the_nearest_are_found_on_the_host(twin: Mirror) -> None:
    assert torch.floor(twin[3] / 2).item() == 1 and (twin - 4).abs().argmin().item() == 4


def test_an_index_of_a_device_table_comes_from_the_device() -> None:
    index = Mirror(torch.tensor([2]), torch.tensor([1]), leads_on_host=False)
    assert torch.arange(5)[index].item() == 2


def test_a_write_reaches_both_sides(twin: Mirror) -> None:
    twin[2:4] = 7
    twin[0] += 5
    assert plain(twin)[:4].tolist() == [105, 101, 7, 7] and twin.tolist()[:4] == [5, 1, 7, 7]


def test_a_write_of_device_values_is_copied_to_the_host(twin: Mirror) -> None:
    twin[:2].mul_(torch.tensor([3, 2]))
    assert plain(twin)[:2].tolist() == [300, 202]


def test_parts_are_joined_on_both_sides(twin: Mirror) -> None:
    joined = torch.cat([twin[:2], twin[4:5]])
    assert isinstance(joined, Mirror) and joined.tolist() == [0, 1, 4] and plain(joined).tolist() == [100, 101, 104]


def test_a_plain_part_is_read_before_the_loop_only() -> None:
    for before, kind in ((True, Mirror), (False, torch.Tensor)):
        twin = mirror(torch.arange(3), "cpu", may_read=lambda before=before: before)
        assert type(torch.cat([torch.tensor([9]), twin])) is kind


@pytest.fixture
def words() -> Mirror:
    return mask(torch.tensor([True, False, True, True]), torch.tensor([True, False, True, True]))


def test_a_mask_selects_by_what_the_host_knows(words: Mirror) -> None:
    text = torch.arange(8).view(4, 2)
    assert text[words].tolist() == [[0, 1], [4, 5], [6, 7]] and text[~words].tolist() == [[2, 3]]
    assert words[words].tolist() == [True] * 3 and bool(torch.any(words)) and not torch.all(words)


def test_what_was_asked_of_a_mask_is_not_worked_out_again(words: Mirror) -> None:
    first, second = words.nonzero(), words.nonzero()
    assert first.on_device is second.on_device and first.tolist() == [[0], [2], [3]]
    words[1] = True
    assert words.nonzero().tolist() == [[0], [1], [2], [3]]


def test_valid_tokens_are_counted_on_the_host() -> None:
    words = mask(torch.tensor([[1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0]]))  # twins differ: who answered is seen
    longer = torch.cat([words.new_ones((1, 3)), words], dim=1)
    count = 2 + longer.sum(dim=1, dtype=torch.int)
    assert torch.arange(20)[: count[0]].tolist() == list(range(7)) and plain(count).item() == 9


def test_a_sum_of_fractions_is_not_answered_by_the_twin() -> None:
    words = mask(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 0.0]))
    assert type(words.sum()) is torch.Tensor and words.sum().item() == 1.0


def test_stacked_masks_are_given_to_the_model_as_plain_tensors(words: Mirror) -> None:
    assert type(torch.stack([words, words])) is torch.Tensor
    assert isinstance(torch.cat([words, words]), Mirror)
