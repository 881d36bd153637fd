"""Where a model is, what it is made of, which weights it holds: hostile and broken folders are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undercrank import families, sources
from undercrank.records import BadInput, LoadSpec, NotFound, Request
from undercrank.sources import (
    bytes_of,
    check_files,
    fingerprint,
    locate,
    looks_like_folder,
    read_index,
    weighted,
    which_model,
)

INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.42.1",
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "boundary_ratio": None,
    "expand_timesteps": False,
}
MODELS = ("transformer", "vae", "text_encoder")


def safetensors(*shape: int, filling: bytes = b"\0") -> bytes:
    """A file of the format with one tensor of bytes."""
    size = 1
    for side in shape:
        size *= side
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    )
    return struct.pack("<Q", len(header)) + header.encode() + filling * size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in diffusers layout, of a few bytes a component."""
    root = tmp_path / "model"
    for name in (*MODELS, "tokenizer", "scheduler"):
        (root / name).mkdir(parents=True)
    for name in MODELS:
        (root / name / "config.json").write_text("{}")
        (root / name / "model.safetensors").write_bytes(safetensors(2, 3))
    (root / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (root / "scheduler" / "scheduler_config.json").write_text("{}")
    write_index(root, INDEX)
    return root


def write_index(root: Path, index: Any) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (root / "model_index.json").write_text(text, encoding="utf-8")


def spec(source: str | Path, **fields: Any) -> LoadSpec:
    return LoadSpec(family="", source=str(source), dtype="float32", device="cpu", **fields)


# --------------------------------------------------------------------------- the index


def test_a_sound_index_is_read(folder: Path) -> None:
    assert read_index(folder) == INDEX


@pytest.mark.parametrize("library", ["evil_module", "os", "diffusers.loaders", "__main__", "", "Diffusers", 5, None])
def test_a_component_of_any_other_library_is_refused(folder: Path, library: Any) -> None:
    write_index(folder, INDEX | {"vae": [library, "AutoencoderKLWan"]})
    with pytest.raises(BadInput, match="component vae comes from .*code of the repository is refused") as caught:
        read_index(folder)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "not json",
        "[]",
        "3",
        "null",
        '"WanPipeline"',
        "{}",
        '{"_class_name": null}',
        '{"_class_name": ["my_pipeline", "Mine"]}',
        '{"_class_name": {"a": 1}}',
        "9" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_an_index_that_names_no_pipeline_is_refused(folder: Path, text: str) -> None:
    write_index(folder, text)
    with pytest.raises(BadInput, match="model_index.json") as caught:
        read_index(folder)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "entry",
    [
        [["evil"], "X"],
        [{"a": 1}, "X"],
        [],
        ["diffusers"],
        ["diffusers", 5],
        ["diffusers", None],
        ["diffusers", ""],
        ["diffusers", "logging.getLogger"],
        ["diffusers", ["WanPipeline"]],
        ["diffusers", "WanPipeline", "y"],
        [None, "AutoencoderKLWan"],
        ["evil_module", "X", "y"],
    ],
    ids=str,
)
def test_a_component_that_is_no_plain_class_of_a_known_library_is_refused(folder: Path, entry: list[Any]) -> None:
    write_index(folder, INDEX | {"vae": entry})
    with pytest.raises(BadInput, match="component vae .*only plain classes of diffusers and transformers") as caught:
        read_index(folder)
    assert caught.value.field == "model"


@pytest.mark.parametrize("class_name", ["AutoModel", "AutoTokenizer", "AutoPipelineForText2Image"])
def test_a_component_that_leaves_its_class_open_is_refused(folder: Path, class_name: str) -> None:
    write_index(folder, INDEX | {"text_encoder": ["transformers", class_name]})
    with pytest.raises(BadInput, match=rf"text_encoder leaves its class open \({class_name}\): refused"):
        read_index(folder)


