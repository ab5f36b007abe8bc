"""A command line of Megatron-LM becomes the config that means the same, or is refused by name."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import Config, ConfigError, load
from megajax.core.train.loss_scale import GROWTH_STEPS, HYSTERESIS, SMALLEST
from megajax.core.train.scaling import WINDOW
from megajax.interop.megatron.command_line.arguments import read_arguments
from megajax.interop.megatron.command_line.line import KNOWN, read_line
from megajax.interop.megatron.command_line.to_config import from_megatron
from megajax.interop.megatron.export import _arguments as arguments_of

SMALL = (
    'pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 '
    '--max-position-embeddings 32 --train-iters 10 --lr 1e-3 --vocab-size 100 '
)
SMALL_SETS = re.compile(r'lr: .*|(min_lr|grad_clip|every|steps|attention_dropout|schedule): .*')


def convert(line: str, *, gpus: int | None = None) -> str:
    return from_megatron(read_line(shlex.split(line), world_size=gpus))


def config_of(line: str, folder: Path, *, gpus: int | None = None) -> Config:
    (folder / 'my.yaml').write_text(convert(line, gpus=gpus))
    return load(folder / 'my.yaml')


def model_of(preset: str) -> dict[str, object]:
    return load(preset).model.model_dump()


PAPER = """
    python -m torch.distributed.launch --nproc_per_node 8 --nnodes=64 --node_rank 0
    pretrain_gpt2.py --model-parallel-size 8 --num-layers 72 --hidden-size 3072
    --num-attention-heads 32 --batch-size 8 --seq-length 1024 --max-position-embeddings 1024
    --train-iters 300000 --lr-decay-iters 300000 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine
    --warmup .01 --weight-decay 1e-2 --clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1
    --checkpoint-activations --checkpoint-num-layers 1 --distributed-backend nccl --fp16
    --tokenizer-type GPT2BPETokenizer --data-path 0.5 web 0.5 books --split 949,50,1
    --save runs/8b --save-interval 5000 --log-interval 10 --eval-interval 500 --eval-iters 16
"""
GPT3 = """
    torchrun --nproc-per-node=8 --nnodes=128 pretrain_gpt.py --use-mcore-models
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536
    --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --init-method-std 0.006 --hidden-dropout 0 --attention-dropout 0 --bf16
    --tokenizer-type GPT2BPETokenizer --sequence-parallel --use-distributed-optimizer
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --num-layers-per-virtual-pipeline-stage 4 --recompute-activations --overlap-grad-reduce
"""
LLAMA = """
    pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --untie-embeddings-and-output-weights --no-position-embedding
    --position-embedding-type rope --rotary-base 500000 --hidden-dropout 0.0
    --attention-dropout 0.0 --vocab-size 128256 --max-position-embeddings 8192 --seq-length 8192
    --train-iters 1000 --lr 3e-4 --micro-batch-size 1 --global-batch-size 128 --bf16
    --tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type all_gather
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --reset-position-ids=true --reset-attention-mask=false --reset-position-ids=false
"""
BERT = """
    pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
    --max-position-embeddings 512 --tokenizer-type BertWordPieceLowerCase --micro-batch-size 8
    --global-batch-size 1024 --train-iters 2000000 --lr 1e-4 --lr-warmup-iters 10000
    --lr-decay-style linear --no-bias-gelu-fusion --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --data-path wiki --mask-prob 0.15 --bf16
