"""`undercrank audit`: the published table to the line, and what careless words are answered."""

import json
import sys

import pytest

from undercrank import audit, cli
from undercrank.testing import tiny_classes


@pytest.fixture
def undercrank(monkeypatch, capsys):
    """Run the command in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["undercrank", "audit", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return run


def test_the_79_stalls_of_the_cogvideox_study_by_line(undercrank) -> None:
    code, out, _ = undercrank("CogVideoXPipeline", "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == ["pipeline", "scheduler", "steps", "in_loop", "per_step", "sites"]
    assert (found["pipeline"], found["scheduler"]) == ("CogVideoXPipeline", "CogVideoXDDIMScheduler")
    assert (found["steps"], found["in_loop"], found["per_step"]) == (20, 79, 3.95)
    assert found["sites"] == [
        {"file": f"diffusers/{file}", "line": line, "count": count, "cause": "scalar read"}
        for file, line, count in (
            ("schedulers/scheduling_ddim_cogvideox.py", 392, 39),
            ("pipelines/cogvideo/pipeline_cogvideox.py", 744, 20),
            ("schedulers/scheduling_ddim_cogvideox.py", 391, 20),
        )
    ]


def test_none_is_left_with_the_lever(undercrank) -> None:
    code, out, _ = undercrank("CogVideoXPipeline", "--lever", "host_sync=auto", "--json")
    assert code == 0 and json.loads(out)["in_loop"] == 0 and json.loads(out)["sites"] == []


def test_people_get_a_table_and_the_reason_of_each_lever(undercrank) -> None:
    code, out, _ = undercrank("LTXPipeline", "--steps", "3")
    assert code == 0 and "LTXPipeline, FlowMatchEulerDiscreteScheduler, 3 steps: 2 stalls in the loop" in out
    assert "scheduling_flow_match_euler_discrete.py:" in out
    code, out, _ = undercrank("LTXPipeline", "--steps", "3", "--lever", "host_sync=on")
    assert code == 0 and "nothing in the loop waits" in out and "host_sync: on - " in out


def test_another_scheduler_can_be_audited(undercrank) -> None:
    code, out, _ = undercrank("WanPipeline", "--steps", "4", "--scheduler", "FlowMatchHeunDiscreteScheduler", "--json")
    assert code == 0 and json.loads(out)["scheduler"] == "FlowMatchHeunDiscreteScheduler"


def test_everything_is_one_table(undercrank, monkeypatch) -> None:
    monkeypatch.setattr("undercrank.testing.tiny_classes", lambda: ["LTXPipeline"])
    monkeypatch.setattr("undercrank.levers.host_sync.LEFT", (("diffusers/some.py", 7, "noise of the host"),))
    code, out, _ = undercrank("--all", "--steps", "2")
    assert code == 0 and "LTXPipeline" in out and "diffusers/some.py:7" in out and "noise of the host" in out
    code, out, _ = undercrank("--all", "--steps", "2", "--json")
    found = json.loads(out)
    assert found["pipelines"][0]["in_loop"] == 2 and found["pipelines"][0]["host_sync"]["in_loop"] == 0
    assert found["left"] == [{"file": "diffusers/some.py", "line": 7, "reason": "noise of the host"}]


def test_every_family_is_in_the_list_of_everything() -> None:
    from undercrank.families import FAMILIES

    assert {row.pipeline for row in FAMILIES} <= set(tiny_classes())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["CogVideoXPipline"], 2, "nearest are CogVideoXPipeline"),
        (["cogvideox"], 2, "nearest are"),
        ([""], 2, "diffusers has no pipeline"),
        (["FluxPipeline"], 5, "no small config for its transformer (FluxTransformer2DModel)"),
        (["WanPipeline", "--scheduler", "DDIM"], 2, "nearest are DDIMScheduler"),
        (["WanPipeline", "--lever", "hostsync=on"], 2, "no lever 'hostsync'"),
        (["WanPipeline", "--lever", "host_sync"], 2, "NAME=VALUE"),
        (["WanPipeline", "--lever", "host_sync=on", "--lever", "host_sync=off"], 2, "given twice"),
        ([], 2, "Name a pipeline class"),
        (["WanPipeline", "--scheduler", "RePaintScheduler"], 1, "does not run"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(undercrank, words: list[str], code: int, said: str) -> None:
    exit_code, out, err = undercrank(*words)
    assert exit_code == code and said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err + out


def test_the_libraries_are_loud_again_afterwards() -> None:
    from diffusers.utils import logging

    before = logging.get_verbosity()
    with audit.quiet_libraries():
        assert logging.get_verbosity() == logging.ERROR
    assert logging.get_verbosity() == before
