"""A server that speaks what gcsfs asks of Google Cloud Storage: its JSON API, for one bucket."""

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = 'corpus'
PAGE = 3  # objects in one answer; Google sends a thousand
LIST, FILE = f'/storage/v1/b/{BUCKET}/o', f'/download/storage/v1/b/{BUCKET}/o/'
ANONYMOUS = (
    'Anonymous caller does not have storage.objects.list access to the Google Cloud Storage bucket.'
)


class Storage(ThreadingHTTPServer):
    """Serves the files of a folder as objects; `refuses` is the status that all get instead."""

    daemon_threads = True

    def __init__(self, folder: Path, *, refuses: int | None = None):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.folder, self.refuses = folder, refuses

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'


class _Handler(BaseHTTPRequestHandler):
    server: Storage
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True  # which keeps each body back for 40 ms

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not path.startswith((LIST, FILE)):
            self._refuse(404, 'The specified bucket does not exist.')
        elif self.server.refuses is not None:
            self._refuse(self.server.refuses, ANONYMOUS)
        elif path == LIST:
            self._send_list(
                {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
            )
        else:
            file = self.server.folder / path.removeprefix(FILE).removeprefix(f'{LIST}/')
            if not file.is_file():
                self._refuse(404, f'No such object: {BUCKET}/{file.name}')
            elif path.startswith(FILE):
                self._send_content(file.read_bytes())
            else:
                self._send(json.dumps(self._about(file)).encode())

    def _send_list(self, query: dict[str, str]) -> None:
        folder = self.server.folder
        names = [path.relative_to(folder).as_posix() for path in folder.rglob('*')]
        names = sorted(
            name
            for name in names
            if name.startswith(query.get('prefix', '')) and (folder / name).is_file()
        )
        start = int(query.get('pageToken', '0'))
        answer: dict[str, object] = {
            'kind': 'storage#objects',
            'items': [self._about(folder / name) for name in names[start : start + PAGE]],
        }
        if start + PAGE < len(names):
            answer['nextPageToken'] = str(start + PAGE)
        self._send(json.dumps(answer).encode())

    def _about(self, file: Path) -> dict[str, str]:
        content = file.read_bytes()
        return {
            'kind': 'storage#object',
            'name': file.relative_to(self.server.folder).as_posix(),
            'bucket': BUCKET,
            'size': str(len(content)),
            'md5Hash': b64encode(md5(content).digest()).decode(),
            'updated': '2026-01-01T00:00:00.000Z',
        }

    def _send_content(self, content: bytes) -> None:
        size, headers, status = len(content), dict[str, str](), 200
        if part := re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', '')):
            first, last = int(part[1]), min(int(part[2] or size), size - 1)
            content = content[first : last + 1]
            headers['Content-Range'] = f'bytes {first}-{last}/{size}'
            status = 206 if content else 416
        self._send(content, status, headers)

    def _refuse(self, status: int, message: str) -> None:
        error = {'error': {'code': status, 'message': message}}
        self._send(json.dumps(error).encode(), status)

    def _send(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), 'Content-Length': str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(folder: Path, *, refuses: int | None = None) -> Iterator[Storage]:
    """Serve a folder as the bucket `corpus` until the block ends."""
    with Storage(folder, refuses=refuses) as storage:
        thread = threading.Thread(target=storage.serve_forever, kwargs={'poll_interval': 0.05})
        thread.start()
        try:
            yield storage
        finally:
            storage.shutdown()
            thread.join()
