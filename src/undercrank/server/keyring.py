"""`undercrank keys`: make, list and revoke."""

from __future__ import annotations

import json

from undercrank import screen
from undercrank.jobs import Key, Limits
from undercrank.server.options import Options, make_folder


def create(options: Options, name: str, *, max_jobs: int | None, max_work: int | None, as_json: bool) -> str:
    """The new key: the only time that it is shown. Each name is an owner of its own."""
    make_folder(options.folder)
    with options.store() as store:
        limits = Limits(max_jobs=max_jobs, max_cost=max_work)
        key, secret = store.create_key(owner=name, name=name, limits=limits)
    return json.dumps({"id": key.id, "owner": key.owner, "key": secret}) if as_json else secret


def show(options: Options, *, as_json: bool) -> None:
    make_folder(options.folder)
    with options.store() as store:
        keys = store.keys()
    if as_json:
        screen.print_json({"keys": [key.to_dict() for key in keys]})
    else:
        screen.table(("id", "owner", "clips", "work", "state"), [_row(key) for key in keys])


def revoke(options: Options, key_id: str) -> str:
    with options.store() as store:
        return f"key {store.revoke_key(key_id).id} opens nothing any more"


def _row(key: Key) -> tuple[str, str, str, str, str]:
    limits = (str(limit) if limit is not None else "-" for limit in (key.limits.max_jobs, key.limits.max_cost))
    return (key.id, key.owner, *limits, "revoked" if key.revoked_at else "in use")  # type: ignore[return-value]
