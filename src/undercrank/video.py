"""Clips out and in: frames <-> files, with exact colour tags, exact frame rates and the recipe inside.

A clip is `frames_FHWC`: F frames of H rows and W columns, 3 channels (red, green, blue), uint8. A file
appears under its name only when it is complete. This is the only module that imports PyAV.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import queue
import re
import secrets
import stat
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
from av.container import InputContainer, OutputContainer
from av.video.reformatter import ColorRange, Colorspace
from av.video.stream import VideoStream
from PIL import Image

from undercrank.images import as_numpy, unit_to_uint8
from undercrank.records import BadInput, RunFailed

CRF = 16
"x264's quality of clips, 1 best to 51."

PathLike: TypeAlias = "str | os.PathLike[str]"
OnFrame: TypeAlias = Callable[[int], None]


class BadFrames(RunFailed, ValueError):
    """These frames are no clip; the message names the first bad frame and the remedy."""


class NotVideo(BadInput):
    """The file is no mp4, mov, mkv or webm with a picture track."""


class NoRecipe(BadInput):
    """The file holds no recipe: it was not made here, or another tool rewrote it without its metadata."""


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What a video file says of itself. `width` and `height` are the file's own, before `crop`.

    The colour tags are code points of ISO/IEC 23091-2: 1 is BT.709, 2 unknown. `color_range`: 0 unknown,
    1 limited (16..235), 2 full.
    """

    width: int
    height: int
    num_frames: int
    fps: Fraction
    codec: str
    pix_fmt: str
    color_range: int
    colorspace: int
    color_primaries: int
    color_trc: int

    @property
    def duration_s(self) -> float:
        return float(self.num_frames / self.fps)


# ---------------------------------------------------------------- frames


def as_uint8(frames: Any) -> np.ndarray:
    """Any clip as frames_FHWC uint8.

    frames: a numpy array F,H,W,3; a torch tensor F,H,W,3 or F,3,H,W; a list of RGB `PIL.Image`. uint8 passes
    unchanged (not copied). Floats are taken as 0..1 and become x * 255 rounded half to even.

    Raises BadFrames: no frames; wrong shape; NaN or infinite; outside 0..1 by more than 1e-3.
    """
    clip = _stacked(frames) if isinstance(frames, list | tuple) else frames
    channels_last = _channels_last(clip)
    if str(channels_last.dtype).endswith("uint8"):
        return as_numpy(channels_last)
    return _rounded(channels_last)


def frames_hash(frames_FHWC: np.ndarray) -> str:
    """SHA-256, in hex, over the shape and the bytes of a uint8 clip: equal if and only if every pixel is."""
    if frames_FHWC.dtype != np.uint8 or frames_FHWC.ndim != 4:
        raise BadFrames(f"no uint8 clip, but {frames_FHWC.dtype} {frames_FHWC.shape}: as_uint8 first")
    digest = hashlib.sha256("x".join(map(str, frames_FHWC.shape)).encode() + b":")
    for frame_HWC in frames_FHWC:
        digest.update(frame_HWC.tobytes())
    return digest.hexdigest()


def _stacked(pictures: Sequence[Any]) -> np.ndarray:
    if not pictures:
        raise BadFrames("a clip of zero frames")
    for index, picture in enumerate(pictures):
        if isinstance(picture, Image.Image) and picture.mode != "RGB":
            raise BadFrames(f"frame {index} is a {picture.mode} picture, not RGB: convert('RGB') first")
    arrays = [as_numpy(picture) for picture in pictures]
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise BadFrames(f"frame {index} has shape {array.shape}, frame 0 has {arrays[0].shape}")
    return np.stack(arrays)


def _channels_last(clip: Any) -> Any:
    if not hasattr(clip, "shape") or not hasattr(clip, "dtype"):
        raise BadFrames(f"a {type(clip).__name__} is no clip: give an array F,H,W,3 or a list of pictures")
    shape = tuple(clip.shape)
    if len(shape) != 4:
        raise BadFrames(f"shape {shape} is no clip F,H,W,3: give one clip with its frames first")
    if 0 in shape:
        empty = ("frames", "rows", "columns", "channels")[shape.index(0)]
        raise BadFrames(f"a clip of zero {empty}, shape {shape}")
    if shape[3] == 3:
        return clip
    if shape[1] == 3 and hasattr(clip, "permute"):
        return clip.permute(0, 2, 3, 1)
    raise BadFrames(f"shape {shape} has {shape[3]} channels in its last axis, not 3 (red, green, blue)")


