"""Megatron-LM's arguments for experts become keys of the same meaning, or are refused by name."""

from pathlib import Path

import numpy as np
import pytest
from interop.oracles import write_ranks
from interop.test_from_megatron import SMALL, config_of, convert

from megajax.core.config import ConfigError
from megajax.core.config.experts import ExpertsConfig
from megajax.interop.megatron.command_line.arguments import of_model, read_arguments
from megajax.interop.megatron.ranks import import_megatron

EXPERTS = SMALL + '--num-experts 8 --moe-ffn-hidden-size 48 --disable-bias-linear '
KEYS = {'count': 8, 'active': 2, 'ffn_size': 48}
IN_A_CHECKPOINT = {
    **{'num_layers': 2, 'hidden_size': 16, 'num_attention_heads': 2, 'num_experts': 4},
    **{'max_position_embeddings': 8, 'vocab_size': 64},
}
SIGMOID = '--moe-router-score-function sigmoid --moe-router-enable-expert-bias '
GROUPS = '--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4'

# fmt: off
READ = {
    '': {},
    '--moe-router-topk 3': {'active': 3},
    '--moe-router-pre-softmax': {'normalize': False},
    '--moe-router-topk 1 --moe-router-pre-softmax': {'active': 1, 'normalize': False},
    '--moe-router-score-function sigmoid': {'scores': 'sigmoid'},
    '--moe-router-score-function sigmoid --moe-router-topk 1':
        {'scores': 'sigmoid', 'active': 1, 'normalize': False},
    '--moe-router-topk-scaling-factor 2.5': {'scale': 2.5},
    SIGMOID: {'scores': 'sigmoid', 'selection_bias': True},
    SIGMOID + '--moe-router-bias-update-rate 1e-2':
        {'scores': 'sigmoid', 'selection_bias': True, 'bias_rate': 1e-2},
    '--moe-router-pre-softmax ' + GROUPS:
        {'normalize': False, 'groups': 4, 'active_groups': 2, 'active': 4},
    '--moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 1':
        {'normalize': False, 'groups': 4, 'active_groups': 1},
    '--moe-router-num-groups 4': {},  # without a number of groups to choose from
    '--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2': {},
    '--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --micro-batch-size 2':
        {'balance_loss': 1e-2, 'balance_over': 'sequence'},
    '--moe-aux-loss-coeff 1e-2 --micro-batch-size 1':
        {'balance_loss': 1e-2, 'balance_over': 'sequence'},
    '--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2':
        {'balance_loss': 1e-2 / 4, 'balance_over': 'batch'},
    SIGMOID + '--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4':
        {'scores': 'sigmoid', 'selection_bias': True, 'balance_loss': 1e-4,
         'balance_over': 'sequence'},
    '--moe-router-load-balancing-type global_aux_loss': {},
    '--moe-z-loss-coeff 1e-3': {'z_loss': 1e-3},
    '--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --micro-batch-size 1 '
    '--moe-pad-expert-input-to-capacity': {'capacity': 1.5, 'capacity_group': 16},
    '--moe-expert-capacity-factor -1': {},
    '--moe-shared-expert-intermediate-size 64': {'shared_ffn_size': 64},
    '--moe-layer-freq 1': {},
    '--moe-layer-freq ([1]*2)*1': {},
    '--moe-layer-freq [0]+[1]': {'first_dense': 1},
}
REFUSED = {
    '--moe-router-score-function sqrtsoftplus': 'give softmax or sigmoid',
    '--moe-router-topk 1': 'moe-router-topk 1: .* give --moe-router-pre-softmax',
    '--moe-router-enable-expert-bias': 'give --moe-router-score-function sigmoid',
    GROUPS: 'and with softmax --moe-router-pre-softmax',
    SIGMOID + GROUPS.replace('topk 4', 'topk 3'): 'topk twice as large',
    '--moe-router-load-balancing-type sinkhorn': 'give one of aux_loss, seq_aux_loss',
    '--moe-router-load-balancing-type aux_loss seq_aux_loss': 'expected a word',
    '--moe-aux-loss-coeff 1e-2 --micro-batch-size 2': 'counts the tokens of a microbatch',
    SIGMOID + '--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-4':
        'whether or not the expert bias and the groups choose them: .* seq_aux_loss',
    '--moe-expert-capacity-factor 1': 'give --moe-token-drop-policy position',
    '--moe-expert-capacity-factor 1 --moe-token-drop-policy position --micro-batch-size 2':
        '--micro-batch-size 1',
    '--moe-router-dtype fp64': 'give fp32',
    '--moe-input-jitter-eps 1e-2': 'no noise',
    '--moe-router-force-load-balancing': 'no noise',
    '--moe-shared-expert-gate': 'no gate',
    '--moe-layer-freq [0]*2': 'no layer would have experts',
    '--moe-layer-freq [1]*3': 'moe_layer_freq has 3 numbers, but num_layers=2',
    '--moe-apply-probs-on-input': "experts' outputs",
    '--moe-use-upcycling': 'random weights',
    '--expert-tensor-parallel-size 1': '2 shards too: leave it out',
    '--expert-model-parallel-size 3': '--expert-model-parallel-size: 3 does not divide',
    '--moe-router-topk 9': '--moe-router-topk: 9 is more than --num-experts 8; use at most 8$',
    '--moe-rooter-topk 2': 'did you mean --moe-router-topk',
}
# fmt: on
# examples/mixtral/train_mixtral_8x7b_distributed.sh
MIXTRAL = """
    torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --use-mcore-models --disable-bias-linear
    --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
    --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
    --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8
    --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather
    --overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
    --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --vocab-size 32000
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel
"""
PARALLEL = ' --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 '


