"""Loading: the right parts, dtype and device, progress in bytes, and nothing left when it fails."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from undercrank import load as load_module
from undercrank.families import family
from undercrank.load import load
from undercrank.records import BadInput, Cancelled, LoadSpec, NotFound
from undercrank.testing import tiny_folder

NAME = "wan2.1-1.3b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(NAME, tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture
def spec(folder) -> LoadSpec:
    return LoadSpec(family=NAME, source=str(folder), dtype="bfloat16", device="cpu")


def test_parts_have_the_asked_dtype_and_wans_vae_its_own(spec) -> None:
    with load(spec, family(NAME)) as loaded:
        pipe = loaded.rig.pipe
        assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
        assert pipe.vae.dtype == torch.float32
        assert not pipe.transformer.training and not any(p.requires_grad for p in pipe.transformer.parameters())
        assert type(pipe).__name__ == "WanPipeline" and loaded.rig.denoisers == [pipe.transformer]


def test_progress_counts_the_bytes_of_the_weights(spec, folder) -> None:
    events = []
    with load(spec, family(NAME), listener=events.append) as loaded:
        weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        assert loaded.load_bytes == weights
    assert (events[0].done, events[-1].done) == (0, weights) and {e.total for e in events} == {weights}
    assert [e.done for e in events] == sorted(e.done for e in events)


def test_leaving_frees_the_weights(spec) -> None:
    with load(spec, family(NAME)) as loaded:
        kept = weakref.ref(loaded.rig.pipe.transformer)
    del loaded
    gc.collect()
    assert kept() is None


def test_a_cancel_between_two_parts_leaves_nothing(spec, monkeypatch) -> None:
    parts = []
    original = load_module._load_part

    def remembered(*arguments):
        part = original(*arguments)
        parts.append(weakref.ref(part))
        return part

    def cancelled():
        if parts:
            raise Cancelled("stop")

    monkeypatch.setattr(load_module, "_load_part", remembered)
    with pytest.raises(Cancelled), load(spec, family(NAME), check_cancelled=cancelled):
        pytest.fail("loaded")
    gc.collect()
    assert len(parts) == 1 and parts[0]() is None


def test_the_libraries_bars_are_silent_and_get_their_voice_back(spec, capfd) -> None:
    import diffusers.utils.logging as theirs

    before = theirs._tqdm_active
    with load(spec, family(NAME)):
        pass
    assert theirs._tqdm_active is before and "Loading" not in capfd.readouterr().err


def copied(folder: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, to))


@pytest.mark.parametrize(("allow_pickle", "asked"), [(False, True), (True, None)])
def test_safetensors_are_asked_for_and_preferred_where_pickles_are_allowed(
    monkeypatch, tmp_path, spec, allow_pickle, asked
) -> None:
    import diffusers

    class Listening:
        options = {}

        @classmethod
        def from_pretrained(cls, folder, **options):
            cls.options.update(options)
            raise OSError("heard enough")

    monkeypatch.setattr(diffusers, "Listening", Listening, raising=False)
    with pytest.raises(BadInput, match="heard enough"):
        load_module._load_part(
            tmp_path, ["diffusers", "Listening"], replace(spec, allow_pickle=allow_pickle), family(NAME)
        )
    assert Listening.options["use_safetensors"] is asked


def test_safetensors_are_read_where_pickles_are_allowed_too(spec) -> None:
    with load(replace(spec, allow_pickle=True), family(NAME)) as loaded:
        assert loaded.rig.pipe.transformer is not None


def test_a_broken_weight_file_is_refused_in_one_line(spec, folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    file = next((other / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with (
        pytest.raises(BadInput, match="cannot be read") as refused,
        load(replace(spec, source=str(other)), family(NAME)),
    ):
        pytest.fail("loaded")
    assert "\n" not in str(refused.value)


def test_weights_of_another_shape_are_refused(spec, folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    config = other / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ffn_dim": 96}))
    with pytest.raises(BadInput, match="transformer"), load(replace(spec, source=str(other)), family(NAME)):
        pytest.fail("loaded")


def test_a_class_that_this_version_lacks_is_named(spec, folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    index = other / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"vae": ["diffusers", "AutoencoderOfTomorrow"]}))
    with pytest.raises(BadInput, match="AutoencoderOfTomorrow"), load(replace(spec, source=str(other)), family(NAME)):
        pytest.fail("loaded")


def test_a_folder_without_weights_is_missing_something(spec, folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    for file in (other / "vae").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(NotFound, match="no weights"), load(replace(spec, source=str(other)), family(NAME)):
        pytest.fail("loaded")


def test_pickled_weights_are_read_only_when_they_are_allowed(spec, folder, tmp_path) -> None:
    from safetensors.torch import load_file

    other = copied(folder, tmp_path / "other")
    (file,) = (other / "vae").glob("*.safetensors")
    torch.save(load_file(file), other / "vae" / "diffusion_pytorch_model.bin")
    file.unlink()
    with pytest.raises(BadInput, match="--allow-pickle"), load(replace(spec, source=str(other)), family(NAME)):
        pytest.fail("loaded")
    with load(replace(spec, source=str(other), allow_pickle=True), family(NAME)) as loaded:
        assert loaded.rig.pipe.vae.dtype == torch.float32


def test_a_broken_scheduler_is_refused_in_one_line(spec, folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    (other / "scheduler" / "scheduler_config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read") as refused:
        with load(replace(spec, source=str(other)), family(NAME)):
            pytest.fail("loaded")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError])
def test_whatever_the_libraries_raise_over_a_folder_is_one_line_that_names_it(error) -> None:
    with pytest.raises(BadInput, match=r"/models/x: cannot be read: ") as refused:
        with load_module._read_errors(Path("/models/x")):
            raise error("first line\nand more")
    assert "\n" not in str(refused.value) and refused.value.field == "model"


def test_memory_that_ran_out_is_no_broken_folder() -> None:
    with pytest.raises(torch.OutOfMemoryError), load_module._read_errors(Path("/models/x")):
        raise torch.OutOfMemoryError("no more")
