"""Convolutions that cuDNN computes, in lines that jax 0.10.2 compiled for an H100, complex matmuls,
and attention.
"""

from math import prod

import pytest

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import Product, product_of, uncounted_calls
from megajax.xla.hlo.program import Program

INPUT, FILTER, OUTPUT = 'f32[4,33,33,8]', 'f32[16,3,3,8]', 'f32[4,16,16,16]'
WINDOW = 'window={size=3x3 stride=2x2}'
LABELS = 'dim_labels=b01f_o01i->b01f'
MULTIPLIED = (4 * 16 * 16) * 16 * (3 * 3 * 8)


def read(call: str, *operands: str) -> Product | None:
    lines = [f'%p{i} = {array} parameter({i})' for i, array in enumerate(operands)]
    names = ', '.join(f'%p{i}' for i in range(len(operands)))
    text = '\n  '.join([*lines, f'ROOT %o = {call.replace("()", f"({names})", 1)}'])
    program = Program(f'HloModule f\n\nENTRY %main () -> f32[] {{\n  {text}\n}}\n')
    return product_of(program.entry, program.entry.root)


def convolution(target: str, result: str, *operands: str, attributes: str = LABELS):
    call = f'({result}, u8[0]{{0}}) custom-call(), {WINDOW}, {attributes}'
    config = '"cudnn_conv_backend_config":{"activation_mode":"kNone","conv_result_scale":1}'
    target = f'custom_call_target="__cudnn${target}", backend_config={{{config}}}'
    return read(f'{call}, {target}', *operands)


@pytest.mark.parametrize(
    ('target', 'result', 'operands', 'sizes'),
    [
        ('convForward', OUTPUT, (INPUT, FILTER), (1, 4 * 16 * 16, 16, 72)),
        ('convBiasActivationForward', OUTPUT, (INPUT, FILTER, 'f32[16]'), (1, 1024, 16, 72)),
        # Of 33 x 33 places, those beside the window's stride are read by fewer outputs.
        ('convBackwardInput', INPUT, (OUTPUT, FILTER), (1, 4 * 33 * 33, 8, 33)),
        ('convBackwardFilter', FILTER, (INPUT, OUTPUT), (1, 3 * 3 * 8, 16, 4 * 16 * 16)),
    ],
)
def test_a_convolution_and_its_gradients_have_the_same_flops(target, result, operands, sizes):
    product = convolution(target, result, *operands)
    assert product == Product(2 * MULTIPLIED, 'f32', sizes=sizes)


def test_a_convolution_with_features_first_has_as_many_columns_as_features():
    labels = 'dim_labels=bf01_oi01->bf01'
    arrays = 'f32[4,16,16,16]', 'f32[4,8,33,33]', 'f32[16,8,3,3]'
    product = convolution('convForward', *arrays, attributes=labels)
    assert product == Product(2 * MULTIPLIED, 'f32', sizes=(1, 1024, 16, 72))


def test_groups_of_features_multiply_only_their_own():
    arrays = OUTPUT, INPUT, 'f32[16,3,3,2]'
    product = convolution('convForward', *arrays, attributes=f'{LABELS}, feature_group_count=4')
    assert product.flops == 2 * MULTIPLIED // 4


def test_a_call_without_labels_is_an_error():
    with pytest.raises(HloError, match='without dim_labels'):
        convolution('convForward', OUTPUT, INPUT, FILTER, attributes='sharding={replicated}')


@pytest.mark.parametrize(('dtype', 'times'), [('f32', 1), ('c64', 4), ('c128', 4)])
def test_a_complex_matmul_is_four_real_ones(dtype, times):
    dims = 'lhs_contracting_dims={1}, rhs_contracting_dims={0}'
    product = read(f'{dtype}[4,16] dot(), {dims}', f'{dtype}[4,8]', f'{dtype}[8,16]')
    assert product == Product(times * 2 * 4 * 8 * 16, dtype, sizes=(1, 4, 16, 8))


