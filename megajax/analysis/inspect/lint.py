"""Lint a compiled step: report errors, and notes for the user.

Each finding names the instruction or parameter and the fix.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from megajax.analysis.inspect.result import Finding
from megajax.analysis.inspect.sites import site_of
from megajax.core.config import Config
from megajax.core.counts.collective import Expected, Site, activation
from megajax.core.counts.megatron import stated
from megajax.core.counts.parameters import SHARDED_BY_MEGATRON, parameters
from megajax.core.counts.vision import shapes
from megajax.core.parallel.layout import CONTEXT, STAGE
from megajax.core.parallel.placements import Placement
from megajax.core.train.compiled_step import CompiledStep
from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.permutes import fault
from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles import confirmed, detect_in
from megajax.xla.miscompiles.empty_permute import is_asked_for

REPLICATED_LIMIT = 64 * 1024  # bytes; smaller parameters cost more to shard than to replicate


def lint(
    config: Config,
    compiled: CompiledStep,
    placed: Sequence[Collective],
    wanted: Sequence[Expected],
    others: Iterable[Finding] = (),
) -> list[Finding]:
    """Return all findings, including `others`, errors first."""
    findings = [
        *_replicated(config, compiled),
        *_optimizer_elsewhere(compiled),
        *_reduced_twice(config, placed, wanted),
        *_gathered_weights(config, compiled, placed),
        *_wide(config, placed),
        *_lossy_permutes(compiled, placed),
        *others,
        *_padded(config),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def known_miscompiles(program: Program, target: str) -> list[Finding]:
    """Return the instructions that match a known XLA miscompile, as errors.

    They are notes if it is not known whether the compiler has the bug.
    """
    return [
        Finding(
            level='note' if finding.doubt else 'error',
            rule=f'miscompiled: {finding.entry.name}',
            message=str(finding),
        )
        for finding in confirmed(detect_in(program), target)
    ]


def replicated_over_model(compiled: CompiledStep) -> list[Placement]:
    """Return the parameters that are replicated on every device of a `model` group."""
    return [
        parameter
        for parameter in compiled.parameters
        if compiled.mesh['model'] > 1 and 'model' not in parameter.mesh_axes
    ]


def _error(rule: str, message: str) -> Finding:
    return Finding(level='error', rule=rule, message=message)


def _replicated(config: Config, compiled: CompiledStep) -> Iterator[Finding]:
    declared = dict(parameters(config.model))
    for parameter in replicated_over_model(compiled):
        declaration = declared[parameter.name]
        if declaration.owner == 'encoder' and not declaration.is_matrix:
            continue  # small: gathering them would cost more time than sharding saves
        dims = declaration.dims
        is_sharded_by_megatron = any(dim in SHARDED_BY_MEGATRON for dim in dims)
        if parameter.bytes_per_device > REPLICATED_LIMIT and is_sharded_by_megatron:
            message = (
                f'{parameter} is replicated on all {config.mesh.model} devices of a model group: '
                f'map one of its dims, {dims}, to `model` in layout.py'
            )
            yield _error('replicated parameter', message)


def _optimizer_elsewhere(compiled: CompiledStep) -> Iterator[Finding]:
    for parameter in compiled.parameters:
        for state in compiled.optimizer:
            if (
                state.name.endswith(f'.{parameter.name}')
                and state.shape == parameter.shape
                and state.axes != parameter.axes
            ):
                message = (
                    f'{state} is not sharded like its parameter ({parameter}): '
                    'create it with the sharding of the parameter'
                )
                yield _error('optimizer state elsewhere', message)


def _reduced_twice(
    config: Config, placed: Sequence[Collective], wanted: Sequence[Expected]
) -> Iterator[Finding]:
    arrays, sources = defaultdict[tuple[Site, tuple[int, ...]], int](int), dict[Site, str]()
    for collective in placed:
        site = site_of(collective, config)
        is_sum = collective.kind in ('all-reduce', 'reduce-scatter')
        if is_sum and site.phase == 'backward' and site.name != 'gradients':
            arrays[site, collective.whole.dims] += collective.times
            sources[site] = collective.source
    for (site, dims), times in arrays.items():
        allowed = max(_sums(site, dims, expected) for expected in (wanted, stated(config)))
        # Image vectors cannot be distinguished from the gradient of an encoder weight that has the
        # same shape.
        alike = shapes(config)[tuple(sorted(dims))] if site.name == 'vision' else 0
        if allowed and times > allowed + alike:
            message = (
                f'the input gradient of {site.name} is reduced {times} times per step, {allowed} '
                f'in Megatron ({sources[site]}): fuse the matmuls that share the input, '
                'as in QKV or gate and up'
            )
            yield _error('input gradient reduced again', message)


def _sums(site: Site, dims: tuple[int, ...], expected: Sequence[Expected]) -> int:
    """Count the expected sums of an array with these dims at a site."""
    return sum(
        transfer.times
        for transfer in expected
        if transfer.site == site
        and transfer.kind in ('all-reduce', 'reduce-scatter')
        and transfer.array.dims == dims
    )


def _gathered_weights(
    config: Config, compiled: CompiledStep, placed: Sequence[Collective]
) -> Iterator[Finding]:
    weights, declared = dict[tuple[int, ...], str](), dict(parameters(config.model))
    for parameter in compiled.parameters:
        if 'model' in parameter.mesh_axes:
            stacked = declared[parameter.name].is_stacked
            shapes = [parameter.shape, parameter.shape[1:]] if stacked else [parameter.shape]
            weights |= {dims: parameter.name for shape in shapes for dims in _spellings(shape)}
    tokens = prod(activation(config).shape[:2])
    counts = tokens, tokens // config.overlap.num_parts
    for collective in placed:
        dims = collective.whole.dims
        name = weights.get(tuple(sorted(dims)))
        # The gathers of ZeRO, images, Muon, keys and values, and the head's tokens have their own
        # rows in the table of collectives.
        is_known = site_of(collective, config).name in ('parameters', 'vision', 'optimizer')
        has_row = is_known or collective.axes in ((STAGE,), (CONTEXT,))
        has_tokens = prod(dims[:-1]) in counts
        if collective.kind == 'all-gather' and name and not has_row and not has_tokens:
            message = (
                f'{name} is all-gathered over {collective.axis} at {collective.place}: '
                'multiply by its shards instead'
            )
            yield _error('gathered weight', message)


def _spellings(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sorted dims of a shape, and of the matrices that a matmul may flatten it to."""
    yield tuple(sorted(size for size in shape if size > 1))
    for cut in range(1, len(shape)):
        yield tuple(sorted((prod(shape[:cut]), prod(shape[cut:]))))


