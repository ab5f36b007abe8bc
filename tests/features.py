"""The settings that give a config the features of the table of conflicts."""

VISION = ' '.join(
    f'vision.{size}' for size in ('num_layers=1', 'hidden_size=64', 'num_heads=4', 'max_patches=16')
)
VALUES = {
    'data.order': 'data.order=megatron',
    'lora': 'lora.rank=8',
    'train.fp8_scaling=current': 'train.dtype=fp8 train.fp8_scaling=current',
    'vision': VISION,
    'vision.fusion=cross_attention': f'{VISION} vision.fusion=cross_attention',
    'vision.deepstack': 'vision.deepstack=[0]',
    'mesh.context': 'mesh.context=2',
    'mesh.model_rows': 'mesh.model_rows=2',
    'mesh.replicas': 'mesh.replicas=2',
    'mesh.stages': 'mesh.stages=2',
    'model.window': 'model.window=8',
    'model.experts': 'model.experts={"count":4,"active":2,"ffn_size":64}',
    'model.dropout': 'model.dropout=0.1',
    'model.norm_position': 'model.norm_position=both',
    'train.sample_prompts': 'train.sample_prompts=["a"]',
    'model.rope_scaling': 'model.rope_scaling={"type":"linear","factor":2}',
}
