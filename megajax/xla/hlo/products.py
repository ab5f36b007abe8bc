"""List the matmuls of a compiled program: dots, convolutions, and library and kernel calls."""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple, TypeVar

from megajax.xla.hlo import mosaic
from megajax.xla.hlo.convolutions import multiplications, of_cudnn
from megajax.xla.hlo.program import Array, Computation, Instruction, Program
from megajax.xla.hlo.starts import opcode_of, results_of

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Custom calls, and the beginnings of others, that neither multiply nor send to another device.
_HARMLESS = frozenset({
    'AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast', 'InspectSharding',
    'LayoutConstraint', 'MoveToDevice', 'MoveToHost', 'PadToStatic', 'PartialReduce',
    'ResizeDynamicSize', 'SPMDFullToShardShape', 'SPMDShardToFullShape', 'Sharding',
    'SliceToDynamic', 'TopK', '__gpu$TopK', 'annotate_device_placement', 'cu_threefry2x32_ffi',
})  # fmt: skip
_HARMLESS_KINDS = ('xla_ffi_python_', 'xla_python_', '__cub$', '__cudnn$norm')
Number = TypeVar('Number', int, float)

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([^}\]]*)[}\]]')
_BATCH = re.compile(r'lhs_batch_dim(?:ension)?s"?[=:] ?[{\[]([^}\]]*)[}\]]')
# Dims of the weights of a ragged-dot that are not columns of its result.
_NOT_COLUMNS = re.compile(r'\brhs_(?:contracting|batch|group)_dims=\{([^}]*)\}')
_MULTIPLY = 'dot', 'convolution', 'custom-call', 'ragged-dot', 'scaled-dot'


class Product(NamedTuple):
    """One matmul on one device, or the matmuls of one attention kernel.

    `flops` counts every pair of query and key, although a causal kernel skips the masked half; with
    a window, it counts `keys_in_window` keys per query. `dtype` is the dtype of the operands.
    `sizes` is (batch, m, n, k) of a matmul [m, k] x [k, n]; for attention it is the shape of the
    first operand.
    """

    flops: int
    dtype: str
    is_attention: bool = False
    is_causal: bool = False
    sizes: tuple[int, ...] = ()


def product_of(computation: Computation, instruction: Instruction) -> Product | None:
    """Return the matmul or convolution of an instruction itself; None for any other instruction.

    A complex matmul counts as four real ones.
    """
    if opcode_of(instruction) not in _MULTIPLY:
        return None
    product = _product(computation, instruction)
    if product and product.dtype in ('c64', 'c128'):
        return product._replace(flops=4 * product.flops)
    return product


