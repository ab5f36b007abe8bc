"""The sums of norms over all heads are a row of their own, and one that sends more is caught."""

import jax
import pytest
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_step
from megajax.analysis.inspect.result import Row
from megajax.core.config import Config
from megajax.core.model import attention as attention_module
from megajax.core.model.norm import NormOverHeads, norm_queries_and_keys
from megajax.core.parallel.mesh import mesh_for


def rows(config: Config) -> list[Row]:
    compiled = compile_step(config, mesh_for(config), config.mesh.num_devices)
    found = audit(config, compiled, 'cpu')
    assert not [finding for finding in found.findings if finding.level == 'error']
    return found.rows


def small(name: str = 'olmo2', **sections: dict[str, object]) -> Config:
    train = {'batch_size': 4, 'recompute': 'full'} | sections.pop('train', {})
    return make_config(name, 1, 2, train=train, **sections)


@pytest.mark.parametrize(
    ('name', 'overlap', 'sums_of_pass'),
    [('olmo2', 'none', 1), exhaustive('olmo2', 'batch_split', 1), slow('layer_norms', 'none', 2)],
)
def test_each_pass_has_a_row_of_one_all_reduce_for_each_sum(
    name: str, overlap: str, sums_of_pass: int
) -> None:
    found = rows(small(name, train={'overlap': overlap}))
    parts = 2 if overlap == 'batch_split' else 1
    sums = [row for row in found if row.site == 'qk_norm']
    assert [(row.phase, row.verdict) for row in sums] == [
        (phase, 'equal') for phase in ('forward', 'recompute', 'backward')
    ]
    for row in sums:
        (sent,) = row.placed
        assert (sent.kind, sent.array, sent.times) == (
            'all-reduce', f'f32[1,{4 // parts},32,2]', 2 * parts * sums_of_pass,
        )  # fmt: skip
    kept = [('mlp', 'recompute', 'less')] if parts == 2 else []  # outputs that the norms read
    assert [(x.site, x.phase, x.verdict) for x in found if x.verdict != 'equal'] == kept


@pytest.mark.slow
def test_a_backward_pass_that_sums_the_squares_again_sends_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgotten(
        q_RSKGH: jax.Array, k_RSKH: jax.Array, *norms: NormOverHeads
    ) -> tuple[jax.Array, jax.Array]:
        return jax.checkpoint(lambda q, k: norm_queries_and_keys(q, k, *norms))(q_RSKGH, k_RSKH)

    monkeypatch.setattr(attention_module, 'norm_queries_and_keys', forgotten)
    more = [row for row in rows(small(train={'recompute': 'none'})) if row.verdict == 'MORE']
    assert {row.site for row in more} == {'qk_norm'}