def _rounded(clip_FHWC: Any) -> np.ndarray:
    """Frame by frame, so that a long clip is never held in floats twice."""
    frames_FHWC = np.empty(tuple(clip_FHWC.shape), np.uint8)
    for index, frame in enumerate(clip_FHWC):
        frame_HWC = as_numpy(frame)
        if not np.issubdtype(frame_HWC.dtype, np.floating):
            raise BadFrames(f"frames of {frame_HWC.dtype}: give uint8, or floats in 0..1")
        try:
            frames_FHWC[index] = unit_to_uint8(frame_HWC)
        except ValueError as error:
            raise BadFrames(f"frame {index} {error}") from error
    return frames_FHWC


# ---------------------------------------------------------------- sizes and rates


def even_padding(width: int, height: int) -> tuple[int, int]:
    """How many columns and rows (right, bottom) make this size even, as yuv420p needs: 0 or 1 each."""
    return width % 2, height % 2


def pad_to_even(frame_HWC: np.ndarray) -> np.ndarray:
    """The frame with its last column and row repeated where the size is odd. Never scaled."""
    right, bottom = even_padding(frame_HWC.shape[1], frame_HWC.shape[0])
    return np.pad(frame_HWC, ((0, bottom), (0, right), (0, 0)), mode="edge") if right or bottom else frame_HWC


def exact_fps(fps: Fraction | int | float) -> Fraction:
    """Frames per second as an exact fraction. Raises BadInput for 23.976: say Fraction(24000, 1001)."""
    if isinstance(fps, float) and not fps.is_integer():
        raise BadInput(f"{fps} frames per second is not exact: give a fraction, as 24000/1001", field="fps")
    rate = Fraction(fps)
    if rate <= 0 or max(rate.numerator, rate.denominator) > 1_000_000:
        raise BadInput(f"{fps} frames per second: give a rate above 0 with terms up to 1000000", field="fps")
    return rate


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True)
class _Coding:
    """How pictures become a file."""

    container: str
    codec: str
    pix_fmt: str
    picture_of: Callable[[np.ndarray], av.VideoFrame]
    container_options: Mapping[str, str]  # movflags belong here: among the codec's options they do nothing
    codec_options: Mapping[str, str]


def _h264(crf: int) -> _Coding:
    if not 1 <= crf <= 51:  # 0 is x264's lossless profile, which browsers do not play
        raise BadInput(f"crf {crf}: give 1 (best) to 51; a master has every pixel exact", field="crf")
    return _Coding(
        container="mp4",
        codec="libx264",
        pix_fmt="yuv420p",
        picture_of=_to_yuv420p,
        container_options={"movflags": "+faststart+use_metadata_tags"},
        codec_options={"crf": str(crf), "threads": "1"},  # more threads give other bytes
    )


def _ffv1() -> _Coding:
    return _Coding(
        container="matroska",
        codec="ffv1",
        pix_fmt="bgr0",
        picture_of=_to_bgr0,
        container_options={"fflags": "+bitexact"},  # else Matroska draws a random segment id
        codec_options={"level": "3", "threads": "1"},
    )


def write_mp4(
    path: PathLike,
    frames_FHWC: Any,
    *,
    fps: Fraction | int,
    recipe: Mapping[str, Any],
    title: str = "",
    comment: str = "",
    crf: int = CRF,
    on_frame: OnFrame | None = None,
    encoded: Encoded | None = None,
) -> Path:
    """Write an mp4 that every browser plays: h264, yuv420p, BT.709 and tagged so, index first, recipe inside.

    frames_FHWC: whatever `as_uint8` takes. recipe: JSON-able, kept whole; its key `crop` belongs to the file
    and is set for odd sizes (padded to even by repeating the edge, never scaled), else removed. crf: x264's
    quality, 1 best to 51. on_frame: called with the number of frames encoded so far; may raise to stop. encoded: these
    very frames, encoded before by `encoding` at this rate and quality; the bytes are the same.

    The same input gives the same bytes. The file appears under `path` only when complete; on any error
    nothing is left, and what stood there before still does.

    Raises BadFrames; BadInput for fps or crf; ValueError or TypeError for a recipe that is no JSON; OSError
    with its errno (ENOSPC, EACCES, ...).
    """
    clip_FHWC, rate = as_uint8(frames_FHWC), exact_fps(fps)
    tags = _tags(recipe_with_crop(recipe, clip_FHWC), title, comment)
    packets = encoded.packets if encoded and (encoded.fps, encoded.crf) == (rate, crf) else None
    return _write(path, clip_FHWC, _h264(crf), rate, tags, on_frame, packets)


