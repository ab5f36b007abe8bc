"""A step with Muon sends what the table says, and orthogonalizes each matrix once."""

from typing import Any

import pytest
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.plan.communication import communication
from megajax.core.config import Config
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.muon import pools_of
from megajax.core.hardware.targets import has_compiler

TARGETS: dict[str, Any] = {'cpu': compile_for, 'h100': compile_in_child}


def case(name: str, shard: str, **mesh: int) -> Config:
    return make_config(
        name,
        mesh={'sequence_parallel': mesh.get('model', 1) > 1, **mesh},
        train={'batch_size': 4 * mesh['data'], 'dtype': 'bfloat16'},
        optim={'kind': 'muon', 'shard': shard},
        model={'dropout': 0.0},
    )


def over_optimizer(sent: Any) -> dict[tuple[str, str], tuple[int, float]]:
    """The times and bytes of each axis and kind."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for axis, kind, times, wire in sent:
        count, total = found.get((axis, kind), (0, 0.0))
        found[axis, kind] = count + times, total + wire
    return found


# With a pool of four matrices, of which each device gathers a part.
POOL = case('gpt', 'none', data=4, model=2)
ZERO_1 = case('llama', 'optimizer', data=2, model=4)
ZERO_3 = case('gpt', 'weights', data=2, model=2)
OTHERS = [
    case('gpt', 'optimizer', data=4, replicas=2),
    case('gpt', 'none', data=4),
    case('gpt', 'none', data=8),
    case('gpt', 'none', data=2, context=2, model=2),
    case('bert', 'gradients', data=4),
    case('gpt', 'weights', data=2, context=2),
    case('gpt', 'weights', data=2, model_rows=2, model=2),
]


def label(value: Config | str) -> str:
    if isinstance(value, str):
        return value
    return '-'.join(map(str, value.mesh.sizes.values())) + value.optim.shard


@pytest.mark.parametrize(
    ('config', 'target'),
    [
        (POOL, 'cpu'),
        slow(POOL, 'h100'),
        slow(ZERO_1, 'cpu'),
        exhaustive(ZERO_1, 'h100'),
        slow(ZERO_3, 'cpu'),
        slow(ZERO_3, 'h100'),
        *(exhaustive(config, target) for config in OTHERS for target in TARGETS),
    ],
    ids=label,
)
def test_two_exchanges_of_each_pool_are_sent_and_nothing_else(config: Config, target: str) -> None:
    if target == 'h100' and not has_compiler():
        pytest.skip("needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'")
    found = audit(config, TARGETS[target](config, target, 1), target)
    assert not [row for row in found.rows if row.site == 'optimizer' and row.verdict == 'MORE']
    assert not [finding for finding in found.findings if finding.level == 'error']
    if target == 'h100':  # a CPU computes in fp32, and sends so
        assert found.products.compiled == pytest.approx(found.products.expected, rel=1e-3)
    rows = [row for row in found.rows if row.site == 'optimizer' and row.placed]
    actual = over_optimizer(
        (row.axis, sent.kind, sent.times, sent.wire_bytes) for row in rows for sent in row.placed
    )
    planned = over_optimizer(
        (sent.site.axis, sent.kind, sent.times, sent.times * sent.wire_bytes)
        for sent in communication(resolved(config, on_gpu=target != 'cpu'))
        if sent.site.name == 'optimizer'
    )
    assert actual == planned
    exchanged = sum(times for (_, kind), (times, _) in actual.items() if kind == 'all-to-all')
    pools = pools_of(config)
    assert any(x.by_elements for x in pools) == (
        config.optim.shard == 'none' and config.mesh.num_devices == 8
    )
    assert exchanged == sum(2 * (x.form.num_pieces > 1) + x.by_elements for x in pools)
