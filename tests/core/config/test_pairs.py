"""A pair of features that is allowed can be loaded, and any other pair cannot."""

import pytest
from features import VALUES

from megajax.core.config import ConfigError, load
from megajax.core.config.conflicts import BIDIRECTIONAL, CAUSAL, CONFLICTS, MASKED
from megajax.core.config.pairs import NEEDS, Pair, pairs

# Settings of sizes, and others that a feature needs besides a feature.
ALSO = {
    'lora': 'lora.targets=[qkv,out]',
    'mesh.model_rows': 'mesh.sequence_parallel=true',
    'mesh.stages': 'train.microbatches=2',
    'vision.fusion=cross_attention': 'vision.cross_every=2',
}


def settings_of(pair: Pair) -> list[str]:
    """The overrides of a config that has both features; of one key, the last counts."""
    features = [pair.one, pair.other]
    features = [*(NEEDS[x] for x in features if x in NEEDS), *features]
    given = ['model.norm=rmsnorm', 'model.position=rope']  # as the features of BERT's need
    for feature in features:
        given += [*VALUES.get(feature, feature).split(), *ALSO.get(feature, '').split()]
    return [*{setting.partition('=')[0]: setting for setting in given}.values()]


def test_every_rejected_pair_of_the_table_is_among_all_pairs() -> None:
    rejected = {frozenset((x.one, x.other)) for x in pairs() if x.conflicts}
    assert {frozenset((x.one, x.other)) for x in CONFLICTS} <= rejected
    assert len({frozenset((x.one, x.other)) for x in pairs()}) == len(pairs())


def test_a_feature_has_the_conflicts_of_what_it_needs() -> None:
    found = {frozenset((x.one, x.other)): x.conflicts for x in pairs()}
    assert found[frozenset((MASKED, 'model.window'))]  # a window needs causal attention
    assert found[frozenset(('vision.deepstack', 'mesh.stages'))]
    assert not found[frozenset((CAUSAL, 'model.window'))]
    assert frozenset(('vision.deepstack', 'vision')) not in found


@pytest.mark.slow
def test_each_allowed_pair_loads() -> None:
    allowed, rejected = [x for x in pairs() if not x.conflicts], {}
    for pair in allowed:
        is_bert = {MASKED, BIDIRECTIONAL} & {pair.one, pair.other}
        try:
            load('tiny_bert' if is_bert else 'tiny', settings_of(pair))
        except ConfigError as error:
            rejected[pair.one, pair.other] = str(error)
    assert not rejected