def write_master(
    path: PathLike,
    frames_FHWC: Any,
    *,
    fps: Fraction | int,
    recipe: Mapping[str, Any],
    title: str = "",
    comment: str = "",
    on_frame: OnFrame | None = None,
) -> Path:
    """Write the archive copy: ffv1 in Matroska, every pixel exact at any size. Else as `write_mp4`.

    The file holds the clip's `frames_hash`, and `read_frames` checks it.
    """
    clip_FHWC, rate = as_uint8(frames_FHWC), exact_fps(fps)
    tags = _tags({key: value for key, value in recipe.items() if key != "crop"}, title, comment)
    return _write(path, clip_FHWC, _ffv1(), rate, tags | {_HASH: frames_hash(clip_FHWC)}, on_frame)


_HASH = "frames_sha256"


def _write(
    path: PathLike,
    clip_FHWC: np.ndarray,
    coding: _Coding,
    fps: Fraction,
    tags: Mapping[str, str],
    on_frame: OnFrame | None,
    packets: Sequence[Any] | None = None,
) -> Path:
    final = Path(path)
    with appears_whole(final) as part, _as_os_errors(final):
        _encode(part, clip_FHWC, coding, fps, tags, on_frame, packets)
        _refuse_lost_frames(part, len(clip_FHWC))
    return final


def _encode(
    part: Path,
    clip_FHWC: np.ndarray,
    coding: _Coding,
    fps: Fraction,
    tags: Mapping[str, str],
    on_frame: OnFrame | None,
    packets: Sequence[Any] | None,
) -> None:
    with av.open(str(part), "w", format=coding.container, options=dict(coding.container_options)) as file:
        file.metadata.update(tags)
        stream = _add_stream(file, clip_FHWC[0], coding, fps)
        if packets is not None:
            _mux_again(file, stream, packets, on_frame)
            return
        for index, frame_HWC in enumerate(clip_FHWC):
            file.mux(_encoded(stream, frame_HWC, coding, index, fps))
            if on_frame:
                on_frame(index + 1)
        file.mux(stream.encode())


def _encoded(stream: VideoStream, frame_HWC: np.ndarray, coding: _Coding, index: int, fps: Fraction) -> list[Any]:
    """The packets that the encoder gives when it is given this frame; it may hold it back."""
    picture = coding.picture_of(frame_HWC)
    picture.pts, picture.time_base = index, 1 / fps
    return list(stream.encode(picture))


def _mux_again(file: OutputContainer, stream: VideoStream, packets: Sequence[Any], on_frame: OnFrame | None) -> None:
    """Packets of another container's stream of the same coding. Copies, since muxing changes a packet's times."""
    for index, packet in enumerate(packets):
        copy = av.Packet(bytes(packet))
        copy.pts, copy.dts, copy.duration = packet.pts, packet.dts, packet.duration
        copy.time_base, copy.is_keyframe, copy.stream = packet.time_base, packet.is_keyframe, stream
        file.mux(copy)
        if on_frame:
            on_frame(index + 1)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A clip as packets of h264, to be put into a file with `write_mp4(encoded=...)`."""

    packets: tuple[Any, ...]
    fps: Fraction
    crf: int


FRAMES_WAIT = 2
"Chunks of frames that may wait for the encoder before whoever brings them waits too."


class Encoder:
    """Encodes in a thread of its own what it is given in order. `encoded` holds the packets when `encoding` is left."""

    def __init__(self, fps: Fraction | int | float, crf: int) -> None:
        self.encoded: Encoded | None = None
        self.wait_s = 0.0
        "How long the last packet was waited for."
        self._fps, self._crf = exact_fps(fps), crf
        self._chunks: queue.Queue[Callable[[], np.ndarray] | None] = queue.Queue(FRAMES_WAIT)
        self._packets: list[Any] = []
        self._error: BaseException | None = None
        self._wanted = True
        self._thread = threading.Thread(target=self._run, name="undercrank-encoder", daemon=True)
        self._thread.start()

    def put(self, frames_of: Callable[[], np.ndarray]) -> None:
        """frames_of: called in the encoder's thread; returns the next frames_FHWC in uint8."""
        self._chunks.put(frames_of)

    def forget(self) -> None:
        """These were not the clip's frames: `encoded` stays None."""
        self._wanted = False

    def close(self) -> None:
        """Wait for the last packet, and end the thread."""
        begun = time.perf_counter()
        self._chunks.put(None)
        self._thread.join()
        self.wait_s = time.perf_counter() - begun
        if self._error is None and self._wanted and self._packets:
            self.encoded = Encoded(packets=tuple(self._packets), fps=self._fps, crf=self._crf)

    def _run(self) -> None:
        """What cannot be encoded here is encoded later, where its error has a file's name."""
        try:
            self._encode()
        except BaseException as error:
            self._error = error
            while self._chunks.get() is not None:
                pass

    def _encode(self) -> None:
        coding, index = _h264(self._crf), 0
        with av.open(io.BytesIO(), "w", format=coding.container, options=dict(coding.container_options)) as file:
            stream: VideoStream | None = None
            while (frames_of := self._chunks.get()) is not None:
                for frame_HWC in frames_of() if self._wanted else ():
                    stream = stream or _add_stream(file, frame_HWC, coding, self._fps)
                    self._packets += _encoded(stream, frame_HWC, coding, index, self._fps)
                    index += 1
            if stream is not None:
                self._packets += stream.encode()