def _wide(config: Config, placed: Sequence[Collective]) -> Iterator[Finding]:
    if config.train.dtype == 'float32':
        return
    for collective in placed:
        dims = collective.whole.dims
        # Only activations: scalars per token and gradients of vectors are in fp32 on purpose.
        if (
            not {'data', 'replica'} & {*collective.axes}
            and collective.operand.dtype == 'f32'
            and len(dims) > 2
            and dims[-1] >= config.model.hidden_size
            and site_of(collective, config).name != 'gradients'
        ):
            array = f'{collective.kind} of {collective.whole} over {collective.axis}'
            fix = f'cast to {config.train.dtype} before it'
            yield _error('fp32 communication', f'{array} at {collective.place}: {fix}')


def _lossy_permutes(compiled: CompiledStep, placed: Sequence[Collective]) -> Iterator[Finding]:
    for permute in placed:
        # XLA's own permutes without pairs are reported as a known miscompile.
        is_known = not permute.groups and not is_asked_for(permute.op_name)
        if permute.kind != 'collective-permute' or is_known:
            continue
        if problem := fault(permute.groups, prod(compiled.mesh.values())):
            rule, sentence = problem
            array = f'{permute.times} x of {permute.whole}'
            yield _error(rule, f'{array} at {permute.place}: {sentence}')


def _padded(config: Config) -> Iterator[Finding]:
    model = config.model
    if model.padded_vocab_size != model.vocab_size:
        message = (
            f'model.vocab_size={model.vocab_size} is padded to {model.padded_vocab_size} '
            'on every mesh'
        )
        yield Finding(level='note', rule='padded', message=message)
    if model.num_kv_heads < config.mesh.model:
        message = (
            f'model.num_kv_heads={model.num_kv_heads} is less than mesh.model={config.mesh.model}: '
            'keys and values are all-gathered'
        )
        yield Finding(level='note', rule='not sharded by head', message=message)