"""


MUON = SMALL + (
    '--optimizer muon --muon-extra-scale-factor 0.2 --position-embedding-type rope --bf16 '
)


def optim_of(line: str, folder: Path) -> dict[str, object]:
    keys = 'kind', 'momentum', 'nesterov', 'ns_steps', 'ns_coefficients', 'shard'
    return config_of(line, folder).optim.model_dump(include=set(keys))


def test_the_line_of_the_paper(tmp_path: Path) -> None:
    config, preset = config_of(PAPER, tmp_path), load('megatron_8.3b')
    assert config.model == preset.model
    assert config.mesh == preset.mesh
    assert config.optim == preset.optim.model_copy(update={'warmup_init': 0.0})
    assert (config.train.steps, config.train.batch_size, config.train.microbatches) == (
        300_000,
        512,
        1,
    )
    assert (config.train.recompute, config.train.dtype) == ('full', 'float16')
    assert (dict(config.data.blend), config.data.order) == ({'web': 0.5, 'books': 0.5}, 'megatron')
    assert (config.run.dir, config.checkpoint.every) == ('runs/8b-megajax', 5000)


def test_a_constant_rate_has_no_end(tmp_path: Path) -> None:
    line = SMALL + '--lr-decay-style constant --lr-decay-iters 5 --micro-batch-size 1'
    optim = config_of(line, tmp_path).optim
    assert (optim.schedule, optim.decay_steps) == ('constant', None)


def test_gpt3_in_stages(tmp_path: Path) -> None:
    config = config_of(GPT3, tmp_path)
    assert config.model.model_dump() == model_of('gpt3_175b') | {'init_std': 0.006}
    assert config.mesh.sizes == {'stage': 8, 'data': 16, 'model': 8}
    assert (config.mesh.virtual_stages, config.mesh.sequence_parallel) == (3, True)
    train, optim = config.train, config.optim
    assert (train.steps, train.batch_size, train.microbatches) == (95367, 1536, 96)
    assert (optim.warmup_steps, optim.decay_steps) == (183105 / 1536, 126953125 / 1536)
    assert (optim.warmup_init, optim.shard) == (0.0, 'optimizer')
    assert (train.recompute, optim.min_lr, optim.beta2) == ('selective', 6e-6, 0.95)


def test_llama_on_context_shards(tmp_path: Path) -> None:
    config = config_of(LLAMA, tmp_path, gpus=32)
    assert config.model == load('llama3_8b').model
    assert config.mesh.sizes == {'data': 8, 'context': 2, 'model': 2}
    assert (config.optim.shard, config.train.microbatches) == ('weights', 16)
    assert config.optim.schedule == 'linear'  # Megatron-LM's default
    assert config.mesh.context_exchange == 'gather'


def test_megatrons_fsdp_shards_weights_unless_a_strategy_is_given(tmp_path: Path) -> None:
    line = SMALL + '--use-megatron-fsdp '
    assert config_of(line, tmp_path, gpus=4).optim.shard == 'weights'
    given = line + '--data-parallel-sharding-strategy optim'
    assert config_of(given, tmp_path, gpus=4).optim.shard == 'optimizer'


def test_a_percentage_of_the_head_dim_is_rotated(tmp_path: Path) -> None:
    line = SMALL + '--position-embedding-type rope --rotary-percent '
    assert config_of(line + '0.5', tmp_path).model.rotary_fraction == 0.5
    assert 'rotary_fraction' not in convert(SMALL + '--position-embedding-type rope')


def test_moments_have_the_dtype_that_both_arguments_give(tmp_path: Path) -> None:
    for given in 'bf16', 'fp32':
        line = f'{SMALL} --use-precision-aware-optimizer --exp-avg-dtype {given}'
        dtype = config_of(f'{line} --exp-avg-sq-dtype {given}', tmp_path).optim.moments_dtype
        assert dtype == {'bf16': 'bfloat16', 'fp32': 'float32'}[given]
    assert config_of(SMALL + '--exp-avg-dtype fp32', tmp_path).optim.moments_dtype == 'float32'


ROPE = '--position-embedding-type rope --num-layers 5'


@pytest.mark.parametrize(
    ('recipe', 'scaling'),
    [('', 'delayed'), ('--fp8-recipe delayed', 'delayed'), ('--fp8-recipe tensorwise', 'current')],
)
def test_the_recipe_of_fp8_is_how_its_scales_are_found(
    recipe: str, scaling: str, tmp_path: Path
) -> None:
    train = config_of(f'{SMALL} --bf16 --fp8-format hybrid {recipe}', tmp_path).train
    assert (train.dtype, train.fp8_scaling) == ('fp8', scaling)
    in_16_bits = config_of(f'{SMALL} --bf16 {recipe}', tmp_path).train
    assert (in_16_bits.dtype, in_16_bits.fp8_scaling) == ('bfloat16', 'delayed')


@pytest.mark.parametrize(
    ('added', 'layers'),
    [
        ('--window-size 7,0', [(8, 'rope')] * 5),
        ('--window-size "(7, 0)"', [(8, 'rope')] * 5),
        ('--window-size -1,0', [(None, 'rope')] * 5),
        (
            '--window-size 7,0 --window-attn-skip-freq 2',
            [(8, 'rope'), (None, 'rope')] * 2 + [(8, 'rope')],
        ),
        ('--window-size 7,0 --window-attn-skip-freq [0,1,1,0,0]', [None, 8, 8, None, None]),
        ('--window-size 7,0 --window-attn-skip-freq "[0]+2*[1]+[0]*2"', [None, 8, 8, None, None]),
        ('--no-rope-freq "([0]*3+[1]*2)*1"', ['rope', 'rope', 'rope', 'none', 'none']),
        ('--no-rope-freq [0,0,0,1,1]', ['rope', 'rope', 'rope', 'none', 'none']),
    ],
)
def test_layers_have_the_windows_and_positions_of_megatron(
    added: str, layers: list[object], tmp_path: Path
) -> None:
    model = config_of(f'{SMALL} {ROPE} {added}', tmp_path).model
    for index, expected in enumerate(layers):
        layer = model.layer_config(index)
        assert expected in ((layer.window, layer.position), layer.window, layer.position)


@pytest.mark.parametrize(
    ('added', 'words'),
    [
        ('--window-size 7,7', ['7,7', 'later tokens', '7,0']),
        ('--window-size 128', ['=128', 'not two whole numbers', 'give 127,0 to attend to 128']),
        ('--window-size a,0', ['=a,0', 'not two whole numbers']),
        ('--window-size 7,0 --window-attn-skip-freq [1,0]', ['2 numbers', 'num_layers=5']),
        *(
            (f'--window-size 7,0 --window-attn-skip-freq "{wrong}"', ['window_attn_skip_freq'])
            for wrong in ('[1]*4+0', '[1]*10**9', '[1]*70000', '[[1]]*5', '[1]*-5', '1+1')
        ),
        ('--softmax-type learnable', ['softmax-type', 'vanilla']),
    ],
)
def test_layers_that_megajax_does_not_have_are_refused(added: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        convert(f'{SMALL} {ROPE} {added}')
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    'default',
    [
        '--glu-linear-offset 0.0', '--glu-linear-offset 0', '--softmax-type vanilla',
        '--num-tokentypes 0', '--multi-latent-attention=false', 'model.softmax_scale=null',
    ],
)  # fmt: skip
def test_supported_values_of_other_arguments_change_nothing(default: str) -> None:
    assert convert(f'{SMALL} --swiglu {default}') == convert(f'{SMALL} --swiglu')


def test_swiglu_has_the_width_of_megatron(tmp_path: Path) -> None:
    config = config_of(SMALL.replace('64', '4096') + '--swiglu', tmp_path)
    assert config.model.ffn_size == 10880  # two thirds of four hidden sizes, a multiple of 64


@pytest.mark.parametrize(
    ('program', 'size'), [('pretrain_gpt.py', 50257), ('pretrain_bert.py', 30522)]
)
def test_a_program_has_its_own_tokenizer(program: str, size: int, tmp_path: Path) -> None:
    line = SMALL.replace('pretrain_gpt.py', program).replace('--vocab-size 100', '')
    assert config_of(line, tmp_path).model.vocab_size == size


def test_bert(tmp_path: Path) -> None:
    config = config_of(BERT, tmp_path, gpus=128)
    assert config.model == load('bert_336m').model
    assert config.mesh == load('bert_336m').mesh
    assert (config.train.batch_size, config.train.recompute) == (1024, 'full')
    assert (config.data.order, config.data.tokenizer) == ('stateless', 'auto')
    assert config.optim == load('bert_336m').optim.model_copy(update={'warmup_init': 0.0})


def test_bert_has_the_tokenizer_of_the_line_or_says_that_it_needs_one(tmp_path: Path) -> None:
    path = tmp_path / 'tokenizer.json'
    line = f'{BERT} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {path} --vocab-size 9'
    note = '  # BERT needs the tokenizer.json that made these tokens: set data.tokenizer, unless'
    for missing in BERT, line:
        assert convert(missing).index(note) < convert(missing).index('  corpus: wiki\n')
    assert note in convert(BERT.replace('--data-path wiki', '--data-path 1 wiki 2 books'))
    path.write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
    assert config_of(line, tmp_path).data.tokenizer == str(path)
    assert note not in convert(line)


def test_the_file_has_what_the_line_sets_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    line = SMALL + '--min-lr 1e-5 --clip-grad 1.0 --save-interval 1000 --lr-decay-style cosine '
    text = convert(line + '--distributed-backend nccl --use-flash-attn --no-rope-fusion')
    for key in ('lr: 0.001', 'min_lr: 1e-05', 'grad_clip: 1.0', 'every: 1000', 'steps: 10'):
        assert f'\n  {key}\n' in text, key
    lines = [line for line in text.splitlines() if not line.lstrip().startswith('#')]
    whole = config_of(line, tmp_path)
    for index, key in enumerate(lines):
        if not SMALL_SETS.fullmatch(key.strip()):
            (tmp_path / 'less.yaml').write_text('\n'.join([*lines[:index], *lines[index + 1 :]]))
            try:
                less = load(tmp_path / 'less.yaml')
            except ConfigError:
                continue
            assert less != whole or not key, key
    assert '--distributed-backend nccl: jax finds the devices' in text
    assert '--no-rope-fusion: XLA chooses and fuses kernels' in text
    assert "--use-flash-attn: attention on a GPU is cuDNN's flash attention, or XLA's" in text
    assert 'give --gpus N' in text


@pytest.mark.parametrize(
    'option',
    [
        '--use-nccl-ub', '--fsdp-double-buffer', '--no-tp-comm-overlap-ag',
        '--disable-align-grad-reduce', '--keep-fp8-transpose-cache', '--disable-manual-gc-eval',
        '--no-pad-vocab-size', '--async-strategy mcore', '--non-persistent-global-ckpt-dir x',
        '--non-persistent-local-ckpt-dir x', '--use-mp-args-from-checkpoint-args',
        '--dist-ckpt-save-pre-mcore-014', '--distrib-optim-fully-reshardable-mem-efficient',
        '--log-max-attention-logit', '--exit-signal-handler-for-training',
        '--tokenizer-hf-no-use-fast', '--tokenizer-hf-no-include-special-tokens',
        '--tokenizer-metadata x', '--disable-use-tokenizer-model-from-checkpoint-args',
    ],
)  # fmt: skip
def test_options_of_the_newest_release_without_a_meaning_are_named(option: str) -> None:
    text = convert(SMALL + option).partition('# Without a meaning here:')[2]
    assert f'#   {option}: ' in text


def test_options_with_two_names_set_one_key(tmp_path: Path) -> None:
    assert config_of(SMALL + '--persistent-save-interval 7', tmp_path).checkpoint.every == 7
    profiled = SMALL + '--profile-step-start 2 --profile-step-end 4 --use-nsys-profiler'
    assert config_of(profiled, tmp_path).train.profile is not None
    assert config_of(SMALL + '--bf16 --fp8-hybrid', tmp_path).train.dtype == 'fp8'


def test_constants_of_scaling_are_told_megajaxs_own() -> None:
    line = '--fp16 --loss-scale-window 200 --min-loss-scale 128 --fp8-margin 2'
    text = ' '.join(convert(SMALL + line).replace('\n#', '').split())
    assert (
        f'--min-loss-scale 128: the loss scale doubles after {GROWTH_STEPS} steps, halves at the '
        f'{HYSTERESIS}nd overflow, and is at least {SMALLEST:g}'
    ) in text
    own = f'delayed scales follow from the largest values of {WINDOW} steps, without a margin'
    assert f'--fp8-margin 2: {own}' in text


@pytest.mark.parametrize(
    ('added', 'theirs'),
    [
        ('', '1 and most_recent'),
        ('--fp8-amax-history-len 16 --fp8-amax-compute-algo max', '16 and max'),
        ('--fp8-amax-history-len 1024', '1024 and most_recent'),
        (f'--fp8-amax-history-len {WINDOW} --fp8-amax-compute-algo max', None),
        ('--fp8-recipe tensorwise', None),
    ],
)
def test_delayed_scales_that_differ_from_the_lines_are_said(added: str, theirs: str | None) -> None:
    text = ' '.join(convert(f'{SMALL} --bf16 --fp8-format hybrid {added}').replace('#', '').split())
    said = f'With this line, Megatron-LM has {theirs}. dtype: fp8' in text
    assert said == (theirs is not None)
    assert said == (f'FP8 scales follow from the largest values of {WINDOW} steps' in text)


def test_arguments_of_delayed_scales_have_no_meaning_without_them() -> None:
    for line in SMALL, f'{SMALL} --bf16 --fp8-format hybrid --fp8-recipe tensorwise ':
        text = convert(f'{line} --fp8-amax-history-len 16')
        assert '--fp8-amax-history-len 16' in text.partition('Without a meaning here:')[2]


def test_short_sequences_of_bert_have_a_reason_of_their_own() -> None:
    text = convert(BERT + ' --short-seq-prob 0.2')
    assert '--short-seq-prob 0.2: sequences of BERT are not shortened at random' in text


def test_dropout_in_attention_is_written_with_what_it_costs() -> None:
    text = convert(SMALL)
    note = "  # Dropout in attention needs XLA's attention, which keeps all scores in memory."
    assert text.index(note) < text.index('  attention_dropout: 0.1\n')
    assert 'attention_dropout: 0.0\n' in convert(SMALL + '--attention-dropout 0')
    assert note not in convert(SMALL + '--attention-dropout 0')


@pytest.mark.parametrize(
    ('split', 'parts'),
    [('98,2', '98,2,0'), ('100', '100,0,0'), ('[90, 8, 2]', '90,8,2'), ('1,0.5,.5', '1,0.5,.5')],
)
def test_the_parts_that_a_split_leaves_out_are_empty(
    split: str, parts: str, tmp_path: Path
) -> None:
    assert config_of(f'{SMALL} --split "{split}"', tmp_path).data.split == parts


def test_a_run_without_validation_data_has_no_evaluation(tmp_path: Path) -> None:
    assert config_of(f'{SMALL} --eval-iters 0 --split 100,0,0', tmp_path).data.split == '100,0,0'


def test_what_is_no_text_on_standard_input_is_refused() -> None:
    done = CliRunner().invoke(app, ['config', 'from-megatron', '-'], input=b'\xff\xfe')
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith('standard input: cannot be read as text: ')


def test_a_run_is_not_written_among_the_checkpoints_of_megatron() -> None:
    for save in 'ckpt', 'ckpt/':
        comment = f"  # This is not {save}, the folder of Megatron-LM's checkpoints.\n"
        assert f'{comment}  dir: ckpt-megajax\n' in convert(SMALL + f'--save {save}')


@pytest.mark.parametrize(
    ('added', 'printed'),
    [
        ('', 'their/ckpt RUN`'),
        ('--finetune', 'their/ckpt RUN --finetune`'),
        ('--ckpt-step 1000', 'their/ckpt/iter_0001000 RUN`'),
        ('--ckpt-step 0', 'their/ckpt RUN`'),
    ],
)
def test_the_import_of_the_checkpoint_is_that_of_the_line(added: str, printed: str) -> None:
    text = convert(f'{SMALL} --load their/ckpt {added}')
    assert f'`megajax import megatron {printed}' in ' '.join(text.replace('\n#', '').split())
    assert 'Without a meaning' not in text


def test_a_line_without_data_says_which_corpus_it_has() -> None:
    note = '# No --data-path is in the line, so that data.corpus is stdlib: set it.\n'
    assert note in convert(SMALL)
    assert note in convert(SMALL + '--mock-data')
    assert 'No --data-path' not in convert(SMALL + '--data-path web')


@pytest.mark.parametrize('norm', ['', '--normalization RMSNorm '])
def test_norms_that_begin_at_one_plus_zero_convert(norm: str) -> None:
    text = convert(f'{SMALL}{norm}--apply-layernorm-1p')
    assert 'zero_centered_norm: true' in text
    assert 'apply-layernorm-1p' not in text


def test_a_problem_of_the_config_has_the_names_of_the_line() -> None:
    with pytest.raises(ConfigError) as refused:
        convert(
            SMALL.replace('--num-layers 2', '--num-layers 24 --pipeline-model-parallel-size 16')
        )
    assert str(refused.value).startswith(
        '--num-layers: 24 is not a multiple of --pipeline-model-parallel-size 16'
    )


def test_all_faults_of_a_line_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        convert(
            SMALL + '--rampup-batch-size 16 16 5859375 --tensor-model-parallel-size 3 '
            '--fp16 --bf16 --decoupled-lr 1e-3 --lr-decay-style WSD --save $DIR',
            gpus=8,
        )
    for part in (
        '--rampup-batch-size 16 16 5859375: is not supported: leave it out; a run that is',
        '8 GPUs are not a multiple of tensor x pipeline x context = 3 x 1 x 1: give --gpus 3',
        '--fp16 and --bf16',
        '--decoupled-lr 1e-3: is not supported',
        '--lr-wsd-decay-iters is missing',
        "--save '$DIR': the value of $DIR is not in the text",
        '4 is not a multiple of --tensor-model-parallel-size 3',
    ):
        assert part in str(refused.value), part


@pytest.mark.parametrize(
    ('added', 'message'),
    [
        ('--multi-latent-attention', r'attention: is not supported: use --group-query-attention'),
        ('--rotary-interleaved', '--rotary-interleaved: is not supported: .* leave it out'),
        (
            '--position-embedding-type rope --rotary-percent 0.2',
            r'--rotary-percent: 0.2 of --kv-channels \d+ is \d+ dims, but .* in pairs; use 0',
        ),
        ('--qk-l2-norm', '--qk-l2-norm: is not supported: .* use --qk-layernorm'),
        ('--use-mup', '--use-mup: is not supported: .* leave it out'),
        ('--swiglu --glu-linear-offset 1.0', '--glu-linear-offset 1.0: .* leave it out'),
        ('--position-embedding-type yarn', '--position-embedding-type yarn: .* rope'),
        ('--no-position-embedding', '--no-position-embedding: .* give --position-embedding-type'),
        (
            '--rampup-batch-size 16 16 5859375',
            '16 16 5859375: is not supported: .*larger train.batch_size',
        ),
        ('--optimizer sgd', '--optimizer sgd: is not supported: give adam or muon'),
        ('--embedding-init-method-std 1.0', 'std 1.0: is not supported: [^?]* leave it out$'),
        ('--dataloader-inter-document-masking', 'give --reset-position-ids, --reset-attention-'),
        ('--start-eval-at-iter 5', '--start-eval-at-iter 5: is not supported: .* leave it out'),
        ('--new-init-method-std 1.0', 'not a known argument of [^?]*$'),  # another argument
        ('--init-method-stdd 1.0', r'did you mean --init-method-std\?$'),
        ('--optimizer adaptive_muon', '--optimizer adaptive_muon: is not supported'),
        ('--end-weight-decay 0.3', '--end-weight-decay 0.3: .* constant'),
        ('--clip-grad 0', '--clip-grad 0: .* large number'),
        ('--eval-iters 0', '^--eval-iters 0: .* give 1, or --split 100,0,0 to have no [^\n]*$'),
        (
            '--pipeline-model-parallel-size 0 --num-layers-per-virtual-pipeline-stage 2',
            '^--pipeline-model-parallel-size: must be greater than 0, not 0$',
        ),
        ('--loss-scale 4096', '--loss-scale 4096: .* dynamic'),
        ('--fp16 --fp8-format hybrid', 'hybrid: .* in bf16: give --bf16 instead of --fp16$'),
        ('--fp8-format hybrid', '--fp8-format hybrid: .* in bf16: give --bf16$'),
        ('--fp8-hybrid trainer.precision=16', 'give --bf16 instead of trainer.precision$'),
        ('--bf16 trainer.precision=32', '^--bf16 and trainer.precision: give one of them$'),
        ('trainer.precision=64', '^trainer.precision=64: is not supported: give bf16, .*, 32$'),
        ('--bf16 --fp8-e4m3', '--fp8-e4m3: .* hybrid'),
        ('--bf16 --fp8-format hybrid --disable-fp8-wgrad', '--disable-fp8-wgrad: .* gradients'),
        ('--fp8-format e4m3', '--fp8-format e4m3: .* hybrid'),
        ('--fp8-format hybrid --fp8-recipe mxfp8', 'mxfp8: .* give delayed or tensorwise'),
        (
            '--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 2',
            '--first-last-layers-bf16: is not supported: all layers have FP8 matmuls',
        ),
        ('--fp8-format hybrid --no-fp8-wgrad', '--no-fp8-wgrad: is not supported: gradients'),
        ('--bf16 --fp32-residual-connection', 'connection: is not supported: .* leave it out'),
        ('--cp-comm-type a2a+p2p', r'--cp-comm-type a2a\+p2p'),
        ('--recompute-modules mlp', '--recompute-modules mlp: .* full'),
        ('--eod-mask-loss', '--eod-mask-loss: is not supported alone: give --reset-position-ids'),
        ('--reset-position-ids', 'data.document_mask does both: give both, or neither'),
        ('--per-split-data-args-path x.json', 'x.json: is not supported: .* with --split'),
        ('--data-path web books news', '--data-path web books news: give each prefix its weight'),
        (
            '--data-path 0.5 a 0.3 b 0.2 a',
            '--data-path 0.5 a 0.3 b 0.2 a: names a twice, .* name it once, with the sum',
        ),
        ('--fp16 --bf16', '--fp16 and --bf16: give one of them'),
        ('--exp-avg-dtype bf16', 'both moments have one dtype, .* give both the same'),
        ('--exp-avg-sq-dtype bf16', 'both moments have one dtype, .* give both the same'),
        (
            '--hiden-size 4',
            r'--hiden-size 4: is not a known argument .* did you mean --hidden-size\?',
        ),
        ('--decoder-num-layers 2', '--decoder-num-layers 2: .* encoder-decoder models are not'),
        ('--zzzz', '--zzzz: is not a known argument'),
        ('--seed many', '--seed many: expected a whole number'),
        ('--lr inf', '--lr inf: expected a number'),
        ('--bf16 yes', '--bf16 yes: expected no value'),
        ('--tensor-model-parallel-size 3', '--tensor-model-parallel-size'),
        ('--tokenizer-type HuggingFaceTokenizer --tokenizer-model none', None),
        ('--save $DIR', r'--save .*\$DIR.*: the value of \$DIR is not in the text'),
    ],
)
def test_what_is_not_supported_is_refused_by_name(added: str, message: str | None) -> None:
    if message is None:
        convert(SMALL + added)  # the size of the vocabulary is in the line
        return
    with pytest.raises(ConfigError, match=message):
        convert(SMALL + added)


@pytest.mark.parametrize(
    ('added', 'expected'),
    [
        ('', {'momentum': 0.9, 'nesterov': False, 'ns_steps': 5, 'ns_coefficients': 'dion'}),
        ('--muon-coefficient-type simple', {'ns_coefficients': 'quintic'}),
        (
            '--muon-coefficient-type polar_express --muon-num-ns-steps 8',
            {'ns_coefficients': 'polar_express', 'ns_steps': 8},
        ),
        ('--muon-momentum 0.95 --muon-nesterov', {'momentum': 0.95, 'nesterov': True}),
        ('--muon-use-nesterov', {'nesterov': True}),  # until megatron-core 0.16
        ('--use-distributed-optimizer', {'shard': 'optimizer'}),
        ('--optimizer dist_muon', {'shard': 'optimizer'}),
        ('--muon-tp-mode duplicated --tensor-model-parallel-size 2', {}),
    ],
)
def test_muon_is_read_with_the_defaults_of_megatron(
    added: str, expected: dict[str, object], tmp_path: Path
) -> None:
    optim = optim_of(MUON + added, tmp_path)
    assert optim == optim | {'kind': 'muon'} | expected


@pytest.mark.parametrize(
    ('added', 'message'),
    [
        ('--muon-extra-scale-factor 1', '--muon-extra-scale-factor 1: .* give 0.2'),
        ('--muon-scale-mode unit_rms_norm', '--muon-scale-mode unit_rms_norm: .* give spectral'),
        ('--muon-coefficient-type aol', '--muon-coefficient-type aol: .* give simple, quintic'),
        ('--muon-no-split-qkv', '--muon-no-split-qkv: .* leave it out'),
        ('--muon-fp32-matmul-prec high', '--muon-fp32-matmul-prec high: .* give medium'),
        ('--muon-scalar-optimizer lion', '--muon-scalar-optimizer lion: .* give adam'),
        ('--tensor-model-parallel-size 2', '--muon-tp-mode blockwise, the default: .* duplicated'),
    ],
)
def test_values_of_muon_that_are_not_supported_are_rejected_by_name(
    added: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(MUON + added)


def test_muon_without_a_scale_factor_is_rejected_with_megatrons_default() -> None:
    with pytest.raises(ConfigError, match=r'--muon-extra-scale-factor 1\.0, the default: .* 0\.2'):
        convert(SMALL + '--optimizer muon')


def test_what_muon_computes_differently_is_said_before_its_key() -> None:
    added = '--swiglu --muon-nesterov --position-embedding-type learned_absolute'
    text = ' '.join(convert(MUON + added).replace('#', '').split())
    for said in ('Gate and up are separate', 'AdamW updates position embeddings', 'first 20 steps'):
        assert said in text
    assert 'Megatron-LM.' not in convert(MUON)


def test_arguments_of_muon_have_no_meaning_for_adam() -> None:
    for added in ('--muon-momentum 0.8', '--muon-no-split-qkv', '--muon-nesterov'):
        text = convert(SMALL + added)
        assert added in text.partition('Without a meaning here:')[2]


@pytest.mark.parametrize(
    ('removed', 'message'),
    [
        ('--lr 1e-3', '--lr: is missing'),
        ('--train-iters 10', '--train-iters: is missing, and so is --train-samples'),
        ('--num-layers 2', '--num-layers: is missing'),
    ],
)
def test_what_is_missing_is_named(removed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(SMALL.replace(removed, ''))


def test_the_null_tokenizer_has_the_tokens_of_the_newest_release(tmp_path: Path) -> None:
    line = SMALL + '--tokenizer-type NullTokenizer'
    assert config_of(line, tmp_path).model.vocab_size == 100
    text = ' '.join(convert(line).replace('#', '').split())
    assert 'Earlier releases add this token: then set 101. vocab_size: 100 ' in text
    assert '--null-tokenizer-eod-id 9: the corpus' in convert(line + ' --null-tokenizer-eod-id 9')
    assert 'Earlier releases' not in convert(SMALL)


def test_documents_are_separated_as_by_the_three_arguments(tmp_path: Path) -> None:
    two = SMALL + '--reset-position-ids --reset-attention-mask '
    assert config_of(two + '--eod-mask-loss', tmp_path).data.document_mask
    assert config_of(two + '--eod-mask-loss', tmp_path) == config_of(two, tmp_path)
    note = '  # The first token of a document has no loss, as with --eod-mask-loss.'
    assert note in convert(two)
    assert note not in convert(two + '--eod-mask-loss')


def test_a_tokenizer_of_unknown_size_is_named() -> None:
    line = SMALL.replace('--vocab-size 100', '--tokenizer-type SentencePieceTokenizer')
    with pytest.raises(ConfigError, match=r'SentencePieceTokenizer: .*add --vocab-size N'):
        convert(line)


@pytest.mark.parametrize('vocab', [[['a', -1.0], ['b', -2.0]], {'a': 0, 'b': 1}])
def test_the_size_of_a_tokenizer_counts_its_vocabulary_and_added_tokens(
    vocab: Any, tmp_path: Path
) -> None:
    path = tmp_path / 'tokenizer.json'
    line = SMALL.replace(
        '--vocab-size 100', f'--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}'
    )
    for added, size in (([], 2), ([{'id': 0}], 2), ([{'id': 4}], 5)):
        path.write_text(json.dumps({'added_tokens': added, 'model': {'vocab': vocab}}))
        assert config_of(line, tmp_path).model.vocab_size == size
        assert config_of(line + ' --vocab-size 9', tmp_path).model.vocab_size == size
        text = ' '.join(convert(line + ' --vocab-size 9').replace('#', '').split())
        assert f'Megatron-LM does not read --vocab-size 9. vocab_size: {size} ' in text


@pytest.mark.parametrize(
    ('kind', 'content', 'size', 'usual'),
    [
        ('GPT2BPETokenizer', '{"a": 0, "b": 1}', 2, 50257),
        ('BertWordPieceLowerCase', '[PAD]\na\n\u2028\n', 3, 30522),
        ('BertWordPieceCase', 'a\nb', 2, 28996),
    ],
)
def test_the_size_of_a_vocabulary_is_counted_in_its_file(
    kind: str, content: str, size: int, usual: int, tmp_path: Path
) -> None:
    path = tmp_path / 'vocabulary'
    line = SMALL.replace('--vocab-size 100', f'--tokenizer-type {kind} --vocab-file {path}')
    assert config_of(line, tmp_path).model.vocab_size == usual
    text = ' '.join(convert(line).replace('#', '').split())
    assert f'{path}, which tells it, is not there. vocab_size: {usual} ' in text
    path.write_text(content, encoding='utf-8')
    assert config_of(line, tmp_path).model.vocab_size == size
    assert 'is not there' not in convert(line)


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / 'vocab.json'
    for content in b'[1]', b'{', b'\xff\xfe':
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f'{path}: is not a vocabulary: '):
            convert(SMALL.replace('--vocab-size 100', f'--vocab-file {path}'))


def test_a_tokenizer_that_is_not_there_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / 'tokenizer.json'
    line = f'{SMALL} --data-path web --tokenizer-type HuggingFaceTokenizer --tokenizer-model '
    for model in 'deepseek-ai/DeepSeek-V2-Lite', str(tmp_path), str(path):
        text = ' '.join(convert(line + model).replace('#', '').split())
        assert f'{model} is not a tokenizer.json or a folder that has one. ' in text
        assert ' samples of text and bits per byte. tokenizer: none ' in text
    path.write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
    for model in tmp_path, path:
        assert config_of(f'{line}{model}', tmp_path).data.tokenizer == str(path)
        assert 'is not a tokenizer' not in convert(f'{line}{model}')


@pytest.mark.parametrize(
    ('added', 'activation'),
    [
        ('', 'gelu_tanh'),
        ('--no-bias-gelu-fusion', 'gelu'),
        ('--no-bias-gelu-fusion --openai-gelu', 'gelu'),
        ('--no-bias-gelu-fusion --openai-gelu --use-mcore-models', 'gelu'),
        ('--no-bias-gelu-fusion --openai-gelu --use-legacy-models', 'gelu_tanh'),
        ('--no-bias-gelu-fusion --use-legacy-models', 'gelu'),
        ('--no-bias-gelu-fusion --use-te-activation-func', 'gelu_tanh'),
        ('--disable-bias-linear --use-te-activation-func', 'gelu_tanh'),
        ('--disable-bias-linear --use-te-activation-func --transformer-impl local', 'gelu'),
        ('--swiglu --use-te-activation-func', 'swiglu'),
    ],
)
def test_the_activation_is_that_of_megatron_core(
    added: str, activation: str, tmp_path: Path
) -> None:
    assert config_of(f'{SMALL} {added}', tmp_path).model.activation == activation


@pytest.mark.parametrize(
    ('arguments', 'activation'),
    [
        ({}, 'gelu_tanh'),  # of a release before megatron-core
        ({'use_mcore_models': False}, 'gelu_tanh'),
        ({'use_mcore_models': True}, 'gelu'),
        ({'use_legacy_models': False}, 'gelu'),
        ({'deprecated_use_mcore_models': False}, 'gelu'),
    ],
)
def test_only_layers_before_megatron_core_read_the_gelu_of_openai(
    arguments: dict[str, bool], activation: str
) -> None:
    model = {'num_layers': 2, 'hidden_size': 16, 'num_attention_heads': 4, 'vocab_size': 64}
    model |= {'max_position_embeddings': 8, 'bias_gelu_fusion': False, 'openai_gelu': True}
    assert read_arguments(model | arguments, 'x')['activation'] == activation


def test_the_surplus_of_a_blend_is_that_of_its_order(tmp_path: Path) -> None:
    one, two = '--data-path web', '--data-path 1 web 2 books'
    surplus = '--mid-level-dataset-surplus'
    for added in (f'{one} {surplus} 0.01', f'{two} {surplus} 0.005'):
        assert config_of(f'{SMALL} {added}', tmp_path).data.order == 'megatron'
    with pytest.raises(ConfigError, match=r'surplus 0\.01: is not supported .*: give 0\.005'):
        convert(f'{SMALL} {two} {surplus} 0.01')


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / 'tokenizer.json'
    path.write_text('{"added_tokens": [], "model": {"vocab": "a"}}')
    line = SMALL.replace(
        '--vocab-size 100', f'--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}'
    )
    with pytest.raises(ConfigError, match=r'tokenizer.json: is not a tokenizer.json: Attribute'):
        convert(line)


def test_a_size_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'^--num-layers: must be greater than 0, not 0$'):
        convert(SMALL.replace('--num-layers 2', '--num-layers 0'))
    with pytest.raises(
        ConfigError, match=r'--tensor-model-parallel-size: must be greater than 0, not 0'
    ):
        convert(SMALL + '--tensor-model-parallel-size 0', gpus=4)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        convert(SMALL + '--multi-latent-attention --zzzz --clip-grad 0')
    assert str(refused.value).count('\n') == 2


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match='12 GPUs are not a multiple of tensor x pipeline'):
        convert(SMALL + '--tensor-model-parallel-size 8', gpus=12)
    with pytest.raises(ConfigError, match='--global-batch-size 9: is not a multiple'):
        convert(SMALL + '--global-batch-size 9 --micro-batch-size 2', gpus=4)


def test_overrides_of_nemo_are_read(tmp_path: Path) -> None:
    line = ' '.join(
        f'{word}'
        for word in (
            'pretrain.py model.num_layers=2 model.hidden_size=64 model.num_attention_heads=4',
            '++model.seq_length=32 train.train_iters=10 optimizer.lr=1e-3 model.vocab_size=100',
            'model.sequence_parallel=True model.tensor_model_parallel_size=2 model.bf16=false',
            'model.layernorm_zero_centered_gamma=true model.num_moe_experts=null',
        )
    )
    with pytest.raises(ConfigError, match='num_moe_experts=null: expected a whole number'):
        convert(line)
    config = config_of(line.replace('model.num_moe_experts=null', ''), tmp_path)
    assert (config.model.num_layers, config.mesh.model, config.train.dtype) == (2, 2, 'float32')
    assert config.mesh.sequence_parallel
    assert config.model.zero_centered_norm


@pytest.mark.parametrize(
    ('given', 'dtype'),
    [
        ('trainer.precision=bf16', 'bfloat16'),
        ('trainer.precision=bf16-mixed model.bf16=True', 'bfloat16'),
        ('trainer.precision=16', 'float16'),
        ('trainer.precision=32', 'float32'),
        ('model.fp8_hybrid=True trainer.precision=bf16-mixed', 'fp8'),
    ],
)
def test_the_precision_of_nemo_is_the_dtype(given: str, dtype: str, tmp_path: Path) -> None:
    assert config_of(SMALL + given, tmp_path).train.dtype == dtype


@pytest.mark.parametrize(
    ('added', 'groups'),
    [
        ('', 4),
        ('--group-query-attention', 1),  # the default of --num-query-groups
        ('--group-query-attention --num-query-groups 2', 2),
        ('--num-query-groups 2', 4),
        ('model.num_query_groups=2', 2),
        ('model.num_query_groups=2 --group-query-attention=false', 4),
    ],
)
def test_query_groups_are_those_of_the_program(added: str, groups: int, tmp_path: Path) -> None:
    assert config_of(SMALL + added, tmp_path).model.num_kv_heads == groups
    note = '  # Without --group-query-attention, Megatron-LM ignores --num-query-groups 2.\n'
    assert (f'{note}  num_kv_heads: 4\n' in convert(SMALL + added)) == (added[:5] == '--num')


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    script = tmp_path / 'train.sh'
    script.write_text(
        '#!/bin/bash\nexport X=1\nGPUS=8; NODES=2\nOUT=runs/out\n'
        'DISTRIBUTED=(--nproc_per_node $GPUS\n --nnodes $NODES)\n'
        'MODEL="--num-layers 2 --hidden-size 64"\n'
        'ARGS=(\n  --num-attention-heads 4 # heads\n --seq-length 32 --train-iters 10\n'
        '  --lr 1e-3 --vocab-size 100 --save ${OUT}/a --tensorboard-dir $TB\n)\n'
        'torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \\\n $MODEL "${ARGS[@]}"\n'
    )
    result = CliRunner().invoke(app, ['config', 'from-megatron', f'@{script}'])
    assert result.exit_code == 0, result.output
    assert '# 16 GPUs: data 16' in result.output
    assert 'dir: runs/out/a-megajax' in result.output
    piped = CliRunner().invoke(app, ['config', 'from-megatron', '-'], input=script.read_text())
    assert piped.output == result.output
    bomb = 'A=aaaaaaaaaa\n' + ''.join('A=$A$A$A$A\n' for _ in range(40))
    script.write_text(bomb)
    with pytest.raises(ConfigError, match='make more than 1,048,576 characters'):
        read_line([f'@{script}'])
    script.write_text('"open')
    with pytest.raises(ConfigError, match='is not the text of a command'):
        read_line([f'@{script}'])


def test_no_argument_is_in_two_rows_of_the_table() -> None:
    from megajax.interop.megatron.command_line.arguments import ONLY
    from megajax.interop.megatron.command_line.table import known_names

    names = [*known_names(), *ONLY]
    assert sorted(names) == KNOWN


@pytest.mark.parametrize('factor', [2.0, 32.0])
@pytest.mark.parametrize('kind', ['linear', 'llama3'])
def test_the_arguments_of_an_export_scale_the_rope_as_its_model(
    kind: str, factor: float, tmp_path: Path
) -> None:
    scaling = {'type': kind, 'factor': factor}
    model = load('llama3_8b', [f'model.rope_scaling={json.dumps(scaling)}']).model
    printed = arguments_of(model, 1, 1, 1, 'local')
    found = config_of(f'{SMALL}--position-embedding-type rope {printed}', tmp_path).model
    assert found.rope_scaling == model.rope_scaling
    learned = config_of(f'{SMALL}--position-embedding-type learned_absolute {printed}', tmp_path)
    assert learned.model.rope_scaling is None


def test_two_scalings_of_the_rope_are_refused() -> None:
    added = '--position-embedding-type rope --use-rope-scaling '
    said = r'--rotary-seq-len-interpolation-factor 4: .* use only one of it and --use-rope-scaling'
    with pytest.raises(ConfigError, match=said):
        convert(f'{SMALL}{added}--rotary-seq-len-interpolation-factor 4')


@pytest.mark.parametrize(
    'added',
    [
        '--enable-experimental', '--use-transformer-engine-op-fuser --fused-residual-rmsnorm',
        '--flight-recorder-dump-path x --gpu-sniff-test-interval 10', '--no-pin-cpu-grads',
        '--save-tokens-per-expert-interval 5', '--dataloader-fast-cache-load',
        '--ddp-reduce-scatter-with-fp32-accumulation --mtp-loss-scaling-factor 0.1',
    ],
)  # fmt: skip
def test_arguments_of_the_newest_release_that_change_no_number_are_listed(added: str) -> None:
    keys, _, unused = convert(SMALL + added).partition('\n# Without a meaning here:')
    assert keys.strip() == convert(SMALL).strip()
    assert all(word in unused for word in added.split())
