"""Pictures are read as a person sees them, or refused by file, limit and fix; nothing hangs."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megajax.core.config import ConfigError
from megajax.runtime.data.images import inside, read_image, read_size

RED, BLUE, WHITE = (200, 30, 30), (30, 30, 200), (255, 255, 255)
PLACE = 'data.jsonl:7'


def halves() -> Image.Image:
    """Red above, blue below: 20 rows, 30 columns."""
    image = Image.new('RGB', (30, 20), RED)
    image.paste(BLUE, (0, 10, 30, 20))
    return image


def save(folder: Path, image: Image.Image, name: str = 'a.png', **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


def assert_halves(pixels: np.ndarray, tolerance: int = 3) -> None:
    assert pixels.shape == (20, 30, 3)
    assert pixels.dtype == np.uint8
    for part, color in ((pixels[:8], RED), (pixels[12:], BLUE)):
        assert np.abs(part.astype(int) - color).max() <= tolerance


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as found:
        read_image(path, place=PLACE)
    text = str(found.value)
    assert text.startswith(f'{PLACE}: {path}: ')
    assert ';' in text
    return text


@pytest.mark.parametrize('name', ['a.png', 'a.webp', 'a.bmp', 'a.tif', 'a.jpg', 'a.gif', 'a.ppm'])
def test_formats_give_the_same_picture(tmp_path: Path, name: str) -> None:
    options: dict[str, object] = {'lossless': True} if name == 'a.webp' else {}
    assert_halves(read_image(save(tmp_path, halves(), name, **options)), tolerance=15)


def test_pages_of_a_tiff_are_not_left_out(tmp_path: Path) -> None:
    path = save(tmp_path, halves(), 'a.tif', save_all=True, append_images=[halves()] * 2)
    assert 'has several pages; write each to a file of its own' in refusal(path)
    with pytest.raises(ConfigError, match='has several pages'):
        read_size(path)


@pytest.mark.parametrize('kind', [{254: 1}, {254: 4}, {255: 2}])
def test_a_smaller_copy_or_mask_in_a_tiff_is_no_page(tmp_path: Path, kind: dict[int, int]) -> None:
    copy = halves().resize((6, 4))
    copy.encoderinfo = {'tiffinfo': kind}
    path = save(tmp_path, halves(), 'a.tif', save_all=True, append_images=[copy])
    with Image.open(path) as image:
        assert image.n_frames == 2
    assert read_size(path) == (20, 30)
    assert_halves(read_image(path))


@pytest.mark.parametrize('kind', [0, 1])
def test_a_copy_in_a_tiff_need_not_be_decodable(tmp_path: Path, kind: int) -> None:
    copy = halves().resize((6, 4))
    copy.encoderinfo = {'tiffinfo': {254: kind}}
    path = save(tmp_path, halves(), 'a.tif', save_all=True, append_images=[copy])
    with Image.open(path) as image:
        image.seek(1)
        second = image._frame_pos[1]
    data = bytearray(path.read_bytes())
    for entry in range(struct.unpack_from('<H', data, second)[0]):
        if struct.unpack_from('<H', data, at := second + 2 + 12 * entry)[0] == 262:
            struct.pack_into('<H', data, at + 8, 999)  # no photometric interpretation
    path.write_bytes(data)
    if kind:
        assert read_size(path) == (20, 30)
        assert_halves(read_image(path))
    else:
        assert 'has several pages' in refusal(path)


def test_a_tiff_without_its_second_directory_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, halves(), 'a.tif')
    data = bytearray(path.read_bytes())
    first = struct.unpack_from('<I', data, 4)[0]
    struct.pack_into('<I', data, first + 2 + 12 * struct.unpack_from('<H', data, first)[0], 1 << 20)
    path.write_bytes(data)
    assert_halves(read_image(path))


@pytest.mark.parametrize('mode', ['P', 'RGBA', 'CMYK', 'YCbCr'])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    name = 'a.jpg' if mode in ('CMYK', 'YCbCr') else 'a.png'
    image = halves().quantize(2) if mode == 'P' else halves().convert(mode)
    assert_halves(read_image(save(tmp_path, image, name, quality=100)), tolerance=8)


def test_a_picture_of_two_colors_is_black_and_white(tmp_path: Path) -> None:
    pixels = read_image(save(tmp_path, Image.new('1', (4, 4), 1)))
    np.testing.assert_array_equal(pixels, np.full((4, 4, 3), 255))


@pytest.mark.parametrize('name', ['a.png', 'a.tif'])
def test_16_bits_keep_their_tones(tmp_path: Path, name: str) -> None:
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    pixels = read_image(save(tmp_path, Image.fromarray(grey), name))
    assert pixels[0].tolist() == [[0] * 3, [1] * 3, [128] * 3, [255] * 3]


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_what_is_transparent_is_white(tmp_path: Path, mode: str) -> None:
    if mode == 'P':
        image = Image.new('P', (4, 4), 1)
        image.putpalette([0, 0, 0, 200, 30, 30])
        path = save(tmp_path, image, transparency=1)
    else:
        path = save(tmp_path, Image.new(mode, (4, 4), (0,) * len(mode)))
    np.testing.assert_array_equal(read_image(path), np.full((4, 4, 3), 255))


def test_half_transparent_is_between_color_and_white(tmp_path: Path) -> None:
    pixels = read_image(save(tmp_path, Image.new('RGBA', (2, 2), (0, 0, 0, 128))))
    assert abs(int(pixels[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('name', ['a.jpg', 'a.png', 'a.tif', 'a.webp'])
def test_pictures_stand_upright(tmp_path: Path, name: str, orientation: int) -> None:
    upright = halves()
    upright.paste((0, 160, 0), (0, 0, 10, 10))  # tells left from right
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path, stored, name, exif=exif, quality=95)
    pixels = read_image(path)
    assert read_size(path) == pixels.shape[:2] == (20, 30)
    assert pixels[5, 5].argmax() == 1
    assert pixels[5, 25].argmax() == 0
    assert pixels[15, 15].argmax() == 2


@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_broken_exif_does_not_hide_the_picture(tmp_path: Path) -> None:
    path = save(tmp_path, halves(), 'a.jpg', exif=b'Exif\0\0MM\0*\xff\xff\xff\xff', quality=95)
    assert_halves(read_image(path), 4)


@pytest.mark.parametrize('name', ['a.gif', 'a.webp', 'a.png'])
def test_an_animation_is_its_first_frame(tmp_path: Path, name: str) -> None:
    other = Image.new('RGB', (30, 20), (0, 255, 0))
    path = save(tmp_path, halves(), name, save_all=True, append_images=[other], lossless=True)
    assert Image.open(path).n_frames == 2
    assert_halves(read_image(path))


@pytest.mark.parametrize('mode', ['L', 'RGB', 'P', 'I;16', '1'])
def test_one_pixel_is_a_picture(tmp_path: Path, mode: str) -> None:
    assert read_image(save(tmp_path, Image.new(mode, (1, 1)))).shape == (1, 1, 3)


@pytest.mark.parametrize('name', ['a.png', 'a.jpg', 'a.gif', 'a.webp', 'a.tif', 'a.bmp'])
@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_truncated_pictures_are_refused(tmp_path: Path, name: str) -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (40, 40, 3), np.uint8))
    path = save(tmp_path, noise, name)
    data = path.read_bytes()
    for length in (0, 1, 10, len(data) // 4, len(data) // 2, len(data) * 9 // 10):
        path.write_bytes(data[:length])
        refusal(path)


@pytest.mark.parametrize('name', ['a.png', 'a.jpg', 'a.gif', 'a.bmp'])
def test_a_size_is_read_from_the_beginning_of_a_file(tmp_path: Path, name: str) -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (200, 300, 3), np.uint8))
    path = save(tmp_path, noise, name)
    path.write_bytes(path.read_bytes()[:1000])
    assert read_size(path) == (200, 300)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), name=st.sampled_from(['png', 'jpeg', 'gif', 'webp', 'tiff']))
def test_broken_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject, name: str) -> None:
    file = io.BytesIO()
    halves().save(file, name)
    content = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f'a.{name}'
    path.write_bytes(content)
    try:
        found: np.ndarray | str = read_image(path, place=PLACE, max_pixels=1 << 20)
    except ConfigError as error:
        found = str(error)
    if isinstance(found, str):
        assert found.startswith(f'{PLACE}: {path}: ')
    else:
        assert found.ndim == 3
        assert found.shape[2] == 3
        assert found.dtype == np.uint8


@pytest.mark.parametrize(
    ('width', 'height'), [(10_000, 10_000), (1 << 26, 2), (30_000, 30_000), (60_000, 60_000)]
)
@pytest.mark.filterwarnings('ignore::PIL.Image.DecompressionBombWarning')
def test_a_bomb_is_refused_by_its_header(tmp_path: Path, width: int, height: int) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        )

    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    path = tmp_path / 'bomb.png'
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', b'x' * 100))
    assert 'more than 67,108,864' in refusal(path)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    texts = {
        'text.png': b'hello',
        'a.eps': b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n',
        'a.svg': b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    }
    for name in ('a.ico', 'a.tga'):
        texts[name] = save(tmp_path, halves(), name).read_bytes()
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
        assert 'is not an image' in refusal(tmp_path / name)


def test_a_picture_without_a_scale_is_refused(tmp_path: Path) -> None:
    grey = np.array([[0.0, 0.5, 7.0]], np.float32)
    assert 'floating-point' in refusal(save(tmp_path, Image.fromarray(grey), 'a.tif'))
    assert '16 bits' in refusal(save(tmp_path, Image.new('I', (2, 2), 70_000), 'b.tif'))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / 'pipe.png')
    for name in ('pipe.png', 'missing.png', '.'):
        assert 'is not a file' in refusal(tmp_path / name)
    with pytest.raises(ConfigError, match=r'is not a file; correct the path'):
        read_image(tmp_path / ('x' * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason='root reads every file')
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, halves())
    path.chmod(0)
    assert 'Permission denied' in refusal(path)


def test_names_lead_into_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / 'set'
    (folder / 'more').mkdir(parents=True)
    path = save(folder, halves())
    save(tmp_path, halves(), 'secret.png')
    (folder / 'link.png').symlink_to(tmp_path / 'secret.png')
    (folder / 'good.png').symlink_to('a.png')
    (folder / 'loop.png').symlink_to('loop.png')
    (tmp_path / 'alias').symlink_to(folder)
    for name in ('a.png', 'more/../a.png', 'good.png', str(path)):
        assert inside(folder, name) == path
        assert inside(tmp_path / 'alias', name) == path
    outside = ('../secret.png', 'link.png', str(tmp_path / 'secret.png'), 'more/../../secret.png')
    for name in (*outside, '/etc/passwd', '..'):
        with pytest.raises(ConfigError, match=r'outside .*; move it there') as found:
            inside(folder, name, place=PLACE)
        assert str(found.value).startswith(f'{PLACE}: {name}: ')
    for name in ('loop.png', 'a\0.png'):
        with pytest.raises(ConfigError, match='is no path'):
            inside(folder, name, place=PLACE)