@contextmanager
def encoding(fps: Fraction | int | float, *, crf: int = CRF) -> Iterator[Encoder]:
    """Encode frames while later ones are made. The thread ends with the block, also when the block fails."""
    encoder = Encoder(fps, crf)
    try:
        yield encoder
    except BaseException:
        encoder.forget()
        raise
    finally:
        encoder.close()


def _add_stream(file: OutputContainer, frame_HWC: np.ndarray, coding: _Coding, fps: Fraction) -> VideoStream:
    picture = coding.picture_of(frame_HWC)
    stream = file.add_stream(coding.codec, rate=fps, options=dict(coding.codec_options))
    context = stream.codec_context
    context.width, context.height, context.pix_fmt = picture.width, picture.height, coding.pix_fmt
    if coding.pix_fmt == "yuv420p":  # all four: where one is missing, browsers guess the matrix
        context.color_range = context.colorspace = context.color_primaries = context.color_trc = _BT709
    return stream


_BT709 = 1  # the code point of BT.709 in matrix, primaries and transfer alike; as a range, 1 is "limited"


def _to_yuv420p(frame_HWC: np.ndarray) -> av.VideoFrame:
    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(pad_to_even(frame_HWC)), format="rgb24")
    limited_709 = {"dst_colorspace": Colorspace.ITU709, "dst_color_range": ColorRange.MPEG}
    return picture.reformat(format="yuv420p", **limited_709)


def _to_bgr0(frame_HWC: np.ndarray) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24").reformat(format="bgr0")


# ---------------------------------------------------------------- a file is whole or absent


@contextmanager
def appears_whole(path: PathLike) -> Iterator[Path]:
    """Yield a hidden sibling to write to. It takes the name `path` when the block ends well, else it goes.

    A reader never sees half a file under `path`, not even after a power cut or a kill.
    """
    final = Path(path).resolve()  # a link is followed: the file it names is the one to replace
    part = final.with_name(f".{safe_stem(final.stem, 40)}.{secrets.token_hex(4)}.part{final.suffix[:8]}")
    _refuse_target(final)
    part.touch(exist_ok=False)  # before any work: Python's own OSError says what is wrong with the folder
    try:
        yield part
        _sync(part)
        os.replace(part, final)
        _sync_folder(final.parent)
    finally:
        part.unlink(missing_ok=True)


def _refuse_target(final: Path) -> None:
    """A name that is too long, or a folder's, should fail now and not after the encoding."""
    with suppress(FileNotFoundError):
        mode = final.lstat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(final))


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_os_errors(final: Path) -> Iterator[None]:
    """FFmpeg's errors about the disk (ENOSPC, EIO, ...) as Python's own, under the name the caller knows."""
    try:
        yield
    except av.FFmpegError as error:
        if not isinstance(error, OSError):
            raise
        raise OSError(error.errno, error.strerror, str(final)) from error


def _refuse_lost_frames(part: Path, num_frames: int) -> None:
    """An encoder may drop a frame without an error, and a disk a block: count what arrived."""
    try:
        arrived = _num_packets(part)
    except NotVideo:
        arrived = 0
    if arrived != num_frames:
        raise OSError(errno.EIO, f"{arrived} of {num_frames} frames reached the file", str(part))


def _num_packets(path: Path) -> int:
    with _opened(path) as file:
        return sum(1 for packet in file.demux(file.streams.video[0]) if packet.size and not packet.is_corrupt)


