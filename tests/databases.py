"""A database for a test: SQLite in its own folder, or one of a PostgreSQL server that the tests start themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa


def postgres_programs() -> Path | None:
    """The folder of initdb and pg_ctl: on the PATH, or where Debian has them."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return next((folder for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """A server of our own on a socket in a temporary folder; yields the URL of its first database."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    account = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="undercrank-postgres-"))
    data, log = folder / "data", folder / "log"
    try:
        if account:
            shutil.chown(folder, "nobody", "nogroup")

        def call(program: str, *arguments: str) -> None:
            command = [str(programs / program), "-D", str(data), *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **account)  # type: ignore[call-overload]
            if done.returncode != 0:
                raise RuntimeError(f"{program}: {done.stderr}{log.read_text() if log.exists() else ''}")

        call("initdb", "-U", "undercrank", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        call("pg_ctl", "-w", "-l", str(log), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://undercrank@/postgres?host={folder}"
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_postgres_database(server: str, name: str) -> str:
    """An empty database on that server; its URL."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    engine.dispose()
    return server.replace("/postgres?", f"/{name}?")
