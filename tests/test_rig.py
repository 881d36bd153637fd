"""The seams of a run: loop start, steps, end, branch, cancel; with a pipeline that is ten lines long."""

from contextlib import contextmanager
from fractions import Fraction

import pytest

from undercrank.records import Cancelled, Family
from undercrank.rig import Rig

FAMILY = Family(
    id="toy", title="Toy", repo="toy", pipeline="Toy", task="t2v", size_multiple=8, frame_step=4, width=8, height=8,
    num_frames=5, fps=Fraction(8), num_inference_steps=3, guidance_scale=1.0,
)  # fmt: skip


class Silent:
    """A progress bar that only counts."""

    def __init__(self, iterable=None):
        self.iterable, self.n, self.closed = iterable, 0, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def __iter__(self):
        return iter(self.iterable)

    def update(self, n=1):
        self.n += n

    def set_postfix(self, **_):
        return "kept"


class Denoiser:
    @contextmanager
    def cache_context(self, name, **where):
        yield


class Toy:
    def __init__(self):
        self.transformer, self.bars, self.offloaded = Denoiser(), [], 0

    def progress_bar(self, iterable=None, total=None):
        self.bars.append(Silent(iterable))
        return self.bars[-1]

    def maybe_free_model_hooks(self):
        self.offloaded += 1

    def __call__(self, steps=3, fail_at=None):
        with self.progress_bar(total=steps) as bar:
            for index in range(steps):
                for branch in ("cond", "uncond"):
                    with self.transformer.cache_context(branch):
                        if index == fail_at:
                            raise ZeroDivisionError
                bar.update()


@pytest.fixture
def rig():
    return Rig(Toy(), FAMILY, "cpu")


def heard(rig):
    log = []
    rig.at_start.append(lambda total: log.append(("start", total)))
    rig.at_step.append(lambda index: log.append(("step", index)))
    rig.at_end.append(lambda error: log.append(("end", type(error).__name__ if error else None)))
    return log


def test_a_run_tells_its_start_its_steps_and_its_end(rig):
    log = heard(rig)
    with rig.seams(), rig.call():
        rig.pipe(steps=2)
    assert log == [("start", 2), ("step", 0), ("step", 1), ("end", None)]


def test_levers_are_armed_only_inside_the_loop(rig):
    seen = []
    rig.at_start.append(lambda total: seen.append(rig.running))
    rig.at_step.append(lambda index: seen.append(rig.running))
    with rig.seams(), rig.call():
        rig.pipe(steps=1)
    assert seen == [False, True] and not rig.running and not rig.called


def test_the_end_is_told_with_the_error_that_ended_it(rig):
    log = heard(rig)
    with pytest.raises(ZeroDivisionError), rig.seams(), rig.call():
        rig.pipe(fail_at=1)
    assert log[-1] == ("end", "ZeroDivisionError") and rig.pipe.bars[0].closed and not rig.running


def test_a_failed_call_frees_offloaded_models(rig):
    with pytest.raises(ZeroDivisionError), rig.seams(), rig.call():
        rig.pipe(fail_at=0)
    assert rig.pipe.offloaded == 1


def test_every_end_callback_is_called_in_reverse_also_when_one_fails(rig):
    order = []
    rig.at_end.append(lambda error: order.append("first"))
    rig.at_end.append(lambda error: 1 / 0)
    rig.at_end.append(lambda error: order.append("last"))
    with pytest.raises(ZeroDivisionError), rig.seams(), rig.call():
        rig.pipe(steps=1)
    assert order == ["last", "first"]


def test_branches_are_named_and_counted(rig):
    names = []
    rig.at_step.append(lambda index: names.append(rig.branch))
    with rig.seams(), rig.call():
        rig.pipe(steps=3)
    assert rig.branch_calls == {"cond": 3, "uncond": 3} and names == [None, None, None]


def test_the_branch_is_known_inside_its_context_and_forgotten_after_an_error(rig):
    with rig.seams():
        with rig.pipe.transformer.cache_context("cond"):
            assert rig.branch == "cond"
            with rig.pipe.transformer.cache_context("skip"):
                assert rig.branch == "skip"
            assert rig.branch == "cond"
        with pytest.raises(ZeroDivisionError), rig.pipe.transformer.cache_context("cond"):
            raise ZeroDivisionError
    assert rig.branch is None


def test_a_cancel_stops_after_the_step_under_way(rig):
    log = heard(rig)
    rig.at_step.append(lambda index: rig.cancel("enough") if index == 1 else None)
    with pytest.raises(Cancelled, match="enough"), rig.seams(), rig.call():
        rig.pipe(steps=9)
    assert [entry for entry in log if entry[0] == "step"] == [("step", 0), ("step", 1)]
    assert log[-1] == ("end", "Cancelled")


def test_the_next_call_knows_nothing_of_a_cancel(rig):
    with rig.seams():
        rig.at_step.append(lambda index: None)
        with pytest.raises(Cancelled), rig.call():
            rig.cancel()
            rig.pipe(steps=2)
        with rig.call():
            rig.pipe(steps=2)
        assert rig.step_index == 2


def test_seams_leave_nothing_on_the_pipeline(rig):
    before = dict(vars(rig.pipe)), dict(vars(rig.pipe.transformer))
    with rig.seams():
        assert "progress_bar" in vars(rig.pipe) and "cache_context" in vars(rig.pipe.transformer)
    assert (dict(vars(rig.pipe)), dict(vars(rig.pipe.transformer))) == before


def test_seams_nest(rig):
    inner, outer_log = Rig(rig.pipe, FAMILY, "cpu"), heard(rig)
    inner_log = heard(inner)
    with rig.seams(), inner.seams(), rig.call(), inner.call():
        rig.pipe(steps=2)
    assert outer_log == inner_log and len(outer_log) == 4


def test_an_iterated_bar_tells_the_same_story(rig):
    log = heard(rig)
    with rig.seams(), rig.call():
        assert list(rig.pipe.progress_bar([7, 8, 9])) == [7, 8, 9]
    assert log == [("start", 3), ("step", 0), ("step", 1), ("step", 2), ("end", None)]


def test_a_bar_is_still_a_bar(rig):
    with rig.seams(), rig.pipe.progress_bar(total=1) as bar:
        assert bar.set_postfix(loss=1) == "kept" and bar.n == 0
