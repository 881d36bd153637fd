"""`with load(spec, family) as loaded`: a pipeline's components in their dtype on their device; nothing stays."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from undercrank.levers.formats import convert, form_of
from undercrank.records import BadInput, Family, Loading, LoadSpec
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

PIECE_BYTES = 16 * 2**20
"Read between two questions whether the load is still wanted: a second on a disk that reads 16 MB/s."

PAGE_BYTES = 4096

TELL_S = 0.1
"Between two words about bytes."

Check = Callable[[], None]
"Raises Cancelled where a load is not wanted any more."


@dataclass(frozen=True, kw_only=True)
class Loaded:
    rig: Rig
    fingerprint: str
    load_s: float
    load_bytes: int


class Watch:
    """One load as it goes: how far it is, who is told, and whether it is still wanted.

    Bytes are counted in any thread; told is in the thread that loads.
    """

    def __init__(self, listener: Listener = ignore, check: Check = lambda: None) -> None:
        self.check = check
        self._listener = listener
        self._at = Loading(state="queued")
        self._most = 0
        "What `bytes_done` may reach in this state."
        self._read = self._to_read = 0
        "Bytes of the weight files of the components so far, and of all."
        self._counting = threading.Lock()
        self._told_at = 0.0

    def queued(self) -> None:
        self._enter(Loading(state="queued"), most=0)

    def downloaded(self, done: int, total: int) -> None:
        self._at = Loading(state="reading", component="download", bytes_done=done, bytes_total=total)
        self.ask()

    def begins(self, total: int) -> None:
        """Weights are read from now on: so many bytes lie in their files."""
        self._to_read = total
        self._enter(Loading(state="reading", bytes_total=total), most=0)

    @contextmanager
    def reading(self, component: str, size: int) -> Iterator[None]:
        """size: bytes of its weight files."""
        at = Loading(state="reading", component=component, bytes_done=self._read, bytes_total=self._to_read)
        self._enter(at, most=self._read + size)
        yield
        self._read += size
        self._enter(replace(at, bytes_done=self._read), most=self._read)

    def placing(self, component: str, total: int) -> None:
        """total: bytes that are to come to their place."""
        self._enter(Loading(state="placing", component=component, bytes_total=total), most=total)

    def moved(self, count: int) -> None:
        """So many more bytes were read, or are in their place. From any thread."""
        with self._counting:
            self._at = replace(self._at, bytes_done=min(self._most, self._at.bytes_done + count))

    def ask(self) -> None:
        """Is it still wanted? And a word about the bytes, now and then."""
        self.check()
        if time.monotonic() - self._told_at >= TELL_S:
            self._tell()

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which lies in a mapped file: read now, in pieces, and not when it is first used."""
        if tensor.nbytes < PAGE_BYTES:
            self.check()
            self.moved(tensor.nbytes)
            return tensor
        for piece in tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            self.check()
            piece[::PAGE_BYTES].sum()
            self.moved(piece.numel())
        return tensor

    def _enter(self, at: Loading, *, most: int) -> None:
        self._at, self._most = at, most
        self._tell()
        self.check()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        at = self._at
        done, total = (at.bytes_done, at.bytes_total) if at.state == "reading" else (self._read, self._to_read)
        self._listener(Event(stage="load", done=done, total=total, unit="bytes", loading=at))


