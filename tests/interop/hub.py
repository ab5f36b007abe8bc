"""A server that speaks what huggingface_hub asks of the Hub, for one repository."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NAME, COMMIT, TAG = 'Some/Model', 'c0ffee' + '0' * 34, 'v1.0'
REVISIONS = ('main', TAG, COMMIT)
PAGE = 3  # entries of a folder in one answer; the Hub sends a thousand


def use(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path) -> None:
    """Have huggingface_hub ask this server and keep files in a folder, as its variables do before
    it is imported.
    """
    name = 'huggingface_hub.constants'
    constants = pytest.importorskip(name, reason="huggingface_hub is in the extra 'hub'")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
    monkeypatch.setattr(constants, 'ENDPOINT', url)
    monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(folder / 'no token'))
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder / 'hf' / 'hub'))


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder; `asked` has the path of each request, in order.

    With a `token`, whoever does not send it is told, as the Hub does, that there is nothing.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        *,
        kind: Literal['models', 'datasets'] = 'models',
        token: str | None = None,
        gated: bool = False,
    ):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.folder, self.kind, self.token, self.gated = folder, kind, token, gated
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
    disable_nagle_algorithm = True  # which keeps each body back for 40 ms

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(f'{self.command} {path}')
        api = f'/api/{hub.kind}/{NAME}'
        of_files = f'{"" if hub.kind == "models" else f"/{hub.kind}"}/{NAME}/resolve/'
        is_known = path.startswith((api, of_files))
        is_allowed = hub.token in (None, self.headers.get('Authorization', '')[len('Bearer ') :])
        verb, _, rest = path.removeprefix(api).removeprefix('/').partition('/')
        revision, _, name = path.removeprefix(of_files).partition('/')
        if not is_known or not is_allowed:
            self._refuse(401, 'RepoNotFound', has_body)
        elif hub.gated and path.startswith(of_files):
            self._refuse(403, 'GatedRepo', has_body)
        elif path.startswith(of_files) and revision in REVISIONS:
            self._send_file(hub.folder / name, has_body)
        elif verb == 'tree' and rest.partition('/')[0] in REVISIONS:
            self._send_tree(rest.partition('/')[2], has_body)
        elif path == api or (verb == 'revision' and rest in REVISIONS):
            listed = [{'rfilename': file.name} for file in self._files()]
            about = {'id': NAME, 'modelId': NAME, 'sha': COMMIT, 'siblings': listed}
            self._send(json.dumps(about), has_body)
        else:
            self._refuse(404, 'RevisionNotFound', has_body)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.server.folder.iterdir() if path.is_file())

    def _send_tree(self, below: str, has_body: bool) -> None:
        """Send a page of the entries of a folder, and a link to the next."""
        folder = self.server.folder / below
        if not folder.is_dir():
            self._refuse(404, 'EntryNotFound', has_body)
            return
        query = parse_qs(urlsplit(self.path).query)
        is_recursive = query.get('recursive', [''])[0].lower() == 'true'
        entries = sorted(folder.rglob('*') if is_recursive else folder.iterdir())
        start = int(query.get('cursor', ['0'])[0])
        headers = {}
        if start + PAGE < len(entries):
            address = f'{self.server.url}{urlsplit(self.path).path}'
            cursor = f'recursive={is_recursive}&cursor={start + PAGE}'
            headers['Link'] = f'<{address}?{cursor}>; rel="next"'
        page = [self._entry(path) for path in entries[start : start + PAGE]]
        self._send(json.dumps(page), has_body, headers)

    def _entry(self, path: Path) -> dict[str, object]:
        name = path.relative_to(self.server.folder).as_posix()
        if path.is_dir():
            return {'type': 'directory', 'path': name, 'size': 0, 'oid': '0' * 40}
        content = path.read_bytes()
        oid = sha1(b'blob %d\0' % len(content) + content).hexdigest()
        return {'type': 'file', 'path': name, 'size': len(content), 'oid': oid}

    def _send_file(self, file: Path, has_body: bool) -> None:
        if not file.is_file():
            self._refuse(404, 'EntryNotFound', has_body)
            return
        content = file.read_bytes()
        etag = f'"{sha256(content).hexdigest()}"'
        headers = {'ETag': etag, 'X-Repo-Commit': COMMIT}
        status, size = 200, len(content)
        if part := re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', '')):
            first, last = int(part[1]), min(int(part[2] or size), size - 1)
            content = content[first : last + 1]
            headers['Content-Range'] = f'bytes {first}-{last}/{size}'
            status = 206 if content else 416
        self._send(content, has_body, headers, status)

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
def serving(
    folder: Path,
    *,
    kind: Literal['models', 'datasets'] = 'models',
    token: str | None = None,
    gated: bool = False,
) -> Iterator[Hub]:
    """Serve a folder as the repository NAME until the block ends."""
    with Hub(folder, kind=kind, token=token, gated=gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={'poll_interval': 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
