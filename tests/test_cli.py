"""The command line as people use it, careless and hostile ones included."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from undercrank import cli
from undercrank.records import Device, Machine
from undercrank.video import probe, read_frames, read_recipe

SMALL = ["--size", "64x64", "--frames", "5", "--steps", "2"]
PROMPT = "a red ball rolls left"


@pytest.fixture
def undercrank(monkeypatch, capfd, tmp_path):
    """Run the command in this process and folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["undercrank", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capfd.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return run


def refused(result, code: int, *words: str) -> None:
    """One line on stderr with these words, the exit code, no traceback."""
    exit_code, out, err = result
    assert exit_code == code, err
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    for word in words:
        assert word in err, err


# --------------------------------------------------------------------------- a clip


def test_a_prompt_becomes_a_file_named_after_it(undercrank, tmp_path) -> None:
    code, out, err = undercrank("generate", PROMPT, *SMALL, "--seed", "3")
    file = Path(out.strip())
    assert code == 0 and file.name == "a-red-ball-rolls-left-3.mp4"
    info = probe(tmp_path / file)
    assert (info.width, info.height, info.num_frames, info.fps) == (64, 64, 5, 16)
    assert "flipbook knows" in err and "denoise" in err


def test_the_schedules_shift_is_in_the_recipe_and_repeats(undercrank) -> None:
    shifted = ("generate", PROMPT, *SMALL, "--seed", "3", "--flow-shift", "9", "-o", "one.mp4", "--quiet")
    assert undercrank(*shifted)[0] == 0
    assert "flow_shift: 9.0" in undercrank("show", "one.mp4")[1]
    code, _, err = undercrank("generate", "--from", "one.mp4", "-o", "two.mp4")
    assert code == 0 and "bit for bit" in err
    code, _, err = undercrank("generate", "--from", "one.mp4", "--flow-shift", "3", "-o", "three.mp4")
    assert code == 0 and "changed settings" in err


def test_a_second_guidance_needs_a_second_expert(undercrank) -> None:
    refused(undercrank("plan", PROMPT, "--guidance-2", "3"), 2, "no second expert")
    code, out, _ = undercrank("plan", PROMPT, "--model", "wan2.2-a14b", "--guidance-2", "3", "--json")
    assert code == 0 and '"guidance_scale_2": 3.0' in out


def test_the_recipe_inside_is_shown_and_repeats_the_same_frames(undercrank) -> None:
    assert undercrank("generate", PROMPT, *SMALL, "--seed", "3", "-o", "one.mp4", "--master", "one.mkv")[0] == 0
    code, out, _ = undercrank("show", "one.mp4")
    assert code == 0 and f"prompt: {PROMPT}" in out and "seed: 3" in out and "model_fingerprint" in out
    code, _, err = undercrank("generate", "--from", "one.mp4", "-o", "two.mp4")
    assert code == 0 and "the same frames as in the recipe, bit for bit" in err
    assert read_recipe("one.mp4")["frames_hash"] == read_recipe("two.mp4")["frames_hash"]
    assert undercrank("generate", "--from", "one.mkv", "-o", "three.mp4")[0] == 0
    code, _, err = undercrank("generate", "--from", "one.mp4", "--seed", "4", "-o", "four.mp4")
    assert code == 0 and "not the same frames" in err and "changed settings" in err
    assert read_recipe("four.mp4")["request"]["prompt"] == PROMPT
    assert (read_frames("one.mkv") == read_frames("one.mkv")).all()


def test_the_report_tells_the_whole_story(undercrank) -> None:
    assert undercrank("generate", PROMPT, *SMALL, "--seed", "3", "-o", "o.mp4", "--report", "o.json", "--quiet")[0] == 0
    report = json.loads(Path("o.json").read_text())
    assert report["trace"]["calls"] == {"cond": 2, "uncond": 2} and len(report["trace"]["step_ms"]) == 2
    assert set(report["trace"]["stage_s"]) == {"load", "text", "denoise", "decode", "encode"}
    assert report["plan"]["decisions"][0]["reason"] and report["frames_hash"] and report["trace"]["peak_bytes"] > 0


def test_json_lines_can_be_read_by_a_program(undercrank) -> None:
    code, out, err = undercrank("generate", PROMPT, *SMALL, "--seed", "3", "-o", "o.mp4", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == ""
    assert [e["event"] for e in events][0] == "plan" and events[-1]["event"] == "done" and events[-1]["file"] == "o.mp4"
    assert {e["stage"] for e in events if e["event"] == "progress"} == {"load", "text", "denoise", "decode", "encode"}


def test_quiet_is_quiet(undercrank) -> None:
    assert undercrank("generate", PROMPT, *SMALL, "--seed", "3", "-o", "o.mp4", "--quiet") == (0, "", "")


def test_the_next_plan_expects_what_the_last_run_took(undercrank) -> None:
    assert "unknown" in undercrank("plan", PROMPT, *SMALL)[1]
    assert undercrank("generate", PROMPT, *SMALL, "--quiet", "-o", "o.mp4")[0] == 0
    assert "measured here, same shape, n=1" in undercrank("plan", PROMPT, *SMALL)[1]


def test_an_empty_prompt_is_allowed_and_said(undercrank) -> None:
    code, out, err = undercrank("generate", "", *SMALL, "--seed", "3")
    assert code == 0 and "the prompt is empty" in err and Path(out.strip()).exists()


def test_a_long_prompt_is_cut_and_that_is_said(undercrank) -> None:
    code, _, err = undercrank("generate", "a red ball " * 4545, *SMALL, "--seed", "3", "-o", "o.mp4")
    assert code == 0 and "the model reads 64" in err


@pytest.mark.parametrize("prompt", ["一只红色的球" * 40, "a/b: c..", "🎈 ball \u202e", "-- --", "'; rm -rf /"])
def test_any_text_is_a_prompt_and_a_safe_file_name(undercrank, tmp_path, prompt: str) -> None:
    code, out, _ = undercrank("generate", *SMALL, "--seed", "1", "--", prompt)
    assert code == 0 and Path(out.strip()).resolve().parent == tmp_path
    assert read_recipe(out.strip())["request"]["prompt"] == prompt


# --------------------------------------------------------------------------- refusals, all before torch is needed

BAD_VALUES = [
    (["--size", "705x480"], "705x480", "704x480 or 720x480"),
    (["--size", "wide"], "WIDTHxHEIGHT"),
    (["--size", "0x64"], "0"),
    (["--frames", "6"], "5 or 9"),
    (["--frames", "-3"], "-3"),
    (["--steps", "0"], "from 1 to 1000"),
    (["--guidance", "nan"], "finite"),
    (["--guidance", "-1"], "0 to 100"),
    (["--guidance", "inf"], "finite"),
    (["--seed", "-1"], "seed -1"),
    (["--seed", str(2**70)], "seed"),
    (["--fps", "0"], "fps"),
    (["--fps", "fast"], "24000/1001"),
    (["--fidelity", "superb"], "faithful"),
    (["--lever", "host_synk=off"], "host_sync"),
    (["--lever", "host_sync"], "NAME=VALUE"),
    (["--lever", "host_sync=9"], "auto, on or off"),
    (["--model", "flipbok"], "flipbook"),
    (["--device", "cuda:9"], "this machine has"),
    (["--dtype", "int3"], "bfloat16"),
    (["--image", "nothing.png"], "takes no picture"),
    (["-o", "clip.gif"], ".mp4"),
    (["-o", "nowhere/clip.mp4"], "mkdir -p"),
    (["--report", "report.txt"], ".json"),
    (["--master", "master.mp4"], ".mkv"),
]


@pytest.mark.parametrize(("options", "words"), [(bad[0], bad[1:]) for bad in BAD_VALUES], ids=lambda v: " ".join(v))
def test_a_bad_value_is_refused_in_one_line(undercrank, monkeypatch, options, words) -> None:
    monkeypatch.setattr("undercrank.oneshot.screen.showing", lambda **_: pytest.fail("went on to load"))
    refused(undercrank("generate", PROMPT, *options), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["generate"], 2, "what shall the film show"),
        (["show", "nothing.mp4"], 5, "no file"),
        (["generate", "--from", "nothing.mp4"], 5, "no file"),
        (["generate", "x", "--model", "./nothing"], 5, "no folder"),
        (["generate", "x", "--model", "someone/some-model", "--local-files-only"], 5, "switched off"),
        (["generate", "x", "--model", "a b/c d!"], 2, "hub id"),
        (["generate", "x", "--model", "wan2.1-14b-480p-i2v"], 2, "--image"),
    ],
)
def test_what_is_missing_is_named(undercrank, arguments, code, word) -> None:
    refused(undercrank(*arguments), code, word)


