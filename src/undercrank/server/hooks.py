"""`undercrank webhooks`: add, list and remove."""

from __future__ import annotations

import json

from undercrank import screen
from undercrank.server.options import Options, make_folder
from undercrank.webhooks import check_url, new_secret


def add(options: Options, owner: str, url: str, *, as_json: bool) -> str:
    """The secret of the new webhook: the only time that it is shown. Raises BadInput."""
    check_url(url)
    make_folder(options.folder)
    with options.store() as store:
        hook = store.add_webhook(owner=owner, url=url, secret=new_secret())
    return json.dumps(hook.to_dict()) if as_json else hook.secret


def show(options: Options, *, as_json: bool) -> None:
    make_folder(options.folder)
    with options.store() as store:
        rows = [(hook.id, hook.owner, hook.url) for hook in store.webhooks()]
    if as_json:
        screen.print_json({"webhooks": [dict(zip(("id", "owner", "url"), row, strict=True)) for row in rows]})
    else:
        screen.table(("id", "owner", "url"), rows)


def remove(options: Options, webhook_id: str) -> str:
    with options.store() as store:
        store.remove_webhook(webhook_id)
    return f"webhook {webhook_id} is told nothing any more"