def _product(computation: Computation, instruction: Instruction) -> Product | None:
    operands = [_first(computation.by_name[name]) for name in instruction.operands]
    results = results_of(computation, instruction)
    opcode = opcode_of(instruction)
    if opcode == 'convolution':
        return _convolution(instruction, operands[0], operands[1], results[0])
    if opcode == 'ragged-dot':
        return _ragged_dot(instruction, *operands[:2])
    if opcode == 'custom-call':
        target = target_of(instruction)
        if 'fmha' in target:
            return _attention(instruction, operands[0])
        if kernel := mosaic.grouped(instruction.attributes):
            return _grouped(kernel, operands[-2:], results[0])
        if target.startswith('__cudnn$conv'):
            return _of_cudnn(instruction, target, operands[0], operands[1], results[0])
    match = _CONTRACTED.search(instruction.attributes)
    if not match:
        return None
    left, result = operands[0], prod(results[0].shape)
    k = _size_along(left, match)
    batch = _size_along(left, _BATCH.search(instruction.attributes))
    m = prod(left.shape) // (batch * k)
    return Product(2 * result * k, left.dtype, sizes=(batch, m, result // (batch * m), k))


def target_of(instruction: Instruction) -> str:
    """Return the name of the function that a custom call calls; empty for other instructions."""
    is_call = opcode_of(instruction) == 'custom-call'
    match = _TARGET.search(instruction.attributes) if is_call else None
    return match[1] if match else ''


def uncounted_calls(program: Program) -> dict[str, int]:
    """Return how often each custom call runs that may compute or send something, by its place.

    Such calls are library functions and kernels other than matmuls and attention.
    """
    calls = Counter[str]()
    for computation in program.computations.values():
        for instruction in computation.instructions:
            target = target_of(instruction)
            is_harmless = target in _HARMLESS or target.startswith(_HARMLESS_KINDS)
            if target and not is_harmless and product_of(computation, instruction) is None:
                source = program.source(instruction).split(' < ')[0]
                place = source or instruction.op_name or instruction.name
                calls[f'{target} at {place}'] += program.times[computation.name]
    return dict(+calls)


def _first(instruction: Instruction) -> Array:
    """Return the array of an instruction, or the first of its tuple, which may be empty."""
    return instruction.results[0] if instruction.results else Array('token', ())


def _attention(instruction: Instruction, query: Array) -> Product:
    size = _score_elements(instruction) * query.shape[-1]
    if window := window_of(instruction.attributes):
        length = query.shape[1]
        size = size * keys_in_window(window, length) // length
    flops = (10 if 'Backward' in target_of(instruction) else 4) * size
    is_causal = bool(re.search(r'"mask_type": ?"(PADDING_)?CAUSAL"', instruction.attributes))
    return Product(flops, query.dtype, is_attention=True, is_causal=is_causal, sizes=query.shape)


def _ragged_dot(instruction: Instruction, rows: Array, weights: Array) -> Product:
    """Return the matmul of all rows, each with the weights of its group."""
    k = _size_along(rows, _CONTRACTED.search(instruction.attributes))
    batch = _size_along(rows, _BATCH.search(instruction.attributes))
    others = _NOT_COLUMNS.findall(instruction.attributes)
    dims = {int(number) for each in others for number in re.findall(r'\d+', each)}
    n = prod(size for dim, size in enumerate(weights.shape) if dim not in dims)
    sizes = batch, prod(rows.shape) // (batch * k), n, k
    return Product(2 * prod(sizes), rows.dtype, sizes=sizes)


def _convolution(instruction: Instruction, left: Array, right: Array, result: Array) -> Product:
    count = multiplications(instruction, left, right, result)
    return _as_matmul(count, left.dtype, result, result.shape[-1])


def _of_cudnn(
    instruction: Instruction, target: str, first: Array, second: Array, result: Array
) -> Product:
    count, features = of_cudnn(instruction, target, first, second, result)
    return _as_matmul(count, first.dtype, result, features)


def _as_matmul(count: int, dtype: str, result: Array, n: int) -> Product:
    """Return a convolution as a matmul whose result has `n` columns."""
    elements = prod(result.shape)
    return Product(2 * count, dtype, sizes=(1, elements // n, n, count // elements))


def _grouped(kernel: mosaic.Grouped, factors: list[Array], result: Array) -> Product:
    """Return the matmul of all rows, including the rows of blocks that a kernel skips."""
    rows, inputs = factors[0].shape
    if kernel.kind == 'outer':
        sizes = 1, inputs, factors[1].shape[1], rows
    else:
        sizes = 1, rows, result.shape[1], inputs
    return Product(2 * prod(sizes), factors[0].dtype, sizes=sizes)


def window_of(attributes: str) -> int | None:
    """Return the sliding window of a call to cuDNN's attention; None if it has no window."""
    window = re.search(r'"sliding_window_length":\s*"?([1-9]\d*)', attributes)
    return int(window[1]) if window else None


def keys_in_window(window: int, length: int) -> int:
    """Return the number of keys per query that counts for a causal kernel with a sliding window.

    It is twice the number of keys that a query reads on average, because the count for a causal
    kernel without a window also includes the masked half.
    """
    window = min(window, length)
    return round(2 * window - window * window / length)


def flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Return the per-device FLOPs of an instruction's matmuls, called computations included."""
    if product := product_of(computation, instruction):
        return product.flops
    return in_all(instruction, [_flops_of(program, name) for name in instruction.called])


def _flops_of(program: Program, name: str) -> int:
    """Return the FLOPs of one run of a computation; each is counted once per program."""
    if name not in program.flops:
        called = program.computations[name]
        program.flops[name] = sum(flops(program, called, each) for each in called.instructions)
    return program.flops[name]


def inside(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[Product]:
    """Yield the matmuls of one kernel: in an instruction, or in the computations that it calls."""
    if product := product_of(computation, instruction):
        yield product
    for called in (program.computations[name] for name in instruction.called):
        for each in called.instructions:
            yield from inside(program, called, each)


def in_all(instruction: Instruction, inside: list[Number]) -> Number:
    """Return the total work of an instruction, from one execution of each computation it calls."""
    if not inside or instruction.opcode in ('async-update', 'async-done'):
        return 0  # older versions of XLA repeat here the computation that async-start started
    if instruction.opcode == 'conditional':
        return max(inside)
    runs = 1 if instruction.trip_count is None else instruction.trip_count
    return runs * sum(inside)


def products(program: Program) -> Iterator[tuple[Product, Computation, Instruction, int]]:
    """Yield every matmul of a program, its computation, its instruction and how often it runs."""
    for computation in program.computations.values():
        for instruction in computation.instructions:
            product = product_of(computation, instruction)
            if product and program.times[computation.name]:
                yield product, computation, instruction, program.times[computation.name]


def is_rematerialized(program: Program, computation: Computation, instruction: Instruction) -> bool:
    """Return whether XLA repeats an instruction in order to save memory."""
    callers = [caller for _, caller in program.callers.get(computation.name, ())]
    return any('.remat' in each.name for each in (instruction, *callers))


def _size_along(array: Array, dims: re.Match[str] | None) -> int:
    """Return the number of elements along the dims of an array that a match lists."""
    numbers = re.findall(r'\d+', dims[1]) if dims else []
    return prod(array.shape[int(number)] for number in numbers)


def _score_elements(instruction: Instruction) -> int:
    scores = re.search(
        r'"intermediate_tensor_shape": ?\{[^\[\]{}]*"dimensions": ?\[([^\]]*)\]',
        instruction.attributes,
    )
    return prod(int(number) for number in re.findall(r'\d+', scores[1])) if scores else 0
