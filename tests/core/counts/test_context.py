"""What context shards send and compute, against closed formulas."""

import pytest

import megajax
from megajax.core.config import Config
from megajax.core.counts.collective import Expected
from megajax.core.counts.flops import step_flops
from megajax.core.counts.megatron import expected, stated
from megajax.core.counts.products import products

TOKENS, LAYERS, HEADS = 32768, 32, 8


def config(*overrides: str, context: int = 4, exchange: str = 'gather', model: int = 2) -> Config:
    return megajax.load(
        'llama3_8b',
        [
            *(f'train.seq_len={TOKENS}', f'model.max_seq_len={TOKENS}', 'train.dtype=bfloat16'),
            *('train.recompute=none', 'mesh.data=1', f'mesh.model={model}'),
            *(f'mesh.context={context}', f'mesh.context_exchange={exchange}'),
            *('train.batch_size=2', 'train.microbatches=2'),
            *('mesh.sequence_parallel=true', 'optim.shard=none'),
            *overrides,
        ],
    )


def sent(found: list[Expected], phase: str) -> float:
    """Bytes over `context` of a layer and microbatch."""
    return sum(
        one.times * one.wire_bytes for one in found if one.site == ('attention', phase, 'context')
    ) / (2 * LAYERS)


@pytest.mark.parametrize('context', [2, 4, 8])
@pytest.mark.parametrize('exchange', ['gather', 'ring'])
def test_keys_and_values_go_round_once_each_way_and_their_gradients_once(
    context: int, exchange: str
) -> None:
    """In TransformerEngine in the compute dtype; here in fp32, and home from the last shard."""
    loaded = config(context=context, exchange=exchange)
    K = 2 * TOKENS * HEADS * 128 / 2
    share = (context - 1) / context
    theirs, ours = expected(loaded), stated(loaded)
    assert sent(theirs, 'forward') == sent(ours, 'forward') == pytest.approx(2 * share * K)
    assert sent(theirs, 'backward') == pytest.approx(4 * share * K)
    sums = 2 * 2 * K * (1 if exchange == 'ring' else share)
    assert sent(ours, 'backward') == pytest.approx(2 * share * K + sums)