@pytest.mark.parametrize("name", ["../vae", "vae/../../x", "/etc", ".", "", "a b"])
def test_a_component_whose_name_is_no_plain_name_is_refused(folder: Path, name: str) -> None:
    write_index(folder, INDEX | {name: ["diffusers", "AutoencoderKLWan"]})
    with pytest.raises(BadInput, match="is no name of a component") as caught:
        read_index(folder)
    assert caught.value.field == "model"


@pytest.mark.parametrize("entry", [[True, False], ["evil_module", True]])
def test_a_pair_that_ends_in_yes_or_no_is_a_setting(folder: Path, entry: list[Any]) -> None:
    write_index(folder, INDEX | {"is_distilled": entry})
    assert "is_distilled" not in sources.components(read_index(folder))


@pytest.mark.parametrize("name", ["", "logging.x", "Wan Pipeline", "../x"])
def test_a_pipeline_whose_name_is_no_class_name_is_refused(folder: Path, name: str) -> None:
    write_index(folder, INDEX | {"_class_name": name})
    with pytest.raises(BadInput, match="names no pipeline class"):
        read_index(folder)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_an_index_nested_without_end_is_refused(folder: Path, opening: str) -> None:
    write_index(folder, opening * 100_000)
    with pytest.raises(BadInput, match="model_index.json cannot be read") as caught:
        read_index(folder)
    assert len(str(caught.value)) < 400


def test_an_index_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "model_index.json").write_bytes(b"\xff\xfe\x00\x00")
    with pytest.raises(BadInput, match="model_index.json cannot be read"):
        read_index(folder)


def test_a_huge_index_of_plain_settings_is_only_settings(folder: Path) -> None:
    write_index(folder, INDEX | {f"setting_{number}": "x" * 100 for number in range(5_000)})
    assert set(sources.components(read_index(folder))) == set(sources.components(INDEX))


def test_settings_that_look_a_little_like_components_are_none() -> None:
    index = INDEX | {"is_distilled": [True, False], "sizes": [1, 2, 3], "_private": ["diffusers", "X"]}
    assert set(sources.components(index)) == {*MODELS, "transformer_2", "tokenizer", "scheduler"}


# --------------------------------------------------------------------------- the files


def test_the_weighted_components_are_those_with_a_config(folder: Path) -> None:
    assert sorted(weighted(folder, INDEX)) == sorted(MODELS)


def test_a_complete_folder_passes(folder: Path) -> None:
    check_files(folder, INDEX, allow_pickle=False)


@pytest.mark.parametrize("name", [*MODELS, "tokenizer", "scheduler"])
def test_a_component_whose_folder_is_missing_is_named(folder: Path, name: str) -> None:
    shutil.rmtree(folder / name)
    with pytest.raises(NotFound, match=rf"model/{name} is missing or has no configuration: .* incomplete"):
        check_files(folder, INDEX, allow_pickle=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_component_without_its_configuration_is_named(folder: Path, name: str) -> None:
    (folder / name / "config.json").unlink()
    with pytest.raises(NotFound, match=f"model/{name} is missing or has no configuration"):
        check_files(folder, INDEX, allow_pickle=False)
    (folder / name / "generation_config.json").write_text("{}")
    with pytest.raises(NotFound, match=rf"model/{name} has weights and no config\.json"):
        check_files(folder, INDEX, allow_pickle=False)


def test_a_component_that_the_pipeline_does_without_needs_no_folder(folder: Path) -> None:
    assert not (folder / "transformer_2").exists()
    check_files(folder, INDEX, allow_pickle=False)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickled_weights_are_refused_unless_they_are_allowed(folder: Path, suffix: str) -> None:
    (folder / "vae" / "model.safetensors").rename(folder / "vae" / f"model{suffix}")
    with pytest.raises(BadInput, match="vae holds only pickled weights.*--allow-pickle") as caught:
        check_files(folder, INDEX, allow_pickle=False)
    assert caught.value.field == "model"
    check_files(folder, INDEX, allow_pickle=True)


def test_a_pickle_beside_safetensors_is_no_trouble(folder: Path) -> None:
    (folder / "vae" / "model.bin").write_bytes(b"evil")
    check_files(folder, INDEX, allow_pickle=False)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_component_without_weights_is_named(folder: Path, allow_pickle: bool) -> None:
    (folder / "transformer" / "model.safetensors").unlink()
    with pytest.raises(NotFound, match="transformer holds no weights"):
        check_files(folder, INDEX, allow_pickle=allow_pickle)


def test_the_bytes_to_read_are_those_of_the_weights(folder: Path) -> None:
    size = len(safetensors(2, 3))
    assert bytes_of(folder / "vae", allow_pickle=False) == size
    (folder / "vae" / "model.bin").write_bytes(b"12345")
    assert bytes_of(folder / "vae", allow_pickle=False) == size
    assert bytes_of(folder / "vae", allow_pickle=True) == size + 5


# --------------------------------------------------------------------------- where a model is


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert locate(spec(folder)) == folder


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match="there is no folder /nowhere/model"):
        locate(spec("/nowhere/model"))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no model_index.json") as caught:
        locate(spec(tmp_path))
    assert caught.value.field == "model"


