"""A plan of generation: bytes that are there, latency that grows with the shards, and limits."""

import pytest
from rich.console import Console
from support import load_script, slow
from support import megajax as run_here

from megajax.analysis.plan.generation import Generation, GenerationLine, plan_generation
from megajax.analysis.plan.generation_report import generation_table
from megajax.base.render.units import si
from megajax.core.config import Config, ConfigError, load
from megajax.core.counts.parameters import num_parameters
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import has_compiler

H100 = hardware('h100')


def planned(
    config: Config, *, gpus: int = 8, prompt: int = 2048, tokens: int = 256, batch: int = 8
) -> Generation:
    return plan_generation(config, gpu='h100', gpus=gpus, prompt=prompt, tokens=tokens, batch=batch)


@pytest.fixture(scope='module')
def lines() -> dict[int, GenerationLine]:
    return {line.model: line for line in planned(load('llama3_8b')).lines}


def test_one_gpu_holds_all_weights_and_the_cache_of_every_row(
    lines: dict[int, GenerationLine],
) -> None:
    model = load('llama3_8b').model
    assert lines[1].weights == pytest.approx(2 * num_parameters(model), rel=0.005)
    heads = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    assert lines[1].cache == 2 * 8 * (2048 + 256) * heads
    assert lines[1].sending == 0


def test_a_layer_with_a_window_caches_and_reads_a_window(lines: dict[int, GenerationLine]) -> None:
    kinds = '[{repeat: 3, window: 512}, {}]'
    line, *_ = planned(load('llama3_8b', [f'model.layers={kinds}'])).lines
    whole = 2048 + 256
    assert line.cache == lines[1].cache * (3 * 512 + whole) / (4 * whole)
    read = lines[1].cache / whole * (2048 + 128 - (3 * 512 + 2048 + 128) / 4)
    rate = H100.memory_bandwidth * H100.efficiency.memory
    assert lines[1].token - line.token == pytest.approx(read / rate)


def test_a_window_fills_up_while_tokens_are_generated(lines: dict[int, GenerationLine]) -> None:
    line, *_ = planned(load('llama3_8b', ['model.window=2176'])).lines
    assert line.cache == lines[1].cache * 2176 / (2048 + 256)
    # 2,048 to 2,176 tokens for half of the time, and then 2,176.
    read = lines[1].cache / (2048 + 256) * (2048 + 128 - (2048 + 96))
    rate = H100.memory_bandwidth * H100.efficiency.memory
    assert lines[1].token - line.token == pytest.approx(read / rate)


def test_shards_read_less_and_wait_for_two_reductions_a_layer_and_one(
    lines: dict[int, GenerationLine],
) -> None:
    assert list(lines) == [1, 2, 4, 8]
    for shards in (2, 4, 8):
        line = lines[shards]
        assert line.weights == pytest.approx(lines[1].weights / shards, rel=0.01)
        assert line.cache == lines[1].cache / shards
        latency = 2 * (shards - 1) * H100.inside_host.latency
        assert line.sending > 65 * latency
        assert line.tokens_per_second == pytest.approx(8 / line.token)
    assert lines[2].first_token < lines[1].first_token


def test_no_token_is_faster_than_its_weights_are_read() -> None:
    for line in planned(load('llama3_70b'), gpus=8, batch=1).lines:
        assert line.token > line.weights / H100.memory_bandwidth
        assert line.fits == (line.model > 2)


def test_while_they_are_loaded_the_weights_are_there_twice() -> None:
    for line in planned(load('llama3_70b'), batch=1).lines:
        assert line.loading == 2 * line.weights
        if line.fits:
            assert line.loading < H100.memory


@pytest.mark.parametrize(
    ('batch', 'reason'), [(1, 'loading needs '), (1024, 'weights, KV cache and prefill need ')]
)
def test_a_size_that_does_not_fit_has_the_bytes_that_it_needs(batch: int, reason: str) -> None:
    found, console = planned(load('llama3_70b'), batch=batch), Console(width=200)
    with console.capture() as shown:
        console.print(generation_table(found))
    line, *_ = found.lines
    needed = max(line.loading, line.weights + line.cache + line.prefill)
    assert f'does not fit: {reason}{si(needed)}' in shown.get()


