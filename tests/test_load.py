"""Loading: the right parts, dtype and device, progress in bytes, and nothing left when it fails."""

import gc
import itertools
import json
import threading
import traceback
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from undercrank import load as load_module
from undercrank.families import family
from undercrank.load import load
from undercrank.records import BadInput, Cancelled, Loading, LoadSpec, NotFound
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
    assert events[0].loading == Loading(state="queued") and {e.total for e in events[1:]} == {weights}
    assert (events[1].done, events[-1].done) == (0, weights)
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
            tmp_path, ["diffusers", "Listening"], replace(spec, allow_pickle=allow_pickle), load_module.Watch()
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


# --------------------------------------------------------------------------- how far it is, and whether it goes on


def test_components_take_turns_in_being_read_and_placed_and_their_bytes_are_counted(spec, folder, monkeypatch) -> None:
    monkeypatch.setattr(load_module, "TELL_S", 0.0)
    told: list[Loading] = []
    with load(spec, family(NAME), listener=lambda event: told.append(event.loading)) as loaded:
        pipe = loaded.rig.pipe
        placed = {name: getattr(pipe, name) for name in ("vae", "text_encoder", "transformer")}
    turns = [(at.state, at.component) for at in told]
    order = [turn for n, turn in enumerate(turns) if n == 0 or turns[n - 1] != turn]
    assert order[:2] == [("queued", ""), ("reading", "")]
    assert order[2:] == [(state, name) for _, name in order[2::2] for state in ("reading", "placing")]
    assert {name for _, name in order[2:]} == set(placed)
    for name, part in placed.items():
        (total,) = {at.bytes_total for at in told if (at.state, at.component) == ("placing", name)}
        assert total == sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
        assert max(at.bytes_done for at in told if (at.state, at.component) == ("placing", name)) <= total
    read = [at.bytes_done for at in told if at.state == "reading"]
    files = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert read == sorted(read) and len(set(read)) > 20 and read[-1] == files, "tensor by tensor"


def shard(folder: Path, **numels: int) -> Path:
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    save_file({name: torch.zeros(numel) for name, numel in numels.items()}, file)
    return file


def test_a_large_tensor_is_read_in_pieces_and_a_cancel_is_heard_between_two_of_them(tmp_path) -> None:
    from safetensors.torch import load_file

    mib = 2**20
    file = shard(tmp_path, a=mib, b=32 * mib)
    asked = []

    def check() -> None:
        asked.append(watch._at.bytes_done)
        if watch._at.bytes_done >= 36 * mib:
            raise Cancelled("stop")

    watch = load_module.Watch(check=check)
    with pytest.raises(Cancelled), load_module._reading_piece_by_piece(tmp_path, watch):
        with watch.reading("transformer", file.stat().st_size):
            load_file(file)
    assert asked[-1] <= 36 * mib + load_module.PIECE_BYTES
    assert max(b - a for a, b in zip(asked, asked[1:], strict=False)) <= load_module.PIECE_BYTES


def test_a_slow_disk_makes_nobody_wait_for_more_than_the_tensors_at_hand(spec, monkeypatch) -> None:
    """Readers that hang in the 8th tensor go on only once the load was cancelled: whatever is read later is counted."""
    import safetensors.torch
    import transformers.modeling_utils

    count, cancelled = itertools.count(1), threading.Event()
    late: list[int] = []

    def slow(original):
        class Slow:
            def __init__(self, file):
                self.file = file

            def __getattr__(self, name):
                return getattr(self.file, name)

            def __enter__(self):
                self.file.__enter__()
                return self

            def __exit__(self, *error):
                return self.file.__exit__(*error)

            def get_tensor(self, name):
                read(1)
                return self.file.get_tensor(name)

            def get_slice(self, name):
                return SlowSlice(self.file.get_slice(name))

        class SlowSlice:
            def __init__(self, part):
                self.part = part

            def __getitem__(self, index):
                read(1)
                return self.part[index]

            def __getattr__(self, name):
                return getattr(self.part, name)

        def read(number):
            if cancelled.is_set():
                late.append(number)
            elif next(count) >= 8:
                cancelled.set()

        return lambda *args, **kwargs: Slow(original(*args, **kwargs))

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled("stop")

    for module in (safetensors.torch, transformers.modeling_utils):
        monkeypatch.setattr(module, "safe_open", slow(module.safe_open))
    with pytest.raises(Cancelled), load(spec, family(NAME), check_cancelled=check):
        pytest.fail("loaded")
    assert len(late) <= 4, "one for each thread that reads"


def test_files_that_others_read_meanwhile_are_none_of_this_load(tmp_path) -> None:
    from safetensors.torch import load_file

    def check() -> None:
        raise Cancelled("stop")

    (tmp_path / "ours").mkdir()
    file = shard(tmp_path, a=4)
    with load_module._reading_piece_by_piece(tmp_path / "ours", load_module.Watch(check=check)):
        assert load_file(file)["a"].shape == (4,)


def test_room_is_made_once_all_is_known_that_can_be_known_without_weights(spec, folder, tmp_path) -> None:
    made: list[str] = []
    other = copied(folder, tmp_path / "other")
    for file in (other / "vae").glob("*.safetensors"):
        file.unlink()
    with (
        pytest.raises(NotFound),
        load(replace(spec, source=str(other)), family(NAME), make_room=lambda: made.append("")),
    ):
        pytest.fail("loaded")
    assert made == []
    told: list[str] = []
    with load(
        spec,
        family(NAME),
        listener=lambda event: told.append(event.loading.state),
        make_room=lambda: made.extend(told),
    ):
        assert made == ["queued"]


def test_an_error_that_is_kept_keeps_its_lines_and_no_tensor() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def inner() -> None:
        weights = torch.zeros(3)
        seen.append(weakref.ref(weights))
        raise KeyError("inner")

    def outer() -> None:
        weights = torch.zeros(3)
        seen.append(weakref.ref(weights))
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError) as kept, load_module.forgetting_frames():
        outer()
    assert [ref() for ref in seen] == [None, None]
    assert "outer()" in "".join(traceback.format_exception(kept.value))
