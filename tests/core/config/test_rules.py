"""Keys that conflict are rejected, with values that work."""

import re

import pytest

from megajax.core.config import ConfigError, Problem, dump, load
from megajax.core.config.unused_rules import Unused

# 12 heads of 64, hidden 768, ffn 3072, vocabulary 50257 -> 51200, seq 1024, batch 512 = 8 x 4 x 16
BASE = 'gpt2_124m'
ZERO = ['none', 'optimizer', 'gradients', 'weights']
GRID = 'mesh.model_rows=2 mesh.model=2 mesh.sequence_parallel=true'


def problems(*overrides: str, base: str = BASE) -> list[Problem]:
    try:
        load(base, overrides)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ('wrong', 'path', 'offer', 'right'),
    [
        ('mesh.model=5', 'model.num_heads', 'use 10 or 15, or mesh.model 4', 'mesh.model=4'),
        (
            'mesh.model=5',
            'model.ffn_size',
            'use 3070 or 3075, or mesh.model 4',
            'model.ffn_size=3070',
        ),
        (
            'mesh.context=5 mesh.context_exchange=all_to_all train.seq_len=1000',
            'mesh.context_exchange',
            'model.num_kv_heads=12 is not a multiple of mesh.context=5; use mesh.context 4 or 6',
            'mesh.context=4',
        ),
        (
            'mesh.context=4 mesh.model=4 mesh.context_exchange=all_to_all',
            'mesh.context_exchange',
            'of mesh.context=4 x mesh.model=4; use mesh.context 3, or mesh.context_exchange gather',
            'mesh.context_exchange=ring',
        ),
        (
            'model.window=256 mesh.context=4',
            'model.window',
            'use at most 128, mesh.context_exchange=all_to_all, mesh.context 2, or train.seq_len',
            'mesh.context_exchange=all_to_all',
        ),
        (
            'model.window=200 mesh.context=8',
            'model.window',
            'use at most 64, mesh.context 2, or train.seq_len',
            'mesh.context=2',
        ),
        (
            'mesh.model=6',
            'model.vocab_size',
            '50257 is padded to 51200, which mesh.model=6 does not divide; use mesh.model 4',
            'mesh.model=4',
        ),
        (
            'model.num_heads=10',
            'model.hidden_size',
            'use 760 or 770, or set model.head_dim',
            'model.hidden_size=770',
        ),
        (
            'model.num_heads=10',
            'model.hidden_size',
            'use 760 or 770, or set model.head_dim',
            'model.head_dim=64',
        ),
        (
            'model.num_kv_heads=5',
            'model.num_heads',
            'use 10 or 15, or model.num_kv_heads 4 or 6',
            'model.num_kv_heads=6',
        ),
        (
            'mesh.model=4 model.num_kv_heads=6',
            'model.num_kv_heads',
            'use mesh.model 2',
            'mesh.model=2',
        ),
        (
            'mesh.model=4 model.num_kv_heads=2 model.head_dim=66',
            'model.head_dim',
            'use 64 or 68, or mesh.model 2',
            'model.head_dim=68',
        ),
        (
            'model.position=rope model.head_dim=63',
            'model.head_dim',
            'use 62 or 64',
            'model.head_dim=62',
        ),
        (
            'train.microbatches=3',
            'train.batch_size',
            'mesh.data=8 x train.microbatches=3 = 24; use 504 or 528',
            'train.batch_size=528',
        ),
        (
            'mesh.model=2 train.microbatches=64 train.overlap=batch_split',
            'train.batch_size',
            'splits them in half; use 1024, or train',
            'train.microbatches=32',
        ),
        (
            'train.loss_scale=1024',
            'train.loss_scale',
            '1024 has no effect with train.dtype=bfloat16 (loss scaling is for float16)',
            'train.dtype=float16',
        ),
        (
            'train.dtype=float16 train.loss_scale=5',
            'train.loss_scale',
            'use 4 or 8',
            'train.loss_scale=8',
        ),
        (
            'train.dtype=float16 train.loss_scale=0.5',
            'train.loss_scale',
            'use 1',
            'train.loss_scale=1',
        ),
        (
            'train.dtype=float16 train.loss_scale=1e10',
            'train.loss_scale',
            'use 4294967296',
            'train.loss_scale=4294967296',
        ),
        (
            'train.seq_len=2048',
            'train.seq_len',
            'use at most 1024, or raise model.max_seq_len',
            'model.max_seq_len=2048',
        ),
        (
            'mesh.model=4 train.seq_len=1022 mesh.sequence_parallel=true',
            'train.seq_len',
            'use 1020 or 1024',
            'train.seq_len=1020',
        ),
        ('optim.lr=1e-6', 'optim.min_lr', 'use less than 1e-06', 'optim.min_lr=1e-7'),
        (
            'optim.lr=6e-5',
            'optim.schedule',
            'cosine has no effect with optim.min_lr=6e-05, which equals optim.lr',
            'optim.min_lr=6e-06',
        ),
        (
            'optim.schedule=wsd optim.lr=6e-5',
            'optim.schedule',
            'set optim.min_lr=6e-06, or optim.schedule=constant',
            'optim.schedule=constant',
        ),
        (
            'train.steps=2000',
            'optim.warmup_steps',
            'use at most 1999, or raise train.steps',
            'optim.warmup_steps=1999',
        ),
        (
            'optim.warmup_steps=100 optim.decay_steps=100',
            'optim.decay_steps',
            'use at least 101, or remove it',
            'optim.decay_steps=101',
        ),
        (
            'optim.momentum=0.9',
            'optim.momentum',
            'has no effect with optim.kind=adamw; remove it, or set optim.kind=muon',
            'optim.kind=muon',
        ),
        (
            'optim.ns_coefficients=polar_express',
            'optim.ns_coefficients',
            'set optim.kind=muon',
            'optim.kind=muon',
        ),
        (
            'train.fp8_scaling=current',
            'train.fp8_scaling',
            'current has no effect with train.dtype=',
            'train.dtype=fp8',
        ),
        (
            'optim.reduce_dtype=bfloat16 lora.rank=8',
            'optim.reduce_dtype',
            'bfloat16 has no effect with lora, whose gradients are summed in float32; remove it',
            'optim.reduce_dtype=float32',
        ),
        (
            'optim.kind=muon lora.rank=8 lora.alpha=16',
            'optim.kind',
            'muon has no matrices to update: lora freezes the layers; use adamw',
            'optim.kind=adamw',
        ),
        (  # transformers reads a number below 1 as a ratio
            'train.steps=1000 optim.warmup_steps=0.03',
            'optim.warmup_steps',
            '0.03 is less than one step; for 0.03 of the schedule, use 30',
            'optim.warmup_steps=30',
        ),
        (
            'train.steps=2 optim.warmup_steps=0.9',
            'optim.warmup_steps',
            'for 0.9 of the schedule, use 1',
            'optim.warmup_steps=1',
        ),
        (
            'train.steps=1100 optim.schedule=wsd optim.warmup_steps=100 optim.wsd_steps=0.1',
            'optim.wsd_steps',
            '0.1 is less than one step; for 0.1 of the steps after warm-up, use 100',
            'optim.wsd_steps=100',
        ),
        (
            'train.steps=1000 optim.warmup_steps=0 optim.decay_steps=0.8',
            'optim.decay_steps',
            '0.8 is less than one step; for 0.8 of train.steps, use 800',
            'optim.decay_steps=800',
        ),
        (
            'optim.warmup_init=1e-2 optim.warmup_steps=9',
            'optim.warmup_init',
            'use at most',
            'optim.warmup_init=0.0',
        ),
        (
            'optim.warmup_init=0.0 optim.warmup_steps=0',
            'optim.warmup_init',
            '0.0 has no effect with optim.warmup_steps=0; remove it, or set optim.warmup_steps=100',
            'optim.warmup_steps=100',
        ),
        (
            'optim.wsd_steps=10',
            'optim.wsd_steps',
            '10 has no effect with optim.schedule=cosine; remove it, or set optim.schedule=wsd',
            'optim.schedule=wsd',
        ),
        (
            'optim.schedule=constant optim.wsd_decay=cosine',
            'optim.wsd_decay',
            'cosine has no effect with optim.schedule=constant; remove it, or set optim.sch',
            'optim.schedule=wsd',
        ),
        (
            'model.rope_theta=1e6',
            'model.rope_theta',
            '1000000.0 has no effect with model.position=learned; remove it, or set model.p',
            'model.position=rope',
        ),
        (
            'model.position=none model.rope_theta=1e6',
            'model.rope_theta',
            '1000000.0 has no effect with model.position=none; remove it, or set model.p',
            'model.layers=[{"position":"rope"},{}]',
        ),
        (
            'optim.schedule=constant optim.decay_steps=5000 optim.warmup_steps=0',
            'optim.decay_steps',
            '5000 has no effect with optim.schedule=constant; remove it, or set optim.schedule=co',
            'optim.schedule=cosine',
        ),
        (
            'train.schedule=gpipe train.microbatches=4',
            'train.schedule',
            'gpipe has no effect with mesh.stages=1; remove it, or set mesh.stages=2',
            'mesh.stages=2',
        ),
        (
            'model.mrope_section=[8,12,12]',
            'model.mrope_section',
            '[8, 12, 12] has no effect with model.position=learned; remove it, or set model.p',
            'model.mrope_section=[24,20,20]',
        ),
        (
            'data.corpus=words data.order=megatron',
            'data.order',
            'megatron has no effect with data.corpus=words; remove it',
            'data.order=stateless',
        ),
        (
            'data.corpus=lines data.split=9,1,0',
            'data.split',
            '9,1,0 has no effect with data.corpus=lines; remove it',
            'data.split=95,5,0',
        ),
        (
            'optim.schedule=inverse_sqrt optim.warmup_steps=0',
            'optim.warmup_steps',
            'use for example 100',
            'optim.warmup_steps=100',
        ),
        (
            'optim.schedule=wsd optim.warmup_steps=100 optim.decay_steps=200 optim.wsd_steps=150',
            'optim.wsd_steps',
            'is more than the 100 steps after warm-up; use at most 100',
            'optim.wsd_steps=100',
        ),
        (
            'mesh.replicas=3 optim.shard=weights',
            'mesh.data',
            '8 is not a multiple of mesh.replicas=3; use 6 or 9, or mesh.replicas 2 or 4',
            'mesh.replicas=4',
        ),
        (
            'mesh.replicas=3 optim.shard=weights',
            'mesh.data',
            'use 6 or 9',
            'mesh.data=9',
        ),
        (
            'mesh.model_rows=2 mesh.model=2',
            'mesh.model_rows',
            '2 needs mesh.sequence_parallel=true, because 2-D tensor parallelism shards',
            'mesh.sequence_parallel=true',
        ),
        (
            'mesh.model_rows=2 mesh.model=2',
            'mesh.model_rows',
            'set it, or mesh.model_rows=1',
            'mesh.model_rows=1',
        ),
        (
            f'{GRID} mesh.model=6 model.num_kv_heads=4',
            'model.num_kv_heads',
            '4 is not a multiple of mesh.model=6, and the columns of a grid (mesh.model_rows=2) '
            'have complete key/value heads; use mesh.model 4, or mesh.model_rows=1',
            'mesh.model=4',
        ),
        (
            f'{GRID} mesh.model=4 model.num_kv_heads=2',
            'model.num_kv_heads',
            'use mesh.model 2, or mesh.model_rows=1',
            'mesh.model_rows=1',
        ),
        (
            f'{GRID} mesh.model_rows=5',
            'model.hidden_size',
            '768 is not a multiple of mesh.model_rows=5; use 765 or 770, or mesh.model_rows 4 or 8',
            'mesh.model_rows=4',
        ),
        (
            f'{GRID} optim.shard=weights mesh.data=10 mesh.replicas=2 train.batch_size=320',
            'model.hidden_size',
            '768 over mesh.model_rows=2 is 384, not a multiple of 5 data shards, which '
            'optim.shard=weights needs; use mesh.data 8 or 12',
            'mesh.data=8',
        ),
        (
            f'{GRID} optim.shard=weights mesh.data=1 mesh.replicas=2',
            'mesh.data',
            '1 is not a multiple of mesh.replicas=2; use 2, or mesh.replicas 1',
            'mesh.replicas=1',
        ),
        (
            f'{GRID} mesh.model_rows=6',
            'model.vocab_size',
            '50257 is padded to 51200, which mesh.model_rows=6 does not divide; '
            'use mesh.model_rows 4 or 8',
            'mesh.model_rows=8',
        ),
        (
            f'{GRID} mesh.model=6',
            'model.vocab_size',
            'which mesh.model_rows=2 x mesh.model=6 = 12 does not divide; use mesh.model 4',
            'mesh.model=4',
        ),
        (
            f'{GRID} mesh.model_rows=4 train.batch_size=64 train.microbatches=4',
            'train.batch_size',
            '64 gives 2 sequences per microbatch and data shard, but mesh.model_rows=4 shards '
            'them; use 128',
            'train.batch_size=128',
        ),
        (
            f'{GRID} train.batch_size=192 train.microbatches=4 train.overlap=batch_split',
            'train.batch_size',
            '192 gives 6 sequences per microbatch and data shard, but train.overlap=batch_split '
            'splits them in half and mesh.model_rows=2 shards them; use 128 or 256',
            'train.batch_size=256',
        ),
        (
            f'{GRID} model.objective=masked_lm',
            'mesh.model_rows',
            'use mesh.model_rows=1 with model.objective=masked_lm',
            'mesh.model_rows=1',
        ),
        (
            'train.steps=3000 train.profile={"start":2995,"steps":20}',
            'train.profile',
            'end at step 3015, after train.steps=3000; use at most start 2980 and 20 steps',
            'train.profile={"start":2980,"steps":20}',
        ),
        (
            'train.replay_every=10',
            'train.replay_every',
            'set train.deterministic=true, or train.replay_every=0',
            'train.deterministic=true',
        ),
        (
            'model.objective=masked_lm train.sample_prompts=["a"]',
            'train.sample_prompts',
            'remove the prompts',
            'train.sample_prompts=[]',
        ),
        (
            'model.objective=masked_lm data.order=megatron',
            'data.order',
            'use stateless',
            'data.order=stateless',
        ),
        (
            'model.objective=masked_lm data.document_mask=true',
            'data.document_mask',
            'remove it',
            'data.document_mask=false',
        ),
        (
            'model.objective=masked_lm train.seq_len=8',
            'train.seq_len',
            'use at least 16',
            'train.seq_len=16',
        ),
        (
            'model.rope_scaling={"type":"linear","factor":8}',
            'model.rope_scaling',
            'needs model.position=rope',
            'model.position=rope',
        ),
        (
            (
                'model.position=rope '
                'model.rope_scaling={"type":"llama3","factor":8,"high_freq_factor":1}'
            ),
            'model.rope_scaling',
            'high_freq_factor 1.0 must be above low_freq_factor 1.0',
            'model.rope_scaling={"type":"llama3","factor":8}',
        ),
        (
            'model.position=rope model.rotary_fraction=0.3',
            'model.rotary_fraction',
            '0.3 of model.head_dim=64 is 19 dims, but they are rotated in pairs; '
            'use 0.28125 or 0.3125',
            'model.rotary_fraction=0.3125',
        ),
        (
            'model.position=rope model.rotary_fraction=0.01',
            'model.rotary_fraction',
            'use 0.03125',
            'model.rotary_fraction=0.03125',
        ),
        (  # 58 / 100 of 100 dims are 57 dims
            'model.position=rope model.head_dim=100 model.rotary_fraction=0.58',
            'model.rotary_fraction',
            'use 0.56 or 0.5800000000000001',
            'model.rotary_fraction=0.5800000000000001',
        ),
        (
            'model.rotary_fraction=0.5',
            'model.rotary_fraction',
            'needs model.position=rope, not learned; remove it',
            'model.position=rope',
        ),
        (
            'model.position=rope model.rope_scaling={"type":"yarn","factor":8}',
            'model.rope_scaling',
            'yarn needs original_max_seq_len, the longest sequence in pre-training; add it',
            'model.rope_scaling={"type":"yarn","factor":8,"original_max_seq_len":4096}',
        ),
        (
            (
                'model.position=rope '
                'model.rope_scaling={"type":"yarn","factor":0.5,"original_max_seq_len":64}'
            ),
            'model.rope_scaling',
            'use at least 1',
            'model.rope_scaling={"type":"yarn","factor":1,"original_max_seq_len":64}',
        ),
        (
            (
                'model.position=rope '
                'model.rope_scaling={"type":"yarn","factor":8,"original_max_seq_len":64,"beta_fast":1}'
            ),
            'model.rope_scaling',
            'beta_fast 1.0 must be above beta_slow 1.0',
            'model.rope_scaling={"type":"yarn","factor":8,"original_max_seq_len":64}',
        ),
        (
            (
                'model.position=rope '
                'model.rope_scaling={"type":"llama3","factor":8,"attention_factor":2}'
            ),
            'model.rope_scaling',
            'attention_factor has no effect with type=llama3; remove it',
            'model.rope_scaling={"type":"llama3","factor":8}',
        ),
        (
            (
                'model.position=rope '
                'model.rope_scaling={"type":"linear","factor":8,"low_freq_factor":3}'
            ),
            'model.rope_scaling',
            'low_freq_factor has no effect with type=linear; remove it',
            'model.rope_scaling={"type":"linear","factor":8}',
        ),
        (
            (
                'model.experts={"count":8,"active":2,"ffn_size":64} model.position=learned '
                'model.layers=[{"experts":null,"rope_theta":5},{}]'
            ),
            'model.layers',
            'sets rope_theta, which needs model.position=rope',
            'model.layers=[]',
        ),
        (
            (
                'model.position=rope model.rope_theta=1 '
                'model.rope_scaling={"type":"yarn","factor":8,"original_max_seq_len":64}'
            ),
            'model.rope_theta',
            'rope_theta 1.0 must be above 1 with yarn; use 10000.0',
            'model.rope_theta=10000.0',
        ),
        (
            ('model.position=rope model.layers=[{},{"rope_scaling":{"type":"yarn","factor":8}}]'),
            'model.layers',
            'yarn needs original_max_seq_len',
            'model.layers=[]',
        ),
        (
            (
                'model.position=rope model.head_dim=4 '
                'model.rope_scaling={"type":"longrope","factor":8,"original_max_seq_len":2048,'
                '"short_factor":[1,2],"long_factor":[1]}'
            ),
            'model.rope_scaling',
            'long_factor has 1 numbers, not one for each of the 2 rotary pairs',
            'model.rope_scaling=null',
        ),
        (
            (
                'model.position=rope model.head_dim=4 '
                'model.rope_scaling={"type":"longrope","factor":8,"original_max_seq_len":512,'
                '"short_factor":[1,2],"long_factor":[1,2]}'
            ),
            'model.max_seq_len',
            '1024 exceeds original_max_seq_len=512: longer sequences are not supported with '
            'longrope; use at most 512',
            'model.max_seq_len=512',
        ),
        ('data.split=95,5', 'data.split', "use for example '95,5,0'", 'data.split=95,5,0'),
        ('data.split=0,95,5', 'data.split', "use for example '95,5,0'", 'data.split=1,0,0'),
    ],
)
def test_the_message_offers_what_works(wrong: str, path: str, offer: str, right: str) -> None:
    (problem,) = [problem for problem in problems(*wrong.split()) if problem.path == path]
    assert offer in problem.message
    assert problem.place in [f'override {override}' for override in wrong.split()]
    is_part = path in ('model.layers', 'model.rope_scaling')  # the key has an effect
    assert isinstance(problem, Unused) or is_part or 'has no effect' not in problem.message
    assert path not in [problem.path for problem in problems(*wrong.split(), right)]


