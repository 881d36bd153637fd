"""`with load(spec, family) as loaded`: a pipeline's components in their dtype on their device; nothing stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from undercrank.levers.formats import convert, form_of
from undercrank.records import BadInput, Family, LoadSpec
from undercrank.rig import Rig
from undercrank.sources import (
    LIBRARIES,
    bytes_of,
    check_files,
    components,
    fingerprint,
    locate,
    read_index,
    weighted,
)
from undercrank.trace import Event, Listener, ignore
from undercrank.undo import swap_attr

OWN_DTYPE = {"AutoencoderKLWan": "float32"}
"Components whose model cards ask for another precision than the pipeline's (Wan: VAE in float32)."


_LOADING = threading.Lock()
"transformers and diffusers build models under process-wide switches (meta device, default dtype): one load at a time."

PATIENCE_S = 0.2
"How often a load that waits for its turn asks whether it is still wanted."

Check = Callable[[], None]
"Raises Cancelled where a load is not wanted any more."


@dataclass(frozen=True, kw_only=True)
class Loaded:
    rig: Rig
    fingerprint: str
    load_s: float
    load_bytes: int


@contextmanager
def load(
    spec: LoadSpec,
    family: Family,
    *,
    listener: Listener = ignore,
    check_cancelled: Check = lambda: None,
) -> Iterator[Loaded]:
    """Read the weights, yield the rig, free everything on leaving, also when reading fails half-way.

    `check_cancelled` is asked while the load waits for its turn and then between two tensors: what it raises leaves
    nothing behind. Raises NotFound (nothing there), BadInput (pickles, foreign code, a broken folder),
    LeverRefused (weights that cannot be kept in the format asked for).
    """
    folder = locate(spec)
    index = read_index(folder)
    check_files(folder, index, allow_pickle=spec.allow_pickle)
    begun = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(_free_device_memory, spec.device)
        with _my_turn(check_cancelled), _quiet_bars(), _no_readers_left(), _Asking(check_cancelled):
            parts = _load_parts(folder, index, spec, family, listener, check_cancelled)
            pipe = _assemble(folder, index, parts, spec, check_cancelled)
        total = sum(bytes_of(folder / name, spec.allow_pickle) for name in parts)
        parts.clear()
        try:
            yield Loaded(
                rig=Rig(pipe, family, spec.device),
                fingerprint=fingerprint(folder),
                load_s=time.perf_counter() - begun,
                load_bytes=total,
            )
        finally:
            del pipe


@contextmanager
def _my_turn(check_cancelled: Check) -> Iterator[None]:
    while not _LOADING.acquire(timeout=PATIENCE_S):
        check_cancelled()
    try:
        yield
    finally:
        _LOADING.release()


@contextmanager
def _no_readers_left() -> Iterator[None]:
    """transformers reads with a pool of threads that it does not wait for, and forgets where it fails early."""
    pools: list[ThreadPoolExecutor] = []

    def pool(*args: Any, **kwargs: Any) -> ThreadPoolExecutor:
        pools.append(ThreadPoolExecutor(*args, **kwargs))
        return pools[-1]

    reading = import_module("transformers.core_model_loading")
    with swap_attr(reading, "ThreadPoolExecutor", pool):
        try:
            yield
        finally:
            for each in pools:  # each thread ends with the tensor that it is at
                each.shutdown(wait=True, cancel_futures=True)


class _Asking(TorchFunctionMode):
    """Asks before each torch function of this thread: the libraries read and place weights tensor by tensor."""

    def __init__(self, check_cancelled: Check) -> None:
        super().__init__()
        self._check = check_cancelled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "__name__", "").lstrip("_").startswith("set_"):
            self._check()  # not before a switch: the blocks that are left on the way out put theirs back
        return func(*args, **(kwargs or {}))


def _load_parts(
    folder: Path,
    index: dict[str, Any],
    spec: LoadSpec,
    family: Family,
    listener: Listener,
    check_cancelled: Check,
) -> dict[str, Any]:
    names = weighted(folder, index)
    sizes = {name: bytes_of(folder / name, spec.allow_pickle) for name in names}
    total, done, parts = sum(sizes.values()), 0, {}
    listener(Event(stage="load", done=0, total=total, unit="bytes"))
    for name in names:
        check_cancelled()
        parts[name] = _load_part(folder / name, components(index)[name], spec, family, check_cancelled)
        done += sizes[name]
        listener(Event(stage="load", done=done, total=total, unit="bytes"))
    check_cancelled()
    return parts


def _load_part(
    folder: Path, entry: list[Any], spec: LoadSpec, family: Family, check_cancelled: Check = lambda: None
) -> Any:
    library, class_name = entry
    cls = getattr(import_module(library), class_name, None)
    if cls is None:
        raise BadInput(f"{folder.name}: this {library} has no class {class_name}; is it too old?", field="model")
    dtype = getattr(torch, OWN_DTYPE.get(class_name, spec.dtype))
    key = "dtype" if library == "transformers" else "torch_dtype"
    options: dict[str, Any] = {
        key: dtype,
        "local_files_only": True,
        "use_safetensors": None if spec.allow_pickle else True,
    }
    with _read_errors(folder, check_cancelled):
        part = cls.from_pretrained(str(folder), **options)
    part = part.eval().requires_grad_(False)
    home = spec.device if spec.resident else "cpu"
    if form := form_of(folder.name, spec):
        convert(part, folder.name, form, device=home, narrow="narrow" in family.traits)
    return part.to(home)


def _assemble(
    folder: Path, index: dict[str, Any], parts: dict[str, Any], spec: LoadSpec, check_cancelled: Check
) -> Any:
    import diffusers

    cls = getattr(diffusers, index["_class_name"], None)
    if cls is None:
        raise BadInput(f"this diffusers has no {index['_class_name']}; is it too old?", field="model")
    with _read_errors(folder, check_cancelled):
        pipe = cls.from_pretrained(str(folder), **parts, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _read_errors(folder: Path, check_cancelled: Check = lambda: None) -> Iterator[None]:
    """What the libraries raise over a broken or foreign file, as one line that names the folder.

    They may have made such an error out of our own Cancelled: then it is that again.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        check_cancelled()
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{folder}: cannot be read: {first}", field="model") from error


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """The libraries' own loading bars stand aside for ours."""
    with ExitStack() as stack:
        for library in LIBRARIES:
            logging = import_module(f"{library}.utils.logging")
            if hasattr(logging, "_tqdm_active"):
                stack.enter_context(swap_attr(logging, "_tqdm_active", False))
        yield


def _free_device_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