@pytest.mark.parametrize('added', READ)
def test_arguments_of_experts_are_read(added: str, tmp_path: Path) -> None:
    config = config_of(EXPERTS + PARALLEL + added, tmp_path, gpus=8)
    assert config.model.experts == ExpertsConfig(**(KEYS | READ[added]))
    assert (config.mesh.experts, config.mesh.data) == (2, 4)


@pytest.mark.parametrize('added', REFUSED)
def test_arguments_that_experts_cannot_follow_are_refused_by_name(added: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[added]):
        convert(EXPERTS + PARALLEL + added, gpus=8)


def test_mixtral_is_read(tmp_path: Path) -> None:
    config = config_of(MIXTRAL, tmp_path)
    experts = {'count': 8, 'active': 2, 'ffn_size': 14336}
    balance = {'balance_loss': 1e-2, 'balance_over': 'sequence'}
    assert config.model.experts == ExpertsConfig(**experts, **balance)
    assert (config.mesh.stages, config.mesh.data, config.mesh.experts) == (4, 8, 8)


def test_what_has_no_effect_on_numbers_is_said() -> None:
    unused = '--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion'
    without, _, comment = convert(EXPERTS + unused).partition('# Without a meaning here:')
    assert without.rstrip() == convert(EXPERTS).rstrip()
    assert all(word in comment for word in unused.split())


def test_the_division_of_the_global_auxiliary_loss_is_explained() -> None:
    added = '--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2'
    assert '# This is 0.01 / 4: Megatron-LM divides' in convert(EXPERTS + added, gpus=4)
    assert 'Megatron-LM divides' not in convert(EXPERTS + added)


def test_arguments_of_experts_mean_nothing_to_a_dense_model(tmp_path: Path) -> None:
    added = '--moe-router-topk 4 --moe-router-load-balancing-type sinkhorn --num-experts 0'
    assert config_of(SMALL + added, tmp_path).model.experts is None
    assert '--moe-router-topk 4, --moe-router-load-balancing-type sinkhorn:' in convert(
        SMALL + added
    )