def test_a_file_that_is_no_clip_has_no_recipe(undercrank, tmp_path) -> None:
    (tmp_path / "not.mp4").write_bytes(b"not a film")
    refused(undercrank("show", "not.mp4"), 2)
    refused(undercrank("generate", "--from", "not.mp4"), 2)


def test_an_output_that_is_a_folder_is_refused(undercrank, tmp_path) -> None:
    (tmp_path / "dir.mp4").mkdir()
    refused(undercrank("generate", PROMPT, "-o", "dir.mp4"), 2, "is a folder")


def test_too_big_for_this_machine_is_refused_with_what_would_fit(undercrank) -> None:
    refused(undercrank("generate", PROMPT, "--size", "8192x8192", "--frames", "9001"), 4, "needs about", "would fit")
    refused(undercrank("generate", PROMPT, "--model", "wan2.1-14b"), 4, "needs about")


def test_a_full_disk_is_a_failed_run(undercrank, monkeypatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    refused(undercrank("generate", PROMPT, "-o", "o.mp4"), 1, "disk is full")


def test_a_disk_that_fills_while_writing_is_a_failed_run_and_leaves_no_file(undercrank, tmp_path, monkeypatch) -> None:
    import errno

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "o.mp4")

    monkeypatch.setattr("undercrank.video.write_mp4", full)
    code, _, err = undercrank("generate", PROMPT, *SMALL, "-o", "o.mp4")
    assert code == 1 and "No space left" in err and list(tmp_path.glob("*.mp4")) == []


