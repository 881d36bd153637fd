"""How a studio is run: what `undercrank serve` was told, as one record that goes to its processes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from undercrank.jobs import Limits, Store
from undercrank.records import BadInput, Record


@dataclass(frozen=True, kw_only=True)
class Options(Record):
    data: str
    "The folder of jobs, clips and pictures."
    db: str | None = None
    "URL of the job store; None: SQLite in the folder."
    host: str = "127.0.0.1"
    port: int = 8200
    "0: any that is free."
    workers: int = 1
    resident: int = 1
    "Models that a worker holds in memory at a time."
    local_files_only: bool = False
    hosts: tuple[str, ...] = ()
    "Names by which browsers may call this server, besides localhost and addresses."
    keep_days: float | None = None
    "How long a clip is kept after it has ended; None: for ever."
    max_jobs: int | None = None
    max_cost: int | None = None
    "Pixels x frames x steps, queued and running together."

    @property
    def folder(self) -> Path:
        return Path(self.data)

    @property
    def db_url(self) -> str:
        return self.db or f"sqlite:///{self.folder / 'jobs.db'}"

    @property
    def worker_options(self) -> tuple[str, ...]:
        """flipbook is small and what a new studio is tried with: it is there before anybody asks."""
        return (
            "--resident",
            str(self.resident),
            "--warm",
            "flipbook",
            *(("--local-files-only",) if self.local_files_only else ()),
        )

    @property
    def limits(self) -> Limits:
        return Limits(max_jobs=self.max_jobs, max_cost=self.max_cost)

    @property
    def is_local(self) -> bool:
        """Only this computer can come in."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def store(self) -> Store:
        keep_s = None if self.keep_days is None else self.keep_days * 86400
        return Store.open(self.db_url, keep_s=keep_s)


def make_folder(folder: Path) -> None:
    """For its owner only: it holds prompts and pictures. Raises BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BadInput(f"--data {folder}: cannot be made: {error.strerror}", field="data") from error


def refuse_open_door(options: Options, store: Store) -> None:
    """Beyond this computer nobody comes in without a key. Raises BadInput."""
    if options.is_local or any(key.revoked_at is None for key in store.keys()):  # noqa: SIM118 - no dict
        return
    raise BadInput(
        f"--host {options.host} lets other computers in, and there is no key yet: make one with "
        "`undercrank keys create NAME`, or listen on 127.0.0.1",
        field="host",
    )
