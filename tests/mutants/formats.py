"""Every format of a file that megajax reads, and which of its files are changed."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from mutants import data_files, model_files
from mutants import mutations as by
from mutants.mutations import Structure


@dataclasses.dataclass(frozen=True)
class Format:
    """How files of a format come to be in a folder, which of them are changed, and who reads them.

    `files` has patterns of names with the structures of those files, besides their bytes. Of
    several patterns that match the last counts. The reader gets the file that was changed.
    """

    write: Callable[[Path], None]
    files: Mapping[str, tuple[Structure, ...]]
    read: Callable[[Path], object]


ALL: dict[str, Format] = {
    'config': Format(data_files.write_configs, {'*': (by.in_lines,)}, data_files.read_config),
    'gpu': Format(data_files.write_gpu, {'*': (by.in_lines,)}, data_files.read_gpu),
    'budget': Format(data_files.write_budget, {'*': (by.in_lines,)}, data_files.read_budget),
    'lines': Format(
        data_files.write_lines,
        {
            '*.jsonl': (by.in_json_lines, by.in_lines),
            '*.txt': (by.in_lines,),
            '*.gz': (by.inside_gzip(by.in_json_lines), by.inside_gzip(by.in_bytes)),
            '*.zst': (by.inside_zstd(by.in_json_lines), by.inside_zstd(by.in_bytes)),
        },
        data_files.read_lines,
    ),
    'parquet': Format(data_files.write_parquet, {'*': ()}, data_files.read_build_input),
    'token_files': Format(
        data_files.write_pair, {'pair.*': (), 'pair*.json': (by.in_json,)}, data_files.read_pair
    ),
    'pictures': Format(
        data_files.write_pictures, {'*': (), '*.png': (by.in_png,)}, data_files.read_picture
    ),
    'image_text': Format(
        data_files.write_image_text,
        {'data.jsonl': (by.in_json_lines, by.in_lines)},
        data_files.read_image_text,
    ),
    'chat_template': Format(
        data_files.write_template, {'*': (by.in_lines,)}, data_files.read_template
    ),
    'tokenizer': Format(
        data_files.write_tokenizers, {'*': (by.in_json,)}, data_files.read_tokenizer
    ),
    'huggingface': Format(
        model_files.write_model, {'*.json': (by.in_json, by.in_json)}, model_files.read_model
    ),
    'safetensors': Format(
        model_files.write_safetensors,
        {'*.safetensors': (by.in_safetensors,), '*.json': (by.in_json,)},
        model_files.read_safetensors,
    ),
    'megatron': Format(
        model_files.write_ranks,
        {'*.txt': (by.in_lines,), '*.pt': (by.inside_zip(by.in_bytes),)},
        model_files.read_ranks,
    ),
    'torch_dist': Format(
        model_files.write_dist,
        {
            '*.txt': (by.in_lines,),
            '*.json': (by.in_json,),
            '.metadata': (),
            '*.pt': (by.inside_zip(by.in_bytes),),
            '*.distcp': (),
        },
        model_files.read_dist,
    ),
    'megatron_script': Format(
        model_files.write_script,
        {'*.sh': (by.in_lines, by.in_lines), '*.json': (by.in_json,)},
        model_files.read_script,
    ),
    'recording': Format(
        model_files.write_recording,
        {'*': (by.inside_zip(by.in_bytes),)},
        model_files.read_recording,
    ),
    'run': Format(
        model_files.write_run_folder,
        {
            'run/*.json*': (by.in_json_lines,),
            'run/*.gz': (by.inside_gzip(by.in_bytes),),
            'run/lock': (by.in_json,),
            'run/config.yaml': (by.in_lines,),
        },
        model_files.read_run_folder,
    ),
    'checkpoint': Format(
        model_files.write_run_folder,
        {
            'checkpoints/2/*.json': (by.in_json,),
            'checkpoints/2/SHA256SUMS': (by.in_lines,),
            'checkpoints/2/_CHECKPOINT_METADATA': (by.in_json,),
        },
        model_files.read_checkpoint,
    ),
    'profile': Format(
        model_files.write_run_folder,
        {
            'profile/**/*.pb': (),
            'profile/*.gz': (by.inside_gzip(by.in_lines),),
            'profile/config.yaml': (by.in_lines,),
        },
        model_files.read_profile,
    ),
}
