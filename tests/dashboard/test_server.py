"""The server of a page answers by the names of its own address only: a rebound name gets nothing."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

HANDSHAKE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "bokeh, token",
}  # fmt: skip


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a page that also answers as ``hub.example``."""
    run = tmp_path_factory.mktemp("run")
    (run / "run.json").write_text("{}")
    command = [sys.executable, "-m", "oocdl", "dashboard", str(run), "--allow-host", "hub.example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = urlsplit(process.stdout.readline()).port
        assert found is not None
        yield found
        process.terminate()


def asked(port: int, path: str, host: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(errors="replace")
    connection.close()
    return found


PATHS = ("/", "/ws", "/autoload.js", "/static/js/bokeh.min.js", "/metadata", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_is_not_listed_is_refused(port: int, path: str) -> None:
    host = f"evil.example:{port}"
    headers = {**HANDSHAKE, "Origin": f"http://{host}"} if path == "/ws" else {}
    status, text = asked(port, path, host, **headers)
    assert status == 403 and "evil" not in text
    assert text == "this page answers as 127.0.0.1, localhost, [::1], hub.example; --allow-host adds a name\n"


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "LOCALHOST", "[::1]:{}", "hub.example"])
def test_a_name_that_is_listed_gets_the_page(port: int, host: str) -> None:
    assert asked(port, "/", host.format(port))[0] == 200


@pytest.mark.parametrize("host", ["localhost.evil.example", "127.0.0.1.evil.example:80", "", "*"])
def test_a_name_that_looks_alike_is_refused(port: int, host: str) -> None:
    assert asked(port, "/", host)[0] in (400, 403)