# ---------------------------------------------------------------- the recipe


def recipe_with_crop(recipe: Mapping[str, Any], frames_FHWC: np.ndarray) -> dict[str, Any]:
    """The recipe as an mp4 of this clip holds it: with `crop`, the true size, only where a side is odd."""
    height, width = frames_FHWC.shape[1:3]
    plain = {key: value for key, value in recipe.items() if key != "crop"}
    return plain | {"crop": {"width": width, "height": height}} if any(even_padding(width, height)) else plain


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def _tags(recipe: Mapping[str, Any], title: str, comment: str) -> dict[str, str]:
    tags = {"recipe": _to_json(recipe), "title": printable(title), "comment": printable(comment)}
    return {key: value for key, value in tags.items() if value}


def _to_json(recipe: Mapping[str, Any]) -> str:
    """Readable UTF-8; NUL and lone surrogates, which a metadata tag cannot hold, as JSON escapes."""
    text = json.dumps(recipe, ensure_ascii=False, allow_nan=False)
    return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: str) -> str:
    """A title is for people: what no tag can hold becomes U+FFFD. The recipe keeps the original."""
    return _UNWRITABLE.sub("\ufffd", text)


def read_recipe(path: PathLike) -> dict[str, Any]:
    """The recipe inside an mp4 or mkv. Raises NoRecipe (also when it is no video), FileNotFoundError."""
    try:
        with _opened(path) as file:
            return _recipe_of(file, path)
    except NotVideo as error:
        raise NoRecipe(str(error)) from error


def _tags_of(file: InputContainer) -> dict[str, str]:
    return {key.lower(): value for key, value in file.metadata.items()}  # Matroska writes RECIPE


def _recipe_of(file: InputContainer, path: PathLike) -> dict[str, Any]:
    try:
        recipe = json.loads(_tags_of(file)["recipe"])
    except KeyError:
        raise NoRecipe(f"{Path(path).name!r} holds no recipe") from None
    except ValueError as error:
        raise NoRecipe(f"the recipe in {Path(path).name!r} is no JSON: {error}") from error
    if not isinstance(recipe, dict):
        raise NoRecipe(f"the recipe in {Path(path).name!r} is no JSON object")
    return recipe


# ---------------------------------------------------------------- reading


def probe(path: PathLike) -> VideoInfo:
    """What the file says of itself, and its frames, counted. Raises NotVideo, FileNotFoundError."""
    num_frames = _num_packets(Path(path))
    with _opened(path) as file:
        stream = file.streams.video[0]
        context = stream.codec_context
        return VideoInfo(
            width=context.width,
            height=context.height,
            num_frames=num_frames,
            fps=Fraction(stream.average_rate or stream.guessed_rate or 1),
            codec=context.codec.name,
            pix_fmt=context.pix_fmt or "unknown",
            color_range=int(context.color_range),
            colorspace=int(context.colorspace),
            color_primaries=int(context.color_primaries),
            color_trc=int(context.color_trc),
        )


def read_frames(path: PathLike) -> np.ndarray:
    """All frames as frames_FHWC uint8: converted back by the file's own colour tags, cut to the true size.

    A master comes back exactly or not at all. An mp4 is lossy: never measure fidelity on one. Raises NotVideo
    (also for a file cut short, or a master with a changed pixel), FileNotFoundError.
    """
    with _opened(path) as file:
        width, height = _crop_of(file, path)
        promised, wanted_hash = file.streams.video[0].frames, _tags_of(file).get(_HASH)
        frames = [_to_rgb(picture)[:height, :width] for picture in file.decode(video=0)]
    if not frames or len(frames) < promised:
        raise NotVideo(f"{Path(path).name!r} is cut short: {len(frames)} of {promised} frames can be read")
    clip_FHWC = np.stack(frames)
    if wanted_hash and frames_hash(clip_FHWC) != wanted_hash:  # ffv1 conceals a damaged slice without a word
        raise NotVideo(f"{Path(path).name!r} is damaged: these are not the frames that were written")
    return clip_FHWC


def _crop_of(file: InputContainer, path: PathLike) -> tuple[int | None, int | None]:
    try:
        crop = _recipe_of(file, path).get("crop", {})
        return int(crop["width"]), int(crop["height"])
    except (NoRecipe, KeyError, TypeError, ValueError):
        return None, None


def _to_rgb(picture: av.VideoFrame) -> np.ndarray:
    return np.asarray(picture.to_ndarray(format="rgb24"))


