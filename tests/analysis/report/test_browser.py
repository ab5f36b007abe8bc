"""The page in a browser: nothing overflows, wide or narrow, and the console stays empty."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
WIDTHS = 400, 1280
# The page in frames of several widths; the sizes of its documents replace the title.
FRAMES = """<!doctype html><body>{frames}<script>
const frames = [...document.querySelectorAll('iframe')];
addEventListener('load', () => document.title = frames.map(frame => {{
  const {{documentElement: root, body}} = frame.contentDocument;
  const charts = frame.contentDocument.querySelectorAll('figure > svg');
  const text = frame.contentDocument.querySelector('svg text').getBoundingClientRect().height;
  return [frame.width, root.scrollWidth, body.scrollWidth, charts.length, text.toFixed()];
}}).join(' '));
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason='chromium is not installed')
def test_the_page_overflows_at_no_width_and_says_nothing_on_the_console(
    finished_run: Path, tmp_path: Path
) -> None:
    page = html.escape((finished_run / 'report.html').read_text())
    frames = [f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in WIDTHS]
    wrapper = tmp_path / 'frames.html'
    wrapper.write_text(FRAMES.format(frames=''.join(frames)))
    done = subprocess.run(
        [
            CHROMIUM,
            *('--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr'),
            *(f'--user-data-dir={tmp_path}/profile', '--virtual-time-budget=5000', '--dump-dom'),
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r'<title>(.*?)</title>', done.stdout)
    assert title is not None, done.stderr
    for measured, width in zip(title[1].split(), WIDTHS, strict=True):
        frame, document, body, charts, text = map(int, measured.split(','))
        assert frame == width
        assert document <= width
        assert body <= width
        assert charts >= 6
        assert text >= 9  # pixels
    assert 'CONSOLE' not in done.stderr
