"""The site of `make docs`: what it holds, and each page in a browser, wide and on a phone."""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from support import exhaustive
from test_readme import headings

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / f'{os.environ.get("VENV", ".venv")}-docs'
CHROMIUM = shutil.which('chromium')
BROKEN = """<!doctype html><title>broken</title><link rel="icon" href="data:,">
<nav class="md-nav--primary"><a class="md-nav__link" href="index.html">Home</a>
<a class="md-nav__link" href="other.html">Other</a></nav><label class="md-header__button"
for="__drawer" hidden></label>"""


# The pages that the site had before it was arranged by the reader's task.
OLD_PAGES = """
add_a_family add_a_gpu add_a_layout add_a_parameter add_an_activation api architecture bert compare
config data fine_tuning first_run fp8 from_a_download from_megatron generate_and_evaluate inspect
install is_it_for_you layouts log many_hosts miscompiles nccl overlap pictures plan profile python
report results run_the_gpu_program stages weights what_you_may_have_read when_a_run_breaks
which_rung
"""
AT_ROOT = [path.name for path in ROOT.glob('*.md') if path.name != 'README.md']
NOTEBOOKS = [f'notebooks/{path.stem}.md' for path in ROOT.glob('notebooks/*.ipynb')]


def settings() -> dict[str, Any]:
    """Return mkdocs.yml, whose navigation and redirects the tests read."""
    return YAML(typ='safe').load(ROOT / 'mkdocs.yml')


def pages(navigation: Any) -> Iterator[str]:
    """Yield the pages of the navigation in order."""
    if isinstance(navigation, str):
        yield navigation
        return
    for part in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from pages(part)


def test_the_navigation_has_every_page_of_docs_once() -> None:
    docs = [path.name for path in ROOT.glob('docs/*.md')]
    read = settings()
    hidden = [name.strip('/') for name in read['not_in_nav'].split()]
    assert sorted(hidden) == sorted(['notebooks', *AT_ROOT, *({*docs} & {*hidden})])
    assert sorted(pages(read['nav'])) == sorted(['index.md', *({*docs} - {*hidden})])


def titles(navigation: Any) -> Iterator[str]:
    """Yield the titles of the pages of the navigation in order."""
    for part in navigation:
        for title, inner in part.items():
            yield from [title] if isinstance(inner, str) else titles(inner)


def test_the_map_has_every_page_of_the_navigation_once() -> None:
    texts = re.findall('<text x=[^>]*>(.*?)</text>', (ROOT / 'docs/map.svg').read_text())
    shown = [title for text in texts for title in text.strip(' ·').split(' · ')]
    assert sorted(shown) == sorted({*titles(settings()['nav'])} - {'Home'})


def test_the_page_of_notebooks_links_each() -> None:
    page = (ROOT / 'docs/notebooks.md').read_text()
    for path in ROOT.glob('notebooks/*.ipynb'):
        assert page.count(f'](../notebooks/{path.name})') == 1


@pytest.mark.parametrize('old', OLD_PAGES.split())
def test_an_old_page_exists_or_leads_to_a_heading_of_one_that_does(old: str) -> None:
    redirects = settings()['extra']['redirects']
    assert ((ROOT / f'docs/{old}.md').exists()) != (f'{old}.md' in redirects)
    file, _, anchor = redirects.get(f'{old}.md', f'{old}.md').partition('#')
    assert not anchor or anchor in headings(ROOT / 'docs' / file)
    assert (ROOT / 'docs' / file).exists()


def build(folder: Path, config: Path = ROOT / 'mkdocs.yml') -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    mkdocs = ENVIRONMENT / 'bin/mkdocs'
    if not mkdocs.exists():
        pytest.skip(f'no {mkdocs}: make docs installs it')
    command = [mkdocs, 'build', '--strict', '--config-file', config, '--site-dir', folder]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the repository, which one of the tests' processes builds."""
    shared = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        shared = shared.parent
    folder = shared / 'site'
    with (shared / 'site.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            done = build(folder)
            assert done.returncode == 0, done.stderr
    return folder


def test_a_dead_link_ends_the_build_of_make_docs(tmp_path: Path) -> None:
    assert 'mkdocs build --strict &&' in (ROOT / 'Makefile').read_text()  # --quiet would hide it
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'docs/index.md').write_text('[gone](gone.md)')
    (tmp_path / 'mkdocs.yml').write_text('site_name: tiny\n')
    done = build(tmp_path / 'site', tmp_path / 'mkdocs.yml')
    assert done.returncode == 1
    assert 'gone.md' in done.stderr


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
@pytest.mark.parametrize('width', [exhaustive(1280), 390])
def test_every_page_opens_by_a_click_and_nothing_is_wrong_with_it(site: Path, width: int) -> None:
    found = browse(site, width)
    read = settings()
    hidden = {name.strip('/') for name in read['not_in_nav'].split()} - {'notebooks'}
    shown = [*pages(read['nav']), *sorted([*hidden, *NOTEBOOKS])]
    assert [*found] == [f'/{page.removesuffix(".md")}.html' for page in shown]
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


SEARCHES = """pipeline parallelism, context parallelism, activation checkpointing, mixed precision,
multi-node, silent data corruption, speedup, global batch size, fault tolerance, preemption"""


def found_by_search(site: Path, queries: list[str]) -> list[list[str]]:
    """Return the pages of docs that the site's own search finds for each query, best first."""
    node = next(ENVIRONMENT.glob('lib/*/site-packages/playwright/driver/node'))
    command = [node, ROOT / 'tests/search.js', site]
    done = subprocess.run(
        command, input=json.dumps(queries), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    listed = {page.replace('.md', '.html') for page in pages(settings()['nav'])}
    return [[page for page in hits if page in listed] for hits in json.loads(done.stdout)]


@pytest.mark.slow
def test_the_search_finds_the_page_of_each_term_of_the_glossary(site: Path) -> None:
    glossary = (ROOT / 'docs/glossary.md').read_text()
    rows = re.findall(r'^\| (.+?) \| .+ \| \[.+\]\((\w+)\.md.*\) \|$', glossary, re.MULTILINE)
    terms = [(term, f'{page}.html') for row, page in rows for term in row.split(', ')]
    firsts = {row.split(', ')[0] for row, _ in rows}
    assert {*' '.join(SEARCHES.split()).split(', ')} <= firsts
    lost = []
    for (term, page), hits in zip(
        terms, found_by_search(site, [term for term, _ in terms]), strict=True
    ):
        best = [name for name in hits if name != 'glossary.html'][:3]
        # A synonym that a page does not use leads to it through the glossary.
        if page not in best and (term in firsts or 'glossary.html' not in hits[:5]):
            lost.append((term, page, hits[:5]))
    assert lost == []