# Playlists that name other files or addresses are formats, too: only plain containers, only local files.
_READABLE = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm", "protocol_whitelist": "file"}


@contextmanager
def _opened(path: PathLike) -> Iterator[InputContainer]:
    path = Path(path).absolute()
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer for ever
        raise NotVideo(f"{path.name!r} is no regular file")
    path.open("rb").close()  # Python's own error where there is no file to read
    try:
        with av.open(str(path), "r", options=dict(_READABLE), metadata_errors="replace") as file:
            if not file.streams.video:
                raise NotVideo(f"{path.name!r} holds no picture track")
            yield file
    except av.FFmpegError as error:
        raise NotVideo(f"{path.name!r} is no whole mp4, mov, mkv or webm: {error.strerror}") from error


# ---------------------------------------------------------------- previews


def write_webp(path: PathLike, frames_FHWC: Any, *, fps: Fraction | int, max_width: int = 320) -> Path:
    """An endless animated WebP for a page or a README, at most `max_width` pixels wide. Lossy, no recipe."""
    clip_FHWC, rate = as_uint8(frames_FHWC), exact_fps(fps)
    first, *others = (_shrunk(frame_HWC, max_width) for frame_HWC in clip_FHWC)
    timing = {"duration": frame_durations_ms(len(clip_FHWC), rate), "loop": 0}
    with appears_whole(path) as part:
        first.save(part, "WEBP", save_all=True, append_images=others, quality=80, **timing)
    return Path(path)


def write_thumbnail(path: PathLike, frames_FHWC: Any, *, index: int = 0, max_width: int = 320) -> Path:
    """One frame (the first) as a PNG of at most `max_width` pixels in width, whatever the path's suffix."""
    frame_HWC = as_uint8(frames_FHWC[index:][:1])[0]
    with appears_whole(path) as part:
        _shrunk(frame_HWC, max_width).save(part, "PNG")
    return Path(path)


def write_picture(path: PathLike, frame_HWC: np.ndarray) -> Path:
    """One uint8 frame as a small JPEG, for a look while the film is being made. Whole or absent, but not synced."""
    final = Path(path)
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    try:
        Image.fromarray(np.ascontiguousarray(frame_HWC)).save(part, "JPEG", quality=80)
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    return final


def frame_durations_ms(num_frames: int, fps: Fraction) -> list[int]:
    """Whole milliseconds per frame whose running sum never drifts from the exact time by more than 0.5 ms."""
    ends_ms = [round(index * 1000 / fps) for index in range(num_frames + 1)]
    return [end - start for start, end in pairwise(ends_ms)]


def _shrunk(frame_HWC: np.ndarray, max_width: int) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(frame_HWC))
    if picture.width <= max_width:
        return picture
    height = max(1, round(picture.height * max_width / picture.width))
    return picture.resize((max_width, height), Image.Resampling.LANCZOS)


# ---------------------------------------------------------------- names


_PORTS = (f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789\u00b9\u00b2\u00b3")
_RESERVED = frozenset(["CON", "PRN", "AUX", "NUL", *_PORTS])


def safe_stem(prompt: str, limit_bytes: int = 80) -> str:
    """A file name without suffix that any system takes and a person can read: `a red ball!` -> `a-red-ball`.

    Letters, digits and symbols of all scripts (emoji too) stay; everything else becomes one hyphen. At most
    `limit_bytes` (8 or more) of UTF-8; never empty, hidden, an option (`-x`) or a name Windows reserves.
    """
    if limit_bytes < 8:
        raise ValueError(f"limit_bytes is {limit_bytes}: at least 8")
    words = re.sub("-{2,}", "-", "".join(map(_safe, unicodedata.normalize("NFC", prompt))))
    stem = _cut(words.strip("-._"), limit_bytes) or "video"
    return _cut(f"_{stem}", limit_bytes) if stem.partition(".")[0].upper() in _RESERVED else stem


def _safe(char: str) -> str:
    if char.isascii():
        return char if char.isalnum() or char in "-_." else "-"
    category = unicodedata.category(char)
    if category == "Cf":
        return ""  # joiners and direction marks: invisible, and able to make a name read as another
    return char if category[0] in "LMNS" else "-"


def _cut(text: str, limit_bytes: int) -> str:
    return text.encode()[:limit_bytes].decode(errors="ignore").rstrip("-._")


def missing_codecs() -> list[str]:
    """Encoders that this build of PyAV lacks, of those that clips are written with."""
    return [name for name in ("libx264", "ffv1") if name not in av.codecs_available]