def test_a_prompt_is_padded_and_its_cache_has_slots_for_all_tokens() -> None:
    config = load('llama3_8b')
    longer, padded = (planned(config, prompt=n, tokens=200, batch=1) for n in (1025, 2048))
    assert longer.prompt == 1025
    assert longer.lines == padded.lines
    of_slot = 2 * 2 * 32 * 8 * 128
    assert longer.lines[0].cache == (2048 + 256) * of_slot


def test_long_prompts_need_their_mask_on_each_gpu_and_a_layers_arrays() -> None:
    config, length = load('llama3_8b_128k'), 131072
    for line in planned(config, prompt=130000, batch=8).lines:
        mask = 2 * 8 * length**2
        arrays = 2 * 8 * length * (5 * 4096 + 3 * 14336 // line.model)
        assert line.prefill == mask + arrays
        assert not line.fits
    for line in planned(config, prompt=130000, batch=1).lines:
        assert line.fits == (line.model >= 2)


def test_without_flash_attention_a_prompt_needs_its_scores() -> None:
    of_gpu = {
        gpu: plan_generation(load('gpt2_345m', ['train.dtype=float16']), gpu=gpu, gpus=1, batch=8)
        for gpu in ('v100', 'a100')
    }
    v100, a100 = (of_gpu[gpu].lines[0].prefill for gpu in ('v100', 'a100'))
    assert v100 > (4 + 2) * 8 * 16 * 1024**2 > a100


def test_a_token_reads_and_multiplies_only_its_own_experts() -> None:
    config = load('qwen3_30b_a3b')
    model = config.model
    table = model.padded_vocab_size * model.hidden_size
    of_experts = 48 * 128 * 3 * model.hidden_size * 768
    for batch, used in ((1, 8 / 128), (32, 1 - (1 - 8 / 128) ** 32)):
        line, *_ = planned(config, gpus=1, batch=batch).lines
        read = line.weights - 2 * (table + of_experts * (1 - used))
        cached = line.cache * (2048 + 128) / (2048 + 256)
        rate = H100.memory_bandwidth * H100.efficiency.memory
        assert line.token == pytest.approx((read + cached) / rate, rel=1e-3)


def test_a_prompt_reads_as_many_experts_as_it_has_rows_for_up_to_all() -> None:
    config = load('qwen3_30b_a3b')
    lengths = 1, 15, 16, 17, 100, 112, 1000, 1024
    seconds = [planned(config, gpus=1, prompt=n, batch=1).lines[0].first_token for n in lengths]
    assert seconds == sorted(seconds)
    bandwidth = H100.memory_bandwidth * H100.efficiency.memory
    of_expert = 48 * 3 * config.model.hidden_size * 768
    for length, time in zip(lengths, seconds, strict=True):
        assert time > 2 * min(8 * length, 128) * of_expert / bandwidth
    assert seconds[-1] < 1.3 * seconds[2]  # the weights take most of the time


def test_shards_without_a_head_of_keys_and_values_copy_one() -> None:
    by_shards = {line.model: line.cache for line in planned(load('qwen3_8b'), gpus=32).lines}
    assert by_shards[16] == by_shards[8] == by_shards[32]


@pytest.mark.parametrize('preset', ['qwen3_vl_2b', 'arr_coc_32b'])
def test_all_weights_of_a_model_of_images_are_there_and_the_times_are_of_text(preset: str) -> None:
    config = load(preset)
    found = planned(config, batch=1)
    text = planned(config.model_copy(update={'vision': None, 'relevance': None}), batch=1)
    assert (found.reads_images, text.reads_images) == (True, False)
    assert found.lines[0].weights == pytest.approx(2 * num_parameters(config.model), rel=0.005)
    for line, of_text in zip(found.lines, text.lines, strict=True):
        assert (line.token, line.cache) == (of_text.token, of_text.cache)
        # no shard has only a part of the encoder
        assert line.weights - of_text.weights == found.lines[0].weights - text.lines[0].weights


def test_layers_of_cross_attention_are_counted() -> None:
    images = ['vision.num_layers=1', 'vision.hidden_size=64', 'vision.num_heads=4']
    images += ['vision.max_patches=16', 'vision.fusion=cross_attention', 'vision.cross_every=4']
    config = load('llama3_8b', images)
    line, *_ = planned(config, batch=1).lines
    assert line.weights == pytest.approx(2 * num_parameters(config.model), rel=0.005)


def test_groups_fill_hosts() -> None:
    found = plan_generation(load('megatron_2.5b'), gpu='h100', gpus=16)
    assert [line.model for line in found.lines] == [1, 2, 4, 5]  # of 20 heads, not 10 GPUs


@pytest.mark.parametrize(
    'overrides',
    [
        ['train.dtype=fp8', 'train.fp8_scaling=current'],
        ['model.experts={count: 8, active: 2, ffn_size: 64, capacity: 1.5, capacity_group: 64}'],
    ],
)
def test_keys_that_only_training_reads_do_not_matter(overrides: list[str]) -> None:
    config = load('tiny', ['mesh.data=1', 'mesh.model=1', *overrides])
    assert plan_generation(config, gpu='h100', gpus=1, prompt=50, tokens=8).lines


def test_the_mesh_of_training_does_not_matter(lines: dict[int, GenerationLine]) -> None:
    mesh = 'mesh.data=2', 'mesh.model=4', 'mesh.model_rows=2', 'train.microbatches=1'
    config = load('llama3_8b', [*mesh, 'mesh.sequence_parallel=true'])
    assert {line.model: line for line in planned(config).lines} == lines
    stages = 'mesh.stages=2', 'train.microbatches=4', 'train.schedule=gpipe', 'optim.shard=none'
    assert {line.model: line for line in planned(load('llama3_8b', stages)).lines} == lines


def test_what_cannot_be_generated_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'model\.max_seq_len=8192: ask for fewer'):
        planned(load('llama3_8b'), prompt=8000)
    with pytest.raises(ConfigError, match='does not generate text'):
        planned(load('bert_336m'), prompt=16, tokens=16)


