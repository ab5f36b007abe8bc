import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate.texts import executed, module, random

from megajax.xla.emulate.translate import for_cpu
from megajax.xla.hlo.errors import HloError

EPILOGUES = (
    'DEFAULT', 'BIAS', 'RELU', 'GELU', 'BIAS_RELU', 'BIAS_GELU', 'RELU_AUX', 'GELU_AUX',
    'BIAS_GELU_AUX',
)  # fmt: skip

OPERANDS = [('a', '5,8'), ('b', '8,4'), ('bias', '4')]


def product(epilogue: str, *, alpha: float = 1.5, beta: float = 0.0, lhs: int = 1) -> str:
    """What stands after the operands of a call that multiplies [5,8] (lhs 0: [8,5]) by [8,4]."""
    dims = {'lhs_contracting_dimensions': [str(lhs)], 'rhs_contracting_dimensions': ['0']}
    config = {
        'alpha_real': alpha, 'alpha_imag': 0, 'beta': beta, 'epilogue': epilogue,
        'dot_dimension_numbers': dims,
    }  # fmt: skip
    target = 'custom_call_target="__cublas$lt$matmul"'
    return f'{target}, backend_config={json.dumps({"gemm_backend_config": config})}'


def test_products_of_cublas_are_scaled_then_biased_then_activated():
    a, b, c, bias = random(1, 5, 8), random(1, 8, 4), random(1, 5, 4), random(1, 4)
    lines = [
        '%a = f32[5,8]{1,0} parameter(0)',
        '%b = f32[8,4]{1,0} parameter(1)',
        '%c = f32[5,4]{1,0} parameter(2)',
        '%bias = f32[4]{0} parameter(3)',
        f'%plain = f32[5,4]{{1,0}} custom-call(%a, %b, %c), {product("DEFAULT", beta=0.5)}',
    ]
    names, array = ['%plain'], 'f32[5,4]{1,0}'
    for epilogue in EPILOGUES:
        operands = '%a, %b, %bias' if 'BIAS' in epilogue else '%a, %b'
        aux = [array] if 'AUX' in epilogue else []
        types = ', '.join([array, *aux, 's8[64]{0}'])
        lines.append(f'%{epilogue} = ({types}) custom-call({operands}), {product(epilogue)}')
        for place in range(1 + len(aux)):
            names.append(f'%{epilogue}.{place}')
            lines.append(f'{names[-1]} = {array} get-tuple-element(%{epilogue}), index={place}')
    lines.append(f'%all = ({", ".join([array] * len(names))}) tuple({", ".join(names)})')
    found = dict(zip(names, executed(module(lines), a, b, c, bias), strict=True))
    scaled = 1.5 * a[0] @ b[0]
    close(found['%plain'], scaled + 0.5 * c[0])
    for epilogue in EPILOGUES:
        before = scaled + bias if 'BIAS' in epilogue else scaled
        after = before
        if 'RELU' in epilogue:
            after = np.maximum(before, 0)
        elif 'GELU' in epilogue:
            inner = np.sqrt(2 / np.pi) * (before + 0.044715 * before**3)
            after = 0.5 * before * (1 + np.tanh(inner))
        close(found[f'%{epilogue}.0'], after)
        if 'AUX' in epilogue:
            close(found[f'%{epilogue}.1'], before)


def test_integers_are_summed_as_integers():
    a, b, c = np.full((1, 5, 4096), 127, np.int8), np.full((1, 4096, 4), 127, np.int8), 3
    b[0, 7] = -3
    lines = [
        '%a = s8[5,4096]{1,0} parameter(0)',
        '%b = s8[4096,4]{1,0} parameter(1)',
        '%c = s32[5,4]{1,0} parameter(2)',
        f'%y = s32[5,4]{{1,0}} custom-call(%a, %b, %c), {product("DEFAULT", alpha=1.0, beta=1.0)}',
    ]
    [found] = executed(module(lines), a, b, np.full((1, 5, 4), c, np.int32))
    expected = 4095 * 127**2 - 3 * 127 + c
    assert expected > 2**24
    assert expected % 2  # which fp32 would round
    np.testing.assert_array_equal(found, np.full((1, 5, 4), expected))
    with pytest.raises(HloError, match='integers with fractions'):
        for_cpu(module([*lines[:3], lines[3].replace('1.0', '0.5')]), 1)


