"""Write tests/interop/qwen3_vl: a tiny random Qwen3-VL as transformers saves it, and what it makes
of rows with two images.

    python tests/interop/make_qwen3_vl.py

needs `pip install 'megajax[test-hf]'`. The tests read what it wrote where that is not installed.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / 'qwen3_vl'
PATCH, MERGE, IMAGE, START, END, LENGTH = 4, 2, 60, 62, 63, 24
NEW = 12  # tokens after each row
GRIDS = [[4, 6], [2, 4]], [[2, 2], [6, 4]]  # patches of the two images in each of two rows
TEXT: dict[str, Any] = {
    'vocab_size': 64,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 128,
    'rms_norm_eps': 1e-6,
    'bos_token_id': None,
    'eos_token_id': None,
    'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': 5e6,
        'mrope_section': [2, 1, 1],
        'mrope_interleaved': True,
    },
}
VISION: dict[str, Any] = {
    'depth': 3,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_heads': 2,
    'patch_size': PATCH,
    'temporal_patch_size': 2,
    'spatial_merge_size': MERGE,
    'out_hidden_size': 16,
    'num_position_embeddings': 25,
    'deepstack_visual_indexes': [0, 1],
}


def random_model(*, tied: bool) -> Any:
    """A model of which no parameter is zero or one; tied or not, the others are the same."""
    torch.manual_seed(0)
    tokens = {'image_token_id': IMAGE, 'video_token_id': 61}
    tokens |= {'vision_start_token_id': START, 'vision_end_token_id': END}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT, vision_config=VISION, tie_word_embeddings=tied, **tokens
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).mul_(0.2).add_(parameter.ndim == 1)
    return model


def random_rows() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [2, S], text around the images, and uint8 patches [all patches, 3 p p]."""
    random = np.random.default_rng(0)
    rows = []
    for grids in GRIDS:
        row = [*random.integers(0, 50, 3)]
        for height, width in grids:
            units = height * width // MERGE**2
            row += [START, *[IMAGE] * units, END, *random.integers(0, 50, 2)]
        rows.append(row)
    tokens = np.array([[*row, *random.integers(0, 50, LENGTH - len(row))] for row in rows])
    count = sum(height * width for grids in GRIDS for height, width in grids)
    return tokens, random.integers(0, 256, (count, 3 * PATCH**2), dtype=np.uint8)


def inputs_of(tokens: np.ndarray, patches: np.ndarray, grids: Any) -> dict[str, torch.Tensor]:
    """What a model takes. A patch is (channel, frame, y, x), with the image in both frames."""
    pixels = (patches.reshape(-1, 3, 1, PATCH**2) / np.float32(127.5) - 1).repeat(2, 2)
    return {
        'input_ids': torch.from_numpy(tokens),
        'attention_mask': torch.ones(tokens.shape, dtype=torch.long),
        'pixel_values': torch.from_numpy(pixels.reshape(len(patches), -1).astype(np.float32)),
        'image_grid_thw': torch.tensor([[1, *grid] for grid in grids]),
        'mm_token_type_ids': torch.from_numpy((tokens == IMAGE).astype(np.int32)),
    }


def logits_of(model: Any, tokens: np.ndarray, patches: np.ndarray) -> np.ndarray:
    """[B, S, V] in fp32."""
    with torch.no_grad():
        made = model(**inputs_of(tokens, patches, [*GRIDS[0], *GRIDS[1]]))
    return made.logits.float().numpy()


def continuations_of(model: Any, tokens: np.ndarray, patches: np.ndarray) -> np.ndarray:
    """The likeliest tokens [B, NEW] after each row, of which the second lacks its last token."""
    rows, used = [], 0
    for row, grids in enumerate(GRIDS):
        count = sum(height * width for height, width in grids)
        prompt = tokens[row : row + 1, : LENGTH - row]
        inputs = inputs_of(prompt, patches[used : used + count], grids)
        used += count
        made = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        rows.append(made[0, prompt.shape[1] :].numpy())
    return np.stack(rows)


if __name__ == '__main__':
    shutil.rmtree(FOLDER, ignore_errors=True)
    tokens, patches = random_rows()
    arrays = {'tokens': tokens.astype(np.int16), 'patches': patches}
    for name, tied in (('tied', True), ('untied', False)):
        model = random_model(tied=tied)
        if not tied:
            model.save_pretrained(FOLDER)
            arrays['new'] = continuations_of(model, tokens, patches).astype(np.int16)
        arrays[name] = logits_of(model, tokens, patches)
    (FOLDER / 'generation_config.json').unlink(missing_ok=True)
    np.savez_compressed(FOLDER / 'logits.npz', **arrays)
