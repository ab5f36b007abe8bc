"""Compare two sources, or dump the numbers of one."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megajax.analysis.compare.difference import Comparison, compare_recordings, config_of
from megajax.analysis.compare.in_transformers import check_installed, execute_with_transformers
from megajax.analysis.compare.recording import SUFFIX, Recording, read_recording, write_recording
from megajax.analysis.compare.site_memory import check_site_memory
from megajax.analysis.compare.sources import WITHOUT_DROPOUT, Source, check_comparable
from megajax.base.files.outputs import check_outputs
from megajax.core.config import Config, ConfigError
from megajax.core.config.lora import without_adapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    source: Source
    config: Config
    recording: Recording | None = None  # read from a file
    with_transformers: bool = False
    is_merged: bool = False  # whether adapters were merged into the weights

    def record(self, batch: Mapping[str, np.ndarray]) -> Recording:
        """Return the numbers of a pass over a batch."""
        if self.recording is not None:
            return self.recording
        source = self.source
        if self.with_transformers:
            return execute_with_transformers(source, self.config, batch)
        from megajax.analysis.compare.execute import execute

        return execute(self.config, source.load, batch, source=source.name)


def compare(
    a: str | Path,
    b: str | Path,
    *,
    overrides: Sequence[str] = (),
    of_a: Sequence[str] = (),
    of_b: Sequence[str] = (),
    transformers: str | None = None,
    data: bool = False,
    tolerance: float | None = None,
) -> Comparison:
    """Run one forward and one backward pass on each of two sources, and compare them site by site.

    Args:
        a: a preset, a YAML file, a run, a Hugging Face directory or a file written by `dump`.
        b: the other source, named in the same way.
        overrides: overrides of both configs, such as `train.batch_size=4`.
        of_a: overrides of A's config alone.
        of_b: overrides of B's config alone.
        transformers: 'a' or 'b', a Hugging Face directory to execute with transformers, in fp32 on
            the CPU. Dropout is then disabled on both sides.
        data: use the first batch of A's training data, or of B's if A is a Hugging Face directory,
            rather than random tokens.
        tolerance: the largest difference that passes; the default depends on the dtype.

    Raises ConfigError for sources that cannot be compared, before anything compiles.
    """
    both = _of_both(overrides, bool(transformers))
    a, b = str(a), str(b)
    with ExitStack() as opened:
        first = opened.enter_context(Source.opened(a, both, of_a))
        if a == b and first.kind == 'run':  # which may be training, and save in between
            second = dataclasses.replace(first, overrides=(*both, *of_b))
        else:
            second = opened.enter_context(Source.opened(b, both, of_b))
        if overrides and first.kind == second.kind == 'dump':
            raise ConfigError(f'{a} and {b} are dumps of computed numbers: remove {overrides[0]}')
        sides = _with_like_adapters(_sides([first, second], transformers))
        if transformers:
            _check_dropout_of_dumps(sides)
        fixed = [side.recording is not None for side in sides]
        check_comparable(sides[0].config, sides[1].config, names=[a, b], fixed=fixed)
        _check_memory(sides)
        batch = _batch(sides, data=data)
        _make_meshes(sides)
        return compare_recordings(
            *(side.record(batch) for side in sides),
            tolerance=tolerance,
            merged=[letter for letter, side in zip('AB', sides, strict=True) if side.is_merged],
        )


compare_sources = compare  # the name in an earlier release


def dump(
    name: str | Path,
    file: str | Path,
    *,
    overrides: Sequence[str] = (),
    transformers: bool = False,
    data: bool = False,
) -> None:
    """Run one forward and one backward pass, and write its numbers to a file for `compare`.

    Args:
        name: a preset, a YAML file, a run or a Hugging Face directory.
        file: the file to write; its name ends in `.npz`.
        overrides: overrides of the config, such as `train.batch_size=4`.
        transformers: whether to execute a Hugging Face directory with transformers, in fp32 on the
            CPU, without dropout.
        data: use the first batch of the training data rather than random tokens.

    Raises ConfigError for a source that cannot be executed, and for a file that cannot be written,
    before anything compiles.
    """
    name, file = str(name), Path(file)
    if file.suffix != SUFFIX:
        raise ConfigError(f'{file}: a dump is a {SUFFIX} file; name it {file.stem}{SUFFIX}')
    check_outputs(file)
    with Source.opened(name, _of_both(overrides, transformers)) as source:
        if source.kind == 'dump':
            raise ConfigError(f'{name} is already a dump: give a config, a run or a directory')
        sides = _sides([source], 'a' if transformers else None)
        _check_memory(sides)
        write_recording(file, sides[0].record(_batch(sides, data=data)))


def _of_both(overrides: Sequence[str], transformers: bool) -> Sequence[str]:
    """Return the overrides of both sides, including those that transformers needs."""
    if not transformers:
        return overrides
    check_installed()
    return *overrides, *WITHOUT_DROPOUT


def _sides(sources: Sequence[Source], transformers: str | None) -> list[_Side]:
    """Read all configs; Hugging Face directories take missing keys from the other side."""
    for letter, source in zip('ab', sources, strict=False):
        if letter == transformers and source.kind != 'huggingface':
            raise ConfigError(
                f'--transformers {letter}: {source.name} is not a Hugging Face directory; write '
                'one with megajax export hf'
            )
    recordings = {
        index: read_recording(source.path)
        for index, source in enumerate(sources)
        if source.kind == 'dump'
    }
    configs = {index: config_of(recording) for index, recording in recordings.items()}
    for index, source in enumerate(sources):
        if source.kind in ('config', 'run'):
            configs[index] = source.config()
    like = next(iter(configs.values()), None)
    for index, source in enumerate(sources):
        if source.kind == 'huggingface':
            configs[index] = source.config(like)
    return [
        _Side(
            source=source,
            config=configs[index],
            recording=recordings.get(index),
            with_transformers='ab'[index] == transformers,
        )
        for index, source in enumerate(sources)
    ]


def _check_dropout_of_dumps(sides: Sequence[_Side]) -> None:
    """Raise ConfigError for a dump computed with dropout, which transformers would not repeat."""
    for side in sides:
        if side.recording is not None and side.config.model.has_dropout:
            raise ConfigError(
                f'{side.source.name} was computed with dropout, which --transformers disables: '
                f'dump it again with {" ".join(WITHOUT_DROPOUT)}'
            )


def _with_like_adapters(sides: Sequence[_Side]) -> list[_Side]:
    """Merge the adapters of a side into its weights if the other side has none."""
    if all(side.config.lora is not None for side in sides):
        return [*sides]
    return [
        side
        if side.config.lora is None or side.recording is not None
        else dataclasses.replace(side, config=without_adapters(side.config), is_merged=True)
        for side in sides
    ]


def _batch(sides: Sequence[_Side], *, data: bool) -> Mapping[str, np.ndarray]:
    """Return the batch of both sides: from a dump, from training data, or random tokens."""
    for side in sides:
        if side.recording is not None:
            if data:
                raise ConfigError(
                    f'--data: {side.source.name} contains its own batch; remove --data, or dump '
                    'again with it'
                )
            return side.recording.batch
    if data:
        with_own = sorted(sides, key=lambda side: side.source.kind == 'huggingface')
        found = next((side for side in with_own if side.source.has_data), None)
        if found is None:
            raise ConfigError(
                f'--data: {sides[0].source.name} is a Hugging Face directory, which has no data; '
                'set data.corpus, or remove --data'
            )
        return found.source.data(found.config).train[0]
    from megajax.analysis.inspect.random_batch import make_batch

    return make_batch(sides[0].config)


def _check_memory(sides: Sequence[_Side]) -> None:
    num_executed = sum(side.recording is None for side in sides)
    check_site_memory([side.config for side in sides], num_executed=num_executed)


def _make_meshes(sides: Sequence[_Side]) -> None:
    """Make the largest mesh first: it decides how many devices the CPU simulates."""
    from megajax.core.parallel.mesh import mesh_for

    executed = [
        side.config for side in sides if side.recording is None and not side.with_transformers
    ]
    if executed:
        mesh_for(max(executed, key=lambda config: config.mesh.num_devices))
