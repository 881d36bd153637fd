"""Where a model's files are, what they are made of, and which weights they hold. No torch, no weight is read.

Safetensors only unless pickles are allowed by name; no code from a repository is ever run; offline, a missing
model is named together with the places where it was looked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from undercrank import families
from undercrank.fetching import Progress, fetch
from undercrank.planner import load_spec
from undercrank.records import BadInput, Family, LoadSpec, NotFound, Request
from undercrank.settings import settings

WEIGHTS = (".safetensors",)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_ID_CHARS = 512
LIBRARIES = ("diffusers", "transformers")
"The only packages whose classes a model_index.json may name: anything else would be code of the repository."


def which_model(
    request: Request,
    *,
    allow_pickle: bool = False,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> tuple[Family, LoadSpec]:
    """The family of the named model and where its weights come from: a family id, a hub id or a folder.

    progress: of a download, which what it raises ends; None: the hub's own bars.

    Raises BadInput with the nearest names, NotFound where a named folder or repository is missing.
    """
    if not isinstance(request.model, str) or not 0 < len(request.model) <= MAX_ID_CHARS:
        raise BadInput("model: name a family, a hub id or a folder", field="model")
    known = families.find(request.model)
    if known is not None:
        spec = load_spec(known)
    else:
        spec = LoadSpec(family="", source=request.model, dtype="float32", device="cpu")
    spec = replace(spec, allow_pickle=allow_pickle, local_files_only=local_files_only)
    if known is not None:
        return known, spec
    if not looks_like_folder(request.model) and "/" not in request.model:
        return families.family(request.model), spec  # raises, with the nearest names
    folder = locate(spec, progress)
    class_name = str(read_index(folder)["_class_name"])
    row = families.of_pipeline(class_name, request.model)
    if row is None:
        raise BadInput(f"{request.model}: {class_name} is no video pipeline that is known here", field="model")
    return row, replace(spec, family=row.id, parameters=count_parameters(folder))


# --------------------------------------------------------------------------- where the model is


def locate(spec: LoadSpec, progress: Progress | None = None) -> Path:
    """The folder that holds the model: in the package, on disk, in the hub's cache, or downloaded into it.

    progress: of a download, which what it raises ends within a second; None: the hub's own bars.
    """
    if spec.source.startswith("package:"):
        name = spec.source.removeprefix("package:")
        if not name.isidentifier():
            raise BadInput(f"{spec.source!r} names no model inside the package", field="model")
        return Path(str(resources.files("undercrank") / name))
    if looks_like_folder(spec.source):
        return _existing(_expanded(spec.source))
    return _from_hub(spec, progress)


def looks_like_folder(source: str) -> bool:
    """A path by its form, or an existing folder; anything else with one slash is a hub id."""
    if source.startswith((".", "/", "~")):
        return True
    return os.path.isdir(source)  # False, not an error, for what is no name of a file


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise NotFound(f"{source}: there is no such home folder") from error


def _existing(folder: Path) -> Path:
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as error:
        raise BadInput(f"model {str(folder)[:80]!r} is no name of a folder: {error}", field="model") from error
    if not there:
        raise NotFound(f"there is no folder {folder}")
    if not (folder / "model_index.json").is_file():
        raise BadInput(f"{folder} holds no model_index.json: it is no model in diffusers layout", field="model")
    return folder


def _from_hub(spec: LoadSpec, progress: Progress | None) -> Path:
    """The cached snapshot if complete; else a download, unless offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.model", "*.safetensors", *(["*.bin"] if spec.allow_pickle else [])]
    options: dict[str, Any] = {"revision": spec.revision, "allow_patterns": patterns}
    missing = "is not on this machine"
    try:
        folder = Path(snapshot_download(spec.source, local_files_only=True, **options))
        if (folder / "model_index.json").is_file():
            check_files(folder, read_index(folder), allow_pickle=spec.allow_pickle)
            return folder
        missing = "is only partly on this machine: model_index.json is missing"
    except HFValidationError as error:
        text = f"{spec.source[:80]!r} is neither a model of this version nor a hub id: {str(error)[:120]}"
        raise BadInput(text, field="model") from error
    except LocalEntryNotFoundError:
        pass
    except NotFound as error:  # a download that was interrupted: the rest of it is fetched below
        missing = f"is only partly on this machine: {error}"
    looked = f"looked in {settings().hub_cache}"
    if spec.local_files_only or settings().offline:
        raise NotFound(f"{spec.source} {missing} ({looked}) and the network is switched off")
    try:
        options["etag_timeout"] = 10
        if progress is not None:
            return _existing(fetch(spec.source, options, progress))
        return _existing(Path(snapshot_download(spec.source, **options)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"{spec.source} {missing} ({looked}) and could not be fetched: {reason}. "
            "Give a folder with --model FOLDER, or try again with a network"
        ) from error


# --------------------------------------------------------------------------- what it is made of


def read_index(folder: Path) -> dict[str, Any]:
    """model_index.json. Raises BadInput where it is broken or names code that is not of a known library."""
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{folder}: model_index.json cannot be read: {str(error)[:120]}", field="model") from error
    if not isinstance(index, dict) or not _is_class_name(index.get("_class_name")):
        raise BadInput(f"{folder}: model_index.json names no pipeline class", field="model")
    for name, entry in index.items():
        if isinstance(entry, list) and not name.startswith("_"):
            _check_entry(folder, name, entry)
    return index


def _check_entry(folder: Path, name: str, entry: list[Any]) -> None:
    """A component is a plain name with a class of a known library, or [null, null] for none."""
    if not name.isidentifier():
        raise BadInput(f"{folder}: {name!r} is no name of a component", field="model")
    if entry == [None, None] or (len(entry) == 2 and isinstance(entry[1], bool)):
        return
    if len(entry) != 2 or entry[0] not in LIBRARIES or not _is_class_name(entry[1]):
        came = f"comes from {entry[0]!r}" if entry else "is empty"
        raise BadInput(
            f"{folder}: component {name} {came}, and only plain classes of diffusers and transformers are read: "
            "code of the repository is refused",
            field="model",
        )
    if entry[1].startswith("Auto") and not entry[1].startswith("Autoencoder"):
        raise BadInput(f"{folder}: component {name} leaves its class open ({entry[1]}): refused", field="model")


def _is_class_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def components(index: dict[str, Any]) -> dict[str, list[Any]]:
    """Name -> [library, class] of each component; [None, None] where the pipeline does without."""
    return {
        name: entry
        for name, entry in index.items()
        if not name.startswith("_") and isinstance(entry, list) and len(entry) == 2 and not isinstance(entry[1], bool)
    }


def check_files(folder: Path, index: dict[str, Any], *, allow_pickle: bool) -> None:
    """Refuse pickles, which can run code when read, and components of which something is missing."""
    for name, entry in components(index).items():
        if entry[1] and not any((folder / name).glob("*config*.json")):
            raise NotFound(
                f"{folder / name} is missing or has no configuration: the download, or the folder, is incomplete"
            )
        if entry[1] and not (folder / name / "config.json").is_file() and _weight_files(folder / name):
            raise NotFound(f"{folder / name} has weights and no config.json: the folder is incomplete")
    for name in weighted(folder, index):
        _check_shards(folder / name)
        files = [file.suffix for file in (folder / name).iterdir()]
        if any(suffix in WEIGHTS for suffix in files):
            continue
        if not any(suffix in PICKLES for suffix in files):
            raise NotFound(f"{folder / name} holds no weights: the download is incomplete, or the folder is")
        if not allow_pickle:
            raise BadInput(
                f"{folder / name} holds only pickled weights, which can run code when read: convert them to "
                "safetensors, or allow them with --allow-pickle if you trust their source",
                field="model",
            )


def _weight_files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix in WEIGHTS + PICKLES]


