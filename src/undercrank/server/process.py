"""The API process: the app on a socket that its parent opened. Door of uvicorn.

python -m undercrank.server.process DESCRIPTOR < OPTIONS_AS_JSON
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn

from undercrank.server import logs
from undercrank.server.app import make_app
from undercrank.server.auth import server_secret
from undercrank.server.options import Options
from undercrank.server.studio import Studio

GRACE_S = 3
"How long streams may take to end when the process is told to."
PARENT_LOOK_S = 1.0


def main() -> None:
    options, descriptor = Options.from_json(sys.stdin.read()), int(sys.argv[1])
    logs.set_up()
    with options.store() as store, socket.socket(fileno=descriptor) as listener:
        studio = Studio(
            store=store,
            folder=options.folder,
            secret=server_secret(options.folder),
            key_needed=not options.is_local,
            limits=options.limits,
            hosts=(options.host, *options.hosts),
        )
        config = uvicorn.Config(
            make_app(studio),
            lifespan="on",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        server = uvicorn.Server(config)
        studio.leaving = lambda: server.should_exit
        asyncio.run(_serve(server, listener))


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    leaving = asyncio.create_task(_leave_with(os.getppid(), server))
    await server.serve(sockets=[listener])
    leaving.cancel()


async def _leave_with(parent: int, server: uvicorn.Server) -> None:
    """Whose parent was killed has nobody left who would end it."""
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_LOOK_S)
    server.should_exit = True


if __name__ == "__main__":
    main()
