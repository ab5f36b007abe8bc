"""Hooks of mkdocs: the site has pages from all of the repository, with links as on GitHub.

The README is the home page, and notebooks are shown as they were run, with their outputs. The old
address of a page that was moved leads to the new one.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from mkdocs.utils.templates import TemplateContext
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
AT_ROOT = ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md')
LINK = re.compile(r'\]\(([^)\s:#]+\.(?:md|ipynb|png|svg))(#[^)\s]*)?\)')
FOOTER = {'Changes': 'CHANGELOG', 'Contributing': 'CONTRIBUTING', 'Security': 'SECURITY'}
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{target}">
<meta http-equiv="refresh" content="0; url={target}">
<a href="{target}">This page has moved.</a>
"""
QUOTED = re.compile(r'^<!-- lines of .* -->\n', re.MULTILINE)  # for the tests


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not below `docs/`."""
    for name in AT_ROOT:
        files.append(File.generated(config, _site_path(name), abs_src_path=str(ROOT / name)))
    for notebook in sorted((ROOT / 'notebooks').glob('*.ipynb')):
        for path, content in _pages_of(notebook):
            files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links within the repository at pages of the site."""
    here = page.file.src_uri
    if here in AT_ROOT or here.startswith('notebooks/'):
        page.meta['search'] = {'boost': 0.5}  # the search lists guides first
    folder = posixpath.dirname(_repository_path(here))

    def link(match: re.Match[str]) -> str:
        target = _site_path(posixpath.normpath(posixpath.join(folder, match[1])))
        return f']({posixpath.relpath(target, posixpath.dirname(here) or ".")}{match[2] or ""})'

    return QUOTED.sub('', LINK.sub(link, markdown))


def on_page_context(
    context: TemplateContext, page: Page, config: MkDocsConfig, nav: Navigation
) -> None:
    """Link the pages at the root of the repository from the footer."""
    links = {name: get_relative_url(f'{file}.html', page.url) for name, file in FOOTER.items()}
    config.copyright = ' · '.join(f'<a href="{url}">{name}</a>' for name, url in links.items())


def on_post_build(config: MkDocsConfig) -> None:
    """Write a page that redirects at each address of `extra.redirects`."""
    site = Path(config.site_dir)
    for old, new in config.extra['redirects'].items():
        target = new.replace('.md', '.html')
        file, _, anchor = target.partition('#')
        page = site / file
        if not page.exists() or (anchor and f'id="{anchor}"' not in page.read_text()):
            logging.getLogger('mkdocs').warning('%s redirects to %s: not found', old, new)
        (site / old).with_suffix('.html').write_text(REDIRECT.format(target=target))


def _pages_of(notebook: Path) -> list[tuple[str, str | bytes]]:
    """Return a notebook as a page, the pictures on it, and itself to download."""
    names = {'unique_key': notebook.stem, 'output_files_dir': f'{notebook.stem}_files'}
    text, resources = MarkdownExporter().from_filename(str(notebook), names)
    note = f'<a href="{notebook.name}" download>Download this notebook</a>; '
    note += 'it is shown with the outputs of its last run.'
    return [
        (f'notebooks/{notebook.stem}.md', f'{text}\n\n{note}\n'),
        (f'notebooks/{notebook.name}', notebook.read_bytes()),
        *((f'notebooks/{name}', content) for name, content in resources['outputs'].items()),
    ]


def _site_path(path: str) -> str:
    """Return where a file of the repository lies in the site's sources."""
    if path == 'README.md':
        return 'index.md'
    return re.sub(r'\.ipynb$', '.md', path.removeprefix('docs/'))


def _repository_path(path: str) -> str:
    """Return the file of the repository of which a page of the site is made."""
    if path == 'index.md':
        return 'README.md'
    return path if path in AT_ROOT or path.startswith('notebooks/') else f'docs/{path}'
