"""Seconds of transfers beside products, on schedules written by hand and on random ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import ARGUMENTS, FLOPS, LOOP, PARAMETERS, body, done, product, program, start

from megajax.xla.hlo.products import Product, flops, product_of, products
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.schedule import Sent, hidden_seconds, overlap


def hidden(read: Program, **sent: float | tuple[str, float]) -> dict[str, float]:
    """By the names of transfers, where a product takes one second."""
    everywhere = read.computations.values()
    homes = {one.name: home.name for home in everywhere for one in home.instructions}
    links = {name: one if isinstance(one, tuple) else ('wire', one) for name, one in sent.items()}
    places = {(homes[name], name): Sent(*one) for name, one in links.items()}
    found = hidden_seconds(read, places, lambda one: one.flops / FLOPS)
    return {name: seconds for (_, name), seconds in found.items()}


@pytest.mark.parametrize(('seconds', 'expected'), [(0.25, 0.25), (1, 1), (5, 2)])
def test_the_smaller_of_the_transfer_and_the_products_is_hidden(seconds, expected):
    between = product('one'), product('other')
    read = program(product('before'), start('t'), *between, done('t'), product('after'))
    assert hidden(read, t=seconds) == {'t': expected}


def test_two_transfers_in_flight_beside_one_product_share_it_in_the_order_of_their_start():
    read = program(start('t'), start('u'), product('only'), done('t'), done('u'))
    assert hidden(read, t=0.7, u=0.7) == {'t': 0.7, 'u': pytest.approx(0.3)}
    assert hidden(read, t=2, u=2) == {'t': 1, 'u': 0}


def test_transfers_of_two_links_are_served_at_once():
    read = program(start('t'), start('u'), product('only'), done('t'), done('u'))
    links = {'t': ('inside a host', 0.7), 'u': ('between hosts', 0.7)}
    assert hidden(read, **links) == {'t': 0.7, 'u': 0.7}


def test_the_wire_has_served_what_started_before_a_transfer_that_is_done():
    read = program(start('t'), start('u'), product('only'), done('u'), product('late'), done('t'))
    assert hidden(read, t=3, u=0.5) == {'t': 1, 'u': 0}
    _, counted = overlap(read, read.entry, read.entry.by_name['t'])
    assert counted == 2 * FLOPS


def test_a_transfer_lasts_until_the_end_of_its_updates():
    update = '%u = f32[8,16]{1,0} all-reduce-update(%t)'
    end = done('t').replace('(%t)', '(%u)')
    assert hidden(program(start('t'), product('one'), update, product('two'), end), t=5) == {'t': 2}


def test_nothing_of_a_synchronous_transfer_is_hidden():
    synchronous = '%t = f32[8,16]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add'
    assert hidden(program(synchronous, product('one')), t=1) == {'t': 0}


def test_in_a_loop_seconds_are_those_of_an_iteration():
    read = program(*LOOP, before=body(start('t'), product('one'), done('t')))
    assert hidden(read, t=0.4) == {'t': 0.4}
    assert hidden(read, t=4) == {'t': 1}


def test_the_flops_of_a_loop_are_those_of_all_its_matmuls_in_each_step():
    read = program(*LOOP, before=body(product('one'), product('other')))
    (loop,) = (each for each in read.entry.instructions if each.opcode == 'while')
    assert loop.trip_count > 1
    assert flops(read, read.entry, loop) == loop.trip_count * 2 * FLOPS


def test_a_transfer_around_a_loop_has_what_those_in_the_loop_leave_of_its_products():
    inside = body(start('t'), product('one'), done('t'), product('other'))
    read = program(start('u'), *LOOP, done('u'), before=inside)
    assert hidden(read, t=0.4, u=100) == {'t': 0.4, 'u': pytest.approx(5 * 1.6)}
    links = {'t': ('inside a host', 0.4), 'u': ('between hosts', 100)}
    assert hidden(read, **links) == {'t': 0.4, 'u': 5 * 2}


@given(st.lists(st.tuples(st.sampled_from('tuvw'), st.booleans()), max_size=24))
def test_no_second_of_a_product_hides_two_transfers_and_none_hides_more_than_its_products(steps):
    sent, lines, open_now, between = {}, [], [], {}
    for index, (name, is_product) in enumerate(steps):
        name = f'{name}{index}'
        if is_product:
            lines.append(product(name))
            between |= {one: between[one] + 1 for one in open_now}
        elif open_now and index % 2:
            lines.append(done(open_now.pop(index % len(open_now))))
        else:
            lines.append(start(name))
            sent[name], between[name] = 0.5 * (1 + index % 5), 0
            open_now.append(name)
    read = program(*lines, *map(done, open_now))
    found = hidden(read, **sent)
    assert all(found[name] <= min(sent[name], between[name]) for name in sent)
    assert sum(found.values()) <= sum(is_product for _, is_product in steps)


ATTENTION = (
    '%{name} = (bf16[2,4,64,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), '
    'custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config='
    '{{"cudnn_fmha_backend_config":{{"mask_type": "{mask}","intermediate_tensor_shape": '
    '{{"element_type": "BF16","dimensions": '
    '["2","4","64","64"]}}}}}}'
)


@pytest.mark.parametrize(('backward', 'of_scores'), [('', 2), ('Backward', 5)])
@pytest.mark.parametrize('mask', ['CAUSAL', 'NO_MASK', 'PADDING', 'PADDING_CAUSAL'])
def test_an_attention_kernel_counts_in_full_causal_or_not(backward, of_scores, mask):
    call = ATTENTION.format(name='o', backward=backward, mask=mask)
    read = program('%q = bf16[2,64,4,8]{3,2,1,0} iota(), iota_dimension=0', call)
    size = of_scores * 2 * 2 * 4 * 64 * 64 * 8
    expected = Product(
        size, 'bf16', is_attention=True, is_causal=mask.endswith('CAUSAL'), sizes=(2, 64, 4, 8)
    )
    assert product_of(read.entry, read.entry.by_name['o']) == expected


GEMM = (
    '%o = (f32[2,8,32]{2,1,0}, s8[64]{0}) custom-call(%p, %q), custom_call_target='
    '"__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}'
)
DOT = (
    '%o = f32[2,8,32]{2,1,0} dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={1}, '
    'rhs_batch_dims={0}, rhs_contracting_dims={1}'
)


@pytest.mark.parametrize('line', [GEMM, DOT])
def test_a_product_has_its_sizes_whether_it_is_a_dot_or_a_call_of_cublas(line):
    sources = ('%p = f32[2,64,8]{2,1,0} iota()', '%q = f32[2,64,32]{2,1,0} iota()')
    text = '\n  '.join((*sources, line, 'ROOT %result = f32[] constant(0)'))
    read = Program(f'HloModule f\n\nENTRY %main () -> f32[] {{\n  {text}\n}}\n')
    found = product_of(read.entry, read.entry.by_name['o'])
    assert found == Product(2 * 2 * 8 * 32 * 64, 'f32', sizes=(2, 8, 32, 64))


CHOICE = 'true_computation=%none, false_computation=%some'
BRANCHES = f"""%none ({ARGUMENTS}) -> f32[16,32] {{
  {PARAMETERS}
  ROOT %zeros = f32[16,32]{{1,0}} broadcast(%p), dimensions={{}}
}}

%some ({ARGUMENTS}) -> f32[16,32] {{
  {PARAMETERS}
  ROOT {product('only')}
}}
"""


def test_of_a_conditional_the_largest_branch_counts_between_start_and_end():
    choose = (
        '%which = pred[] constant(true)',
        f'%chosen = f32[16,32]{{1,0}} conditional(%which, %p, %p), {CHOICE}',
    )
    read = program(start('t'), *choose, done('t'), before=BRANCHES)
    assert flops(read, read.entry, read.entry.by_name['chosen']) == FLOPS
    assert hidden(read, t=3) == {'t': 1}


def test_products_of_a_loop_run_as_often_as_the_loop():
    read = program(product('once'), *LOOP, before=body(product('often')))
    found = {instruction.name: (one.flops, times) for one, _, instruction, times in products(read)}
    assert found == {'once': (FLOPS, 1), 'often': (FLOPS, 5)}
