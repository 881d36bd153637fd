"""How long four blocks of HunyuanVideo-1.5's kind take to compile: dense, and with weights of fewer bits.

    python tools/gpu/compile_time.py                            # on a CUDA machine, at the model's own width
    python tools/gpu/compile_time.py --device cpu               # 512 wide
    python tools/gpu/compile_time.py --words int8               # another format, or several

Each compile is cold: a model of its own, an empty folder for what compilers keep. The order is A B B A for each word,
so that whoever comes later is not favoured. CPU seconds are those of this process and of the compilers that it waits
for (not of Triton's workers): on a busy machine they say more than seconds. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from undercrank import families
from undercrank.levers import formats
from undercrank.levers.compile import Compile
from undercrank.levers.formats import FORMATS, converted
from undercrank.levers.text_trim import TextTrim
from undercrank.machine import this_machine
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline

FAMILY = "hunyuanvideo-1.5-720p"
BLOCKS = 4
HEAD = 128
HEADS = {"cuda": 16, "cpu": 4}
"The model's own on a GPU; on a CPU the least that takes a format."


def main() -> None:
    options = _options()
    found = ratios(options.device, options.words, backend=options.backend)
    print(json.dumps(found | {"machine": this_machine().name, "torch": torch.__version__}))


def ratios(device: str, words: list[str], *, backend: str = "inductor", heads: int = 0) -> dict[str, Any]:
    """By word: seconds of dense and quantised blocks in the order of the runs, their ratio, graphs and kernels."""
    heads = heads or HEADS[device]
    _warm_up(device)
    found: dict[str, Any] = {"device": device, "blocks": BLOCKS, "width": heads * HEAD}
    for word in words:
        order = ("dense", word, word, "dense")
        runs = [compiled(each, device, heads, backend) | {"blocks": each} for each in order]
        found[word] = {
            "runs": runs,
            "ratio": _ratio(runs, word, "s"),
            "ratio_of_cpu_seconds": _ratio(runs, word, "cpu_s"),
        }
    return found


def _ratio(runs: list[dict[str, Any]], word: str, what: str) -> dict[str, Any]:
    """Quantised over dense: of each neighbouring pair, and of the medians."""
    dense, few = ([run[what] for run in runs if run["blocks"] == each] for each in ("dense", word))
    pairs = [round(b / a, 3) for a, b in zip(dense, few, strict=True)]
    return {"pairs": pairs, "of_medians": round(statistics.median(few) / statistics.median(dense), 3)}


def compiled(word: str, device: str, heads: int, backend: str = "inductor") -> dict[str, Any]:
    """Compile four blocks anew: seconds, graphs, kernels that were generated, layers in a format."""
    rig = four_blocks(word, device, heads)
    inputs = tiny_inputs(rig.pipe, steps=1)
    metrics.reset()
    with ExitStack() as stack:
        stack.enter_context(fresh_cache(delete=device == "cpu"))  # a kernel may be read again as long as it lives
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(rig.seams())
        stack.enter_context(TextTrim().engage(rig))
        stack.enter_context(Compile(backend=backend).engage(rig))
        stack.enter_context(rig.call())
        stack.enter_context(torch.no_grad())
        before = os.times()
        rig.pipe(**inputs)
        after = os.times()
    counted = rig.counters
    return {
        "s": round(counted["compile.ms"] / 1000, 2),
        "cpu_s": round(sum(after[:4]) - sum(before[:4]), 2),
        "graphs": counted["compile.graphs"],
        "ran_outside": counted["compile.calls"] - counted["compile.executed"],
        "kernels": metrics.generated_kernel_count,
        "layers": len(converted(rig.denoisers[0])),
    }


def four_blocks(word: str, device: str, heads: int) -> Rig:
    """The tiny pipeline of the family with four blocks of a real width, in bfloat16; `dense`: in no format."""
    pipe = tiny_pipeline(FAMILY)
    pipe.set_progress_bar_config(disable=True)
    sizes = {"num_layers": BLOCKS, "attention_head_dim": HEAD, "num_attention_heads": heads}
    sizes |= {"rope_axes_dim": (16, 56, 56)}
    torch.manual_seed(0)
    denoiser = type(pipe.transformer).from_config(dict(pipe.transformer.config) | sizes)
    pipe.register_modules(transformer=denoiser.eval().requires_grad_(False))
    pipe.to(device, torch.bfloat16)
    if word != "dense":
        with patch.multiple(formats, LEAST_FEATURES=dict.fromkeys(formats.LEAST_FEATURES, heads * HEAD)):
            formats.convert(pipe.transformer, "transformer", FORMATS["transformer", word], device=device)
    return Rig(pipe, families.family(FAMILY), device)


def _warm_up(device: str) -> None:
    """The first compile of a process also imports the compiler and starts its workers."""
    x = torch.randn(64, 64, device=device)
    torch.compile(lambda x: torch.nn.functional.layer_norm(x, (64,)).sin())(x)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(HEADS), default="cuda")
    parser.add_argument("--words", nargs="*", default=["fp8"], help="formats of a transformer")
    parser.add_argument("--backend", default="inductor")
    return parser.parse_args()


if __name__ == "__main__":
    main()
