import ml_dtypes
import numpy as np
import pytest
from xla.emulate.texts import ADD, executed, module, random

from megajax.xla.emulate.translate import for_cpu
from megajax.xla.hlo.errors import HloError

FIRST, SUM = 'dimensions={0}', 'to_apply=%add'
CHAIN, SWAP = 'source_target_pairs={{0,1},{1,2},{2,3}}', 'source_target_pairs={{0,3},{3,0}}'
ALL = 'channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true'


def test_bitcasts_keep_the_bytes_in_the_order_of_memory():
    x = random(1, 2, 3, 4)
    found = executed(
        module(
            [
                '%p = f32[2,3,4]{0,2,1:T(8,128)} parameter(0)',
                '%same = f32[2,3,4]{2,1,0} bitcast(%p)',
                '%flat = f32[4,6]{0,1} bitcast(%p)',
                '%bits = u32[24]{0} bitcast(%p)',
                '%all = (f32[2,3,4]{2,1,0}, f32[4,6]{0,1}, u32[24]{0}) tuple(%same, %flat, %bits)',
            ]
        ),
        x,
    )
    memory = x[0].transpose(1, 2, 0).ravel()
    np.testing.assert_array_equal(found[0][0], memory.reshape(2, 3, 4))
    np.testing.assert_array_equal(found[1][0], memory.reshape(6, 4).T)
    np.testing.assert_array_equal(found[2][0], memory.view(np.uint32))


def test_fusions_and_asynchronous_pairs_are_what_they_wrap():
    fused = """%fused (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0} add(%a, %a)
}"""
    x = random(1, 4)
    [found] = executed(
        module(
            [
                '%p = f32[4]{0} parameter(0)',
                '%f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="a, b=(c"}',
                '%s = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(%f), calls=%fused',
                '%d = f32[4]{0} async-done(%s)',
                '%cs = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%d)',
                '%c = f32[4]{0} copy-done(%cs)',
            ],
            fused,
        ),
        x,
    )
    np.testing.assert_array_equal(found, 4 * x)