@pytest.mark.parametrize(
    ('arrays', 'dims', 'batch'),
    [
        (
            ('[64,16]', '[64,32]', '[4,32,16]'),
            '{1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}',
            1,
        ),
        (
            ('[4,32,16]', '[64,32]', '[64,16]'),
            '{0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}',
            1,
        ),
        (
            ('[8,64,16]', '[8,64,32]', '[8,32,16]'),
            '{2}, rhs_contracting_dims={1}, lhs_batch_dims={0}, rhs_batch_dims={0}',
            8,
        ),
    ],
)
def test_a_ragged_dot_multiplies_each_row_with_the_weights_of_its_group(arrays, dims, batch):
    result, *factors = (f'bf16{shape}' for shape in arrays)
    product = read(f'{result} ragged-dot(), lhs_contracting_dims={dims}', *factors, 's32[4]')
    assert (product.flops, product.dtype) == (batch * 2 * 64 * 32 * 16, 'bf16')
    assert product.sizes[0] == batch
    assert 2 * prod(product.sizes) == product.flops


def test_a_scaled_dot_is_a_dot():
    dims = 'lhs_contracting_dims={1}, rhs_contracting_dims={0}'
    factors = 'f8e4m3fn[64,32]', 'f8e4m3fn[32,16]'
    scales = 'f8e8m0fnu[64,1]', 'f8e8m0fnu[1,16]'
    product = read(f'bf16[64,16] scaled-dot(), {dims}', *factors, *scales)
    assert product == read(f'bf16[64,16] dot(), {dims}', *factors)


def test_a_call_that_is_started_counts_as_one_that_is_awaited():
    factors, results = ('f32[64,32]', 'f32[32,16]'), '(f32[64,16], s8[128])'
    dims = '"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]'
    attributes = f'custom_call_target="__cublas$lt$matmul", backend_config={{{dims}}}'
    started = f'(({", ".join(factors)}), {results}, s32[]) custom-call-start(), {attributes}'
    product = read(started, *factors)
    assert product == read(f'{results} custom-call(), {attributes}', *factors)
    assert product.sizes == (1, 64, 16, 32)


def test_a_call_with_an_empty_tuple_is_no_matmul():
    assert read('f32[4] custom-call(), custom_call_target="other"', '()') is None


@pytest.mark.parametrize('precision', ['', 'F8'])
@pytest.mark.parametrize(('direction', 'matmuls'), [('', 2), ('Backward', 5)])
def test_attention_multiplies_twice_and_its_gradient_five_times(precision, direction, matmuls):
    array = 'f8e4m3fn[1,16,2,8]'
    call = f'custom-call(), custom_call_target="__cudnn$fmhaSoftmax{direction}{precision}"'
    config = 'backend_config={"intermediate_tensor_shape":{"dimensions":["1","2","16","16"]}}'
    product = read(f'{array} {call}, {config}', array, array, array)
    assert product.flops == matmuls * 2 * (2 * 16 * 16) * 8


def test_calls_that_may_multiply_or_send_are_listed_with_their_runs():
    dims = '"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]'
    started = 'custom_call_target="__cublas$lt$matmul"'  # without its config
    calls = {
        'Sharding': '',
        '__cublas$lt$matmul': f', backend_config={{{dims}}}',
        'te_fused_attn_forward_ffi': ', metadata={op_name="jit(f)/attn"}',
        'tpu_custom_call': '',
        'xla_ffi_python_cpu_callback': '',
    }
    body = '\n  '.join(
        f'{"ROOT " * (target == "xla_ffi_python_cpu_callback")}%c{i} = f32[8,8] '
        f'custom-call(%{f"c{i - 1}" if i else "p"}), custom_call_target="{target}"{attributes}'
        for i, (target, attributes) in enumerate(calls.items())
    )
    program = Program(f"""HloModule f

%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  {body}
}}

%condition (q: f32[8,8]) -> pred[] {{
  %q = f32[8,8] parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %s = ((f32[8,8]), f32[8,8], s32[]) custom-call-start(%x), {started}
  %d = f32[8,8] custom-call-done(%s)
  ROOT %loop = f32[8,8] while(%d), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
""")
    assert uncounted_calls(program) == {
        'te_fused_attn_forward_ffi at jit(f)/attn': 3,
        'tpu_custom_call at c3': 3,
        '__cublas$lt$matmul at s': 1,
    }