@pytest.mark.parametrize("name", ["../x", "..", "", ".", "/etc", "a/b"])
def test_a_load_of_the_package_never_leaves_it(name: str) -> None:
    with pytest.raises(BadInput, match="names no model inside the package") as caught:
        locate(spec(f"package:{name}"))
    assert caught.value.field == "model"


@pytest.mark.parametrize("source", ["../x", "./x", "/x", "~/x", ".", "/"])
def test_what_is_written_as_a_path_is_a_path(source: str) -> None:
    assert looks_like_folder(source)


def test_an_existing_folder_is_a_path_and_other_words_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert looks_like_folder("model")
    assert not looks_like_folder("somebody/some-model")
    assert not looks_like_folder("flipbook-2")


def test_a_path_never_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_from_hub", lambda spec, progress: pytest.fail(f"asked the hub for {spec.source}"))
    for source in ("../x", "../../etc/passwd", "/nowhere/x", "~/nowhere-at-all"):
        with pytest.raises(NotFound, match="there is no folder"):
            locate(spec(source))


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate(spec("~/model")) == folder


# --------------------------------------------------------------------------- the hub, without a network


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """A hub that answers as told: `hub(cached, fetched)`; what it was asked is in the returned list."""
    import huggingface_hub

    for name in ("UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def install(cached: Path | Exception, fetched: Path | Exception) -> list[dict[str, Any]]:
        asked = []

        def snapshot_download(repo: str, **options: Any) -> str:
            asked.append({"repo": repo, **options})
            answer = cached if options.get("local_files_only") else fetched
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return install


def not_cached() -> Exception:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return LocalEntryNotFoundError("not in the cache")


def test_a_cached_model_is_used_without_the_network(hub: Any, folder: Path) -> None:
    asked = hub(folder, AssertionError("the network was asked"))
    assert locate(spec("somebody/some-model", revision="v2")) == folder
    assert [(each["repo"], each["local_files_only"], each["revision"]) for each in asked] == [
        ("somebody/some-model", True, "v2")
    ]


def test_a_model_that_is_not_cached_is_fetched(hub: Any, folder: Path) -> None:
    asked = hub(not_cached(), folder)
    assert locate(spec("somebody/some-model")) == folder
    assert len(asked) == 2


def test_an_interrupted_download_is_completed(hub: Any, folder: Path, tmp_path: Path) -> None:
    part = Path(shutil.copytree(folder, tmp_path / "part"))
    shutil.rmtree(part / "transformer")
    asked = hub(part, folder)
    assert locate(spec("somebody/some-model")) == folder
    assert len(asked) == 2


@pytest.mark.parametrize("missing", ["transformer", "vae/model.safetensors", "vae/config.json", "model_index.json"])
def test_offline_an_interrupted_download_is_named_with_what_is_missing(hub: Any, folder: Path, missing: str) -> None:
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    hub(folder, AssertionError("the network was asked"))
    with pytest.raises(NotFound, match=r"is only partly on this machine: .*the network is switched off") as caught:
        locate(spec("somebody/some-model", local_files_only=True))
    assert missing.split("/")[0] in str(caught.value)


def test_pickles_are_fetched_only_when_allowed_and_code_never(hub: Any, folder: Path) -> None:
    asked = hub(not_cached(), folder)
    locate(spec("somebody/some-model"))
    locate(spec("somebody/some-model", allow_pickle=True))
    strict, loose = asked[1]["allow_patterns"], asked[3]["allow_patterns"]
    assert "*.safetensors" in strict
    assert set(loose) - set(strict) == {"*.bin"}
    assert not any(pattern.endswith((".py", "*", ".pt")) for pattern in loose)


@pytest.mark.parametrize("how", ["local_files_only", "UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_a_missing_model_is_named_with_the_place_that_was_searched(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    hub(not_cached(), AssertionError("the network was asked"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "models"))
    asked = spec("somebody/some-model", local_files_only=how == "local_files_only")
    if how != "local_files_only":
        monkeypatch.setenv(how, "1")
    with pytest.raises(NotFound) as caught:
        locate(asked)
    assert "somebody/some-model is not on this machine" in str(caught.value)
    assert f"looked in {tmp_path / 'models'}" in str(caught.value)
    assert "network is switched off" in str(caught.value)


def test_the_real_hub_library_answers_offline_without_a_traceback() -> None:
    with pytest.raises(NotFound, match="is not on this machine"):
        locate(spec("undercrank-tests/there-is-no-such-model", local_files_only=True))


@pytest.mark.parametrize("error", [OSError("no route to host\nmore"), ConnectionError(), None])
def test_a_failed_download_is_one_line_with_a_remedy(hub: Any, error: Exception | None) -> None:
    hub(not_cached(), error or not_cached())
    with pytest.raises(NotFound, match="could not be fetched: .*Give a folder with --model FOLDER") as caught:
        locate(spec("somebody/some-model"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["a b/c", "a/b/c", "a/..", "-a/b", "a/b?c", "x" * 97 + "/y"])
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(source: str) -> None:
    with pytest.raises(BadInput, match="neither a model of this version nor a hub id") as caught:
        locate(spec(source, local_files_only=True))
    assert caught.value.field == "model"


# --------------------------------------------------------------------------- which model is meant


def test_a_family_is_found_by_id_and_by_repository() -> None:
    for name in ("wan2.1-14b", "Wan2.1-14B", "Wan-AI/Wan2.1-T2V-14B-Diffusers"):
        family, load = which_model(Request(model=name))
        assert (family.id, load.family, load.source) == ("wan2.1-14b", "wan2.1-14b", family.repo)


def test_what_was_allowed_travels_with_the_load() -> None:
    _, load = which_model(Request(model="wan2.1-14b"), allow_pickle=True, local_files_only=True)
    assert (load.allow_pickle, load.local_files_only) == (True, True)
    _, load = which_model(Request(model="wan2.1-14b"))
    assert (load.allow_pickle, load.local_files_only) == (False, False)


@pytest.mark.parametrize(("name", "near"), [("wan2.1-13b", "wan2.1-1.3b"), ("flipbok", "flipbook")])
def test_an_unknown_model_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(BadInput, match=f"unknown model '{name}': nearest are .*{near}") as caught:
        which_model(Request(model=name))
    assert caught.value.field == "model"


@pytest.mark.parametrize("model", ["", None, 5, ["wan2.1-14b"], "a" * 513, "a/" + "b" * 5000])
def test_an_empty_or_endless_model_word_is_refused_with_what_to_name(model: Any) -> None:
    with pytest.raises(BadInput, match="model: name a family, a hub id or a folder") as caught:
        which_model(Request(model=model), local_files_only=True)
    assert caught.value.field == "model"


def test_somebody_s_home_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match="~nosuchuser/x: there is no such home folder"):
        which_model(Request(model="~nosuchuser/x"))


@pytest.mark.parametrize("model", ["/" + "a" * 300, "./" + "a" * 300, "~/" + "a" * 300])
def test_a_path_too_long_for_any_folder_is_refused_in_one_line(model: str) -> None:
    with pytest.raises(BadInput, match="is no name of a folder") as caught:
        which_model(Request(model=model))
    assert caught.value.field == "model"


def test_a_folder_s_family_is_that_of_its_pipeline(folder: Path) -> None:
    family, load = which_model(Request(model=str(folder)))
    assert family.pipeline == "WanPipeline"
    assert not family.repo.startswith("package:")
    assert (load.family, load.source) == (family.id, str(folder))


def test_a_folder_s_parameters_are_counted_in_its_files(folder: Path) -> None:
    _, load = which_model(Request(model=str(folder)))
    assert load.parameters == 3 * 2 * 3
    _, load = which_model(Request(model="wan2.1-14b"))
    assert load.parameters == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"w": {}}',
        struct.pack("<Q", 22) + b'{"w": {"shape": null}}',
        struct.pack("<Q", 23) + b'{"w": {"shape": ["2"]}}',
        b"version https",
    ],
)
def test_a_weight_file_that_is_none_is_refused_before_it_is_loaded(folder: Path, data: bytes) -> None:
    (folder / "vae" / "model.safetensors").write_bytes(data)
    with pytest.raises(BadInput, match="model.safetensors: is no safetensors file"):
        which_model(Request(model=str(folder)))


