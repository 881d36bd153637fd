"""Webhooks: signatures that the standard's own library accepts, public addresses only, no redirect, try again."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook
from typer.testing import CliRunner

from undercrank import cli, webhooks
from undercrank.jobs import Delivery, Store
from undercrank.records import BadInput
from undercrank.webhooks import (
    NotDelivered,
    check_secret,
    check_url,
    deliver_next,
    delivering,
    new_secret,
    post,
    signed_headers,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_standards_own_library_accepts_our_signature() -> None:
    secret, body = new_secret(), '{"type": "video.completed"}'
    headers = signed_headers("msg_1", body, secret, now=time.time())
    assert Webhook(secret).verify(body, headers) == json.loads(body)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(secret).verify(body + " ", headers)


def test_the_signature_is_that_of_the_specification() -> None:
    """The example that the public libraries test themselves with."""
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", '{"test": 2432232314}', SECRET, now=1614265330)
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_%%%", "whsec_eA==", "whsec_" + "A" * 400])
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_secret(secret)
    assert caught.value.field == "secret"


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "http://example.org/", "ftp://example.org", "https://", "https:///x", "https://example.org:8443/",
        "https://example.org:x/", "https://ann:secret@example.org/", "https://ann@example.org/",
        "https://127.0.0.1/", "https://[::1]/", "https://10.0.0.1/", "https://169.254.169.254/latest",
        "https://[::ffff:10.0.0.1]/", "https://192.168.1.1", "https://[fe80::1]/", "https://0.0.0.0/",
        "https://[2002:7f00:1::]/", "https://[64:ff9b::7f00:1]/", "https://224.0.0.1/", "https://2130706433/",
        "https://exa mple.org/", "https://example.org/\r\nx: y", "https://exämple.org/", "file:///etc/passwd",
        "https://[::1/", "https://100.64.0.1/",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_https_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_url(url)
    assert caught.value.field == "url"


@pytest.mark.parametrize(
    "url", ["https://example.org", "https://example.org:443/x?y=z", "https://93.184.216.34/", "https://[2606:4700::1]/"]
)
def test_a_public_https_address_is_taken(url: str) -> None:
    assert check_url(url).scheme == "https"


# --------------------------------------------------------------------------- a receiver on this machine


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    done = subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.example",
            "-addext", "subjectAltName=DNS:hooks.example", "-keyout", "key.pem", "-out", "cert.pem",
        ],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


class Receiver(BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, str], str]] = []
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.got.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        self.send_response(self.status)
        self.send_header("location", "https://127.0.0.1/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def receiver(certificate: Path, status: int = 200) -> Iterator[tuple[int, type[Receiver]]]:
    handler = type("Handler", (Receiver,), {"got": [], "status": status})
    server = HTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port, handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def delivery(url: str = "https://hooks.example/told?x=1") -> Delivery:
    return Delivery(id="msg_1", url=url, secret=SECRET, body='{"type": "video.completed"}', attempts=1)


@pytest.fixture
def loopback_counts_as_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_is_public", lambda address: True)


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate / "cert.pem"))


@pytest.mark.usefixtures("loopback_counts_as_public")
def test_a_message_arrives_signed_at_the_address_that_was_checked(certificate: Path) -> None:
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    with receiver(certificate) as (port, handler):
        post(delivery(), resolve=resolve, context=trusting(certificate), port=port)
    ((path, headers, body),) = handler.got
    assert (path, asked) == ("/told?x=1", ["hooks.example"])
    assert headers["host"].startswith("hooks.example") and headers["content-type"] == "application/json"
    assert Webhook(SECRET).verify(body, headers) == {"type": "video.completed"}


@pytest.mark.usefixtures("loopback_counts_as_public")
@pytest.mark.parametrize("status", [301, 302, 307, 404, 500])
def test_any_answer_but_success_is_none_and_a_redirect_is_not_followed(certificate: Path, status: int) -> None:
    with receiver(certificate, status) as (port, handler):
        with pytest.raises(NotDelivered, match=f"answered {status}"):
            post(delivery(), resolve=lambda host: ["127.0.0.1"], context=trusting(certificate), port=port)
    assert len(handler.got) == 1


@pytest.mark.usefixtures("loopback_counts_as_public")
def test_a_stranger_s_certificate_is_not_accepted(certificate: Path) -> None:
    with receiver(certificate) as (port, handler):
        with pytest.raises(NotDelivered, match="could not be told"):
            post(delivery(), resolve=lambda host: ["127.0.0.1"], port=port)
        with pytest.raises(NotDelivered, match="could not be told"):
            url = "https://other.example/"
            post(delivery(url), resolve=lambda host: ["127.0.0.1"], context=trusting(certificate), port=port)
    assert handler.got == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["fe80::1%eth0"]])
def test_a_name_with_one_address_that_is_not_public_is_not_told(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("connected"))
    with pytest.raises(BadInput, match="not a public address"):
        post(delivery(), resolve=lambda host: addresses)


def test_a_name_without_address_is_not_told() -> None:
    def resolve(host: str) -> list[str]:
        raise socket.gaierror("no such name")

    with pytest.raises(NotDelivered, match="has no address"):
        post(delivery(), resolve=resolve)


# --------------------------------------------------------------------------- the outbox


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/jobs.db") as store:
        store.add_webhook(owner="ann", url="https://hooks.example/", secret=SECRET)
        job, _ = store.enqueue(owner="ann", model="m", request={"prompt": "x"})
        store.cancel(job.id)
        yield store


def test_a_message_that_arrived_does_not_come_again(store: Store) -> None:
    sent: list[Delivery] = []
    assert deliver_next(store, send=sent.append) is True
    assert deliver_next(store, send=sent.append) is False
    assert [json.loads(each.body)["type"] for each in sent] == ["video.cancelled"]


def test_a_message_that_did_not_arrive_waits_and_its_reason_is_kept(store: Store) -> None:
    def send(each: Delivery) -> None:
        raise NotDelivered("hooks.example answered 500")

    assert deliver_next(store, send=send) is True
    assert deliver_next(store, send=send) is False
    with store._reading() as connection:
        (row,) = connection.exec_driver_sql("SELECT state, attempts, error FROM outbox").all()
    assert tuple(row) == ("waiting", 1, "hooks.example answered 500")


def test_the_outbox_is_emptied_in_the_background(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threading.Event()
    monkeypatch.setattr(webhooks, "post", lambda each: sent.set())
    with delivering(store, every_s=0.01):
        assert sent.wait(10)


# --------------------------------------------------------------------------- the command


def test_webhooks_are_added_listed_and_removed_on_the_command_line(tmp_path: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(cli.app, ["webhooks", *words, "--data", str(tmp_path)])

    secret = call("add", "ann", "https://hooks.example/x").output.strip()
    check_secret(secret)
    assert isinstance(call("add", "ann", "https://10.0.0.1/").exception, BadInput)
    listed = call("list", "--json").output
    (hook,) = json.loads(listed)["webhooks"]
    assert (hook["owner"], hook["url"]) == ("ann", "https://hooks.example/x") and secret not in listed
    assert hook["id"] in call("list").output
    assert call("remove", hook["id"]).exit_code == 0
    assert json.loads(call("list", "--json").output) == {"webhooks": []}
