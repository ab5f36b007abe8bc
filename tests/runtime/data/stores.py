"""Places for files that fsspec opens: its own memory, and a server of the S3 protocol."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest


@contextmanager
def memory(name: str) -> Iterator[str]:
    """A folder in fsspec's memory."""
    yield f'memory://{name}'
    fsspec.filesystem('memory').rm(f'/{name}', recursive=True)


@cache
def _s3_server() -> str:
    """The address of a server of the S3 protocol; s3fs keeps its first one for a whole process."""
    moto = pytest.importorskip('moto.server', reason='moto is not installed')
    server = moto.ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f'http://{host}:{port}'


@contextmanager
def s3(setenv: Callable[[str, str], None]) -> Iterator[str]:
    """A bucket of a real server of the S3 protocol, on loopback."""
    pytest.importorskip('s3fs', reason='s3fs is not installed')
    setenv('AWS_ENDPOINT_URL', _s3_server())
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        setenv(name, 'testing')
    files = fsspec.filesystem('s3', skip_instance_cache=True)
    files.mkdir('corpus')
    try:
        yield 's3://corpus'
    finally:
        files.rm('corpus', recursive=True)


class Ranges(SimpleHTTPRequestHandler):
    """Answers requests for ranges of the files of a folder, except those that the server fails."""

    server: 'Web'

    def log_message(self, *_: Any) -> None:
        pass

    def send_error(self, code: int, *others: Any) -> None:
        super().send_error(self.server.missing if code == 404 else code, *others)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.exists():
            self.send_error(404)
            return
        self.server.asked.append(self.path)
        if self.server.failures > 0 or len(self.server.asked) > self.server.most:
            self.server.failures -= 1
            self.send_error(503)
            return
        _, _, bounds = self.headers.get('Range', '').partition('=')
        first, last = map(int, bounds.split('-'))
        with path.open('rb') as file:
            file.seek(first)
            part = file.read(last + 1 - first)
        self.send_response(206)
        self.send_header('Content-Range', f'bytes {first}-{last}/{path.stat().st_size}')
        self.send_header('Content-Length', str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class Web(ThreadingHTTPServer):
    """A web server of a folder.

    It answers the next `failures` requests for content with 503, and all after the first `most`.
    The answer for a file that does not exist is `missing`.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(('127.0.0.1', 0), partial(Ranges, directory=str(folder)))
        self.failures, self.asked = 0, list[str]()
        self.most, self.missing = math.inf, 404

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'


@contextmanager
def web(folder: Path) -> Iterator[Web]:
    """A web server of a folder that answers requests for ranges."""
    pytest.importorskip('aiohttp', reason='the extra remote is not installed')
    with Web(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def copy(folder: Path, url: str) -> None:
    """Copy the files of a folder."""
    for path in folder.iterdir():
        with fsspec.open(f'{url}/{path.name}', 'wb') as file:
            file.write(path.read_bytes())
