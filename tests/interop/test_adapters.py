"""Adapters are exported added to the weights, or alone as PEFT loads them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import make_state
from safetensors.numpy import load_file
from support import by_name, exhaustive, on_mesh, slow
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import Config, ConfigError, LoraConfig, load
from megajax.core.model.parameters import map_parameters
from megajax.interop.huggingface.adapters import export_adapters
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.run.start import start_checkpoint

DATA = Path(__file__).parent / 'data'
FAMILIES = (
    'gpt2',
    exhaustive('llama3'),
    slow('bert'),
    slow('phi3'),
    exhaustive('qwen3'),
    *map(slow, ('glm4', 'olmo3')),
)
LORA = LoraConfig(rank=4, alpha=6.0)
TARGETS = {
    'gpt2': {'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'},
    'bert': {f'self.{x}' for x in ('query', 'key', 'value')}
    | {'output.dense', 'intermediate.dense'},
    'glm4': {f'self_attn.{x}_proj' for x in 'qkvo'} | {'mlp.gate_up_proj', 'mlp.down_proj'},
    'phi3': {'self_attn.qkv_proj', 'self_attn.o_proj', 'mlp.gate_up_proj', 'mlp.down_proj'},
}
OF_LLAMA = {f'self_attn.{x}_proj' for x in 'qkvo'} | {
    f'mlp.{x}_proj' for x in ('gate', 'up', 'down')
}


def folder_of(family: str) -> Path:
    return DATA.parent / 'bert' if family == 'bert' else DATA / family


def save(run: Path, config: Config, *, adds: bool = True) -> Path:
    """A state of random numbers, in which adapters add something or nothing."""

    def begun(declared: object, x: jax.Array) -> jax.Array:
        return x if adds or not (declared.is_adapter and declared.dims[1] == 'Q') else 0 * x

    with on_mesh(config), Checkpoints(run / 'checkpoints', config) as checkpoints:
        state = make_state(config, 0)
        checkpoints.save(state._replace(params=map_parameters(begun, state.params)), 1)
    return run


def tuned(family: str, folder: Path) -> Config:
    """The model of a directory, with adapters."""
    import_huggingface(folder_of(family), folder, ['train.dtype=float32'])
    return load(folder / 'config.yaml').model_copy(update={'lora': LORA})


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--adapter', '--dtype', 'bfloat16'], '--dtype bfloat16 has no effect with --adapter'),
        (['--adapter', '--shard-gb', '2'], '--shard-gb 2.0 has no effect with --adapter'),
        (['--base', 'ORG/NAME'], '--base ORG/NAME has no effect without --adapter'),
    ],
)
def test_an_option_of_the_other_kind_of_export_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ['export', 'hf', 'run', 'out', *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def export(run: Path, base: Path, folder: Path, family: str) -> None:
    """Write the model with its adapters, the one without, and the adapters alone."""
    named = family if family == 'phi3' else None  # the others are the first that fits
    export_huggingface(run, folder / 'with', family=named)
    export_huggingface(base, folder / 'without', family=named)
    export_adapters(run, folder / 'alone', base=str(folder / 'without'))


@pytest.mark.parametrize('family', FAMILIES)
def test_what_pefts_tensors_add_is_what_the_weights_have_more(family: str, tmp_path: Path) -> None:
    config = tuned(family, tmp_path / 'import')
    run, base = save(tmp_path / 'run', config), save(tmp_path / 'base', config, adds=False)
    export(run, base, tmp_path, family)
    merged, plain = (
        load_file(tmp_path / name / 'model.safetensors') for name in ('with', 'without')
    )
    added = {name: merged[name] - x for name, x in plain.items()}
    settings = json.loads((tmp_path / 'alone/adapter_config.json').read_text())
    alone = load_file(tmp_path / 'alone/adapter_model.safetensors')
    assert {*settings['target_modules']} == TARGETS.get(family, OF_LLAMA)
    assert (settings['r'], settings['lora_alpha']) == (4, 6.0)
    modules = {name.rsplit('.lora_', 1)[0] for name in alone}
    linears = 6 if family == 'bert' else len(settings['target_modules'])  # two output.dense
    assert len(modules) == config.model.num_layers * linears
    for module in modules:
        a, b = (alone.pop(f'{module}.lora_{which}.weight') for which in 'AB')
        weight = settings['lora_alpha'] / settings['r'] * b @ a
        actual = added.pop(f'{module.removeprefix("base_model.model.")}.weight')
        expected = weight.T if settings['fan_in_fan_out'] else weight
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert not alone
    assert all(not x.any() for x in added.values())


@pytest.mark.parametrize(('target', 'end'), [('out', 'attention.output'), ('down', 'output')])
def test_the_names_of_adapted_modules_select_no_others(
    target: str, end: str, tmp_path: Path
) -> None:
    """In a BERT, `output.dense` ends the names of two modules of a layer."""
    config = tuned('bert', tmp_path / 'import')
    config = config.model_copy(update={'lora': LORA.model_copy(update={'targets': (target,)})})
    export_adapters(save(tmp_path / 'run', config), tmp_path / 'alone')
    settings = json.loads((tmp_path / 'alone/adapter_config.json').read_text())
    layers = range(config.model.num_layers)
    expected = {f'bert.encoder.layer.{i}.{end}.dense' for i in layers}
    assert {*settings['target_modules']} == expected


@pytest.mark.parametrize('family', FAMILIES)
def test_peft_computes_with_them_what_the_merged_weights_compute(
    family: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip('torch', reason='needs torch')
    transformers = pytest.importorskip('transformers', reason='needs transformers')
    peft = pytest.importorskip('peft', reason='needs peft')
    config = tuned(family, tmp_path / 'import')
    run, base = save(tmp_path / 'run', config), save(tmp_path / 'base', config, adds=False)
    export(run, base, tmp_path, family)
    token = torch.arange(12)[None] % config.model.vocab_size

    def logits(path: Path) -> np.ndarray:
        # Phi-3's default is beyond a small vocabulary.
        kind = transformers.AutoModelForCausalLM
        if family == 'bert':
            kind = transformers.AutoModelForPreTraining
        model = kind.from_pretrained(path, pad_token_id=None)
        if path.name == 'without':
            model = peft.PeftModel.from_pretrained(model, tmp_path / 'alone')
        with torch.no_grad():
            output = model(token)
        return (output.prediction_logits if family == 'bert' else output.logits).numpy()

    expected = logits(tmp_path / 'with')
    actual = logits(tmp_path / 'without')
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


def test_training_an_import_in_its_own_folder_keeps_the_names_of_its_family(tmp_path: Path) -> None:
    config, run = tuned('phi3', tmp_path / 'run'), tmp_path / 'run'
    for resumed, step in (0, 1), (1, 2):
        with on_mesh(config), Checkpoints(run / 'checkpoints', config) as checkpoints:
            checkpoints.restore(resumed)
            checkpoints.save(make_state(config, step), step)
    export_adapters(run, tmp_path / 'alone')
    settings = json.loads((tmp_path / 'alone/adapter_config.json').read_text())
    assert {*settings['target_modules']} == TARGETS['phi3']
    assert export_huggingface(run, tmp_path / 'with') == ('phi3', 'float32')


def test_a_base_with_other_weights_is_rejected(tmp_path: Path) -> None:
    config = tuned('llama3', tmp_path / 'import')
    run, base = save(tmp_path / 'run', config), save(tmp_path / 'base', config, adds=False)
    export_huggingface(base, tmp_path / 'bfloat16', dtype='bfloat16')
    export_adapters(run, tmp_path / 'rounded', base=str(tmp_path / 'bfloat16'))
    for folder, fault in ((DATA / 'llama3', 'embed_tokens.weight differs'), (DATA / 'phi3', '.*')):
        with pytest.raises(ConfigError, match=f'--base {folder}: .*{fault}'):
            export_adapters(run, tmp_path / 'alone', base=str(folder), family='llama')
    export_huggingface(run, tmp_path / 'with')  # so that the adapters would be added twice
    with pytest.raises(ConfigError, match=r'proj.weight differs from .*: megajax export hf RUN'):
        export_adapters(run, tmp_path / 'alone', base=str(tmp_path / 'with'))
    assert not (tmp_path / 'alone').exists()


def test_an_import_of_the_merged_weights_begins_with_adapters_of_another_rank(
    tmp_path: Path,
) -> None:
    config = tuned('gpt2', tmp_path / 'import')
    run, merged = save(tmp_path / 'run', config), tmp_path / 'merged'
    export_huggingface(run, merged)
    import_huggingface(merged, tmp_path / 'base', ['train.dtype=float32'])
    start = config.run.model_copy(update={'start_from': str(tmp_path / 'base')})
    new = config.model_copy(update={'lora': LoraConfig(rank=8), 'run': start})
    with on_mesh(new), start_checkpoint(new, tmp_path / 'new') as found:
        assert found is not None
        begun = by_name(restore_params(found, new))
        plain = new.model_copy(update={'lora': None})
        expected = by_name(restore_params(run / 'checkpoints/1', plain))
    assert begun['layers.mlp.up.adapter.A'].shape[-1] == 8
    assert 'layers.mlp.up.weight' in expected
    for name, x in expected.items():
        if name.startswith('layers.'):  # the embedding has rows of padding
            np.testing.assert_allclose(begun[name], x, rtol=1e-5, atol=1e-5)


def test_an_import_begins_without_adapters(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'lora.rank=8: an import has no adapters yet; leave lora'
    ):
        import_huggingface(DATA / 'llama3', tmp_path / 'import', ['lora.rank=8'])
    assert not (tmp_path / 'import').exists()


def test_peft_is_told_of_no_task_that_it_has_no_class_for(tmp_path: Path) -> None:
    """AutoModelForCausalLM has no class for a model with images, and none with BERT's two heads."""
    overrides = ['train.dtype=float32', 'vision.max_patches=16']
    import_huggingface(DATA.parent / 'qwen3_vl', tmp_path / 'import', overrides)
    config = load(tmp_path / 'import/config.yaml').model_copy(update={'lora': LORA})
    export_adapters(save(tmp_path / 'run', config), tmp_path / 'alone')
    settings = json.loads((tmp_path / 'alone/adapter_config.json').read_text())
    assert settings['task_type'] is None
    assert {*settings['target_modules']} == OF_LLAMA
    names = load_file(tmp_path / 'alone/adapter_model.safetensors')
    assert all('.language_model.layers.' in name for name in names)


def test_a_model_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    import_huggingface(DATA / 'llama3', tmp_path / 'import')
    with pytest.raises(ConfigError, match='trained without lora and has no adapters'):
        export_adapters(tmp_path / 'import', tmp_path / 'alone')
    assert not (tmp_path / 'alone').exists()