EXPERTS = (
    'model.experts={"count":8,"active":2,"ffn_size":96,"shared_ffn_size":48} '
    'model.bias=false model.head_dim=64'
)


@pytest.mark.parametrize(
    ('base', 'overrides', 'offered'),
    [
        (BASE, 'mesh.model=8', [4]),  # 12 heads
        (BASE, 'mesh.model=3', [2, 4]),  # 51200 rows of the embedding table
        (BASE, 'mesh.model=12', [4]),
        (BASE, f'mesh.model=32 {EXPERTS} model.num_heads=32', [16]),
        (BASE, 'mesh.model=8 model.num_kv_heads=4', [4]),
        (BASE, 'mesh.model=14 model.num_heads=28 model.num_kv_heads=4 model.head_dim=64', [4]),
        (BASE, 'mesh.model=4 mesh.sequence_parallel=true train.seq_len=1022', [2]),
        (BASE, f'{GRID} mesh.model=3', [2, 4]),
        (BASE, f'{GRID} mesh.model_rows=6', [4, 8]),  # 768 elements, and 51200 rows
        (BASE, f'{GRID} mesh.model_rows=5 optim.shard=weights mesh.data=64', [4]),
        ('megatron_4.2b', 'mesh.model=16', [8]),
    ],
)
def test_every_degree_that_is_offered_works(base: str, overrides: str, offered: list[int]) -> None:
    wrong = overrides.split()
    found = problems(*wrong, base=base)
    offer = re.compile(r'(mesh.model|mesh.model_rows) (\d+)(?: or (\d+))?')
    offers = [offer.search(problem.message) for problem in found]
    fixes = {(at[1], int(n)) for at in offers if at for n in at.groups()[1:] if n}
    assert sorted(n for _, n in fixes) == offered
    sizes = 'train.batch_size=4096', 'train.microbatches=1'
    for key, n in fixes:
        assert problems(*wrong, *sizes, f'{key}={n}', base=base) == []