def test_a_folder_named_like_a_repository_is_of_its_family(tmp_path: Path, folder: Path) -> None:
    named = tmp_path / "Wan2.1-T2V-14B-Diffusers"
    folder.rename(named)
    assert which_model(Request(model=str(named)))[0].id == "wan2.1-14b"


def test_a_pipeline_that_makes_no_video_is_refused(folder: Path) -> None:
    write_index(folder, INDEX | {"_class_name": "StableDiffusionPipeline"})
    with pytest.raises(BadInput, match="StableDiffusionPipeline is no video pipeline") as caught:
        which_model(Request(model=str(folder)))
    assert caught.value.field == "model"


def test_a_hostile_folder_is_refused_when_it_is_named(folder: Path) -> None:
    write_index(folder, INDEX | {"transformer": ["evil_module", "Net"]})
    with pytest.raises(BadInput, match="evil_module"):
        which_model(Request(model=str(folder)))


def test_every_family_can_be_meant() -> None:
    for row in families.FAMILIES:
        assert which_model(Request(model=row.id))[0] == row


# --------------------------------------------------------------------------- which weights


def test_the_fingerprint_follows_every_byte_and_name_of_the_weights(folder: Path) -> None:
    before = fingerprint(folder)
    file = folder / "vae" / "model.safetensors"
    assert fingerprint(folder) == before
    assert len(before) == 64
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(folder) != before
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(folder) == before
    file.rename(file.with_name("other.safetensors"))
    assert fingerprint(folder) != before


