"""The page on failure cases has every case once, with tests that exist."""

from support import ROOT, load_script

failure_cases = load_script('failure_cases', 'scripts')


def test_every_case_is_there_once() -> None:
    lines = failure_cases.CASES.read_text().splitlines()
    numbers = sorted(line[:2] for line in lines if not line.startswith('#'))
    assert len(numbers) > 50
    assert numbers == [f'{number:02}' for number in range(1, len(numbers) + 1)]


def test_the_page_has_the_cases_and_each_names_one_test() -> None:
    page = (ROOT / 'docs/failure_cases.md').read_text()
    assert failure_cases.page() == page, 'python scripts/failure_cases.py > docs/failure_cases.md'
