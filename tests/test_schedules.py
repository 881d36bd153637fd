"""Which steps are computed: MagCache's rule against diffusers' own, masks, the searched path, ratios read anew."""

import itertools
import math
import types

import pytest
import torch
from diffusers.hooks.hooks import CacheContext, StateManager
from diffusers.hooks.mag_cache import MagCacheConfig, MagCacheHeadHook, MagCacheState
from hypothesis import given, settings
from hypothesis import strategies as st

from undercrank.records import BadInput
from undercrank.schedules import (
    PRESETS,
    Rule,
    around,
    budget_of,
    by_index,
    by_sigma,
    drifts_anew,
    everything,
    fewest,
    gaps,
    lightest,
    magcache,
    mask,
    merged,
    moved,
    nearest,
    searched,
)

RATIO = st.floats(0.5, 1.5, allow_nan=False)
RULE = st.builds(
    Rule, threshold=st.floats(0, 0.5), max_skip_steps=st.integers(0, 6), retention=st.floats(0, 1)
)  # fmt: skip
DRIFT = st.floats(0, 1, allow_nan=False)


def stock(ratios: list[float], rule: Rule, steps: int) -> tuple[bool, ...]:
    """What the head hook of diffusers' MagCache decides over a run, without a model below it."""
    config = MagCacheConfig(
        threshold=rule.threshold, max_skip_steps=rule.max_skip_steps, retention_ratio=rule.retention,
        num_inference_steps=steps, mag_ratios=ratios,
    )  # fmt: skip
    manager = StateManager(MagCacheState, (), {})
    manager.set_context(CacheContext(name="cond"))
    hook = MagCacheHeadHook(manager, config)
    hook._metadata = types.SimpleNamespace(
        hidden_states_argument_name="x",
        return_encoder_hidden_states_index=None,
        _get_parameter_from_args_kwargs=lambda name, args, kwargs: args[0],
    )
    hook.fn_ref = types.SimpleNamespace(original_forward=lambda x: x)
    state, decided = manager.get_state(), []
    for step in range(steps):
        state.step_index = step
        hook.new_forward(None, torch.zeros(1))
        decided.append(state.should_compute)
        state.previous_residual = torch.zeros(1)
    return tuple(decided)


@given(st.lists(RATIO, min_size=1, max_size=60), RULE)
@settings(max_examples=150, deadline=None)
def test_the_rule_decides_as_diffusers_does(ratios: list[float], rule: Rule) -> None:
    assert magcache(ratios, rule) == stock(ratios, rule, len(ratios))


@given(st.lists(RATIO, min_size=2, max_size=60), RULE, st.integers(1, 80))
@settings(max_examples=150, deadline=None)
def test_nearest_ratios_decide_as_diffusers_does_at_another_step_count(
    ratios: list[float], rule: Rule, steps: int
) -> None:
    assert magcache(nearest(ratios, steps), rule) == stock(ratios, rule, steps)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_are_the_published_ones(preset: str) -> None:
    rule = PRESETS[preset]
    known = {"quality": (0.06, 2, 0.3), "balanced": (0.12, 3, 0.2), "fast": (0.24, 3, 0.2)}
    assert (rule.threshold, rule.max_skip_steps, rule.retention) == known[preset]


@given(st.lists(RATIO, min_size=1, max_size=60), RULE)
def test_never_more_skips_in_a_row_than_allowed(ratios: list[float], rule: Rule) -> None:
    assert longest_gap(magcache(ratios, rule)) <= rule.max_skip_steps


@given(st.lists(RATIO, min_size=1, max_size=60), RULE)
def test_the_retained_steps_and_the_first_are_computed(ratios: list[float], rule: Rule) -> None:
    schedule = magcache(ratios, rule)
    assert schedule[0] and all(schedule[: int(rule.retention * len(ratios) + 0.5)])


@given(st.lists(RATIO, min_size=1, max_size=60))
def test_a_threshold_of_zero_skips_only_where_nothing_changes(ratios: list[float]) -> None:
    schedule = magcache(ratios, Rule(threshold=0, max_skip_steps=3, retention=0))
    assert all(
        computed or math.isclose(ratio, 1, abs_tol=1e-7) for computed, ratio in zip(schedule, ratios, strict=True)
    )


def test_five_and_fifty_steps_share_no_schedule() -> None:
    ratios = [1.0, *(1 + 0.2 * 0.9**step for step in range(49))]
    long, short = magcache(ratios, PRESETS["balanced"]), magcache(nearest(ratios, 5), PRESETS["balanced"])
    assert len(long) == 50 and len(short) == 5 and long[:5] == (True,) * 5 and short != long[:5]