@pytest.mark.parametrize(
    ('name', 'given', 'expected'),
    [
        ('llama3_8b', {}, (1024, 256)),
        ('gpt2_124m', {}, (768, 256)),
        ('gpt2_124m', {'prompt': 1000}, (1000, 24)),
        ('gpt2_124m', {'tokens': 100}, (924, 100)),
        ('tiny', {}, (64, 64)),
    ],
)
def test_by_default_prompt_and_tokens_are_as_long_as_the_model_supports(
    name: str, given: dict[str, int], expected: tuple[int, int]
) -> None:
    found = plan_generation(load(name), gpu='h100', gpus=1, **given)
    assert (found.prompt, found.tokens) == expected


def test_the_command_shows_the_table() -> None:
    shown = run_here('plan', 'gpt2_124m', '--generate', '--prompt', 512).stdout
    assert shown.startswith('256 tokens after a prompt of 512, 1 sequence at once, NVIDIA H100')
    assert 'not measured' in shown


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--batch', '8'], '--prompt and --batch apply to generation only: add --generate'),
        (['--compare', 'h100,h200', '--what-if'], '--what-if: not supported with --compare'),
        (['--compare', 'h100', '--price', '2'], 'write the prices as --compare h100=2.5,h200=3.2'),
        (['--generate', '--verify'], '--verify: not supported with --generate; remove it'),
        (['--generate', '--tokens', '300e9'], 'model.max_seq_len=1024: ask for fewer'),
    ],
)
def test_a_wrong_call_exits_2_and_names_the_fix(options: list[str], message: str) -> None:
    done = run_here('plan', 'gpt2_124m', *options)
    assert (done.returncode, done.stdout) == (2, '')
    assert message in ' '.join(done.stderr.split())


def test_infinite_numbers_survive_json(lines: dict[int, GenerationLine]) -> None:
    line = lines[1].model_copy(update={'token': float('inf')})
    plan = Generation(hardware='h100', prompt=1, tokens=1, batch=1, lines=[line])
    assert Generation.model_validate_json(plan.model_dump_json()) == plan


@slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.parametrize('gpus', [1, 4])
def test_a_compiled_prefill_needs_no_more_than_planned_and_no_more_for_a_deeper_model(
    gpus: int,
) -> None:
    script = load_script('plan_prefill')
    shallow, deep = (script.Case('llama3_8b', layers, gpus, 8, 2048) for layers in (6, 18))
    needed, planned = script.compiled_bytes(deep), script.predicted_bytes(deep)
    assert 0.7 * planned < needed < planned
    assert needed == pytest.approx(script.compiled_bytes(shallow), rel=0.01)