@pytest.mark.parametrize(
    ('overrides', 'path', 'offer'),
    [
        # Neither axis divides the 51200 rows.
        ('mesh.model_rows=6 mesh.model=3', 'model.vocab_size', 'mesh.model_rows 4 or 8'),
        (
            'model.dropout=0 mesh.model=2 train.overlap=sequence_split train.seq_len=1023',
            'train.seq_len',
            'mesh.model 1',
        ),
    ],
)
def test_no_degree_is_offered_that_the_size_itself_rejects(
    overrides: str, path: str, offer: str
) -> None:
    found = problems('mesh.sequence_parallel=true', *overrides.split(), base=BASE)
    assert any(each.path == path and each.message.endswith(offer) for each in found)


@pytest.mark.parametrize(('steps', 'offered'), [(1, '0.5'), (2, '1'), (100, '10'), (5000, '100')])
@pytest.mark.parametrize('length', ['train.steps', 'optim.decay_steps'])
@pytest.mark.parametrize('needs', ['optim.schedule=inverse_sqrt', 'optim.warmup_init=0.0'])
def test_the_warmup_that_is_offered_is_shorter_than_the_schedule(
    steps: int, offered: str, length: str, needs: str
) -> None:
    wrong = [needs, 'optim.warmup_steps=0', f'{length}={steps}']
    (problem,) = problems(*wrong)
    fix = re.split('for example |warmup_steps=', problem.message)[-1]
    assert fix == offered
    assert problems(*wrong, f'optim.warmup_steps={fix}') == []