def test_debug_shows_the_traceback(undercrank) -> None:
    code, _, err = undercrank("generate", PROMPT, "--steps", "0", "--debug")
    assert code == 2 and "Traceback" in err


def test_errors_are_json_too_when_asked(undercrank) -> None:
    code, out, _ = undercrank("generate", PROMPT, "--steps", "0", "--json")
    assert code == 2 and json.loads(out)["field"] == "num_inference_steps"


# --------------------------------------------------------------------------- plan, models, levers, doctor


def test_plan_has_one_decision_and_reason_for_every_lever(undercrank) -> None:
    from undercrank.levers import ORDER

    code, out, _ = undercrank("plan", PROMPT, "--json")
    plan = json.loads(out)
    assert code == 0 and [d["lever"] for d in plan["decisions"]] == [lever.name for lever in ORDER]
    assert all(d["reason"] for d in plan["decisions"])


def test_plan_names_the_rows_behind_a_decision(undercrank, monkeypatch) -> None:
    rows = {d["lever"]: d["evidence"] for d in json.loads(undercrank("plan", PROMPT, "--json")[1])["decisions"]}
    assert rows["quantize"] and all(row.startswith("cpu-flipbook") for row in rows["quantize"])
    line = next(line for line in undercrank("plan", PROMPT)[1].splitlines() if line.startswith("  quantize:"))
    assert line.endswith(f"[{', '.join(rows['quantize'])}]")


@pytest.mark.parametrize("command", ["plan", "generate", "bench"])
@pytest.mark.parametrize(
    ("capability", "word", "line"),
    [
        ((10, 0), "nvfp4", 'needs the package torchao: pip install "torchao>=0.18,<0.19"'),
        ((9, 0), "mxfp8", "needs a GPU of capability 10.0 or later, which multiplies mxfp8: choose int8 here"),
        ((8, 0), "fp8", "needs a GPU of capability 8.9 or later, which multiplies float8: choose int8 here"),
    ],
)
def test_a_format_that_cannot_be_had_ends_with_3_and_the_line_to_type(
    undercrank, monkeypatch, command, capability, word, line
) -> None:
    gpu = Device(kind="cuda", name="a GPU", capability=capability, total_bytes=180 << 30, free_bytes=180 << 30)
    machine = Machine(name="m", devices=(gpu,), cpu_count=2)
    for module in ("machine", "oneshot"):
        monkeypatch.setattr(f"undercrank.{module}.this_machine", lambda: machine)
    option = "--b" if command == "bench" else "--lever"
    refused(undercrank(command, PROMPT, option, f"transformer_quant={word}"), 3, line)


def test_plan_in_words_names_time_and_memory(undercrank) -> None:
    code, out, _ = undercrank("plan", PROMPT, "--model", "wan2.1-14b")
    assert code == 0 and "time:" in out and "memory: about" in out and "host_sync" in out


def test_models_levers_and_doctor_answer(undercrank) -> None:
    assert "hunyuanvideo-1.5-720p" in undercrank("models")[1]
    assert "Promises: EXACT" in undercrank("levers")[1]
    code, out, _ = undercrank("doctor")
    assert code in (0, 5) and "torch" in out and "h264" in out
    assert json.loads(undercrank("doctor", "--json")[1])["findings"]