@pytest.mark.parametrize(('context', 'model'), [(2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize('window', ['null', '1024'])
def test_heads_are_exchanged_once_each_way_whatever_the_window(
    context: int, model: int, window: str
) -> None:
    """TransformerEngine also sends the output in the backward pass."""
    loaded = config(f'model.window={window}', context=context, model=model, exchange='all_to_all')
    queries, keys = (2 * TOKENS * n * 128 / (context * model) for n in (32, HEADS))
    share = (context - 1) / context
    theirs, ours = expected(loaded), stated(loaded)
    assert sent(ours, 'forward') == sent(ours, 'backward') == share * (2 * queries + 2 * keys)
    assert sent(theirs, 'forward') == sent(ours, 'forward')
    assert sent(theirs, 'backward') == share * (3 * queries + 2 * keys)
    work = [
        x for x in products(loaded, flash=True) if x.phase == 'forward' and x.name == 'attention'
    ]
    alone = config(f'model.window={window}', context=1, model=model, exchange='gather')
    one = [x for x in products(alone, flash=True) if x.phase == 'forward' and x.name == 'attention']
    assert context * sum(x.times * x.flops for x in work) == sum(x.times * x.flops for x in one)


@pytest.mark.parametrize('context', [2, 4, 8])
@pytest.mark.parametrize('exchange', ['gather', 'ring'])
def test_a_window_layer_sends_the_ends_of_two_chunks_to_one_neighbor_each(
    context: int, exchange: str
) -> None:
    loaded = config('model.window=1024', context=context, exchange=exchange)
    of_end = 2 * 1024 * HEADS * 128 / 2
    ours, theirs = stated(loaded), expected(loaded)
    # Keys and values of two chunks, and their gradients.
    assert sent(ours, 'forward') == sent(ours, 'backward') == 2 * 2 * of_end
    gathered = expected(config(context=context))
    for phase in ('forward', 'backward'):
        assert sent(theirs, phase) == sent(gathered, phase)


@pytest.mark.parametrize('context', [2, 8])
def test_a_step_gathers_the_ids_of_documents_once(context: int) -> None:
    loaded = config('data.document_mask=true', context=context, exchange='ring')
    (ids,) = (one for one in stated(loaded) if one.site.name == 'documents')
    assert ids.times * ids.wire_bytes == (context - 1) / context * 4 * 2 * TOKENS  # two rows
    assert not any(one.site.name == 'documents' for one in expected(loaded))
    assert not any(one.site.name == 'documents' for one in stated(config(context=context)))


def test_a_step_of_bert_also_finds_its_real_rows() -> None:
    keys = 'mesh.data=1', 'mesh.context=2', 'train.seq_len=128', 'train.microbatches=1'
    loaded = megajax.load('tiny_bert', [*keys, 'train.batch_size=8', 'mesh.model=1'])
    ids, rows = (one for one in stated(loaded) if one.site.name == 'documents')
    assert (ids.array.bytes, rows.array.bytes) == (4 * 8 * 128, 4 * 8)


def test_layers_of_a_pattern_send_by_their_kind() -> None:
    windows, full, both, longer = (
        sent(stated(config(f'model.layers={layers}', 'model.position=rope', exchange='ring')), of)
        for of in ('forward',)
        for layers in (
            '[{window: 1024}]',
            '[{}]',
            '[{repeat: 3, window: 1024}, {}]',
            f'[{{window: {TOKENS}}}]',
        )
    )
    assert both == (3 * windows + full) / 4
    assert longer == full


def test_windows_of_1024_at_131072_tokens_send_a_twentieth_of_a_ring_or_less() -> None:
    tokens = 131072
    window, ring = (
        sum(
            one.times * one.wire_bytes
            for one in stated(
                config(*more, 'train.seq_len=131072', 'model.max_seq_len=131072', context=8)
            )
        )
        for more in (['model.window=1024'], ['mesh.context_exchange=ring'])
    )
    of_token = 2 * HEADS * 128 / 2 * 2  # keys and values on a device, in bf16
    runs = 2 * LAYERS
    assert window == runs * of_token * (2 + 2) * 1024
    assert ring == runs * of_token * tokens / 8 * (7 + 7 + 2 * 8)  # gradients in fp32
    assert window <= ring / 20


def test_full_recomputation_sends_keys_and_values_once_more() -> None:
    loaded = config('train.recompute=full')
    assert sent(expected(loaded), 'recompute') == sent(expected(loaded), 'forward') > 0


def test_a_key_head_of_several_devices_is_sent_by_each() -> None:
    whole, shared = (sent(expected(config(model=model)), 'forward') for model in (8, 16))
    assert whole == shared


def test_gradients_are_reduced_over_data_and_context_together() -> None:
    for shard, kinds in (('none', {'all-reduce'}), ('optimizer', {'reduce-scatter', 'all-reduce'})):
        found = [
            one
            for one in expected(config('mesh.data=2', 'train.batch_size=4', f'optim.shard={shard}'))
            if one.site.name == 'gradients' and 'data' in one.site.axis
        ]
        assert {one.kind for one in found} == kinds
        assert {(one.site.axis, one.size) for one in found} == {('data+context', 8)}


def test_activations_are_a_shards() -> None:
    alone, shared = (
        sum(
            one.times * one.wire_bytes
            for one in expected(config(context=context))
            if one.site.axis == 'model' and one.site.name in ('attention', 'mlp', 'head', 'loss')
        )
        for context in (1, 4)
    )
    assert shared == alone / 4


@pytest.mark.parametrize('context', [2, 4, 8])
def test_a_shard_computes_its_own_block_and_half_a_block_for_each_other(context: int) -> None:
    def attention(loaded: Config) -> int:
        return sum(
            one.times * one.flops
            for one in products(loaded, flash=True)
            if one.where == 'attention' and one.phase == 'forward'
        )

    whole, part = attention(config(context=1)), attention(config(context=context))
    assert part / whole == pytest.approx((context + 1) / (2 * context**2))


@pytest.mark.parametrize('context', [2, 4, 8])
def test_a_shard_computes_a_window_of_keys_for_each_of_its_tokens(context: int) -> None:
    loaded = config('model.window=1024', context=context)
    computed = [one for one in products(loaded, flash=True) if one.phase == 'forward']
    attention = sum(one.times * one.flops for one in computed if one.where == 'attention')
    pairs = TOKENS / context * 1024  # the kernels skip half of what they are counted with
    assert attention / 2 == 2 * LAYERS * 2 * 2 * pairs * 32 * 128 / 2
    assert all(one.is_causal for one in computed if one.where == 'attention')


def test_flops_of_a_step_do_not_depend_on_the_shards() -> None:
    assert step_flops(config()) == step_flops(config(context=1))