def _check_shards(folder: Path) -> None:
    """Weights in several files are listed in an index: each of them must be there."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise BadInput(f"{index} cannot be read: {str(error)[:120]}", field="model") from error
        if missing := sorted(name for name in names if not (folder / str(name)).is_file()):
            raise NotFound(f"{folder} lacks {missing[0]} and {len(missing) - 1} more: the download is incomplete")


def weighted(folder: Path, index: dict[str, Any]) -> list[str]:
    """Components that are models: they have a config.json beside their weights; tokenizers and schedulers do not."""
    present = [name for name, entry in components(index).items() if entry[1] and (folder / name).is_dir()]
    return [name for name in present if (folder / name / "config.json").is_file()]


# --------------------------------------------------------------------------- which model it is

FULL_HASH_BYTES = 2**30
MAX_HEADER_BYTES = 100_000_000
"The format's own limit of a safetensors header."
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(folder: Path) -> str:
    """Which weights these are: sha256 over every weight file's name and contents.

    A file of the hub's cache is named by its own sha256, which is taken as its contents. Other files are read
    whole up to 1 GiB in all; beyond that, each by its size and its first and last MiB ("sampled:").
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix in WEIGHTS + PICKLES)
    whole = sum(file.stat().st_size for file in files) <= FULL_HASH_BYTES
    digest, sampled = hashlib.sha256(), False
    for file in files:
        digest.update(str(file.relative_to(folder)).encode())
        blob = file.resolve().name
        if _SHA256.fullmatch(blob):
            digest.update(bytes.fromhex(blob))
        elif whole:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        else:
            digest.update(_ends(file))
            sampled = True
    return ("sampled:" if sampled else "") + digest.hexdigest()


def _ends(file: Path, mib: int = 2**20) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as data:
        first = data.read(mib)
        data.seek(max(0, size - mib))
        return size.to_bytes(8, "big") + first + data.read(mib)


def count_parameters(folder: Path) -> int:
    """Weights in all safetensors files, from their headers alone; 0 where there are none.

    The header is a little-endian length and a JSON object of name -> {dtype, shape, data_offsets}.
    """
    total = 0
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as data:
            size = int.from_bytes(data.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise BadInput(f"{file}: is no safetensors file", field="model")
            try:
                header = json.loads(data.read(size))
                shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
                total += sum(math.prod(shape) for shape in shapes)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise BadInput(f"{file}: is no safetensors file", field="model") from error
    return total


def bytes_of(folder: Path, allow_pickle: bool) -> int:
    suffixes = WEIGHTS + PICKLES if allow_pickle else WEIGHTS
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in suffixes)
