"""A module and its later forms compute the same on the same inputs, or differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from megajax.xla.hlo.errors import HloError
from megajax.xla.reduce.execute import LIMIT, Differs, Execution

from .test_cut import CHAIN, SHARDED

OWN = """HloModule own, num_partitions=2

ENTRY %main (x: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0)
  ROOT %sine = f32[2,8]{1,0} sine(%x)
}
"""


@pytest.fixture(scope='module', name='chain')
def fixture_chain() -> Execution:
    return Execution(CHAIN, 2)


def test_every_device_has_inputs_of_its_own(chain: Execution) -> None:
    assert [len(values) for values in chain.inputs] == [2, 2]
    pieces = [piece for values in chain.inputs for piece in values]
    assert len({piece.tobytes() for piece in pieces}) == 4
    assert all((piece > 0).all() and piece.dtype == np.float32 for piece in pieces)
    (x, other), (y, _) = chain.inputs
    np.testing.assert_allclose(chain.expected[0][0], np.cos(x + y), rtol=1e-5)
    both = 2 * np.sin([*(x + y), *(other + chain.inputs[1][1])])
    for gathered in chain.expected[1]:
        np.testing.assert_allclose(gathered, both, rtol=1e-5)


def test_only_the_result_that_a_later_form_changes_has_an_error(chain: Execution) -> None:
    assert chain.errors(CHAIN) == [0, 0]
    right, wrong = chain.errors(CHAIN.replace('add(%gathered, %gathered)', 'sine(%gathered)'))
    assert right == 0
    assert wrong > 0.1


def test_a_result_that_was_not_finite_to_begin_with_has_no_error() -> None:
    execution = Execution(OWN, 2)
    execution.expected = [[np.full((2, 8), np.nan)] * 2]
    assert execution.errors(OWN.replace('sine(%x)', 'cosine(%x)')) == [0]


def test_a_module_with_shardings_is_compared_with_its_piece_on_each_device() -> None:
    execution = Execution(SHARDED, 2)
    assert [piece.shape for piece in execution.inputs[0]] == [(2, 8), (2, 8)]
    assert execution.errors(OWN) == [0]
    assert execution.errors(OWN.replace('sine(%x)', 'cosine(%x)'))[0] > 0.1
    with pytest.raises(HloError, match='shapes'):  # not partitioned
        execution.errors(SHARDED)


ROUNDING = """HloModule rounding

ENTRY %main (x: f32[2,8]) -> (f32[2,8], f32[2,8]) {
  %x = f32[2,8]{1,0} parameter(0)
  %one = f32[] constant(1)
  %ones = f32[2,8]{1,0} broadcast(%one), dimensions={}
  %sine = f32[2,8]{1,0} sine(%x)
  %cosine = f32[2,8]{1,0} cosine(%x)
  %sine_2 = f32[2,8]{1,0} multiply(%sine, %sine)
  %cosine_2 = f32[2,8]{1,0} multiply(%cosine, %cosine)
  %sum = f32[2,8]{1,0} add(%sine_2, %cosine_2)
  %nothing = f32[2,8]{1,0} subtract(%ones, %sum)
  ROOT %both = (f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%nothing, %sine)
}
"""


def test_a_result_that_is_rounding_alone_is_not_wrong_but_another_is() -> None:
    execution = Execution(ROUNDING, 2)
    rounded = ROUNDING.replace('subtract(%ones, %sum)', 'subtract(%sum, %ones)')
    assert execution.errors(rounded)[0] > 1
    assert not execution.is_wrong(rounded)
    assert execution.is_wrong(rounded.replace('tuple(%nothing, %sine)', 'tuple(%nothing, %cosine)'))
    assert execution.limits[1] == LIMIT


def test_a_module_differs_only_if_its_last_form_can_be_executed_and_is_wrong() -> None:
    said = list[str]()

    def last(text: str) -> str:
        if 'tanh' in text:
            raise HloError('no layout')
        return text.replace('cosine(', 'sine(')

    differs = Differs(SimpleNamespace(optimized=last, num_devices=2), said.append)
    wrong, right = OWN.replace('sine(%x)', 'cosine(%x)'), OWN
    assert [differs(wrong), differs(right), said] == [True, False, []]
    assert not differs(OWN.replace('sine(%x)', 'tanh(%x)'))
    assert said == ['not executed: no layout']