def test_a_pickle_counts_as_weights(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "vae" / "model.bin").write_bytes(b"x")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("name", ["README.md", "vae/config.json", "picture.png"])
def test_the_fingerprint_does_not_follow_what_is_no_weight(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).write_text("something else")
    assert fingerprint(folder) == before


def test_the_fingerprint_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder)
    assert fingerprint(folder.rename(tmp_path / "elsewhere")) == before


def test_a_file_of_the_hub_s_cache_is_known_by_its_name_and_not_read(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file = folder / "vae" / "model.safetensors"

    def point_to(name: str, data: bytes) -> str:
        (blobs / name).write_bytes(data)
        file.unlink(missing_ok=True)
        file.symlink_to(blobs / name)
        return fingerprint(folder)

    first = point_to("0a" * 32, b"one")
    assert point_to("0a" * 32, b"two") == first, "the contents were read"
    assert point_to("0b" * 32, b"two") != first
    assert point_to("short", b"one") != point_to("short", b"two")
    assert point_to("0G" * 32, b"one") != point_to("0G" * 32, b"two"), "no sha256, so it must be read"


def test_the_same_weights_have_the_same_fingerprint_in_the_cache_and_in_a_folder(folder: Path, tmp_path: Path) -> None:
    plain = fingerprint(folder)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in list(folder.rglob("*.safetensors")):
        blob = file.rename(blobs / hashlib.sha256(file.read_bytes()).hexdigest())
        file.symlink_to(blob)
    assert fingerprint(folder) == plain


def test_large_files_are_sampled_and_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint(folder)
    monkeypatch.setattr(sources, "FULL_HASH_BYTES", 10)
    file = folder / "vae" / "model.safetensors"
    first = fingerprint(folder)
    assert first == f"sampled:{first.removeprefix('sampled:')}" != whole
    file.write_bytes(safetensors(2, 3, filling=b"\1"))
    second = fingerprint(folder)
    assert second != first
    file.write_bytes(safetensors(2, 4, filling=b"\1"))
    assert fingerprint(folder) != second


def test_both_ends_of_a_large_file_and_its_size_count(tmp_path: Path) -> None:
    mib = 1 << 10
    file = tmp_path / "w.safetensors"

    def ends(data: bytes) -> bytes:
        file.write_bytes(data)
        return sources._ends(file, mib)

    base = b"\0" * (4 * mib)
    assert ends(base) == ends(base)
    assert ends(b"\1" + base[1:]) != ends(base)
    assert ends(base[:-1] + b"\1") != ends(base)
    assert ends(base + b"\0") != ends(base)
    assert len(ends(base)) == 8 + 2 * mib


def test_a_load_of_the_package_lies_in_the_package() -> None:
    found = locate(spec("package:flipbook"))
    assert found == Path(sources.__file__).parent / "flipbook"
    assert locate(replace(spec("package:flipbook"), local_files_only=True)) == found


def test_a_missing_shard_is_missing(folder: Path) -> None:
    part = folder / "transformer"
    (part / "model.safetensors").rename(part / "d-00001-of-00002.safetensors")
    names = {"a": "d-00001-of-00002.safetensors", "b": "d-00002-of-00002.safetensors"}
    (part / "d.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(NotFound, match="00002-of-00002"):
        check_files(folder, INDEX, allow_pickle=False)


def test_a_cached_model_that_names_foreign_code_is_refused_not_called_partial(hub: Any, folder: Path) -> None:
    write_index(folder, INDEX | {"vae": ["evil", "X"]})
    hub(folder, AssertionError("asked the network"))
    with pytest.raises(BadInput, match="evil"):
        locate(spec("somebody/some-model", local_files_only=True))


def test_pickled_weights_without_a_config_are_not_overlooked(folder: Path) -> None:
    part = folder / "vae"
    (part / "config.json").rename(part / "x_config.json")
    (part / "model.safetensors").rename(part / "model.bin")
    with pytest.raises(NotFound, match="no config.json"):
        check_files(folder, INDEX, allow_pickle=False)


@pytest.mark.parametrize("model", ["a" * 300, "a" * 300 + "/b"])
def test_a_name_longer_than_a_file_system_allows_is_refused(model: str) -> None:
    with pytest.raises(BadInput):
        which_model(Request(model=model), local_files_only=True)
