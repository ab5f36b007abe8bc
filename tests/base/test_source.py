"""A digest of source changes with what a file holds and where it is, and with nothing else."""

from pathlib import Path

from megajax.base.source import source_digest


def test_a_digest_changes_with_the_source_of_its_parts_alone(tmp_path: Path) -> None:
    def digest() -> str:
        source_digest.cache_clear()
        return source_digest('a', 'b.py', package=tmp_path)

    (tmp_path / 'a' / 'inner').mkdir(parents=True)
    file = tmp_path / 'a' / 'inner' / 'x.py'
    for path in (file, tmp_path / 'b.py', tmp_path / 'other.py'):
        path.write_text('one')
    first = digest()
    (tmp_path / 'other.py').write_text('two')
    (tmp_path / 'a' / 'x.pyc').touch()
    assert digest() == first
    file.write_text('two')
    second = digest()
    file.rename(file.with_name('y.py'))
    assert len({first, second, digest()}) == 3
    source_digest.cache_clear()


def test_a_part_of_the_package_has_a_digest() -> None:
    assert source_digest('xla/hlo') != source_digest('xla/miscompiles')
