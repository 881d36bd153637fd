"""The levers, first entered to last. One file each; the core never names one of them.

Each entry's comment says why it stands where it stands: ORDER is the only place where levers meet.
"""

from __future__ import annotations

from undercrank.levers.attention import Attention
from undercrank.levers.cfg_parallel import CfgParallel
from undercrank.levers.compile import Compile
from undercrank.levers.cuda_graph import CudaGraph
from undercrank.levers.decode import Decode
from undercrank.levers.host_sync import HostSync
from undercrank.levers.offload import Offload
from undercrank.levers.prompt_cache import PromptCache
from undercrank.levers.quantize import Quantize
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.records import BadInput, Lever

ORDER: tuple[type[Lever], ...] = (
    Quantize,  # at load, before weights are placed: whatever moves, reads or compiles them finds them as they are
    Decode,  # of the VAE alone, whose formats are known; before what asks whether everything fits, which it decides
    PromptCache,  # of the text encoders alone; like the one above
    Offload,  # after the formats, whose bytes it moves; its hooks are the innermost: what comes next wraps them
    CfgParallel,  # copies denoisers that nothing has touched, so that all others engage on both; it routes where a
    # denoiser is called, which is above all that they change in its forward and its blocks
    TextTrim,  # decides how many tokens there are: whatever chooses, captures or compiles by shape comes after it
    Attention,  # after the trimming, which knows processors by their class and takes masks away; before compiled code
    StepCache,  # after what changes a block's inputs, whose residuals it keeps; before what compiles or captures blocks
    Compile,  # after what changes the blocks or their inputs: it compiles what it finds
    CudaGraph,  # after what changes the model's code: it records what it finds, compiled blocks too
    HostSync,  # around all of them: the denoiser is given plain tensors, and the loop outside never waits
)


def lever_of_knob(knob: str) -> type[Lever] | None:
    """The lever that a request's knob speaks of."""
    return next((lever for lever in ORDER if knob in (lever.knobs or (lever.name,))), None)


def group_of(knob: str) -> str:
    """What cannot be had twice: the lever of a knob, or the knob itself where each speaks of a thing of its own."""
    lever = lever_of_knob(knob)
    if lever is None:
        raise BadInput(f"no lever has a knob {knob!r}: see undercrank levers", field=knob)
    return knob if lever.apart else lever.name


def knobs() -> tuple[str, ...]:
    """Every knob that a request may name in this version."""
    return tuple(knob for lever in ORDER for knob in (lever.knobs or (lever.name,)))
