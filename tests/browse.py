"""Open a built site in Chromium and print what is wrong: `browse.py SITE WIDTH CHROMIUM`.

Clicks through every page of the navigation, opens those that are only linked, and prints a JSON
object with the problems of each, by its path: errors of the console, requests that fail or leave
this machine, pictures that do not load, a page that is wider than the window, and links within the
site that lead nowhere. Runs in the environment of `make docs`, which has Playwright, and not in
that of the tests.
"""

import functools
import http.server
import json
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Locator, Page, sync_playwright

NAVIGATION = '.md-nav--primary a.md-nav__link:not(.md-nav--secondary a)'
OPEN = 'li.md-nav__item--nested:has(> input:checked)'
HEIGHT = 900
# The container is the sandbox, and nothing may be fetched from elsewhere.
ARGUMENTS = ['--no-sandbox', '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1']


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    protocol_version = 'HTTP/1.1'

    def log_message(self, *_: object) -> None: ...


class Anchors(HTMLParser):
    """The ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == 'id'}


class Visit:
    """What goes wrong on the page that is open."""

    def __init__(self, page: Page, site: Path, origin: str) -> None:
        self.page, self.site, self.origin = page, site, origin
        self.problems: list[str] = []
        page.on('console', lambda line: line.type == 'error' and self.add(f'console: {line.text}'))
        page.on('pageerror', lambda error: self.add(f'error: {error}'))
        page.on('requestfailed', lambda request: self.add(f'failed: {request.url}'))

    def add(self, problem: str) -> None:
        self.problems.append(problem)

    def look(self) -> list[str]:
        """The problems of the page since the last look."""
        self.page.wait_for_load_state('load')
        self.page.evaluate('new Promise(done => requestIdleCallback(done))')
        width, window = self.page.evaluate('[document.body.scrollWidth, window.innerWidth]')
        if width > window:
            self.add(f'{width} pixels wide in a window of {window}')
        broken = '[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)'
        self.problems += [f'no picture: {source}' for source in self.page.evaluate(broken)]
        links = self.page.evaluate('[...document.querySelectorAll("a[href]")].map(a => a.href)')
        self.problems += [f'dead link: {link}' for link in sorted({*links}) if self.is_dead(link)]
        found, self.problems = self.problems, []
        return found

    def is_dead(self, link: str) -> bool:
        """Whether a link within the site leads to no file, or to no id of a page."""
        if not link.startswith(self.origin):
            return False
        target = urlsplit(link)
        file = self.site / unquote(target.path).lstrip('/')
        file = file / 'index.html' if file.is_dir() else file
        if not file.is_file():
            return True
        return bool(target.fragment) and unquote(target.fragment) not in ids_of(file)


@functools.cache
def ids_of(file: Path) -> set[str | None]:
    return Anchors(file.read_text()).ids


def click_through(page: Page, site: Path, origin: str) -> dict[str, list[str]]:
    """Open the home page, each page by a click on its line of the navigation, then the others."""
    visit = Visit(page, site, origin)
    page.goto(f'{origin}/index.html')
    found = {'/index.html': visit.look()}
    for place in range(page.locator(NAVIGATION).count()):
        link = page.locator(NAVIGATION).nth(place)
        target = link.evaluate('a => a.href')
        if target == page.url:
            continue
        open_drawer(page, link)
        link.click()
        page.wait_for_url(target)
        found[urlsplit(target).path] = visit.look()
    for file in sorted(site.rglob('*.html')):
        path = f'/{file.relative_to(site)}'
        if path not in found and is_page(file):
            page.goto(f'{origin}{path}')
            found[path] = visit.look()
    return found


def is_page(file: Path) -> bool:
    """Whether it is neither a redirect nor shown at an address that does not exist."""
    return file.name != '404.html' and 'http-equiv="refresh"' not in file.read_text()


def open_drawer(page: Page, link: Locator) -> None:
    """Show the link on a phone, where the navigation is a drawer with a panel for each section."""
    drawer = page.locator('label.md-header__button[for=__drawer]')
    if not drawer.is_visible():
        return
    drawer.click()
    section = link.locator('xpath=ancestor::li[contains(@class, "md-nav__item--nested")]')
    in_section = section.count() > 0
    if in_section and section.locator('> input').is_checked():
        return
    if page.locator(OPEN).count():
        page.locator(f'{OPEN} > nav > label.md-nav__title').click()
    if in_section:
        section.locator('> label').click()


def main() -> None:
    site, width, chromium = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    handler = functools.partial(Server, directory=str(site))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            page = browser.new_page(
                viewport={'width': width, 'height': HEIGHT}, reduced_motion='reduce'
            )
            origin = f'http://127.0.0.1:{server.server_port}'
            print(json.dumps(click_through(page, site, origin)))
            browser.close()
        server.shutdown()


if __name__ == '__main__':
    main()
