"""cuda_graph: a forward is one launch instead of thousands.

Does: the whole forward of each denoiser is recorded as a CUDA graph, once for each kind of call (shapes, dtypes,
strides, host values, branch, program), and replayed from then on. A kind of call runs as it is the first time, is
recorded the second time, and is replayed from the second time on. Arguments are copied into buffers of the graph's
own and results out of them, so that nothing a caller holds is overwritten.

Promises: EXACT. The same kernels run on the same values in the same order.

Costs: memory for the buffers and for one forward's intermediate values, which other code cannot use while the lever is
on; it is in the receipt. The first two calls of each kind are slower. It gains where the host is slower than the
device: small models, small clips, busy hosts. Models that select tokens by the prompt's mask are recorded anew for
each clip, and need host_sync.

Measured: on one H200, levers kept on, loops of 20 steps (n = 4), over `host_sync` alone: Wan 2.1 1.3B at 416x240, 17
frames, 46.1 ms a step became 20.7 ms, of compiled blocks 24.1 and 13.8 ms; LTX-Video at 384x256, 25 frames, 47.7 and
8.1 ms, of compiled blocks 22.5 and 4.8 ms. Recording takes 0.5 s. CogVideoX-2b at full size gains nothing. Latents
equal. Spread: docs/evidence.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercrank.records import BadInput, Case, Lever, LeverRefused, Needs, Promise, Trace
from undercrank.undo import appended, swap_attr, swap_class

if TYPE_CHECKING:
    from undercrank.rig import Rig

RECORDERS = ("cuda", "tape")
"What may record a forward: CUDA, or for tests without a GPU a tape of operations."

MOST = 8
"Graphs kept of one denoiser: two branches, two programs, two sizes."

DECLINED = "cuda_graph.declined: "
"Counters of calls that ran as they are begin with this; the reason follows."


@dataclass(frozen=True, kw_only=True)
class CudaGraph(Lever):
    name = "cuda_graph"
    summary = "a forward of the denoiser is one launch instead of thousands"
    needs = Needs(capability=(7, 0))
    only_measured = True
    only_when_small = True
    seals = True

    recorder: str = "cuda"
    "For tests: `tape` records and replays operations on any device, and gains nothing."

    def __post_init__(self) -> None:
        if self.recorder not in RECORDERS:
            raise BadInput(f"recorder={self.recorder}: choose {', '.join(RECORDERS)}", field="cuda_graph")

    def promises(self, case: Case) -> Promise:
        return Promise.EXACT

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _recorded_forwards(rig, self)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        seen = rig.counters
        calls, replays, firsts = (seen.get(f"cuda_graph.{what}", 0) for what in ("calls", "replays", "firsts"))
        if not calls:
            return ["no forward came past it: no effect"]
        complaints = [
            f"{count} of {calls} forwards ran as they are: {what.removeprefix(DECLINED)}"
            for what, count in seen.items()
            if what.startswith(DECLINED)
        ]
        if firsts > MOST:
            complaints.append(f"arguments change too often: {firsts} of {calls} forwards were the first of their kind")
        elif firsts and not replays:
            complaints.append("no kind of call came a second time: no effect")
        if dropped := seen.get("cuda_graph.dropped"):
            complaints.append(f"{dropped} graphs were thrown away for newer ones: a denoiser keeps {MOST}")
        return complaints


@contextmanager
def _recorded_forwards(rig: Rig, lever: CudaGraph) -> Iterator[None]:
    """On: each denoiser is of a subclass whose forward is recorded and replayed. Off: no graph is left.

    The class's own forward and not the instance's: what others put on the instance (trimmed texts, a step cache)
    stays outside of the recording and sees every call.
    """
    if lever.recorder == "cuda" and not rig.device.startswith("cuda"):
        raise LeverRefused(f"cuda_graph: needs CUDA, and {rig.device} has none: leave it out with cuda_graph=off")
    for denoiser in rig.denoisers:
        _check_whole(denoiser)
    from undercrank.levers import graphs  # needs torch

    with ExitStack() as stack:
        recorder = stack.enter_context(graphs.recorder(lever.recorder, rig.device))
        everything = []
        for denoiser in rig.denoisers:
            kept = graphs.Graphs(rig, denoiser, recorder, most=MOST, declined=DECLINED)
            stack.callback(kept.clear)
            stack.enter_context(swap_class(denoiser, graphs.recorded(type(denoiser), kept)))
            for block, call in graphs.compiled_blocks(denoiser):
                stack.enter_context(swap_attr(block, "_compiled_call_impl", call))
            stack.enter_context(appended(rig.at_start, kept.begin))
            stack.enter_context(appended(rig.at_end, kept.end))
            everything.append(kept)
        # The last one is called first: what is held is told before models that are bound to a prompt let go of it.
        stack.enter_context(appended(rig.at_end, lambda error: _tell(rig, recorder, everything)))
        yield


def _tell(rig: Rig, recorder: Any, everything: list[Any]) -> None:
    rig.count("cuda_graph.bytes", recorder.pool_bytes() + sum(kept.buffer_bytes for kept in everything))


def _check_whole(denoiser: Any) -> None:
    title = type(denoiser).__name__
    if "_orig_mod" in denoiser._modules or denoiser._compiled_call_impl is not None:
        raise LeverRefused(f"cuda_graph: {title} is compiled as a whole; leave one of the two out")
    if denoiser.training:
        raise LeverRefused(f"cuda_graph: {title} is in training mode, which draws at random: call its eval() first")
