"""tune: each setting is measured once, in time, between two stock films; rows are kept as they come; a plan is made."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from undercrank.comparing import run_tune
from undercrank.engine import Engine
from undercrank.ledger import read_ledger
from undercrank.quality import NotComputed
from undercrank.records import BadInput, Cancelled, Fidelity, Lever, NotFound, Promise, Request, RunFailed
from undercrank.testing import tiny_folder
from undercrank.tune import Goal, Tried, Tuning, agreed, tune
from undercrank.undo import swap_attr

ASKED: dict[str, Any] = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 3}


class InForward(Lever):
    """Base of levers that change the denoiser's answer."""

    by: float = 0.0

    def promises(self, case: Any) -> Promise:
        return Promise.LOSSY

    @property
    def setting(self) -> str:
        return f"{self.by:g}"

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        return cls(by=float(wishes.get(cls.name, "0")))  # type: ignore[call-arg]

    @contextmanager
    def engage(self, rig: Any) -> Iterator[None]:
        forward = rig.denoisers[0].forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            return (self.change(result[0]), *result[1:])

        with swap_attr(rig.denoisers[0], "forward", changed):
            yield

    def change(self, answer: Any) -> Any:
        return answer


@dataclass(frozen=True, kw_only=True)
class Scale(InForward):
    """Makes the answer larger by so many thousandths."""

    name = "scale"
    by: float = 0.0

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("scale", value),) for value in ("1", "2000"))

    def change(self, answer: Any) -> Any:
        return answer * (1 + self.by / 1000)


@dataclass(frozen=True, kw_only=True)
class Shift(InForward):
    """Adds so many thousandths; has one setting that is refused, and one with a doubt."""

    name = "shift"
    by: float = 0.0

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("shift", value),) for value in ("2", "13", "7"))

    def lacks(self, case: Any) -> str | None:
        return "thirteen is not to be had here" if self.by == 13 else None

    def doubt(self, case: Any) -> str | None:
        return "seven is doubtful" if self.by == 7 else None

    def change(self, answer: Any) -> Any:
        return answer + self.by / 1000


@dataclass(frozen=True, kw_only=True)
class Sleepy(InForward):
    name = "sleepy"
    seconds: ClassVar[float] = 1.0
    by: float = 0.0

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return (((cls.name, "1"),),)

    def change(self, answer: Any) -> Any:
        time.sleep(self.seconds)
        return answer


@dataclass(frozen=True, kw_only=True)
class Drowsy(Sleepy):
    """A film takes longer than what lies between two cancels."""

    name = "drowsy"
    seconds: ClassVar[float] = 0.2


