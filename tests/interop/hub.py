"""A server that speaks what huggingface_hub asks of the Hub, for one repository."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME, COMMIT, TAG = 'Some/Model', 'c0ffee' + '0' * 34, 'v1.0'


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder; `asked` has the path of each request, in order.

    With a `token`, whoever does not send it is told, as the Hub does, that there is nothing.
    """

    daemon_threads = True

    def __init__(self, folder: Path, *, token: str | None = None, gated: bool = False):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.folder, self.token, self.gated = folder, token, gated
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'

    @property
    def fetched(self) -> set[str]:
        """The files whose content was sent."""
        return {path.partition(f'/resolve/{COMMIT}/')[2] for path in self.asked if 'GET' in path}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = 'HTTP/1.1'

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        hub, path = self.server, self.path.partition('?')[0]
        hub.asked.append(f'{self.command} {path}')
        api, files = f'/api/models/{NAME}', f'/{NAME}/resolve/{COMMIT}/'
        is_known = path.startswith((api, files))
        is_allowed = hub.token in (None, self.headers.get('Authorization', '')[len('Bearer ') :])
        if not is_known or not is_allowed:
            self._refuse(401, 'RepoNotFound', has_body)
        elif hub.gated and path.startswith(files):
            self._refuse(403, 'GatedRepo', has_body)
        elif path.startswith(files):
            self._send_file(hub.folder / path.removeprefix(files), has_body)
        elif path.startswith(f'{api}/tree/'):
            self._send(json.dumps([self._entry(file) for file in self._files()]), has_body)
        elif path in (api, *(f'{api}/revision/{name}' for name in ('main', TAG, COMMIT))):
            listed = [{'rfilename': file.name} for file in self._files()]
            about = {'id': NAME, 'modelId': NAME, 'sha': COMMIT, 'siblings': listed}
            self._send(json.dumps(about), has_body)
        else:
            self._refuse(404, 'RevisionNotFound', has_body)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.server.folder.iterdir() if path.is_file())

    def _entry(self, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        oid = sha1(b'blob %d\0' % len(content) + content).hexdigest()
        return {'type': 'file', 'path': file.name, 'size': len(content), 'oid': oid}

    def _send_file(self, file: Path, has_body: bool) -> None:
        if not file.is_file():
            self._refuse(404, 'EntryNotFound', has_body)
            return
        content = file.read_bytes()
        etag = f'"{sha256(content).hexdigest()}"'
        self._send(content, has_body, {'ETag': etag, 'X-Repo-Commit': COMMIT})

    def _refuse(self, status: int, code: str, has_body: bool) -> None:
        self._send('', has_body, {'X-Error-Code': code}, status)

    def _send(
        self,
        content: str | bytes,
        has_body: bool,
        headers: dict[str, str] | None = None,
        status: int = 200,
    ) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {**(headers or {}), 'Content-Length': str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@contextmanager
def serving(folder: Path, *, token: str | None = None, gated: bool = False) -> Iterator[Hub]:
    """Serve a folder as the repository NAME until the block ends."""
    with Hub(folder, token=token, gated=gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={'poll_interval': 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
