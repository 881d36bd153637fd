"""What the routes share: the store, the folder, who asks, and the plan of a clip. One for each process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from fastapi import Depends
from starlette.requests import Request as HttpRequest

from undercrank import families
from undercrank.jobs import Limits, Store, Watch
from undercrank.ledger import Ledger, read_ledger
from undercrank.machine import this_machine
from undercrank.planner import load_spec, make_plan, refuse_if_too_big
from undercrank.records import BadInput, FidelityReport, Machine, Plan, Request, UndercrankError
from undercrank.server.auth import Owner, owner_of
from undercrank.server.logs import log
from undercrank.server.meters import Meters
from undercrank.server.pictures import remove_unused
from undercrank.settings import settings
from undercrank.sources import locate

FRESH_S = 2.0
"How long what is known of the machine and of the ledger is taken for true."
PATIENCE_S = 10.0
"A worker whose heart has stood still for so long is not counted on."


class LedgerBroken(UndercrankError):
    http_status: ClassVar[int] = 503
    code: ClassVar[str] = "ledger_broken"


@dataclass(kw_only=True)
class Studio:
    """store: the jobs. folder: pictures that came in, clips that were made. limits: for owners that have none."""

    store: Store
    folder: Path
    secret: bytes
    key_needed: bool = False
    limits: Limits = Limits()
    hosts: tuple[str, ...] = ()
    find_machine: Callable[[], Machine] = this_machine
    leaving: Callable[[], bool] = lambda: False
    "Whether this process was told to end: streams end then, and clients come back to the next one."
    watch: Watch = field(default_factory=lambda: Watch(PATIENCE_S))
    "Over the hearts of workers."
    meters: Meters = field(init=False)
    _known: tuple[float, Machine, Ledger] | None = None
    comparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    "Held while two films are compared: one pair at a time."
    compared: dict[tuple[Path, Path], FidelityReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meters = Meters(self.store, self.watch)

    def look_around(self) -> None:
        """Call it about once a second. Raises StoreUnavailable."""
        self.watch.look({worker.id: worker.beats for worker in self.store.workers()})

    def tidy(self) -> None:
        """Raises StoreUnavailable, OSError."""
        remove_unused(self.folder, self.store)

    def check(self) -> None:
        """Raises StoreUnavailable, LedgerBroken: nothing could be asked for now."""
        self.store.check()
        self._facts()

    def plan(self, request: Request) -> Plan:
        """Decide everything, read nothing. Raises BadInput, LeverRefused, OutOfMemory, NotFound."""
        family = families.family(request.model)
        machine, ledger = self._facts()
        load = load_spec(family)
        plan = make_plan(request, family=family, machine=machine, ledger=ledger, load=load)
        refuse_if_too_big(plan, family, machine, machine.device(plan.load.device))
        if settings().offline:
            locate(replace(load, local_files_only=True))
        return plan

    def _facts(self) -> tuple[Machine, Ledger]:
        """The machine with all its memory free, since a worker holds some for the models that it has loaded."""
        now = time.monotonic()
        if self._known is None or now - self._known[0] > FRESH_S:
            machine = self.find_machine()
            devices = tuple(replace(device, free_bytes=device.total_bytes) for device in machine.devices)
            self._known = (now, replace(machine, devices=devices), _ledger())
        return self._known[1], self._known[2]

    def limits_of(self, owner: Owner) -> Limits:
        """The owner's own limits, and the server's where it has none."""
        own = owner.limits
        return Limits(
            max_jobs=self.limits.max_jobs if own.max_jobs is None else own.max_jobs,
            max_cost=self.limits.max_cost if own.max_cost is None else own.max_cost,
        )


def _ledger() -> Ledger:
    """A broken row is the server's affair: whoever asks for a clip cannot mend it, and is not told where it lies."""
    try:
        return read_ledger()
    except (BadInput, OSError) as error:
        log.error("ledger unreadable", reason=str(error))
        raise LedgerBroken("the server cannot read its ledger of measured rows: its log says why") from error


def studio_of(http: HttpRequest) -> Studio:
    studio = http.app.state.studio
    assert isinstance(studio, Studio)
    return studio


def who_asks(http: HttpRequest, studio: Annotated[Studio, Depends(studio_of)]) -> Owner:
    return owner_of(http, studio.store, secret=studio.secret, key_needed=studio.key_needed)


TheStudio = Annotated[Studio, Depends(studio_of)]
TheOwner = Annotated[Owner, Depends(who_asks)]