def test_biases_are_the_routers_too(tmp_path: Path) -> None:
    model = config_of(EXPERTS.replace('--disable-bias-linear', ''), tmp_path).model
    assert model.bias
    assert model.experts is not None
    assert model.experts.router_bias


def test_a_checkpoint_is_read_whatever_its_training_was(caplog: pytest.LogCaptureFixture) -> None:
    arguments = {
        'num_experts': 4,
        'micro_batch_size': 8,
        'moe_aux_loss_coeff': 0.5,
        'moe_expert_capacity_factor': 1.25,
        'moe_router_dtype': 'fp64',
    }
    kept = of_model(arguments | {'moe_latent_size': 8}, 'x')
    assert kept == {'num_experts': 4, 'micro_batch_size': 8, 'moe_latent_size': 8}
    for name in ('moe_aux_loss_coeff=0.5', 'moe_expert_capacity_factor=1.25', 'dtype=fp64'):
        assert f'{name}, of the training' in caplog.text


@pytest.mark.parametrize('coefficients', [[0.5, 0.25], [0.5, 0.0], [0.0, 0.0], 0.0])
def test_a_checkpoint_of_several_losses_is_read(coefficients: object) -> None:
    arguments = {
        **IN_A_CHECKPOINT,
        'moe_router_load_balancing_type': ['seq_aux_loss', 'global_aux_loss'],
        'moe_aux_loss_coeff': coefficients,
    }
    balance = {'balance_loss': 0.5, 'balance_over': 'sequence'}
    found = read_arguments(of_model(arguments, 'x'), 'x')['experts']
    assert found == found | (balance if coefficients == [0.5, 0.0] else {})
    assert ('balance_loss' in found) == (coefficients == [0.5, 0.0])
    if coefficients == [0.5, 0.25]:
        with pytest.raises(
            ConfigError, match='give one of seq_aux_loss, global_aux_loss: their sum'
        ):
            read_arguments(arguments, 'x')
    sinkhorn = arguments | {'moe_router_load_balancing_type': ['sinkhorn', 'seq_aux_loss']}
    with pytest.raises(ConfigError, match='give one of aux_loss, seq_aux_loss, global_aux_loss'):
        read_arguments(of_model(sinkhorn, 'x'), 'x')


def test_arguments_in_a_checkpoint_are_read_and_refused_alike() -> None:
    base = {
        **IN_A_CHECKPOINT,
        'ffn_hidden_size': 32,
        'add_bias_linear': False,
        'moe_router_load_balancing_type': ['seq_aux_loss'],
        'moe_aux_loss_coeff': [0.5],
        'moe_layer_freq': 1,
    }
    experts = {'count': 4, 'active': 2, 'ffn_size': 32}
    balance = {'balance_loss': 0.5, 'balance_over': 'sequence'}
    assert read_arguments(base, 'x')['experts'] == experts | balance
    with pytest.raises(ConfigError, match=r'x: moe_layer_freq=\[0, 0\] is not supported'):
        read_arguments(base | {'moe_layer_freq': [0, 0]}, 'x')


def test_every_second_layer_has_experts_as_in_megatron_core(tmp_path: Path) -> None:
    line = EXPERTS.replace('--num-layers 2', '--num-layers 4') + '--moe-layer-freq 2'
    model = config_of(line, tmp_path).model
    assert [model.layer_config(i).experts is None for i in range(4)] == [False, True, False, True]


def test_one_of_several_expert_parallel_ranks_is_refused_by_name(tmp_path: Path) -> None:
    arguments = {'swiglu': True, 'expert_model_parallel_size': 2}
    write_ranks(tmp_path / 'in', {'norm': np.ones(2, np.float32)}, 1, arguments)
    with pytest.raises(
        ConfigError, match=r'one of 2 expert-parallel ranks.*ckpt-format torch_dist'
    ):
        import_megatron(tmp_path / 'in', tmp_path / 'run')
