"""`undercrank serve`: one API process and the workers, watched by this small process, which does nothing else.

The socket is opened here and lives on when the API process is started anew: clients wait, they are not refused.
SIGTERM, SIGINT and SIGHUP end all.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from undercrank import fleet
from undercrank.jobs import Store
from undercrank.machine import this_machine
from undercrank.records import BadInput, RunFailed
from undercrank.server.options import Options, make_folder, refuse_open_door
from undercrank.settings import settings

LOOK_S = 0.1
RESTS_S = (0.2, 1.0, 5.0, 15.0)
"Before the next start of an API process that ended soon, and soon again."
STEADY_S = 30.0
"One that has lived so long did not end soon."
LEAVE_S = 10.0
"How long the API process may take to end."


def serve(options: Options, *, announce: Callable[[str], None]) -> None:
    """Run until told to stop. announce: is given the address once it can be called. Raises BadInput, RunFailed."""
    make_folder(options.folder)
    with options.store() as store, told_to_stop() as stop:
        refuse_open_door(options, store)
        with (
            listening(options) as listener,
            fleet.workers(
                options.db_url, options.folder, count=options.workers, options=options.worker_options, gpus=gpus()
            ),
            fleet.housekeeping(store, options.folder),
            answering(options, listener) as api,
        ):
            announce(address(listener))
            while not stop():
                api.look_after()
                time.sleep(LOOK_S)


def gpus() -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them."""
    count = sum(device.kind == "cuda" for device in this_machine().devices)
    named = settings().visible_cuda
    return tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))


class Api:
    """The API process, started again when it ends."""

    def __init__(self, options: Options, listener: socket.socket) -> None:
        self._options, self._descriptor = options, listener.fileno()
        self._share = fleet.shares(gpus(), max(1, options.workers))[0]
        self._started_at, self._start_at, self._ends = 0.0, 0.0, 0
        self.process: subprocess.Popen[bytes] | None = None

    def look_after(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            self._has_ended(self.process.returncode)
        if self.process is None and time.monotonic() >= self._start_at:
            self._start()

    def _start(self) -> None:
        """In a session of its own: Ctrl-C on the terminal is for us, and we tell it. The options hold a password."""
        self._started_at = time.monotonic()
        command = [sys.executable, "-m", "undercrank.server.process", str(self._descriptor)]
        with fleet.seeing(self._share):  # it plans for what a worker sees
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(self._descriptor,), start_new_session=True
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # it ended at once: the next look sees it
            stdin.write(self._options.to_json().encode())

    def _has_ended(self, code: int) -> None:
        now = time.monotonic()
        self._ends = 0 if now - self._started_at > STEADY_S else self._ends + 1
        rest_s = RESTS_S[min(self._ends, len(RESTS_S) - 1)]
        print(f"the API process ended with {code}: another one in {rest_s:g} s", file=sys.stderr, flush=True)
        self.process, self._start_at = None, now + rest_s

    def dismiss(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def answering(options: Options, listener: socket.socket) -> Iterator[Api]:
    api = Api(options, listener)
    try:
        api.look_after()
        yield api
    finally:
        api.dismiss()


# --------------------------------------------------------------------------- socket and signals


@contextmanager
def listening(options: Options) -> Iterator[socket.socket]:
    """Raises BadInput for an address that is not ours, RunFailed where somebody listens there already."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInput(f"--host {options.host}: {error.strerror}", field="host") from error
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(target)
        except OSError as error:
            raise RunFailed(
                f"cannot listen on {options.host}, port {options.port}: {error.strerror}; choose another --port"
            ) from error
        listener.listen(128)
        yield listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def told_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether a signal to end has come."""
    came: list[int] = []
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    kept = {number: signal.signal(number, lambda number, _: came.append(number)) for number in heeded}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def openapi_text() -> str:
    """The description of the API, as it is kept beside `openapi.py`."""
    from undercrank.server.app import make_app
    from undercrank.server.openapi import describe
    from undercrank.server.studio import Studio

    with TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/jobs.db") as store:
        app = make_app(Studio(store=store, folder=Path(folder), secret=b""))
        return json.dumps(describe(app), indent=2, ensure_ascii=True) + "\n"