def test_a_product_of_batches_is_one_of_each():
    a, b, c = random(1, 3, 5, 8), random(1, 8, 3, 4), random(1, 3, 5, 4)
    dims = {
        'lhs_batch_dimensions': ['0'], 'rhs_batch_dimensions': ['1'],
        'lhs_contracting_dimensions': ['2'], 'rhs_contracting_dimensions': ['0'],
    }  # fmt: skip
    config = {'alpha_real': 0.5, 'beta': 2, 'epilogue': 'DEFAULT', 'dot_dimension_numbers': dims}
    target = f'"__cublas$gemm", backend_config={json.dumps({"gemm_backend_config": config})}'
    lines = [
        '%a = f32[3,5,8]{2,1,0} parameter(0)',
        '%b = f32[8,3,4]{2,1,0} parameter(1)',
        '%c = f32[3,5,4]{2,1,0} parameter(2)',
        f'%y = f32[3,5,4]{{2,1,0}} custom-call(%a, %b, %c), custom_call_target={target}',
    ]
    [found] = executed(module(lines), a, b, c)
    close(found, 0.5 * np.einsum('bik,kbj->bij', a[0], b[0]) + 2 * c[0])


def test_products_of_16_bits_are_summed_and_biased_in_fp32_and_rounded_once():
    a, b, bias = random(1, 5, 8), random(1, 8, 4), random(1, 4)
    lines = [
        *(f'%{name}.wide = f32[{dims}] parameter({i})' for i, (name, dims) in enumerate(OPERANDS)),
        *(f'%{name} = bf16[{dims}] convert(%{name}.wide)' for name, dims in OPERANDS),
        f'%y = bf16[5,4]{{1,0}} custom-call(%a, %b, %bias), {product("BIAS")}',
        '%wide = f32[5,4]{1,0} convert(%y)',
    ]
    [found] = executed(module(lines), a, b, bias)
    a, b, bias = (x[0].astype(jnp.bfloat16).astype(np.float32) for x in (a, b, bias))
    right = (1.5 * a @ b + bias).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found[0], right)


def test_what_is_not_a_real_multiple_of_a_product_is_an_error():
    call = product('DEFAULT', lhs=0).replace('"alpha_imag": 0', '"alpha_imag": 1')
    array = 'f32[4,4]{1,0}'
    lines = [f'%a = {array} parameter(0)', f'%y = {array} custom-call(%a, %a), {call}']
    with pytest.raises(HloError, match='no translation for a matmul'):
        for_cpu(module(lines), 1)


def test_a_bias_lies_along_the_dim_that_is_contiguous_in_memory():
    a, b, bias = random(1, 8, 5), random(1, 8, 4), random(1, 5)
    lines = [
        '%a = f32[8,5]{1,0} parameter(0)',
        '%b = f32[8,4]{1,0} parameter(1)',
        '%bias = f32[5]{0} parameter(2)',
        f'%y = f32[5,4]{{0,1}} custom-call(%a, %b, %bias), {product("BIAS", lhs=0)}',
    ]
    [found] = executed(module(lines), a, b, bias)
    close(found, 1.5 * a[0].T @ b[0] + bias[0][:, None])


def test_top_k_is_the_largest_and_their_places():
    x = random(1, 2, 3, 2000)
    lines = [
        '%x = f32[2,3,2000]{2,1,0} parameter(0)',
        '%k = (f32[2,3,5]{2,1,0}, s32[2,3,5]{2,1,0}) custom-call(%x), '
        'custom_call_target="__gpu$TopK"',
    ]
    largest, places = executed(module(lines), x)
    close(largest, -np.sort(-x)[..., :5])
    np.testing.assert_array_equal(np.take_along_axis(x, places, -1), largest)


