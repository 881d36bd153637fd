"""bench --companions: each part of side B alone, then all; what cannot be had is refused with what can."""

from __future__ import annotations

from typing import Any

import pytest

from undercrank import companions
from undercrank.companions import ALL, COMPANIONS, configurations, to_be_had
from undercrank.levers import group_of
from undercrank.records import BadInput, Device, Fidelity, LeverRefused, Machine, Request

B = (("transformer_quant", "int8"), ("vae_quant", "fp8"), ("transformer_cache_quality", "fast"),
     ("transformer_cache_retention", "0.5"))  # fmt: skip


def asked(*wishes: tuple[str, str], **more: Any) -> Request:
    return Request(prompt="a ball", model="flipbook", seed=1, wishes=wishes, **more)


def on(request: Request) -> dict[str, str]:
    return {knob: value for knob, value in request.wishes if value != "off"}


def test_each_part_is_alone_and_all_are_together() -> None:
    stock, found = configurations(asked(), asked(*B, fidelity="quality"))
    assert list(found) == ["transformer_quant", "vae_quant", "step_cache", ALL]
    assert on(stock) == {} and on(found["transformer_quant"]) == {"transformer_quant": "int8"}
    assert on(found["step_cache"]) == {"transformer_cache_quality": "fast", "transformer_cache_retention": "0.5"}
    assert on(found[ALL]) == dict(B)
    assert found[ALL].fidelity is Fidelity.QUALITY and found["vae_quant"].fidelity is Fidelity.FAITHFUL


def test_a_part_that_is_alone_has_the_others_off() -> None:
    _, found = configurations(asked(), asked(*B))
    off = {knob for knob, value in found["vae_quant"].wishes if value == "off"}
    assert off == {"transformer_quant", "transformer_cache"}


def test_levers_of_side_a_are_on_in_every_configuration() -> None:
    stock, found = configurations(asked(("host_sync", "on"), ("vae_quant", "fp8")), asked(("vae_quant", "off"), *B[:1]))
    assert on(stock) == {"host_sync": "on", "vae_quant": "fp8"}
    assert on(found["transformer_quant"]) == on(stock) | {"transformer_quant": "int8"}
    assert on(found[ALL]) == {"host_sync": "on", "transformer_quant": "int8"}


def test_one_part_alone_is_all_there_is() -> None:
    assert list(configurations(asked(), asked(B[0]))[1]) == ["transformer_quant"]


def test_without_a_side_b_the_parts_are_the_usual_ones() -> None:
    _, found = configurations(asked(), asked())
    assert list(found) == [*(group_of(knob) for knob, _ in COMPANIONS), ALL]


def test_a_knob_that_no_lever_has_is_refused() -> None:
    with pytest.raises(BadInput, match="no lever has a knob 'shine'"):
        configurations(asked(), asked(("shine", "on")))


def test_a_part_that_cannot_be_had_is_refused_with_those_that_can() -> None:
    with pytest.raises(LeverRefused, match="nvfp4 needs a GPU.*; those that can be had: vae_quant") as refused:
        to_be_had(asked(), asked(("transformer_quant", "nvfp4"), ("vae_quant", "fp8")))
    assert refused.value.exit_code == 3
    with pytest.raises(LeverRefused, match="no part of side B can be had here"):
        to_be_had(asked(), asked(("transformer_quant", "nvfp4")))


def test_of_the_usual_parts_those_that_are_doubted_here_are_left_out_and_not_in_all() -> None:
    few = {"num_inference_steps": 6}
    stock, found, refused = to_be_had(asked(**few), asked(**few))
    assert list(found) == ["transformer_quant", "text_encoder_quant", "vae_quant", ALL]
    assert "6 steps are few" in refused["step_cache"] and "transformer_cache" not in str(found[ALL].wishes)
    assert "transformer_cache" not in str(stock.wishes)
    _, found, refused = to_be_had(asked(**few), asked(*B, **few))
    assert "step_cache" in found and not refused, "what is named is honoured"


def test_a_gpu_without_fp8_products_leaves_that_part_out(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Device(kind="cuda", name="an A100", capability=(8, 0), free_bytes=80 << 30)
    monkeypatch.setattr(companions, "this_machine", lambda: Machine(name="m", devices=(old,), cpu_count=1))
    _, found, refused = to_be_had(asked(), asked())
    assert "capability 8.9" in refused["transformer_quant"] and list(found)[0] == "text_encoder_quant"


def test_the_command_times_each_and_prints_one_table(capsys: Any, own_ledger: Any) -> None:
    from contextlib import nullcontext

    small: dict[str, Any] = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 2}
    companions.run_companions(
        asked(**small), asked(("transformer_quant", "int8"), ("vae_quant", "fp8"), **small), pairs=1, keep=True,
        look=False, allow_pickle=False, local_files_only=True, as_json=False,
        on_cancellable=lambda cancel: nullcontext(),
    )  # fmt: skip
    said = capsys.readouterr().out
    lines = [line.split()[0] for line in said[said.index("configuration") :].splitlines()]
    assert lines == ["configuration", "A", "transformer_quant", "vae_quant", ALL]
    assert own_ledger.read_text().count('"lever": "quantize"') == 3, "each is quantize and nothing else"
