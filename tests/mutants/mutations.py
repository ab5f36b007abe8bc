"""Small random changes of a file's bytes, and of the structure that its format gives them.

A structure is a function of a content and a random generator that returns another content. Those of
containers change what is inside, and pack it again with the right lengths and checksums: otherwise
these would be all that a reader ever checks.
"""

import copy
import gzip
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Structure = Callable[[bytes, Random], bytes]

MAX_BYTES = 1 << 20  # of a mutant, so that what it costs to read is bounded by its size
DEEP = 5_000  # brackets within each other
INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float('nan'), float('inf'), '', ' ', 'x', '0', 'null', '../../etc/passwd', '/dev/zero', '-',
    'a\0b', '\ud800', '\u2028', '²', 'é' * 300, 'x' * 5_000, [], {}, [None], {'': None}, [[]], '\n',
    [0] * 1_000,
)  # fmt: skip
WORDS = (
    '', '-', '--', '=', '0', '-1', '1e999', 'nan', '9' * 5_000, '10' * 9, '!!python/object:os',
    '&a', '*a', '<<', '[' * 60, '{', '}', '"', "'", '\\', '\0', '\t', '\r', '\ufeff', '\u2028',
    '$x', '${x}', '(', ')', '@x', '#', '{{', '}}', '{%', '%}', '~', '|', '>', ':', ': ', '- ', '²',
)  # fmt: skip


def in_bytes(content: bytes, random: Random) -> bytes:
    """Change, insert, delete, copy or cut off some bytes."""
    start = random.randrange(len(content) + 1)
    end = min(len(content), start + random.choice((1, 1, 1, 2, 4, 8, 16, 64, 1_000)))
    before, part, after = content[:start], content[start:end], content[end:]
    kind = random.randrange(8)
    if kind == 0 and part:
        flipped = bytes([part[0] ^ 1 << random.randrange(8)])
        return before + flipped + part[1:] + after
    if kind == 1:
        return before + random.randbytes(len(part)) + after
    if kind == 2:
        return before + after
    if kind == 3:
        return before + part * random.choice((2, 3, 100)) + after
    if kind == 4:
        return before
    if kind == 5:
        size, order = random.choice((1, 2, 4, 8)), random.choice(('little', 'big'))
        number = random.choice(INTEGERS) % 256**size
        return before + number.to_bytes(size, order) + content[start + size :]
    if kind == 6:
        other = random.randrange(len(content) + 1)
        return before + content[other : other + len(part)] + after
    return before + random.choice(WORDS).encode() + after


def in_json(content: bytes, random: Random) -> bytes:
    """Change a value or a key of a JSON document."""
    try:
        document = json.loads(content)
        places = [*_places(document)] or [([document], 0)]
    except (ValueError, RecursionError):  # an earlier mutation of the same file has broken it
        return in_bytes(content, random)
    if random.random() < 0.05:
        bracket = random.choice(('[', '{"a":'))
        return bracket.encode() * DEEP
    group, key = random.choice(places)
    kind = random.randrange(6)
    if kind == 0:
        del group[key]
    elif kind == 1:
        other, place = random.choice(places)
        group[key] = copy.deepcopy(other[place])
    elif kind == 2 and isinstance(group, dict):
        group[str(random.choice(VALUES))] = group.pop(key)
    elif kind == 2:
        group.append(copy.deepcopy(group[key]))
    elif kind == 3 and isinstance(group[key], int | float) and abs(group[key]) < 1e60:
        group[key] *= random.choice((-1, 2, 10**6, 10**30, 0.5))
    else:
        group[key] = copy.deepcopy(random.choice(VALUES))
    return json.dumps(document, ensure_ascii=True).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(document, dict | list):
        return
    for key in document if isinstance(document, dict) else range(len(document)):
        yield document, key
        yield from _places(document[key])


def in_json_lines(content: bytes, random: Random) -> bytes:
    lines = content.split(b'\n')
    number = random.randrange(len(lines))
    lines[number] = in_json(lines[number], random)
    return b'\n'.join(lines)


def in_lines(content: bytes, random: Random) -> bytes:
    """Drop, repeat, exchange or cut lines, or replace a word in one."""
    lines = content.split(b'\n')
    number, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.randrange(6)
    if kind == 0:
        del lines[number]
    elif kind == 1:
        lines.insert(other, lines[number])
    elif kind == 2:
        lines[number], lines[other] = lines[other], lines[number]
    else:
        words = re.split(rb'(\W+)', lines[number])
        place = random.randrange(len(words))
        words[place] = random.choice(
            (random.choice(WORDS).encode(), random.choice(re.split(rb'(\W+)', lines[other])))
        )
        lines[number] = b''.join(words)
    return b'\n'.join(lines)


def inside_gzip(inner: Structure) -> Structure:
    def structure(content: bytes, random: Random) -> bytes:
        try:
            plain = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            return in_bytes(content, random)
        return gzip.compress(inner(plain, random), compresslevel=1, mtime=0)

    return structure


def inside_zstd(inner: Structure) -> Structure:
    import zstandard

    def structure(content: bytes, random: Random) -> bytes:
        try:
            plain = zstandard.decompress(content, max_output_size=MAX_BYTES)
        except zstandard.ZstdError:
            return in_bytes(content, random)
        return zstandard.compress(inner(plain, random))

    return structure


def inside_zip(inner: Structure) -> Structure:
    """Change one member, or its name."""

    def structure(content: bytes, random: Random) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
        except Exception:  # zipfile raises almost anything for a broken file
            return in_bytes(content, random)
        name = random.choice([*members] or ['x'])
        member = members.pop(name, b'')
        renamed = name + random.choice(WORDS) if random.random() < 0.1 else name
        file = io.BytesIO()
        with zipfile.ZipFile(file, 'w') as archive:
            for each, data in {**members, renamed: inner(member, random)}.items():
                archive.writestr(each, data)
        return file.getvalue()

    return structure


def in_safetensors(content: bytes, random: Random) -> bytes:
    """Change the header, which is JSON, and give it its new length."""
    length = int.from_bytes(content[:8], 'little')
    header = in_json(content[8 : 8 + length], random)
    return len(header).to_bytes(8, 'little') + header + content[8 + length :]


def in_png(content: bytes, random: Random) -> bytes:
    """Change a chunk, and give it its new length and checksum."""
    chunks, start = [], 8
    while start + 12 <= len(content):
        (length,) = struct.unpack('>I', content[start : start + 4])
        kind = content[start + 4 : start + 8]
        chunks.append((kind, content[start + 8 : start + 8 + length]))
        start += 12 + length
    if not chunks:
        return in_bytes(content, random)
    number = random.randrange(len(chunks))
    kind, data = chunks[number]
    chunks[number] = kind, in_bytes(data, random)
    packed = (
        struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return content[:8] + b''.join(packed)


def mutate(content: bytes, structures: tuple[Structure, ...], random: Random) -> bytes:
    """Return another content, after one to four changes."""
    changed = content
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        changed = random.choice((in_bytes, *structures))(changed, random)[:MAX_BYTES]
    return changed if changed != content else content + b'\0'
