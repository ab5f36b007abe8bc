"""Sizes of a vision encoder that cannot work are refused with the value that does."""

import pytest

from megajax.core.config import ConfigError, LoraConfig, load, reload

BASE = 'tiny_vlm'


def problems(*overrides: str) -> list[str]:
    try:
        load(BASE, overrides)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ('wrong', 'said', 'right'),
    [
        ('vision.num_heads=5', '96 is not a multiple of vision.num_heads=5', 'vision.num_heads=6'),
        ('vision.num_heads=16', 'use 64 or 128', 'vision.hidden_size=128'),
        ('vision.max_patches=26', 'use 24 or 28', 'vision.max_patches=28'),
        ('vision.max_patches=100', 'at most 96', 'vision.max_patches=96'),
        (
            'vision.max_patches=100 model.num_layers=4 vision.deepstack=[]',
            'or vision.fusion=cross_attention',
            'vision.fusion=cross_attention',
        ),
        (
            'vision.cross_every=1 vision.deepstack=[]',
            '1 has no effect with vision.fusion=tokens; remove it, or set vision.fusion=cross_a',
            'vision.fusion=cross_attention',
        ),
        (
            'vision.cross_gate=1.0',
            '1.0 has no effect with vision.fusion=tokens',
            'vision.cross_gate=0.0',
        ),
        (
            'vision.freeze=[encoder] lora.rank=4',
            "['encoder'] has no effect with lora, which freezes everything except its adapters",
            'vision.freeze=[]',
        ),
        ('vision.image_token=258', 'at most 257', 'vision.image_token=257'),
        ('vision.deepstack=[1,0]', 'must be ascending layers', 'vision.deepstack=[0,1]'),
        ('vision.deepstack=[3]', '0 to 2', 'vision.deepstack=[2]'),
        ('model.num_layers=1 vision.deepstack=[0,1]', 'use at most 1', 'vision.deepstack=[1]'),
        (
            'vision.deepstack=[] vision.fusion=cross_attention vision.cross_every=2',
            'model.num_layers: 3 is not a multiple of vision.cross_every=2',
            'vision.cross_every=3',
        ),
        (
            'vision.fusion=cross_attention vision.cross_every=3 vision.deepstack=[] '
            'model.experts={"count":4,"active":2,"ffn_size":64} model.ffn_size=250 '
            'mesh.data=1 mesh.model=4',
            'model.ffn_size: 250 is not a multiple of mesh.model=4; use 248 or 252',
            'model.ffn_size=252',
        ),
        (
            'vision.fusion=cross_attention vision.cross_every=1 vision.deepstack=[1]',
            'one token marks the image',
            'vision.deepstack=[]',
        ),
        (
            'model.position=mrope model.mrope_section=[8,5,5]',
            'add up to 16',
            'model.mrope_section=[6,5,5]',
        ),
        (
            'model.position=mrope model.mrope_section=[4,6,6]',
            'at most 5',
            'model.mrope_section=[6,5,5]',
        ),
        ('model.mrope_section=[6,5,5] model.position=rope_2d', 'use mrope', 'model.position=mrope'),
    ],
)
def test_the_message_offers_what_works(wrong: str, said: str, right: str) -> None:
    (problem,) = problems(*wrong.split())
    assert said in problem
    assert problem.startswith('override ')
    assert problems(*wrong.split(), right) == []


def test_a_config_without_the_section_has_no_encoder() -> None:
    assert load('tiny').vision is None
    assert load('tiny').model.vision is None


def test_the_model_of_a_copy_has_the_sections_of_the_copy() -> None:
    config = load(BASE)
    assert config.model.vision is config.vision is not None
    text = config.model_copy(update={'vision': None})
    assert text.model.vision is None
    assert config.model.vision is config.vision
    adapted = text.model_copy(update={'lora': LoraConfig(rank=4)})
    assert adapted.model.lora is adapted.lora is not None
    assert adapted.model_copy(update={'lora': None}).model == text.model
    assert text.model_copy(update={'model': config.model}) == text


def test_the_section_is_no_key_of_the_model() -> None:
    (problem,) = problems('model.vision=1')
    assert 'model.vision: unknown key' in problem


def test_no_smallest_image_is_set_where_every_image_has_one_size() -> None:
    with pytest.raises(ConfigError) as error:
        load('tiny_arr_coc', ['vision.min_patches=16'])
    assert str(error.value) == (
        'override vision.min_patches=16: vision.min_patches: 16 has no effect with relevance, '
        'which scales every image to vision.max_patches; use 0, or remove relevance'
    )
    stored = load('tiny_arr_coc').model_dump(mode='json')
    stored['vision']['min_patches'] = 16
    assert reload(stored, place='record.json') == load('tiny_arr_coc')