@pytest.mark.parametrize(
    'overrides',
    [
        'mesh.sequence_parallel=true',
        'mesh.model=4 mesh.sequence_parallel=true',
        'mesh.model=4 model.num_kv_heads=1',
        'mesh.model=4 model.num_kv_heads=2',
        'mesh.model=2 model.num_kv_heads=4',
        'optim.shard=weights mesh.data=512 train.microbatches=1',  # 768 is padded to 1024
        'optim.shard=gradients mesh.replicas=8',
        GRID,
        f'{GRID} mesh.model=1',
        f'{GRID} model.num_kv_heads=2 optim.shard=weights mesh.replicas=2',
        'model.position=rope',
        'optim.min_lr=0 optim.schedule=constant',
        'optim.warmup_steps=0.125 optim.warmup_init=0',  # one sample of a batch of 8
        (
            'model.objective=masked_lm mesh.model=4 mesh.sequence_parallel=true optim.shard=true '
            'model.tie_embeddings=false'
        ),
        'data.split=0.9,0.1,0',
    ],
)
def test_what_can_work_is_allowed(overrides: str) -> None:
    assert problems(*overrides.split()) == []


@pytest.mark.parametrize(
    ('value', 'stage'),
    [
        ('true', 'optimizer'),
        ('false', 'none'),
        ('zero1', 'optimizer'),
        ('zero2', 'gradients'),
        ('zero3', 'weights'),
        ('fsdp', 'weights'),
        *zip(ZERO, ZERO, strict=True),
    ],
)
def test_a_zero_stage_has_other_names_which_only_the_schema_sees(value: str, stage: str) -> None:
    config = load(BASE, [f'optim.shard={value}'])
    assert config.optim.shard == stage
    assert config.model_dump()['optim']['shard'] == stage
    assert f'shard: {stage}' in dump(config)


def test_an_unknown_zero_stage_is_rejected_with_those_that_exist() -> None:
    (problem,) = problems('optim.shard=zero4')
    assert all(stage in problem.message for stage in ZERO)


@pytest.mark.parametrize('wrong', ['mesh.model=two', 'mesh.modle=5', 'model.num_heads=0'])
def test_nothing_is_concluded_from_a_wrong_value(wrong: str) -> None:
    assert len(problems(wrong)) == 1


def test_a_problem_is_placed_at_the_override_that_causes_it() -> None:
    assert [str(problem) for problem in problems('train.microbatches=3')] == [
        (
            'override train.microbatches=3: train.batch_size: '
            '512 is not a multiple of mesh.data=8 x train.microbatches=3 = 24; use 504 or 528'
        )
    ]