@contextmanager
def load(
    spec: LoadSpec,
    family: Family,
    *,
    listener: Listener = ignore,
    check_cancelled: Check = lambda: None,
    make_room: Callable[[], None] = lambda: None,
) -> Iterator[Loaded]:
    """Read the weights, yield the rig, free everything on leaving, also when reading fails half-way.

    `check_cancelled` is asked while the load waits for its turn, between two tensors, and within large ones every
    16 MiB that are read: what it raises leaves nothing behind. `make_room` is called once all is known that can be
    known without weights, just before the first is read. Tells the states queued, reading and placing; components
    take turns in the last two, so that the host never holds more than one that is not in its place yet.

    Raises NotFound (nothing there), BadInput (pickles, foreign code, a broken folder),
    LeverRefused (weights that cannot be kept in the format asked for).
    """
    watch = Watch(listener, check_cancelled)
    watch.queued()
    folder = locate(spec, watch.downloaded)
    index = read_index(folder)
    check_files(folder, index, allow_pickle=spec.allow_pickle)
    sizes = {name: bytes_of(folder / name, spec.allow_pickle) for name in weighted(folder, index)}
    begun = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(free_device_memory, spec.device)
        with _my_turn(check_cancelled), forgetting_frames():
            check_cancelled()
            make_room()
            watch.begins(sum(sizes.values()))
            with _quiet_bars(), _no_readers_left(), _reading_piece_by_piece(folder, watch), asking(watch.ask):
                parts = _load_parts(folder, index, sizes, spec, family, watch)
                pipe = _assemble(folder, index, parts, spec, check_cancelled)
        parts.clear()
        try:
            yield Loaded(
                rig=Rig(pipe, family, spec.device),
                fingerprint=fingerprint(folder),
                load_s=time.perf_counter() - begun,
                load_bytes=sum(sizes.values()),
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
def forgetting_frames() -> Iterator[None]:
    """An error that leaves this block keeps its lines, and not the local variables of the frames that it went through:
    whoever holds the error would hold their tensors."""
    try:
        yield
    except BaseException as error:
        forget_frames(error)
        raise


def forget_frames(error: BaseException) -> None:
    seen: set[int] = set()
    others: list[BaseException | None] = [error]
    while others:
        each = others.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            others += [each.__cause__, each.__context__]


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
            for each in pools:  # each thread ends with the piece that it is at
                each.shutdown(wait=True, cancel_futures=True)


READERS = ("safetensors.torch", "transformers.modeling_utils")
"Modules that open safetensors files through a `safe_open` of their own."


@contextmanager
def _reading_piece_by_piece(folder: Path, watch: Watch) -> Iterator[None]:
    """The files of this folder are opened so that their bytes are counted and a cancel is heard between them."""
    with ExitStack() as stack:
        for name in READERS:
            module = import_module(name)
            stack.enter_context(swap_attr(module, "safe_open", _opener(module.safe_open, folder, watch)))
        yield


def _opener(original: Callable[..., Any], folder: Path, watch: Watch) -> Callable[..., Any]:
    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        file = original(filename, *args, **kwargs)
        return _Reader(file, watch) if Path(filename).is_relative_to(folder) else file  # others may read meanwhile

    return safe_open


class _Reader:
    """A safetensors file whose tensors are handed out read, one by one."""

    def __init__(self, file: Any, watch: Watch) -> None:
        self._file, self._watch = file, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Reader:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._watch.check()
        return self._watch.fetched(self._file.get_tensor(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 - a file, and no mapping

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._watch)


class _Slice:
    """A tensor that is read when it is indexed."""

    def __init__(self, part: Any, watch: Watch) -> None:
        self._part, self._watch = part, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._watch.check()
        return self._watch.fetched(self._part[index])


class asking(TorchFunctionMode):
    """Asks before each torch function of this thread: the libraries read and place weights tensor by tensor."""

    def __init__(self, ask: Check) -> None:
        super().__init__()
        self._ask = ask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "__name__", "").lstrip("_").startswith("set_"):
            self._ask()  # not before a switch: the blocks that are left on the way out put theirs back
        return func(*args, **(kwargs or {}))


def _load_parts(
    folder: Path, index: dict[str, Any], sizes: dict[str, int], spec: LoadSpec, family: Family, watch: Watch
) -> dict[str, Any]:
    """sizes: bytes of the weight files of each component that has any."""
    parts = {}
    for name, size in sizes.items():
        with watch.reading(name, size):
            parts[name] = _load_part(folder / name, components(index)[name], spec, watch)
        _place(parts[name], name, spec, family, watch)
    watch.check()
    return parts


def _load_part(folder: Path, entry: list[Any], spec: LoadSpec, watch: Watch) -> Any:
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
    with _read_errors(folder, watch.check):
        part = cls.from_pretrained(str(folder), **options)
    return part.eval().requires_grad_(False)


def _place(part: Any, name: str, spec: LoadSpec, family: Family, watch: Watch) -> None:
    """Bring a component to where it is used, in the format asked for, tensor by tensor."""
    home = spec.device if spec.resident else "cpu"
    watch.placing(name, _bytes_in(part))
    if form := form_of(name, spec):
        convert(part, name, form, device=home, narrow="narrow" in family.traits)
        watch.placing(name, _bytes_in(part))

    counted: set[int] = set()

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(home)
        if id(tensor) not in counted:
            counted.add(id(tensor))
            watch.moved(there.nbytes)
        return there

    part._apply(placed)  # what `Module.to` does, with a word about each tensor


def _bytes_in(part: Any) -> int:
    """Weights and buffers, each once."""
    tables = [table for module in part.modules() for table in (module._parameters, module._buffers)]
    return sum(
        {id(tensor): tensor.nbytes for table in tables for tensor in table.values() if tensor is not None}.values()
    )


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


def free_device_memory(device: str) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
