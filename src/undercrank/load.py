"""`with load(spec, family) as loaded`: a pipeline's components in their dtype on their device; nothing stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

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
    check_cancelled: Callable[[], None] = lambda: None,
) -> Iterator[Loaded]:
    """Read the weights, yield the rig, free everything on leaving, also when reading fails half-way.

    Raises NotFound (nothing there), BadInput (pickles, foreign code, a broken folder).
    """
    folder = locate(spec)
    index = read_index(folder)
    check_files(folder, index, allow_pickle=spec.allow_pickle)
    begun = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(_free_device_memory, spec.device)
        with _LOADING, _quiet_bars():
            parts = _load_parts(folder, index, spec, listener, check_cancelled)
            pipe = _assemble(folder, index, parts, spec)
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


def _load_parts(
    folder: Path,
    index: dict[str, Any],
    spec: LoadSpec,
    listener: Listener,
    check_cancelled: Callable[[], None],
) -> dict[str, Any]:
    names = weighted(folder, index)
    sizes = {name: bytes_of(folder / name, spec.allow_pickle) for name in names}
    total, done, parts = sum(sizes.values()), 0, {}
    listener(Event(stage="load", done=0, total=total, unit="bytes"))
    for name in names:
        check_cancelled()
        parts[name] = _load_part(folder / name, components(index)[name], spec)
        done += sizes[name]
        listener(Event(stage="load", done=done, total=total, unit="bytes"))
    check_cancelled()
    return parts


def _load_part(folder: Path, entry: list[Any], spec: LoadSpec) -> Any:
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
    with _read_errors(folder):
        part = cls.from_pretrained(str(folder), **options)
    return part.eval().requires_grad_(False).to(spec.device)


def _assemble(folder: Path, index: dict[str, Any], parts: dict[str, Any], spec: LoadSpec) -> Any:
    import diffusers

    cls = getattr(diffusers, index["_class_name"], None)
    if cls is None:
        raise BadInput(f"this diffusers has no {index['_class_name']}; is it too old?", field="model")
    with _read_errors(folder):
        pipe = cls.from_pretrained(str(folder), **parts, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    """What the libraries raise over a broken or foreign file, as one line that names the folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
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
