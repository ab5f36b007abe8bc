"""The command that installs an optional extra, from where megajax itself was installed.

megajax is not on a package index yet. A command with the plain name would install the package of
whoever registers that name. Imports no jax.
"""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = 'megajax'


def install(extra: str = '', *, upgrade: bool = False) -> str:
    """Return the command that adds an extra of `pyproject.toml` to this installation.

    Without an extra, the command adds the packages that every installation needs. Follows PEP 610:
    pip records where a package came from, unless it came from an index.
    """
    return f'pip install {"--upgrade " * upgrade}{_requirement(extra, _origin())}'


def _origin() -> dict[str, Any]:
    try:
        return json.loads(distribution(NAME).read_text('direct_url.json') or '{}')
    except (PackageNotFoundError, json.JSONDecodeError):
        return {}


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    extras = f'[{extra}]' if extra else ''
    url, name = str(origin.get('url', '')), f'{NAME}{extras}'
    if not url:
        return f'-e {shlex.quote(f"/path/to/{name}")}'
    if origin.get('dir_info', {}).get('editable'):
        return f'-e {shlex.quote(f"{unquote(urlsplit(url).path)}{extras}")}'
    version_control = origin.get('vcs_info')
    if version_control:
        url = f'{version_control["vcs"]}+{url}@{version_control["commit_id"]}'
    return f"'{name} @ {url}'"