# --------------------------------------------------------------------------- signals


def started(tmp_path: Path, *more: str) -> subprocess.Popen:
    """A long run in a process of its own, at its fifth step. It heeds Ctrl-C, also where the tests run under nohup."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; import sys; from undercrank.cli import console; sys.argv[0] = 'undercrank'; console()"
    arguments = ["generate", PROMPT, "--size", "64x64", "--frames", "5", "--steps", "1000", "--json", "-o", "o.mp4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments, *more], cwd=tmp_path, **pipes)
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "progress" and event["stage"] == "denoise" and event["done"] >= 5:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_within_a_step_with_130_and_leaves_no_file(tmp_path, number) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["code"] == "cancelled"
    assert list(tmp_path.glob("**/*.mp4")) == []


def test_a_kill_leaves_no_half_file_under_the_final_name(tmp_path) -> None:
    process = started(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "o.mp4").exists()


def test_a_kill_while_encoding_leaves_no_half_file_under_the_final_name(tmp_path) -> None:
    code = (
        "import numpy as np, sys, time\nfrom undercrank.video import write_mp4\n"
        "def slow(n):\n    print(n, flush=True); time.sleep(0.2)\n"
        "write_mp4('o.mp4', np.zeros((50, 64, 64, 3), np.uint8), fps=16, recipe={}, on_frame=slow)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "1"
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "o.mp4").exists()


# --------------------------------------------------------------------------- bench


def test_bench_compares_two_sides_and_keeps_the_row_when_asked(undercrank) -> None:
    sides = ["--a", "host_sync=off", "--b", "host_sync=on", "--pairs", "1"]
    code, out, _ = undercrank("bench", PROMPT, *SMALL, *sides, "--keep")
    assert code == 0 and "the same frames, bit for bit" in out and "run 2 B" in out
    row = json.loads(Path(os.environ["UNDERCRANK_LEDGER"]).read_text())
    assert row["lever"] == "host_sync" and row["gain"] > 0 and row["distances"]["max_abs"] == 0
    assert row["id"] in undercrank("plan", PROMPT, *SMALL, "--json")[1] or row["device"]


def test_bench_names_two_plans(undercrank) -> None:
    sides = ["--a", "fidelity=faithful", "--b", "fidelity=quality,transformer_cache_quality=balanced"]
    code, out, _ = undercrank("bench", PROMPT, *SMALL, *sides, "--pairs", "1", "--quick", "--json")
    found = json.loads(out)["comparison"]
    assert code == 0 and found["a"] == "every lever auto (fidelity faithful)"
    assert found["b"] == "transformer_cache_quality=balanced (fidelity quality)"
    refused(undercrank("bench", PROMPT, "--a", "fidelity=fine"), 2, "choose exact, faithful")


def test_bench_refuses_a_companion_that_cannot_be_had_with_those_that_can(undercrank) -> None:
    parts = "transformer_quant=nvfp4,vae_quant=fp8"
    refused(undercrank("bench", PROMPT, "--companions", "--b", parts), 3, "nvfp4", "can be had: vae_quant")
    refused(undercrank("bench", PROMPT, "--companions", "--sweep", "host_sync"), 2, "--companions")


def test_bench_takes_a_denied_setting_where_that_is_allowed(undercrank) -> None:
    row = {
        "id": "no", "family": "flipbook", "lever": "quantize", "setting": "transformer=int8", "source": "measured",
        "machine": "m", "device": "d", "versions": {}, "width": 64, "height": 64, "num_frames": 5,
        "num_inference_steps": 4, "dtype": "float32", "n": 1, "verdict": "denied",
    }  # fmt: skip
    Path(os.environ["UNDERCRANK_LEDGER"]).write_text(json.dumps(row) + "\n")
    asked = ["bench", PROMPT, *SMALL, "--b", "transformer_quant=int8", "--pairs", "1", "--quick"]
    refused(undercrank(*asked), 3, "denied by what was measured", "--allow-denied")
    code, out, _ = undercrank(*asked, "--allow-denied")
    assert code == 0 and "run 2 B" in out


def test_bench_refuses_what_plan_refuses(undercrank) -> None:
    refused(undercrank("bench", PROMPT, "--a", "host_synk=off"), 2, "host_sync")


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "undercrank", "levers"], capture_output=True, text=True, check=True)
    assert "host_sync" in done.stdout
