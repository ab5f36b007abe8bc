"""Text, ids and mask of chats are those of transformers, for the templates of other models."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megajax.core.config import ConfigError
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.chat import DEFAULT, Template, TemplateChat
from megajax.runtime.data.image_text.documents import FileDocument, read_documents
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.synthetic_corpus import NO_TOKEN
from megajax.runtime.data.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures('forked_renderers')

transformers = pytest.importorskip('transformers')
TEMPLATES = Path(pytest.importorskip('trl').__file__).parent / 'chat_templates'

DEEPSEEK = ['<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>']
LLAMA = ['<|begin_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>']
QWEN = ['<|endoftext|>', '<|im_end|>', '<|im_start|>']
# the special tokens of each family; the first two are bos_token and eos_token
FAMILIES = {
    'cohere': ['<BOS_TOKEN>', '<|END_OF_TURN_TOKEN|>', '<|START_OF_TURN_TOKEN|>'],
    'deepseek_r1_distill': DEEPSEEK,
    'deepseekv3': DEEPSEEK,
    'gemma': ['<bos>', '<eos>', '<start_of_turn>', '<end_of_turn>'],
    'gemma3': ['<bos>', '<eos>', '<start_of_turn>', '<end_of_turn>'],
    'glm4moe': ['[gMASK]', '<|endoftext|>', '<|user|>', '<|assistant|>', '<|system|>'],
    'gptoss': [
        '<|startoftext|>',
        '<|return|>',
        '<|start|>',
        '<|end|>',
        '<|message|>',
        '<|channel|>',
        '<|call|>',
    ],
    'lfm2': ['<|startoftext|>', '<|im_end|>', '<|im_start|>'],
    'llama3': LLAMA,
    'llama3_1': LLAMA,
    'llama3_2': LLAMA,
    'nemotron_3_nano': ['<s>', '<|im_end|>', '<|im_start|>'],
    'phi3': ['<s>', '<|endoftext|>', '<|user|>', '<|assistant|>', '<|system|>', '<|end|>'],
    'phi3_5': ['<s>', '<|endoftext|>', '<|user|>', '<|assistant|>', '<|system|>', '<|end|>'],
    'qwen2_5': QWEN,
    'qwen3': QWEN,
    'qwen3_instruct_2507': QWEN,
}


def message(role: str, content: Any = None, **keys: Any) -> dict[str, Any]:
    return {'role': role, **({} if content is None else {'content': content}), **keys}


WEATHER = {
    'type': 'function',
    'function': {
        'name': 'weather',
        'description': 'The weather <now> & "here"',
        'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}},
    },
}
CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Ōsaka'}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    'one turn': {'messages': [message('user', 'Hi'), message('assistant', 'Hello')]},
    'system': {
        'messages': [
            message('system', 'Be brief.'),
            message('user', 'Hi'),
            message('assistant', 'Hello'),
        ]
    },
    'two turns': {
        'messages': [
            message('user', 'one'),
            message('assistant', 'a first\nanswer'),
            message('user', 'two'),
            message('assistant', 'and a second'),
        ]
    },
    'not ASCII': {
        'messages': [message('user', 'Größe? 大きさ 🦜'), message('assistant', '  três ½ 🦜\n')]
    },
    'tools': {
        'messages': [
            message('user', 'The weather?'),
            message('assistant', 'No idea.'),
        ],
        'tools': [WEATHER],
    },
    'call, content null': {
        'messages': [
            message('user', 'The weather?'),
            {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
            message('tool', '22 degrees', name='weather', tool_call_id='1'),
            message('assistant', 'Warm.'),
        ],
        'tools': [WEATHER],
    },
    'call, content absent': {
        'messages': [
            message('user', 'The weather?'),
            message('assistant', tool_calls=[CALL]),
        ],
    },
    'call with content': {
        'messages': [
            message('user', 'The weather?'),
            message('assistant', 'I ask.', tool_calls=[CALL]),
            message('tool', '{"degrees": 22}', name='weather'),
            message('assistant', 'Warm.'),
        ],
        'tools': [WEATHER],
    },
    'reasoning': {
        'messages': [
            message('user', '2+2?'),
            message('assistant', '4', reasoning_content='two and two'),
        ]
    },
    'reasoning, two turns': {
        'messages': [
            message('user', '2+2?'),
            message('assistant', '4', reasoning_content='two and two'),
            message('user', '3+3?'),
            message('assistant', '6', reasoning_content='three and three'),
        ]
    },
    'names': {
        'messages': [message('user', 'Hi', name='Ada'), message('assistant', 'Hello, Ada')],
    },
    'documents': {
        'messages': [message('user', 'Hi'), message('assistant', 'Hello')],
        'documents': [{'title': 'A', 'text': 'a <b>'}],
    },
}
# templates that write earlier turns otherwise once more messages follow
REWRITE = {'qwen3', 'gptoss', 'glm4moe', 'nemotron_3_nano'}
END = '</s>'  # of our documents
SHAPE = RowShape(
    seq_len=100_000,
    images=0,
    patches=PatchSize(patch_size=1, merge_size=1, max_patches=1),
    image_token=NO_TOKEN,
    mrope=False,
)


@functools.cache
def trained() -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [json.dumps(conversation) for conversation in CONVERSATIONS.values()] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def tokenizer_of(special: list[str]) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(trained())
    backend.add_special_tokens([*special, END])
    return backend


def named(special: list[str]) -> dict[str, str]:
    return dict(zip(('bos_token', 'eos_token'), special, strict=False))


class Ours:
    """Documents as a run reads them."""

    def __init__(self, template: str, special: list[str], folder: Path):
        self.tokenizer = Tokenizer(tokenizer_of(special), 'small')
        self.chat = TemplateChat(Template(name='t', texts={DEFAULT: template}), named(special))
        self._folder = folder

    def read(self, line: dict[str, Any]) -> FileDocument:
        (self._folder / 'a.jsonl').write_text(json.dumps(line) + '\n')
        (document,) = read_documents(self._folder / 'a.jsonl', SHAPE, self.tokenizer, self.chat)
        return document

    def answers(self, document: FileDocument) -> str:
        return self.tokenizer.decode(document.tokens[document.answered]).removesuffix(END)


class Theirs:
    """Documents as transformers reads them."""

    def __init__(self, template: str, special: list[str]):
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer_of(special), chat_template=template, **named(special)
        )
        self.has_marks = 'endgeneration' in template

    def read(self, line: dict[str, Any]) -> tuple[list[int], list[int]]:
        found = self._tokenizer.apply_chat_template(
            line['messages'],
            tools=line.get('tools'),
            documents=line.get('documents'),
            return_dict=True,
            return_assistant_tokens_mask=self.has_marks,
        )
        return found['input_ids'], found.get('assistant_masks', [])


def without(line: dict[str, Any], unread: str) -> dict[str, Any]:
    """A line without the keys that an error says are not read."""
    names = re.findall(r'"(\w+)"(?: of message (\d+))?', unread)
    line = json.loads(json.dumps(line))
    for key, number in names:
        del (line['messages'][int(number) - 1] if number else line)[key]
    return line


def verdict(ours: Ours, theirs: Theirs, line: dict[str, Any]) -> str:
    """How one conversation compares; starts with 'different' if it is a fault."""
    try:
        expected, mask = theirs.read(line)
    except Exception as error:  # whatever a template raises
        with pytest.raises(ConfigError):
            ours.read(line)
        return f'neither renders it: {error}'
    try:
        document = ours.read(line)
    except ConfigError as error:
        said = str(error).split('a.jsonl:1: ')[1]
        if 'does not read this' in said:
            same = theirs.read(without(line, said.split(': the chat')[0]))[0] == expected
            return 'refused, for a key is not read' if same else f'different: {said}'
        if 'writes message' in said:
            return 'refused, for earlier turns are rewritten'
        return f'different: {said}'
    end = [ours.tokenizer.eod]
    if document.tokens.tolist() not in (expected, expected + end):
        return 'different: ids'
    if theirs.has_marks and document.answered.tolist()[: len(mask)] != list(map(bool, mask)):
        return 'different: mask'
    last = line['messages'][-1]
    if str(last.get('content', '')).strip() not in ours.answers(document):
        return f'different: {ours.answers(document)!r} counts'
    return 'equal'


FILES = [
    (f'{family}{kind}', special)
    for family, special in FAMILIES.items()
    for kind in ('', '_training')
    if (TEMPLATES / f'{family}{kind}.jinja').is_file()
]


@pytest.mark.parametrize(('name', 'special'), FILES, ids=[name for name, _ in FILES])
def test_chats_of_a_family_are_those_of_transformers_or_refused_with_reason(
    name: str, special: list[str], tmp_path: Path
) -> None:
    template = (TEMPLATES / f'{name}.jinja').read_text('utf-8')
    ours, theirs = Ours(template, special, tmp_path), Theirs(template, special)
    with ours.chat:
        found = {said: verdict(ours, theirs, line) for said, line in CONVERSATIONS.items()}
    for said, how in found.items():
        print(f'{name:28} {said:22} {how}')
    assert not [how for how in found.values() if how.startswith('different')]
    assert found['one turn'] == found['not ASCII'] == 'equal'
    rewritten = [said for said, how in found.items() if 'rewritten' in how]
    if rewritten:
        assert name in REWRITE
    elif name not in REWRITE:
        assert found['two turns'] == 'equal'


def test_what_a_message_spells_is_text_and_not_a_token_as_for_transformers(tmp_path: Path) -> None:
    """The one difference, as with `sanitize_control_tokens` of transformers."""
    template = (TEMPLATES / 'qwen2_5.jinja').read_text('utf-8')
    line = {'messages': [message('user', 'a<|im_end|>'), message('assistant', 'b')]}
    ours, theirs = Ours(template, QWEN, tmp_path), Theirs(template, QWEN)
    with ours.chat:
        tokens = ours.read(line).tokens.tolist()
    end = ours.tokenizer.token_id('<|im_end|>')
    assert (tokens.count(end), theirs.read(line)[0].count(end)) == (3, 4)
    assert ours.tokenizer.decode(tokens[:-1]) == ours.tokenizer.decode(theirs.read(line)[0])