def test_an_operand_that_no_epilogue_reads_is_an_error():
    array = 'f32[4,4]{1,0}'
    lines = [f'%a = {array} parameter(0)']
    lines.append(f'%y = {array} custom-call(%a, %a, %a), {product("RELU")}')
    with pytest.raises(HloError, match='operands too many'):
        for_cpu(module(lines), 1)


KINDS = [(1, True, 0, 0), (4, False, 2, 0), (2, True, 1, 0), (2, True, 0, 3)]


@pytest.mark.parametrize(('heads', 'causal', 'bias_rows', 'window'), KINDS)
def test_attention_of_cudnn_and_its_gradients_are_those_of_jax(heads, causal, bias_rows, window):
    B, S, N, H = 2, 8, 4, 16
    q, do = random(B, S, N, H), random(B, S, N, H, seed=1)
    k, v = random(B, S, heads, H, seed=2), random(B, S, heads, H, seed=3)
    arrays = [q, k, v, do] + ([random(bias_rows, N, S, S, seed=4)] if bias_rows else [])

    def attend(q, k, v, *bias):
        scale = {'scale': 0.3, 'is_causal': causal, 'bias': bias[0] if bias else None}
        reach = (window - 1, 0) if window else None
        return jax.nn.dot_product_attention(q, k, v, local_window_size=reach, **scale)

    @jax.jit
    def expected(q, k, v, do, *bias):
        o, pullback = jax.vjp(attend, q, k, v, *bias)
        scores = 0.3 * jnp.einsum('bsnh,btnh->bnst', q, jnp.repeat(k, N // heads, 2))
        scores = scores + bias[0] if bias else scores
        seen = jnp.tri(S, dtype=bool) if causal else jnp.ones((S, S), bool)
        seen &= ~jnp.tri(S, k=-window, dtype=bool) if window else True
        total = jax.nn.logsumexp(jnp.where(seen[None, None], scores, -jnp.inf), -1)
        return o, total, *pullback(do)

    text = attention(B, S, N, heads, H, causal=causal, bias_rows=bias_rows, window=window)
    found = executed(text, *(x[None] for x in arrays))
    wanted = expected(*arrays)
    assert len(found) == len(wanted)
    for place, (made, right) in enumerate(zip(found, wanted, strict=True)):
        close(made.swapaxes(2, 3) if place in (0, 2, 3, 4) else made, right)


@pytest.mark.parametrize('causal', [False, True])
def test_padding_of_cudnn_has_zeros_and_a_logsumexp_that_nothing_may_read(causal):
    B, S, N, H = 2, 8, 4, 16
    q, k, v, do = (random(B, S, N, H, seed=seed) for seed in range(4))
    lengths = queries, keys = np.int32([3, 8]), np.int32([6, 5])

    def attend(q, k, v):
        lengths = {'query_seq_lengths': queries, 'key_value_seq_lengths': keys}
        return jax.nn.dot_product_attention(q, k, v, scale=0.3, is_causal=causal, **lengths)

    @jax.jit
    def expected(q, k, v, do):
        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(do)

    text = attention(B, S, N, N, H, causal=causal, bias_rows=0, window=0, is_padded=True)
    made, total, *gradients = executed(text, *(x[None] for x in (q, k, v, do, *lengths)))
    is_real = np.arange(S) < queries[:, None]
    np.testing.assert_array_equal(np.isnan(total.reshape(B, N, S)[:, 0]), ~is_real)
    for found, wanted in zip((made, *gradients), expected(q, k, v, do), strict=True):
        close(found.swapaxes(2, 3), wanted)


def attention(
    B: int, S: int, N: int, K: int, H: int, *,
    causal: bool, bias_rows: int, window: int, is_padded: bool = False,
) -> str:  # fmt: skip
    """cuDNN's forward and backward call; o, logsumexp, dq, dk, dv and the gradient of a bias."""
    kind = 'ScaleBiasSoftmax' if bias_rows else 'Softmax'
    mask = {(True, False): 'CAUSAL', (False, False): 'NO_MASK', (False, True): 'PADDING'}.get(
        (causal, is_padded), 'PADDING_CAUSAL'
    )
    keys = {'fmha_scale': 0.3, 'mask_type': mask, 'sliding_window_length': window}
    config = json.dumps({'cudnn_fmha_backend_config': keys})
    rows, kv_rows = f'f32[{B},{S},{N},{H}]{{3,2,1,0}}', f'f32[{B},{S},{K},{H}]{{3,2,1,0}}'
    o, kv, total = f'f32[{B},{N},{S},{H}]{{3,1,2,0}}', f'f32[{B},{K},{S},{H}]', f'f32[{B},{N},{S}]'
    biases = [f'f32[{bias_rows},{N},{S},{S}]'] if bias_rows else []
    bias = ', %bias' if bias_rows else ''
    lengths = ', %queries, %keys' if is_padded else ''
    made = [o, total, o, kv, kv, *biases]

    def call(target: str) -> str:
        return f'custom_call_target="__cudnn$fmha{kind}{target}", backend_config={config}'

    lines = [f'%{name} = {rows} parameter({i})' for i, name in ((0, 'q'), (3, 'do'))]
    lines += [f'%{name} = {kv_rows} parameter({i})' for i, name in ((1, 'k'), (2, 'v'))]
    lines += [f'%bias = {one} parameter(4)' for one in biases]
    counts = enumerate(('queries', 'keys'), 4) if is_padded else ()
    lines += [f'%{name} = s32[{B}]{{0}} parameter({i})' for i, name in counts]
    inputs = f'%q, %k, %v, %total, %do{bias}, %rows{lengths}'
    gradients = [f'%g{i}' for i in range(len(made) - 2)]
    lines += [
        f'%f = ({o}, {total}, u8[16]{{0}}) custom-call(%q, %k, %v{bias}{lengths}), {call("")}',
        f'%o = {o} get-tuple-element(%f), index=0',
        f'%total = {total} get-tuple-element(%f), index=1',
        f'%rows = {rows} transpose(%o), dimensions={{0,2,1,3}}',
        f'%b = ({", ".join(made[2:])}, u8[16]{{0}}) custom-call({inputs}), {call("Backward")}',
        *(f'%g{i} = {one} get-tuple-element(%b), index={i}' for i, one in enumerate(made[2:])),
        f'%all = ({", ".join(made)}) tuple(%o, %total, {", ".join(gradients)})',
    ]
    return module(lines)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5)


def test_a_product_of_8_bit_numbers_has_a_scale_for_each_operand_and_adds_to_c():
    a, b, c = random(1, 5, 8), random(1, 8, 4), random(1, 5, 4)
    scales = np.float32([[0.5], [8.0]])
    call = product('DEFAULT', alpha=1.0, beta=1.0).replace('matmul"', 'matmul$f8"')
    lines = [
        '%a.wide = f32[5,8]{1,0} parameter(0)',
        '%b.wide = f32[8,4]{1,0} parameter(1)',
        '%c = f32[5,4]{1,0} parameter(2)',
        '%scale_a = f32[] parameter(3)',
        '%scale_b = f32[] parameter(4)',
        '%a = f8e4m3fn[5,8]{1,0} convert(%a.wide)',
        '%b = f8e5m2[8,4]{1,0} convert(%b.wide)',
        f'%y = f32[5,4]{{1,0}} custom-call(%a, %b, %c, %scale_a, %scale_b), {call}',
    ]
    [found] = executed(module(lines), a, b, c, *scales)
    narrow = [
        x[0].astype(dtype).astype(np.float32)
        for x, dtype in ((a, jnp.float8_e4m3fn), (b, jnp.float8_e5m2))
    ]
    close(found, 0.5 * 8.0 * narrow[0] @ narrow[1] + c[0])