Order = Callable[..., None]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    def install(*levers: type[Lever]) -> None:
        for module in ("planner", "levers", "rounding", "fidelity", "sweep", "tune"):
            monkeypatch.setattr(f"undercrank.{module}.ORDER", levers)

    return install


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_folder("wan2.1-1.3b", tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


NEAR = Goal(metric="psnr_db", budget=40.0)


def tuned(engine: Engine, folder: Path, goal: Goal = NEAR, **more: Any) -> Tuning:
    engine.ledger = read_ledger()
    given: dict[str, Any] = {"prompts": ("a ball",), "seconds": 600.0} | more
    return tune(engine, Request(model=str(folder), **ASKED), goal, **given)


def own_rows() -> list[Any]:
    return [row for row in read_ledger().rows if row.source == "measured here"]


# --------------------------------------------------------------------------- goals


def a_try(label: str, speed: float, **distances: float) -> Tried:
    return Tried(label=label, wishes=(("scale", label),), speed=speed, distances=distances)


TRIED = [
    a_try("a", 1.0, lpips=0.0),
    a_try("b", 1.5, lpips=0.04),
    a_try("c", 2.0, lpips=0.06),
    a_try("d", 2.4, lpips=0.3),
]


def best(goal: Goal) -> str | None:
    found = goal.best(TRIED)
    return found.label if found else None


def test_a_budget_chooses_the_fastest_within_it() -> None:
    assert [best(Goal(metric="lpips", budget=b)) for b in (0.0, 0.05, 0.06, 1.0)] == ["a", "b", "c", "d"]


def test_a_target_speed_chooses_the_nearest_that_is_fast_enough() -> None:
    assert [best(Goal(metric="lpips", speed=s)) for s in (1.2, 1.6, 2.3, 3.0)] == ["b", "c", "d", None]


def test_what_has_no_such_distance_is_never_chosen() -> None:
    assert Goal(metric="ssim", budget=0.5).best(TRIED) is None and Goal(metric="ssim", speed=1.2).best(TRIED) is None


def test_a_distance_that_is_nearer_when_higher_is_read_so() -> None:
    goal = Goal(metric="psnr_db", budget=40.0)
    assert goal.allows(45.0) and not goal.allows(35.0) and not goal.allows(None)


def test_without_a_goal_the_word_s_bound_is_one() -> None:
    assert Goal.of(None, None, None, Fidelity.QUALITY) == Goal(metric="st_lpips_alex", budget=0.01)
    assert Goal.of("lpips", None, None, Fidelity.FAST).budget == 0.40
    assert Goal.of(None, 0.05, None, Fidelity.QUALITY).budget == 0.05
    assert Goal.of(None, None, 2.0, Fidelity.QUALITY) == Goal(speed=2.0)


@pytest.mark.parametrize(
    ("metric", "budget", "speed", "word", "match"),
    [
        ("shine", None, None, "quality", "no metric 'shine'"),
        (None, 0.1, 2.0, "quality", "not both"),
        (None, None, 1.0, "quality", "a number above 1"),
        (None, None, float("nan"), "quality", "a number above 1"),
        (None, -1.0, None, "quality", "0 or more"),
        (None, float("nan"), None, "quality", "0 or more"),
        ("psnr_db", None, None, "quality", "no bound in psnr_db; give --budget"),
        (None, None, None, "exact", "no bound in st_lpips_alex"),
    ],
)
def test_a_goal_that_cannot_be_meant_is_refused(metric: Any, budget: Any, speed: Any, word: str, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        Goal.of(metric, budget, speed, Fidelity(word))


@pytest.mark.parametrize(
    ("before", "after", "claimed"), [(1.5, 1.2, 1.2), (0.8, 0.9, 0.9), (0.8, 1.5, 1.0), (1.5, 0.8, 1.0)]
)
def test_a_gain_is_what_both_orders_show(before: float, after: float, claimed: float) -> None:
    assert agreed(before, after) == claimed


# --------------------------------------------------------------------------- the walk


def test_each_setting_becomes_a_row_and_what_cannot_be_had_is_said(order: Order, engine: Engine, folder: Path) -> None:
    order(Scale, Shift)
    found = tuned(engine, folder)
    assert [each.label for each in found.tried][:3] == ["scale=1", "scale=2000", "shift=2"]
    rows = {(row.lever, row.setting): row for row in own_rows()}
    assert {("scale", "1"), ("scale", "2000"), ("shift", "2")} <= set(rows)
    near, far = rows["scale", "1"], rows["scale", "2000"]
    assert near.distances["psnr_db"] > far.distances["psnr_db"] and 0 < near.distances["one_forward"] < 0.01
    assert near.gain and near.floor and near.prompts == ("a ball",) and "stock before it" in near.note
    assert [line.split(":")[0] for line in found.left_out] == ["shift=13", "shift=7"]
    assert "thirteen" in found.left_out[0] and "seven is doubtful" in found.left_out[1]
    assert found.ended == "complete" and "stock" in found.front
    assert Tuning.from_json(found.to_json()) == found


def test_the_best_of_two_levers_are_measured_together(
    order: Order, engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(Scale, Shift)
    monkeypatch.setattr("undercrank.tune.agreed", lambda before, after: next(gains))
    gains = iter((1.3, 1.9, 1.2, 1.6))
    found = tuned(engine, folder)
    last = found.tried[-1]
    assert last.label == "scale=1, shift=2" and dict(last.wishes) == {"scale": "1", "shift": "2"}, "2000 is too far"
    row = own_rows()[-1]
    assert (row.lever, row.setting, row.gain) == (None, last.label, 1.6)
    assert found.chosen == last.label and found.wishes == last.wishes


def test_what_the_ledger_knows_is_not_measured_again(
    order: Order, engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(Scale)
    first, count = tuned(engine, folder), len(own_rows())
    made: list[Any] = []
    stock = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, *a, **k: made.append(a) or stock(self, *a, **k))
    second = tuned(engine, folder)
    assert not made and len(own_rows()) == count and all(each.was_known for each in second.tried)
    assert [(t.label, t.row, t.speed) for t in second.tried] == [(t.label, t.row, t.speed) for t in first.tried]
    others = ({"prompts": ("a box",)}, {"seeds": (2,)}, {"again": True})
    for other in others:
        made.clear()
        assert not any(each.was_known for each in tuned(engine, folder, **other).tried) and made
    request = Request(model=str(folder), guidance_scale=3.0, **ASKED)
    engine.ledger = read_ledger()
    assert not any(each.was_known for each in tune(engine, request, NEAR, prompts=("a ball",)).tried)


def ticking() -> Callable[[], float]:
    """A hundred seconds go by whenever somebody looks."""
    seconds = itertools.count(step=100)
    return lambda: float(next(seconds))


@pytest.mark.parametrize("seconds", [500, 900, 1200, 1500, 1900, 3000])
def test_nothing_is_begun_that_would_not_end_in_time(order: Order, engine: Engine, folder: Path, seconds: int) -> None:
    order(Scale, Shift)
    found = tuned(engine, folder, seconds=float(seconds), clock=ticking(), again=True)
    late = [line for line in found.left_out if "no time was left" in line]
    assert (found.ended == "time") is bool(late) and len(own_rows()) == len(found.tried)
    ended = found.seconds - 100 * (1 + len(late))  # a look for each that was not begun, and one at the end
    assert ended <= seconds and (found.tried or found.chosen == "stock")
    if seconds == 500:
        assert not found.tried
    if seconds == 3000:
        assert not late


def test_a_run_that_goes_beyond_the_time_is_stopped(order: Order, engine: Engine, folder: Path) -> None:
    order(Sleepy)
    found = tuned(engine, folder, seconds=4.0)
    assert found.ended == "time" and not found.tried and not own_rows() and found.chosen == "stock"
    order(Scale)
    assert tuned(engine, folder).ended == "complete", "the engine goes on"


def test_no_run_begins_once_the_time_is_up(
    order: Order, engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(Drowsy)
    begun: list[bool] = []
    stock, up = Engine.generate, threading.Event()

    def generate(self: Engine, *args: Any, **more: Any) -> Any:
        begun.append(up.is_set())
        return stock(self, *args, **more)

    def tell(words: str) -> None:  # between two runs, where a cancel stops nothing
        if words.startswith("drowsy=1: film"):
            up.wait(10)
            time.sleep(0.05)

    def cancel(self: Engine, reason: str = "cancelled") -> bool:
        up.set()
        return stop(self, reason)

    stop = Engine.cancel
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(Engine, "cancel", cancel)
    found = tuned(engine, folder, seconds=6.0, tell=tell, prompts=("a ball", "a box"))
    assert found.ended == "time" and not found.tried and not own_rows()
    assert sum(begun) <= 1, "one, which a cancel then ends"


def test_more_time_than_a_clock_can_hold_is_no_alarm(order: Order, engine: Engine, folder: Path) -> None:
    order(Scale)
    assert tuned(engine, folder, seconds=1e30).ended == "complete"


def test_levers_that_count_steps_are_on_in_stock_runs_as_they_are(engine: Engine, order: Order, folder: Path) -> None:
    from undercrank.levers.step_cache import StepCache

    order(Scale, StepCache)
    engine.ledger = read_ledger()
    request = Request(model=str(folder), wishes=(("transformer_cache_mask", "101"),), **ASKED)
    found = tune(engine, request, NEAR, prompts=("a ball",))
    assert [each.label for each in found.tried] == ["scale=1", "scale=2000"]


def test_an_interrupt_keeps_what_was_measured(order: Order, engine: Engine, folder: Path) -> None:
    order(Scale)

    def interrupt(words: str) -> None:
        if words.startswith("scale=2000: film"):
            raise KeyboardInterrupt

    found = tuned(engine, folder, tell=interrupt)
    assert found.ended == "cancelled" and [each.label for each in found.tried] == ["scale=1"]
    assert [row.setting for row in own_rows()] == ["1"]
    assert [each.was_known for each in tuned(engine, folder).tried] == [True, False]


def test_levers_of_the_request_are_on_in_every_run(order: Order, engine: Engine, folder: Path) -> None:
    order(Scale, Shift)
    engine.ledger = read_ledger()
    request = Request(model=str(folder), wishes=(("shift", "2"),), **ASKED)
    found = tune(engine, request, NEAR, prompts=("a ball",))
    assert {knob for each in found.tried for knob, _ in each.wishes} == {"scale"}
    assert all("with shift=2: " in row.note and row.lever == "scale" for row in own_rows())
    assert not any(each.was_known for each in tuned(engine, folder).tried), "alone it is another measurement"


def test_a_distance_that_cannot_be_had_is_told_with_the_remedy(
    order: Order, engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(Scale)

    def missing(device: str) -> Any:
        raise NotComputed("the package is not here: pip install 'undercrank[metrics]'")

    monkeypatch.setattr("undercrank.quality._st_lpips_net", missing)
    with pytest.raises(NotFound, match=r"ST-LPIPS .*pip install 'undercrank\[metrics\]'"):
        tuned(engine, folder, Goal(budget=0.05))


def test_no_time_is_refused(engine: Engine, folder: Path) -> None:
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(BadInput, match="a time above 0"):
            tuned(engine, folder, seconds=seconds)


# --------------------------------------------------------------------------- the command


def command(folder: Path, **more: Any) -> None:
    given: dict[str, Any] = dict(
        metric="psnr_db", budget=40.0, target_speedup=None, seconds=600.0, prompts=("a ball",), seeds=(1,), again=False,
        allow_pickle=False, local_files_only=True, as_json=False, on_cancellable=quietly,
    )  # fmt: skip
    run_tune(Request(model=str(folder), **ASKED), **given | more)


def quietly(cancel: Callable[[str], bool]) -> AbstractContextManager[None]:
    return nullcontext()


def test_the_command_prints_the_front_the_choice_and_what_each_word_is_now(
    order: Order, folder: Path, capsys: Any
) -> None:
    order(Scale)
    command(folder)
    said = capsys.readouterr().out
    for row in own_rows():
        assert row.id in said
    for words in ("scale=1", "scale=2000", "chosen: ", "--fidelity quality is now: ", "all settings are measured"):
        assert words in said


def test_the_command_gives_json(order: Order, folder: Path, capsys: Any) -> None:
    order(Scale)
    command(folder, as_json=True)
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert told["event"] == "done" and len(told["tuning"]["tried"]) == 2
    assert set(told["plans"]) == {"faithful", "quality", "balanced", "fast"}


def test_a_speed_that_nothing_reaches_is_an_error_after_all_was_told(order: Order, folder: Path, capsys: Any) -> None:
    order(Scale)
    with pytest.raises(RunFailed, match="nothing that was measured is 900x as fast: the fastest is"):
        command(folder, budget=None, target_speedup=900.0)
    assert "scale=2000" in capsys.readouterr().out


def test_a_cancelled_command_says_that_it_goes_on_from_there(
    order: Order, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(Scale)
    from undercrank import screen

    def say(words: str) -> None:
        if words.startswith("scale=2000: film"):
            raise KeyboardInterrupt

    monkeypatch.setattr(screen, "say", say)
    with pytest.raises(Cancelled, match="what was measured is kept"):
        command(folder)
    assert [row.setting for row in own_rows()] == ["1"]