# --------------------------------------------------------------------------- the searched path


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[float], list[float], int, int, tuple[int, ...]]:
    steps = draw(st.integers(1, 14))
    drifts = draw(st.lists(DRIFT, min_size=steps, max_size=steps))
    weights = draw(st.lists(st.floats(0.01, 1), min_size=steps, max_size=steps))
    starts = tuple(sorted({0, draw(st.integers(0, steps - 1))}))
    skips = draw(st.integers(0, 5))
    fixed = len({0, steps - 1, *starts})
    budget = draw(st.integers(max(fixed, fewest(steps, skips, starts)), steps))
    return drifts, weights, budget, skips, starts


@given(searches())
@settings(max_examples=200, deadline=None)
def test_the_searched_path_keeps_its_budget_and_its_fixed_steps(case: tuple) -> None:
    drifts, weights, budget, skips, starts = case
    schedule = searched(drifts, weights, budget, max_skip_steps=skips, starts=starts)
    assert sum(schedule) == budget and schedule[0] and schedule[-1] and all(schedule[s] for s in starts)
    assert longest_gap(schedule) <= skips
    assert schedule == searched(drifts, weights, budget, max_skip_steps=skips, starts=starts)


def cost(schedule: tuple[bool, ...], drifts: list[float], weights: list[float]) -> tuple[float, float]:
    """The largest and the summed error of the gaps of a schedule."""
    reached, gaps, here = list(itertools.accumulate(drifts)), [], 0
    for step, computed in enumerate(schedule):
        if computed:
            here, gap = step, 0.0
            gaps.append(gap)
        else:
            gaps[-1] += (reached[step] - reached[here]) * weights[step]
    return max(gaps), sum(gaps)


@given(searches())
@settings(max_examples=60, deadline=None)
def test_no_other_path_of_that_budget_is_better(case: tuple) -> None:
    drifts, weights, budget, skips, starts = case
    found = cost(searched(drifts, weights, budget, max_skip_steps=skips, starts=starts), drifts, weights)
    free = [step for step in range(len(drifts)) if step not in {0, len(drifts) - 1, *starts}]
    for chosen in itertools.combinations(free, budget - (len(drifts) - len(free))):
        steps = {0, len(drifts) - 1, *starts, *chosen}
        other = tuple(step in steps for step in range(len(drifts)))
        if longest_gap(other) <= skips:
            worst, total = cost(other, drifts, weights)
            assert found[0] <= worst + 1e-9
            assert worst > found[0] + 1e-9 or found[1] <= total + 1e-6


def test_the_searched_path_skips_where_nothing_moves() -> None:
    drifts = [0.0, 0.5, 0.5, 0.01, 0.01, 0.01, 0.5, 0.5]
    assert searched(drifts, [1.0] * 8, 5, starts=(0,)) == (True, True, True, False, False, False, True, True)


@pytest.mark.parametrize("budget", [0, 1, 11])
def test_a_budget_that_cannot_be_kept_is_refused_with_the_range(budget: int) -> None:
    with pytest.raises(BadInput, match="2 to 10") as raised:
        searched([0.1] * 10, [1.0] * 10, budget)
    assert raised.value.field == "transformer_cache_budget"


# --------------------------------------------------------------------------- masks


def test_a_mask_is_read_digit_by_digit() -> None:
    assert mask("1, 0 11", 4) == (True, False, True, True)


@pytest.mark.parametrize(
    ("text", "steps", "why"),
    [("110", 4, "3 steps for a run of 4"), ("0111", 4, "step 1"), ("11x1", 4, "a 1 for each"), ("", 4, "a 1 for each")],
)
def test_a_mask_that_does_not_fit_is_refused(text: str, steps: int, why: str) -> None:
    with pytest.raises(BadInput, match=why) as raised:
        mask(text, steps)
    assert raised.value.field == "transformer_cache_mask"


def test_a_mask_may_not_skip_where_the_second_expert_begins() -> None:
    with pytest.raises(BadInput, match="step 3"):
        mask("1101", 4, starts=(0, 2))


# --------------------------------------------------------------------------- ratios for another number of steps


@given(st.lists(RATIO, min_size=2, max_size=50), st.integers(2, 80))
def test_ratios_read_anew_keep_the_whole_change(ratios: list[float], steps: int) -> None:
    again = by_index(ratios, steps)
    assert len(again) == steps
    assert math.isclose(sum(map(math.log, again)), sum(map(math.log, ratios[1:])), abs_tol=1e-6)


@given(st.lists(RATIO, min_size=2, max_size=50))
def test_ratios_read_at_their_own_places_are_the_same(ratios: list[float]) -> None:
    sigmas = [1 - step / len(ratios) for step in range(len(ratios))]
    for again in (by_index(ratios, len(ratios)), by_sigma(ratios, sigmas, sigmas), nearest(ratios, len(ratios))):
        assert again[1:] == pytest.approx(ratios[1:], rel=1e-6)


