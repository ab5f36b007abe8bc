"""What is wrong with a compiled step, and what its user should know; each finding names the place and the fix."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from megajax.config import Config
from megajax.counts.megatron import Expected, Site
from megajax.counts.parameters import SHARDED_BY_MEGATRON, parameters
from megajax.hlo.collectives import Collective
from megajax.hlo.permutes import fault
from megajax.hlo.program import Program
from megajax.inspect.compile import CompiledStep
from megajax.inspect.result import Finding
from megajax.inspect.sites import site_of
from megajax.miscompiles import confirmed, detect_in
from megajax.parallel.placements import Placement

REPLICATED_LIMIT = 64 * 1024  # bytes; smaller parameters cost more to shard than to hold


def lint(
    config: Config,
    compiled: CompiledStep,
    placed: Sequence[Collective],
    wanted: Sequence[Expected],
    others: Iterable[Finding] = (),
) -> list[Finding]:
    """Every finding, those of others among them, errors first."""
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
    """Every instruction that shows what XLA is known to compile wrongly."""
    findings = confirmed(detect_in(program), target)
    return [_error(f'miscompiled: {finding.entry.name}', str(finding)) for finding in findings]


def replicated_over_model(compiled: CompiledStep) -> list[Placement]:
    """Parameters that every device of a `model` group holds whole."""
    return [
        one for one in compiled.parameters if compiled.mesh['model'] > 1 and 'model' not in one.axes
    ]


def _error(rule: str, message: str) -> Finding:
    return Finding(level='error', rule=rule, message=message)


def _replicated(config: Config, compiled: CompiledStep) -> Iterator[Finding]:
    declared = dict(parameters(config.model))
    for one in replicated_over_model(compiled):
        dims = declared[one.name].dims
        if one.bytes_per_device > REPLICATED_LIMIT and any(
            dim in SHARDED_BY_MEGATRON for dim in dims
        ):
            message = (
                f'{one} is whole on each of the {config.mesh.model} devices of a model group: '
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
                message = f'{state} does not lie where its parameter lies ({parameter}): create it with the sharding of the parameter'
                yield _error('optimizer state elsewhere', message)


def _reduced_twice(
    config: Config, placed: Sequence[Collective], wanted: Sequence[Expected]
) -> Iterator[Finding]:
    arrays, sources = defaultdict[tuple[Site, tuple[int, ...]], int](int), dict[Site, str]()
    for one in placed:
        if (
            one.kind in ('all-reduce', 'reduce-scatter')
            and site_of(one, config).phase == 'backward'
        ):
            arrays[site_of(one, config), one.whole.dims] += one.times
            sources[site_of(one, config)] = one.source
    for (site, dims), times in arrays.items():
        allowed = sum(
            one.times
            for one in wanted
            if one.site == site
            and one.kind in ('all-reduce', 'reduce-scatter')
            and one.array.dims == dims
        )
        if allowed and times > allowed:
            message = f'the input gradient of {site.name} is reduced {times} times a step, {allowed} in Megatron ({sources[site]}): '
            yield _error(
                'input gradient reduced again',
                message + 'fuse the products that share the input, as QKV and gate and up are',
            )


def _gathered_weights(
    config: Config, compiled: CompiledStep, placed: Sequence[Collective]
) -> Iterator[Finding]:
    weights, declared = dict[tuple[int, ...], str](), dict(parameters(config.model))
    for parameter in compiled.parameters:
        if 'model' in parameter.axes:
            stacked = declared[parameter.name].is_stacked
            shapes = [parameter.shape, parameter.shape[1:]] if stacked else [parameter.shape]
            weights |= {dims: parameter.name for shape in shapes for dims in _spellings(shape)}
    tokens = config.microbatch_rows * config.train.seq_len
    for one in placed:
        name = weights.get(tuple(sorted(one.whole.dims)))
        at_rest = (
            config.optim.shard and site_of(one, config).name == 'parameters'
        )  # ZeRO-1, whose bytes have a row of their own
        if (
            one.kind == 'all-gather'
            and name
            and not at_rest
            and prod(one.whole.dims[:-1]) != tokens
        ):
            message = f'{name} is gathered over {one.axis} at {one.op_name} ({one.source}): contract it where it lies'
            yield _error('gathered weight', message)


def _spellings(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Its dims in order of size, whole and flattened to two as a matrix product has them."""
    yield tuple(sorted(size for size in shape if size > 1))
    for cut in range(1, len(shape)):
        yield tuple(sorted((prod(shape[:cut]), prod(shape[cut:]))))


def _wide(config: Config, placed: Sequence[Collective]) -> Iterator[Finding]:
    if config.train.dtype == 'float32':
        return
    for one in placed:
        # Of tokens and width: numbers per token, and gradients of vectors, are in fp32 by intent.
        if (
            'data' not in one.axes
            and one.operand.dtype == 'f32'
            and len(one.whole.dims) > 2
            and one.whole.dims[-1] >= config.model.hidden_size
        ):
            message = f'{one.kind} of {one.whole} over {one.axis} at {one.op_name} ({one.source}): cast to {config.train.dtype} before it'
            yield _error('fp32 on the wire', message)


def _lossy_permutes(compiled: CompiledStep, placed: Sequence[Collective]) -> Iterator[Finding]:
    permutes = [
        one for one in placed if one.kind == 'collective-permute' and one.groups
    ]  # without pairs: the register has it
    for one in permutes:
        if found := fault(one.groups, prod(compiled.mesh.values())):
            rule, sentence = found
            yield _error(
                rule, f'{one.times} x of {one.whole} at {one.op_name} ({one.source}): {sentence}'
            )


def _padded(config: Config) -> Iterator[Finding]:
    model = config.model
    if model.padded_vocab_size != model.vocab_size:
        message = f'model.vocab_size {model.vocab_size} is held as {model.padded_vocab_size} rows, whatever the mesh'
        yield Finding(level='note', rule='padded', message=message)
    if model.num_kv_heads < config.mesh.model:
        message = f'model.num_kv_heads={model.num_kv_heads} is less than mesh.model={config.mesh.model}: keys and values are gathered'
        yield Finding(level='note', rule='not sharded by head', message=message)