def test_collectives_of_one_array_and_of_several():
    a, b = random(4, 4, 2), random(4, 8, 3, seed=1)
    lines = [
        '%a = f32[4,2]{1,0} parameter(0)',
        '%b = f32[8,3]{1,0} parameter(1)',
        f'%rs = (f32[4,2]{{1,0}}, f32[4,2]{{1,0}}) all-reduce-start(%a), {ALL}, to_apply=%add',
        '%r = f32[4,2]{1,0} all-reduce-done(%rs)',
        f'%rr = (f32[4,2]{{1,0}}, f32[8,3]{{1,0}}) all-reduce(%a, %b), {ALL}, to_apply=%add',
        f'%gs = ((f32[4,2]{{1,0}}, f32[8,3]{{1,0}}), (f32[16,2]{{1,0}}, f32[32,3]{{1,0}}))'
        f' all-gather-start(%a, %b), {ALL}, dimensions={{0}}',
        '%g = (f32[16,2]{1,0}, f32[32,3]{1,0}) all-gather-done(%gs)',
        f'%s = (f32[1,2]{{1,0}}, f32[2,3]{{1,0}}) reduce-scatter(%a, %b), {ALL}, {FIRST}, {SUM}',
        f'%ms = (f32[4,2], f32[4,2]) collective-permute-start(%a), channel_id=2, {CHAIN}',
        '%m = f32[4,2]{1,0} collective-permute-done(%ms)',
        f'%mm = (f32[4,2], f32[8,3]) collective-permute(%a, %b), channel_id=3, {SWAP}',
        '%none = f32[4,2]{1,0} collective-permute(%a), channel_id=4, source_target_pairs={}',
        '%id = u32[] partition-id()',
        '%first = u32[] replica-id()',
    ]
    names = [('rr', 0), ('rr', 1), ('g', 0), ('g', 1), ('s', 0), ('s', 1), ('mm', 0), ('mm', 1)]
    shapes = ['[4,2]', '[8,3]', '[16,2]', '[32,3]', '[1,2]', '[2,3]', '[4,2]', '[8,3]']
    shaped = zip(names, shapes, strict=True)
    parts = [f'%{n}.{i} = f32{s} get-tuple-element(%{n}), index={i}' for (n, i), s in shaped]
    taken = ['%r', *(f'%{name}.{i}' for name, i in names), '%m', '%none', '%id', '%first']
    types = [f'f32{shape}' for shape in ('[4,2]', *shapes, '[4,2]', '[4,2]')] + ['u32[]'] * 2
    result = f'%all = ({", ".join(types)}) tuple({", ".join(taken)})'
    found = executed(module([*lines, *parts, result], ADD), a, b)
    r, rr0, rr1, g0, g1, s0, s1, mm0, mm1, m, none, ids, first = found
    for found, x in ((r, a), (rr0, a), (rr1, b)):
        np.testing.assert_allclose(found, np.broadcast_to(x.sum(0), x.shape), rtol=1e-5, atol=1e-6)
    for found, x in ((g0, a), (g1, b)):
        np.testing.assert_array_equal(found[2], x.reshape(-1, x.shape[-1]))
    for found, x in ((s0, a), (s1, b)):
        np.testing.assert_allclose(found.reshape(x.shape[1:]), x.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(m, np.stack([np.zeros_like(a[0]), *a[:3]]))
    np.testing.assert_array_equal(mm0[[0, 3]], a[[3, 0]])
    np.testing.assert_array_equal(mm1[1:3], np.zeros_like(b[1:3]))
    np.testing.assert_array_equal(none, np.zeros_like(a))
    np.testing.assert_array_equal(ids, range(4))
    np.testing.assert_array_equal(first, np.zeros(4))


def test_all_to_alls_of_one_array_and_of_a_part_for_each_device():
    a = random(4, 4, 2)
    lines = [
        '%a = f32[4,2]{1,0} parameter(0)',
        f'%whole = f32[4,2]{{1,0}} all-to-all(%a), {ALL}, dimensions={{0}}',
        *(f'%p{i} = f32[1,2]{{1,0}} slice(%a), slice={{[{i}:{i + 1}], [0:2]}}' for i in range(4)),
        f'%parts = ({", ".join(["f32[1,2]"] * 4)}) all-to-all(%p0, %p1, %p2, %p3), {ALL}',
        *(f'%q{i} = f32[1,2]{{1,0}} get-tuple-element(%parts), index={i}' for i in range(4)),
        '%joined = f32[4,2]{1,0} concatenate(%q0, %q1, %q2, %q3), dimensions={0}',
        '%both = (f32[4,2]{1,0}, f32[4,2]{1,0}) tuple(%whole, %joined)',
    ]
    whole, joined = executed(module(lines), a)
    np.testing.assert_array_equal(whole, a.swapaxes(0, 1))
    np.testing.assert_array_equal(joined, whole)


def test_an_exchange_of_a_device_with_itself_hands_on_what_it_has():
    a = random(4, 1, 2)
    alone = 'channel_id=1, replica_groups=[4,1]<=[4], use_global_device_ids=true'
    lines = [
        '%a = f32[1,2]{1,0} parameter(0)',
        f'%parts = (f32[1,2]{{1,0}}) all-to-all(%a), {alone}',
        '%part = f32[1,2]{1,0} get-tuple-element(%parts), index=0',
    ]
    [found] = executed(module(lines), a)
    np.testing.assert_array_equal(found, a)


def test_parts_of_an_exchange_may_have_any_shape():
    parts = [random(4, 2, 3, seed=device) for device in range(4)]
    shape = 'f32[2,3]{1,0}'
    lines = [
        *(f'%p{i} = {shape} parameter({i})' for i in range(4)),
        f'%parts = ({", ".join([shape] * 4)}) all-to-all(%p0, %p1, %p2, %p3), {ALL}',
    ]
    found = executed(module(lines), *parts)
    for sender, received in enumerate(np.stack(found, axis=1)):
        sent = np.stack([part[sender] for part in np.stack(parts, axis=1)])
        np.testing.assert_array_equal(received, sent)


def test_groups_along_mesh_axes_keep_the_order_of_their_devices():
    x = random(8, 2)
    groups = "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}"
    lines = ['%p = f32[2]{0} parameter(0)']
    lines.append(f'%g = f32[8]{{0}} all-gather(%p), channel_id=1, {groups}, dimensions={{0}}')
    [found] = executed(module(lines), x)
    np.testing.assert_array_equal(found[4], x[[0, 2, 4, 6]].ravel())
    np.testing.assert_array_equal(found[7], x[[1, 3, 5, 7]].ravel())


def test_products_of_16_bits_are_sums_in_fp32_and_exactly_nothing_is_rounded():
    x = random(1, 8, 64)
    lines = [
        '%p = f32[8,64]{1,0} parameter(0)',
        '%c = bf16[] constant(0.1001)',
        '%cs = bf16[8,64]{1,0} broadcast(%c), dimensions={}',
        '%n = bf16[8,64]{1,0} convert(%p)',
        '%m = bf16[8,64]{1,0} multiply(%n, %cs)',
        '%d = bf16[8,8]{1,0} dot(%m, %n), lhs_contracting_dims={1}, rhs_contracting_dims={1}',
        '%q = f32[8,64]{1,0} reduce-precision(%p), exponent_bits=8, mantissa_bits=7',
        '%w = f32[8,8]{1,0} convert(%d)',
        '%both = (f32[8,8]{1,0}, f32[8,64]{1,0}) tuple(%w, %q)',
    ]
    bf16 = ml_dtypes.bfloat16
    constant, narrow = np.float32(bf16(0.1001)), x[0].astype(bf16).astype(np.float32)
    product, rounded = executed(module(lines), x)
    scaled = (narrow * constant).astype(bf16).astype(np.float32)
    np.testing.assert_allclose(product[0], (scaled @ narrow.T), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(product[0], product[0].astype(bf16).astype(np.float32))
    np.testing.assert_array_equal(rounded[0], narrow)
    product, rounded = executed(module(lines), x, exact=True)
    np.testing.assert_allclose(product[0], constant * x[0] @ x[0].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rounded, x)


CUBLAS = '{"gemm_backend_config":{"alpha_real":1,"beta":0,"epilogue":"DEFAULT"}}'
SWISH = CUBLAS.replace('DEFAULT', 'SWISH')
CALL = 'custom-call(%p), custom_call_target='


@pytest.mark.parametrize(
    'line',
    [
        '%s = (f32[4]{0}, u32[], token[]) send(%p, %t), channel_id=1',
        f'%u = f32[4]{{0}} {CALL}"my_kernel"',
        '%r = u32[4]{0} rng-bit-generator(%p), algorithm=rng_default',
        '%a = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add',
        '%b = f32[4]{0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1}}',
        f'%e = f32[4]{{0}} {CALL}"__cublas$gemm", backend_config={SWISH}',
        f'%w = (f32[4]{{0}}, s8[8]{{0}}, s8[8]{{0}}) custom-call(%p, %p), '
        'custom_call_target="__cublas$gemm", '
        f'backend_config={CUBLAS[:-2]},"dot_dimension_numbers":{{}}}}}}',
        f'%o = f32[4,4]{{1,0}} {CALL}"__cudnn$fmhaSoftmax", backend_config={{"fmha_scale":1.0}}',
    ],
)
def test_an_instruction_without_a_translation_is_an_error_with_its_line(line):
    lines = ['%p = f32[4]{0} parameter(0)', '%t = token[] after-all()', line]
    with pytest.raises(HloError) as error:
        for_cpu(module(lines, ADD), 2)
    assert line in str(error.value)
