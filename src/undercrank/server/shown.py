"""A stored job as its owner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from undercrank.jobs import Job, State
from undercrank.records import Request, UndercrankError
from undercrank.server import files
from undercrank.server.schemas import Video, as_error, in_seconds
from undercrank.server.studio import Studio


def as_videos(studio: Studio, jobs: Sequence[Job]) -> list[Video]:
    """A page of them, with one question about their places in line."""
    is_waiting = any(job.state is State.QUEUED for job in jobs)
    positions = studio.store.queue_positions() if is_waiting else {}
    return [_video(studio, job, positions.get(job.id)) for job in jobs]


def as_video(studio: Studio, job: Job) -> Video:
    return _video(studio, job, studio.store.queue_position(job.id) if job.state is State.QUEUED else None)


def _video(studio: Studio, job: Job, queue_position: int | None) -> Video:
    request = Request.from_dict(job.request)
    assert request.width and request.height and request.num_frames and request.fps
    assert request.num_inference_steps and request.guidance_scale is not None
    report = files.report_of(job) or {}
    plan = report.get("plan") or _plan(studio, request)
    trace = report.get("trace") or {}
    return Video(
        id=job.id,
        model=job.model,
        status=job.state.value,
        progress=job.progress,
        created_at=int(job.created_at),
        completed_at=int(job.ended_at) if job.ended_at and job.state is State.COMPLETED else None,
        expires_at=int(job.expires_at) if job.expires_at else None,
        prompt=request.prompt,
        size=f"{request.width}x{request.height}",
        seconds=in_seconds(request.num_frames, request.fps),
        remixed_from_video_id=job.remixed_from,
        error=as_error(job.error),
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        fps=str(request.fps),
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        guidance_scale_2=request.guidance_scale_2,
        flow_shift=request.flow_shift,
        seed=job.seed,
        fidelity=request.fidelity,
        allow_denied=request.allow_denied,
        stage="cancelling" if job.cancel_requested else job.stage,
        eta_s=job.eta_s,
        queue_position=queue_position,
        attempts=job.attempts,
        promise=(plan or {}).get("promise"),
        inference_time_s=_inference_s(trace),
        peak_memory_mb=trace["peak_bytes"] / 2**20 if trace.get("peak_bytes") else None,
        variants=files.variants_of(studio, job),
        request=(plan or {}).get("request") or job.request,
        plan=plan,
        notes=report.get("notes") or [*((plan or {}).get("notes") or ()), *job.options.get("picture_notes", ())],
    )


def _plan(studio: Studio, request: Request) -> dict[str, Any] | None:
    """As it would be decided now; None where this version would refuse what an earlier one took."""
    try:
        return studio.plan(request).to_dict()
    except UndercrankError:
        return None


def _inference_s(trace: dict[str, Any]) -> float | None:
    stages = trace.get("stage_s")
    return sum(s for stage, s in stages.items() if stage != "load") if stages else None