def test_nearest_ratios_understate_a_steady_decline_over_fewer_steps() -> None:
    ratios = [1.0, *[0.99] * 49]
    assert math.prod(by_index(ratios, 11)) == pytest.approx(0.99**49)
    assert math.prod(nearest(ratios, 11)[1:]) == pytest.approx(0.99**10)


def test_ratios_over_sigma_follow_a_shifted_schedule() -> None:
    ratios, sigmas = [1.0, 0.9, 0.9, 0.9], [1.0, 0.75, 0.5, 0.25]
    assert by_sigma(ratios, sigmas, [1.0, 0.5, 0.25]) == pytest.approx((1.0, 0.81, 0.9))


@given(st.lists(DRIFT, min_size=2, max_size=50), st.integers(2, 80))
def test_drifts_read_anew_add_up_to_the_same(drifts: list[float], steps: int) -> None:
    places = [step / (len(drifts) - 1) for step in range(len(drifts))]
    again = drifts_anew(drifts, places, [step / (steps - 1) for step in range(steps)])
    assert len(again) == steps and math.isclose(sum(again), sum(drifts[1:]), abs_tol=1e-6)


@pytest.mark.parametrize("ratios", [[], [1.0, math.nan], [1.0, 0.0], [1.0, math.inf]])
def test_ratios_that_are_none_are_refused(ratios: list[float]) -> None:
    with pytest.raises(BadInput, match="ratios"):
        magcache(ratios, PRESETS["quality"])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"threshold": -0.1}, "transformer_cache_threshold"),
        ({"threshold": math.nan}, "transformer_cache_threshold"),
        ({"retention": 1.1}, "transformer_cache_retention"),
        ({"max_skip_steps": -1}, "max_skip_steps"),
    ],
)
def test_a_rule_out_of_range_is_refused(settings: dict[str, float], field: str) -> None:
    with pytest.raises(BadInput) as raised:
        Rule(**{"threshold": 0.1, "max_skip_steps": 2, "retention": 0.2} | settings)
    assert raised.value.field == field


def test_everything_skips_nothing() -> None:
    assert everything(3) == (True, True, True)


def longest_gap(schedule: tuple[bool, ...]) -> int:
    return max((len(list(group)) for computed, group in itertools.groupby(schedule) if not computed), default=0)


# --------------------------------------------------------------------------- gaps


def test_gaps_are_all_that_a_schedule_may_leave() -> None:
    assert gaps(6, 2) == ((0, 2), (0, 3), (1, 3), (1, 4), (2, 4), (2, 5), (3, 5))
    assert gaps(6, 2, starts=(0, 1, 2)) == ((2, 4), (2, 5), (3, 5))
    assert around((1, 4), 6) == (True, True, False, False, True, True)


@given(st.lists(DRIFT, min_size=60, max_size=60), st.integers(3, 9), st.sampled_from(["worst", "sum"]))
@settings(max_examples=60, deadline=None)
def test_the_lightest_path_is_the_least_of_all(numbers: list[float], budget: int, by: str) -> None:
    steps = 9
    errors = dict(zip(gaps(steps, 4), numbers, strict=False))

    def cost(plan: tuple[bool, ...]) -> tuple[float, ...]:
        nodes = [step for step, computed in enumerate(plan) if computed]
        found = [errors.get(gap, math.inf) for gap in itertools.pairwise(nodes) if gap[1] - gap[0] > 1]
        return (max(found, default=0.0), sum(found)) if by == "worst" else (sum(found),)

    every = [
        (True, *middle, True) for middle in itertools.product((False, True), repeat=steps - 2)
        if sum(middle) == budget - 2
    ]  # fmt: skip
    found = lightest(errors, steps, budget, by=by)
    assert sum(found) == budget
    assert cost(found) == pytest.approx(min(map(cost, every)))


def test_moving_keeps_the_number_of_steps_the_first_ones_and_the_last() -> None:
    plan = (True, True, False, True, False, True)
    assert set(moved(plan, kept=2)) == {(True, True, True, False, False, True), (True, True, False, False, True, True)}
    assert (True, False, True, True, False, True) in moved(plan)


def test_moves_that_do_not_meet_are_made_together() -> None:
    plan = (True, False, True, False, False, True, False, True)
    one = (True, True, False, False, False, True, False, True)
    two = (True, False, True, False, True, False, False, True)
    three = (True, False, False, True, False, True, False, True)  # the step that the first has moved already
    assert merged(plan, [one, two, three]) == (True, True, False, False, True, False, False, True)
    assert merged(plan, []) == plan


def test_a_preset_never_computes_more_than_its_share() -> None:
    for steps in range(12, 101):
        counts = [budget_of(preset, steps) for preset in PRESETS]
        assert counts == sorted(counts, reverse=True)
        assert [steps / count for count in counts] >= [1.6, 2.2, 2.5]
        assert all(steps / count >= least for count, least in zip(counts, (1.6, 2.2, 2.5), strict=True))
