"""The site of `make docs`: what it holds, and each page in a browser, wide and on a phone."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / f'{os.environ.get("VENV", ".venv")}-docs'
CHROMIUM = shutil.which('chromium')
BROKEN = """<!doctype html><title>broken</title><link rel="icon" href="data:,">
<nav class="md-nav--primary"><a class="md-nav__link" href="index.html">Home</a>
<a class="md-nav__link" href="other.html">Other</a></nav><label class="md-header__button"
for="__drawer" hidden></label>"""


def pages() -> Iterator[str]:
    """The pages of the navigation, in its order."""
    navigation = YAML(typ='safe').load(ROOT / 'mkdocs.yml')['nav']
    for section in navigation:
        for names in section.values():
            yield from names


def test_the_navigation_has_every_page_and_notebook_once() -> None:
    docs = [path.name for path in ROOT.glob('docs/*.md')]
    notebooks = [f'notebooks/{path.stem}.md' for path in ROOT.glob('notebooks/*.ipynb')]
    others = ['index.md', *(path.name for path in ROOT.glob('*.md') if path.name != 'README.md')]
    assert sorted(pages()) == sorted([*docs, *notebooks, *others])


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    mkdocs = ENVIRONMENT / 'bin/mkdocs'
    if not mkdocs.exists():
        pytest.skip(f'no {mkdocs}: make docs installs it')
    folder = tmp_path_factory.mktemp('site')
    command = [mkdocs, 'build', '--strict', '--quiet', '--site-dir', folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def browse(folder: Path, width: int) -> dict[str, Any]:
    """The problems of each page of a site."""
    if CHROMIUM is None:
        pytest.skip('no chromium: apt-get install chromium')
    python = ENVIRONMENT / 'bin/python'
    command = [python, ROOT / 'tests/browse.py', folder, str(width), CHROMIUM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize('width', [1280, 400])
def test_every_page_opens_by_a_click_and_nothing_is_wrong_with_it(site: Path, width: int) -> None:
    found = browse(site, width)
    assert [*found] == [f'/{page.removesuffix(".md")}.html' for page in pages()]
    assert {page: problems for page, problems in found.items() if problems} == {}


@pytest.mark.slow
@pytest.mark.usefixtures('site')
def test_a_broken_page_is_noticed(tmp_path: Path) -> None:
    (tmp_path / 'index.html').write_text(BROKEN)
    (tmp_path / 'other.html').write_text(
        f'{BROKEN}<div style="width: 2000px">wide</div><a href="gone.html">gone</a>'
        '<a href="index.html#nowhere">nowhere</a><img src="gone.png">'
        '<script src="https://example.com/x.js"></script><script>none()</script>'
    )
    found = browse(tmp_path, 1280)
    assert found['/index.html'] == []
    said = '\n'.join(found['/other.html'])
    for problem in (
        'error: none is not defined',
        'failed: https://example.com/x.js',
        'pixels wide in a window of 1280',
        '/gone.html\n',
        '/index.html#nowhere',
        'no picture: http://127.0.0.1',
    ):
        assert problem in said
