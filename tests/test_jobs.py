"""The store and its queue, on SQLite and on PostgreSQL: order, leases, fences, events, keys, the outbox."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from tests.databases import new_postgres_database, postgres_server
from undercrank.jobs import (
    Claim,
    Clock,
    IdempotencyConflict,
    Job,
    JobError,
    LeaseLost,
    LimitReached,
    Limits,
    NoSuchJob,
    SchemaTooNew,
    State,
    Store,
    StoreUnavailable,
    Watch,
)
from undercrank.jobs.database import METADATA, migrate
from undercrank.records import BadInput

NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return new_postgres_database(request.getfixturevalue("postgres"), f"test{next(NUMBERS)}")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Store]:
    """Where the database makes no difference."""
    with Store.open(f"sqlite:///{tmp_path}/jobs.db") as store:
        yield store


def add(store: Store, prompt: str = "a red ball", **settings: Any) -> Job:
    job, _ = store.enqueue(**({"owner": "ann", "model": "flipbook", "request": {"prompt": prompt}} | settings))
    return job


def take(store: Store, worker: str = "w1") -> Claim:
    claim = store.claim(worker)
    assert claim is not None
    return claim


def kinds(store: Store, job: Job) -> list[str]:
    return [event.kind for event in store.events_after(job_id=job.id)]


# --------------------------------------------------------------------------- the way of a job


def test_a_job_goes_from_queued_over_in_progress_to_completed(store: Store) -> None:
    job = add(store)
    assert (job.state, job.progress, job.attempts) == (State.QUEUED, 0, 0)
    claim = take(store)
    assert (claim.job.state, claim.job.attempts, claim.job.worker) == (State.IN_PROGRESS, 1, "w1")
    assert store.event(claim.lease, "step", {"step": 3}, stage="denoise", progress=40, eta_s=2.5) is False
    seen = store.get(job.id)
    assert (seen.stage, seen.progress, seen.eta_s) == ("denoise", 40, 2.5)
    done = store.finish(claim.lease, {"files": {"video": "clip.mp4"}})
    assert (done.state, done.progress, done.eta_s) == (State.COMPLETED, 100, None)
    assert done.result == {"files": {"video": "clip.mp4"}} and done.ended_at is not None
    assert store.get(job.id) == done
    assert kinds(store, job) == ["queued", "started", "step", "completed"]


def test_a_failed_job_says_why_and_is_not_tried_again(store: Store) -> None:
    job = add(store)
    error = JobError(code="out_of_memory", message="memory ran out", remedy="try 480p")
    assert store.fail(take(store).lease, error).error == error
    assert store.get(job.id).state is State.FAILED
    assert store.events_after(job_id=job.id)[-1].data == {"error": error.to_dict()}
    assert store.claim("w2") is None


def test_a_job_without_a_seed_is_given_one_that_stays(store: Store) -> None:
    job = add(store)
    assert job.request["seed"] == job.seed == store.get(job.id).seed
    assert add(store, request={"prompt": "x", "seed": 7}).seed == 7


def test_the_queue_is_by_priority_then_by_arrival(store: Store) -> None:
    jobs = [add(store, priority=priority) for priority in (0, 5, 0, 5, -1)]
    assert [store.queue_position(job.id) for job in jobs] == [2, 0, 3, 1, 4]
    assert [take(store).job.id for _ in jobs] == [jobs[i].id for i in (1, 3, 0, 2, 4)]
    assert store.claim("w1") is None and store.queue_position(jobs[0].id) is None


def test_counts_by_state_and_by_owner(store: Store) -> None:
    add(store, cost=10), add(store, cost=5), add(store, owner="bob", cost=1)
    store.finish(take(store).lease, {})
    take(store)
    assert store.counts() == {
        State.QUEUED: 1, State.IN_PROGRESS: 1, State.COMPLETED: 1, State.FAILED: 0, State.CANCELLED: 0,
    }  # fmt: skip
    assert (store.load_of("ann").jobs, store.load_of("ann").cost) == (1, 5)


# --------------------------------------------------------------------------- idempotency, limits, owners


def test_the_same_idempotency_key_and_request_give_the_same_job(store: Store) -> None:
    request = {"owner": "ann", "model": "flipbook", "request": {"prompt": "x"}, "idempotency_key": "k"}
    (first, is_new), (second, is_new_again) = store.enqueue(**request), store.enqueue(**request)
    assert (first.id, is_new, is_new_again) == (second.id, True, False)
    assert store.enqueue(**{**request, "owner": "bob"})[1]  # another owner's key is another key
    with pytest.raises(IdempotencyConflict, match="another request"):
        store.enqueue(**{**request, "request": {"prompt": "y"}})
    store.delete(first.id)
    assert store.enqueue(**request)[1]  # a deleted job frees its key


def test_many_at_once_with_one_key_make_one_job(store: Store) -> None:
    made: list[tuple[Job, bool]] = []

    def ask() -> None:
        made.append(store.enqueue(owner="ann", model="m", request={"prompt": "x"}, idempotency_key="k"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job.id for job, _ in made}) == 1 and sum(is_new for _, is_new in made) == 1


def test_limits_count_what_is_queued_and_running(store: Store) -> None:
    limits = Limits(max_jobs=2, max_cost=100)
    add(store, cost=40, limits=limits), add(store, cost=40, limits=limits)
    with pytest.raises(LimitReached, match="2 jobs"):
        add(store, cost=1, limits=limits)
    add(store, cost=90, owner="bob", limits=limits)
    store.finish(take(store).lease, {})
    with pytest.raises(LimitReached, match="140 pixels"):
        add(store, cost=100, limits=limits)
    add(store, cost=60, limits=limits)


def test_an_owner_sees_only_what_is_theirs(store: Store) -> None:
    mine, theirs = add(store, owner="ann"), add(store, owner="bob")
    assert [job.id for job in store.list(owner="ann").jobs] == [mine.id]
    for call in (store.get, store.cancel, store.delete):
        with pytest.raises(NoSuchJob):
            call(theirs.id, owner="ann")
    assert store.get(theirs.id, owner="bob").state is State.QUEUED
    assert {event.job_id for event in store.events_after(owner="ann")} == {mine.id}


def test_a_list_comes_in_pages(store: Store) -> None:
    ids = [add(store).id for _ in range(5)]
    first = store.list(limit=2)
    assert [job.id for job in first.jobs] == [ids[4], ids[3]] and first.has_more
    last = store.list(limit=3, after=ids[3])
    assert [job.id for job in last.jobs] == [ids[2], ids[1], ids[0]] and not last.has_more
    assert [job.id for job in store.list(order="asc", after=ids[2]).jobs] == ids[3:]
    take(store)
    assert [job.id for job in store.list(states=[State.IN_PROGRESS]).jobs] == [ids[0]]
    for wrong in ({"after": "video_x"}, {"limit": 0}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(BadInput) as caught:
            store.list(**wrong)
        assert caught.value.field in wrong


# --------------------------------------------------------------------------- cancel and delete


def test_a_queued_job_is_cancelled_at_once(store: Store) -> None:
    job = add(store)
    assert store.cancel(job.id).state is State.CANCELLED
    assert store.claim("w1") is None
    assert store.cancel(job.id).state is State.CANCELLED and kinds(store, job) == ["queued", "cancelled"]


def test_a_running_job_is_cancelled_when_its_worker_has_stopped(store: Store) -> None:
    job = add(store)
    lease = take(store).lease
    assert store.renew(lease) is False
    asked = store.cancel(job.id)
    assert (asked.state, asked.cancel_requested) == (State.IN_PROGRESS, True)
    assert store.renew(lease) is True and store.event(lease, "step", {}) is True
    stopped = store.stopped(lease)
    assert (stopped.state, stopped.cancel_requested) == (State.CANCELLED, False)
    assert kinds(store, job) == ["queued", "started", "cancelling", "step", "cancelled"]


def test_a_deleted_job_is_gone_for_all_and_its_files_go_before_its_row(store: Store) -> None:
    job, kept = add(store), add(store)
    lease = take(store).lease
    store.delete(job.id)
    with pytest.raises(NoSuchJob):
        store.get(job.id)
    assert [each.id for each in store.list().jobs] == [kept.id]
    removed: list[str] = []
    assert store.retain(lambda each: removed.append(each.id)) == ()  # its worker is still at it
    assert store.renew(lease) is True
    store.stopped(lease)

    def fails(each: Job) -> None:
        raise OSError("a disk error")

    with pytest.raises(OSError):
        store.retain(fails)
    assert store.retain(lambda each: removed.append(each.id)) == (job.id,) == tuple(removed)
    assert store.events_after(job_id=job.id) == () and store.retain(fails) == ()


def test_ended_jobs_expire_and_living_ones_do_not(url: str) -> None:
    now = [1000.0]
    with Store.open(url, keep_s=60, now=lambda: now[0]) as store:
        first, second, third = add(store), add(store), add(store)
        store.finish(take(store).lease, {})
        now[0] += 50
        store.fail(take(store).lease, JobError(code="x", message="x"))
        now[0] += 11
        assert store.retain(lambda job: None) == (first.id,)
        now[0] += 10_000
        take(store)
        assert store.retain(lambda job: None) == (second.id,)
        assert store.get(third.id).state is State.IN_PROGRESS


# --------------------------------------------------------------------------- events


def test_events_are_numbered_within_a_job_and_over_all(store: Store) -> None:
    jobs = [add(store), add(store)]
    leases = [take(store).lease, take(store).lease]
    for step in range(3):
        for lease in leases:
            store.event(lease, "step", {"step": step})
    everything = store.events_after()
    assert [event.id for event in everything] == sorted({event.id for event in everything})
    for job in jobs:
        own = store.events_after(job_id=job.id)
        assert [event.n for event in own] == [1, 2, 3, 4, 5]
        assert store.events_after(own[2].id, job_id=job.id) == own[3:]  # as after a lost connection
    assert store.events_after(everything[3].id, limit=2) == everything[4:6]


def test_event_ids_become_visible_in_their_order(store: Store) -> None:
    """A reader that has seen id N never misses a smaller one that is committed later."""
    for _ in range(3):
        add(store)
    leases = [take(store).lease for _ in range(3)]

    def write(lease: Any) -> None:
        for step in range(15):
            store.event(lease, "step", {"step": step})

    threads = [threading.Thread(target=write, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while any(thread.is_alive() for thread in threads) or len(seen) < 3 * 15 + 6:
        seen += [event.id for event in store.events_after(seen[-1] if seen else 0)]
    assert seen == sorted(seen) and len(seen) == len({event.id for event in store.events_after()})


# --------------------------------------------------------------------------- leases and fences


def every_write(store: Store, lease: Any) -> list[Any]:
    return [
        lambda: store.renew(lease),
        lambda: store.event(lease, "step", {}),
        lambda: store.finish(lease, {}),
        lambda: store.fail(lease, JobError(code="x", message="x")),
        lambda: store.stopped(lease),
        lambda: store.release(lease),
    ]


def test_whoever_lost_the_lease_writes_nothing(store: Store) -> None:
    job = add(store)
    old = take(store, "w1").lease
    assert store.worker_lost("w1") == (job.id,)
    for write in every_write(store, old):
        with pytest.raises(LeaseLost):
            write()
    new = take(store, "w2").lease
    before = store.get(job.id), store.events_after()
    for write in every_write(store, old):
        with pytest.raises(LeaseLost):
            write()
    assert (store.get(job.id), store.events_after()) == before
    assert store.finish(new, {}).state is State.COMPLETED
    for write in every_write(store, new):
        with pytest.raises(LeaseLost):
            write()


def test_a_silent_lease_goes_back_in_line_while_attempts_remain(store: Store) -> None:
    job, later = add(store), add(store)
    now = [0.0]
    watch = Watch(10, monotonic=lambda: now[0])

    def seconds_pass(seconds: int) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        for _ in range(seconds):
            now[0] += 1
            found += store.requeue_expired(watch)
        return found

    lease = take(store, "w1").lease
    assert seconds_pass(9) == ()
    store.renew(lease)
    assert seconds_pass(9) == ()
    assert seconds_pass(3) == (job.id,)
    again = store.get(job.id)
    assert (again.state, again.attempts, again.worker, again.stage) == (State.QUEUED, 1, None, None)
    second = take(store, "w2")
    assert second.job.id == job.id and second.lease.attempt == 2 and second.job.seed == job.seed
    assert seconds_pass(12) == (job.id,)
    failed = store.get(job.id)
    assert failed.state is State.FAILED and failed.error and failed.error.code == "worker_lost"
    assert take(store).job.id == later.id
    assert kinds(store, job) == ["queued", "started", "requeued", "started", "failed"]


def test_a_silent_job_that_was_to_be_cancelled_is_cancelled(store: Store) -> None:
    job = add(store)
    take(store, "w1")
    store.cancel(job.id)
    store.worker_lost("w1")
    assert store.get(job.id).state is State.CANCELLED


def test_a_released_job_is_first_in_line_again_and_its_attempt_is_not_counted(store: Store) -> None:
    job, _ = add(store), add(store)
    store.release(take(store).lease)
    claim = take(store)
    assert (claim.job.id, claim.lease.attempt) == (job.id, 1)


def test_no_job_is_claimed_twice_and_none_is_lost_by_many_at_once(store: Store) -> None:
    ids = {add(store).id for _ in range(40)}
    claimed: list[str] = []

    def work(worker: str) -> None:
        while (claim := store.claim(worker)) or store.counts()[State.QUEUED]:
            if claim:
                claimed.append(claim.job.id)
                store.finish(claim.lease, {})

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(ids)
    assert store.counts()[State.COMPLETED] == 40


# --------------------------------------------------------------------------- time


def test_a_watch_tells_the_silent_from_those_who_could_not_be_heard() -> None:
    now = [0.0]
    watch = Watch(8, monotonic=lambda: now[0])
    watch.look({"a": 1, "b": 1})
    assert watch.alive == frozenset() == watch.silent  # nobody has been seen to move yet
    now[0] = 1000.0  # the onlooker slept
    watch.look({"a": 2, "b": 1})
    assert watch.alive == {"a"} and watch.silent == frozenset()
    for _ in range(4):
        now[0] += 2
        watch.look({"a": watch._seen["a"].beat, "b": 1})
    assert watch.silent == {"a", "b"} and watch.alive == frozenset()
    watch.look({"a": 3})
    assert watch.alive == {"a"} and watch.silent == frozenset()


def test_a_clock_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock() < before + 60


@pytest.mark.parametrize("jump_s", [-1e7, 1e7])
def test_a_moved_clock_loses_no_job_and_runs_none_twice(store: Store, url: str, jump_s: float) -> None:
    """Another process that sees another time: leases, order and the queue do not depend on it."""
    first, second = add(store), add(store)
    lease = take(store, "w1").lease
    with Store.open(url, keep_s=3600, now=lambda: time.time() + jump_s) as elsewhere:
        watch = Watch(60)
        assert elsewhere.requeue_expired(watch) == () == elsewhere.requeue_expired(watch)
        third = add(elsewhere)
        assert take(elsewhere, "w2").job.id == second.id
        elsewhere.retain(lambda job: None)
    store.finish(lease, {})
    assert store.get(first.id).attempts == 1
    assert take(store).job.id == third.id


# --------------------------------------------------------------------------- workers and commands


def test_a_worker_shows_how_it_is_and_that_it_lives(store: Store) -> None:
    who = {"host": "h", "pid": 1, "device": "cpu"}
    store.beat("w1", **who, state="starting")
    watch = Watch(10)
    watch.look({worker.id: worker.beats for worker in store.workers()})
    assert watch.alive == frozenset()
    store.beat("w1", **who, state="busy", models=["flipbook"], job_id="video_1", loading={"state": "reading"})
    (worker,) = store.workers()
    assert (worker.state, worker.models, worker.job_id) == ("busy", ("flipbook",), "video_1")
    assert worker.loading == {"state": "reading"}
    watch.look({worker.id: worker.beats})
    assert watch.alive == {"w1"}
    store.worker_lost("w1")
    assert store.workers() == ()


def test_a_load_ends_where_it_is_cancelled_or_gives_way_to_a_newer_one_of_another_model(url: str) -> None:
    now = [100.0]
    with Store.open(url, now=lambda: now[0]) as store:
        ours, again = (store.command("load", "wan", owner="ann") for _ in range(2))
        assert store.claim_command("w1") == store.get_command(ours.id)
        assert store.why_end(ours.id, "w1", gives_way_after_s=1) is None, "the newer one is of the same model"
        store.command("load", "ltx", owner="ben")
        assert store.why_end(ours.id, "w1", gives_way_after_s=1) is None, "somebody else may be about to take it"
        now[0] += 1
        assert store.why_end(ours.id, "w1", gives_way_after_s=1) == "overtaken"
        assert store.why_end(ours.id, "w1") is None, "it does not give way"
        store.cancel_command(ours.id)
        assert store.why_end(ours.id, "w1", gives_way_after_s=1) == "cancelled"
        with pytest.raises(LeaseLost):
            store.why_end(again.id, "w1")


def test_who_is_first_is_told_and_not_taken(store: Store) -> None:
    assert store.first_in_line() is None and store.first_command(holds=["wan"]) is None
    for model, priority in (("wan", 0), ("ltx", 5)):
        add(store, model=model, priority=priority)
    store.command("unload", "mochi", owner="ann")
    store.command("load", "wan", owner="ann")
    for _ in range(2):
        assert store.first_in_line() == "ltx"
        assert store.first_command() == ("load", "wan")
        assert store.first_command(holds=["mochi"]) == ("unload", "mochi")
    assert take(store).job.model == "ltx" and store.first_in_line() == "wan"


def test_a_model_is_loaded_by_command(store: Store) -> None:
    load = store.command("load", "wan", owner="ann")
    unload = store.command("unload", "ltx", owner="ann")
    taken = store.claim_command("w1")
    assert taken and (taken.id, taken.state) == (load.id, State.IN_PROGRESS)
    assert store.claim_command("w1") is None  # it does not hold ltx
    assert store.command_progress(load.id, "w1", stage="load", progress=30) is False
    assert store.cancel_command(load.id).cancel_requested
    assert store.command_progress(load.id, "w1", stage="load", progress=60) is True
    assert store.end_command(load.id, "w1", State.CANCELLED).state is State.CANCELLED
    with pytest.raises(LeaseLost):
        store.end_command(load.id, "w1", State.COMPLETED)
    other = store.claim_command("w2", holds=["ltx"])
    assert other and other.id == unload.id
    store.worker_lost("w2")
    lost = store.get_command(unload.id)
    assert lost.state is State.FAILED and lost.error and lost.error.code == "worker_lost"
    assert store.cancel_command(store.command("load", "x", owner="ann").id).state is State.CANCELLED
    assert len(store.commands(limit=2)) == 2
    with pytest.raises(BadInput):
        store.command("paint", "x", owner="ann")


# --------------------------------------------------------------------------- keys


def test_a_key_opens_until_it_is_revoked_and_its_secret_is_stored_nowhere(sqlite: Store, tmp_path: Path) -> None:
    key, secret = sqlite.create_key(owner="ann", name="laptop", limits=Limits(max_jobs=3))
    assert sqlite.key_of(secret) == key and key.limits.max_jobs == 3
    for wrong in ("", "x", secret[:-1], secret + "x", f"uc_{key.id}_", "uc__", "\ud800", secret.replace("uc_", "uk_")):
        assert sqlite.key_of(wrong) is None
    assert sqlite.revoke_key(key.id).revoked_at is not None
    assert sqlite.key_of(secret) is None and len(sqlite.keys()) == 1
    with pytest.raises(NoSuchJob):
        sqlite.revoke_key("x")
    sqlite.close()
    assert all(secret.encode() not in file.read_bytes() for file in tmp_path.glob("jobs.db*"))


# --------------------------------------------------------------------------- the outbox


def test_the_end_of_a_job_is_put_in_the_outbox_of_its_owner(store: Store) -> None:
    hook = store.add_webhook(owner="ann", url="https://example.org/x", secret="whsec_eA==")
    store.add_webhook(owner="bob", url="https://example.org/y", secret="whsec_eA==")
    ended = [add(store), add(store), add(store)]
    store.finish(take(store).lease, {})
    store.fail(take(store).lease, JobError(code="x", message="y"))
    store.cancel(ended[2].id)
    bodies = []
    while delivery := store.next_delivery(retry_s=(60, 60)):
        assert (delivery.url, delivery.attempts) == (hook.url, 1)
        bodies.append(json.loads(delivery.body))
        store.delivered(delivery.id)
    assert [(body["type"], body["data"]["id"]) for body in bodies] == [
        (f"video.{state}", job.id) for state, job in zip(("completed", "failed", "cancelled"), ended, strict=True)
    ]


def test_a_message_comes_again_until_it_is_delivered_or_given_up(url: str) -> None:
    now = [1000.0]
    with Store.open(url, now=lambda: now[0]) as store:
        hook = store.add_webhook(owner="ann", url="https://example.org/x", secret="whsec_eA==")
        store.cancel(add(store).id)
        for attempt, wait_s in enumerate((5, 60, 600, 7200), start=1):
            delivery = store.next_delivery(retry_s=(5, 60, 600))
            assert delivery and delivery.attempts == attempt
            store.not_delivered(delivery.id, "refused")
            now[0] += wait_s - 1
            assert store.next_delivery(retry_s=(5, 60, 600)) is None
            now[0] += 2
        assert store.next_delivery(retry_s=(5, 60, 600)) is None
        store.cancel(add(store).id)
        now[0] -= 1e7  # the clock is set back: the message does not wait for months
        assert store.next_delivery(retry_s=(5,)) is not None
        assert store.webhooks(owner="ann") == (hook,) and store.webhooks(owner="bob") == ()
        with pytest.raises(NoSuchJob):
            store.remove_webhook(hook.id, owner="bob")
        store.remove_webhook(hook.id, owner="ann")
        assert store.webhooks() == ()


# --------------------------------------------------------------------------- the database


def test_the_migrations_make_the_tables_that_the_code_uses(url: str) -> None:
    with Store.open(url) as store, store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    with Store.open(url) as store:  # nothing left to do
        add(store)


def test_a_newer_schema_is_refused(store: Store, url: str) -> None:
    with store._writing() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNew, match="schema 9999"):
        Store.open(url)


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: sa.Connection) -> None:
        migrate(connection)
        raise RuntimeError("half-way")

    monkeypatch.setattr("undercrank.jobs.migrate", broken)
    with pytest.raises(RuntimeError):
        Store.open(f"sqlite:///{tmp_path}/jobs.db")
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()


def test_many_that_start_at_once_make_the_tables_once(url: str) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            Store.open(url).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("url", ["", "x", "mysql://h/d", "sqlite://", "sqlite:///:memory:", "postgresql://h/d"])
def test_another_kind_of_database_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        Store.open(url)
    assert caught.value.field == "db"


def test_a_database_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        Store.open(f"sqlite:///{tmp_path}/no/jobs.db")
    with pytest.raises(StoreUnavailable):
        Store.open(f"postgresql+psycopg://x@/x?host={tmp_path}", busy_s=1)


def test_the_file_is_for_its_owner_only_and_survives_a_crash(sqlite: Store, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "jobs.db").stat().st_mode) == 0o600
    with sqlite._reading() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert pragmas == ["wal", 1]


def locked_by_another(tmp_path: Path, seconds: float) -> threading.Thread:
    connection = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")

    def let_go() -> None:
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    thread = threading.Thread(target=let_go)
    thread.start()
    return thread


def test_a_locked_database_is_waited_for(sqlite: Store, tmp_path: Path) -> None:
    thread = locked_by_another(tmp_path, 0.5)
    job = add(sqlite)
    thread.join()
    assert sqlite.get(job.id).state is State.QUEUED


def test_a_database_locked_for_too_long_is_an_error_with_a_reason_and_reading_goes_on(
    sqlite: Store, tmp_path: Path
) -> None:
    job = add(sqlite)
    with Store.open(f"sqlite:///{tmp_path}/jobs.db", busy_s=0.1) as hasty:
        thread = locked_by_another(tmp_path, 1.0)
        with pytest.raises(StoreUnavailable, match="locked"):
            add(hasty)
        assert hasty.get(job.id) == job
        with pytest.raises(StoreUnavailable):
            hasty.check()
        thread.join()
        hasty.check()
        assert len(hasty.list().jobs) == 1


WRITER = """
import sys
from undercrank.jobs import Store
store = Store.open(sys.argv[1])
while True:
    job, _ = store.enqueue(owner="ann", model="m", request={"prompt": "x"})
    print(job.id, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True, env=environment) as p:
        assert p.stdout is not None
        acknowledged = [p.stdout.readline().strip() for _ in range(20)]
        p.kill()
        acknowledged += [line.strip() for line in p.stdout if line.endswith("\n")]
    with Store.open(url) as store:
        order = [store.claim("w") for _ in acknowledged]
        assert [claim.job.id for claim in order if claim] == acknowledged


@pytest.mark.parametrize("id", ["", "\0", "video_\0", "\ud800", "x" * 1000])
def test_an_id_that_no_database_would_hold_is_that_of_no_job(store: Store, id: str) -> None:
    for ask in (store.get, store.cancel, store.delete):
        with pytest.raises(NoSuchJob):
            ask(id)


def test_an_error_of_the_database_does_not_tell_the_prompt(sqlite: Store) -> None:
    with pytest.raises(sa.exc.SQLAlchemyError) as caught:
        sqlite.enqueue(owner="ann", model=None, request={"prompt": "my secret film"})  # type: ignore[arg-type]
    assert "my secret film" not in str(caught.value)
