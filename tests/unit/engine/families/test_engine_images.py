"""A picture's file to pixels, digest and length: what is taken, what is refused, and what is told apart."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parkd_engine.vision import images
from parkd_engine.vision.images import MAX_READS, MAX_SCANS, ImageProcessor, decode
from PIL import Image

from parkd.errors import UnreadableImage
from parkd.state import ImageSize, ImageTokens
from tests.unit.engine.kit.hybrid_models import hybrid_config
from tests.unit.engine.kit.vision_models import IMAGE_ID, png

NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def qwen(**settings: Any) -> ImageProcessor:
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    library = transformers.Qwen2VLImageProcessorPil(
        **{"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": size, **settings}
    )
    return ImageProcessor(library, hybrid_config("qwen3.5-vl"), ImageTokens("i", "i", IMAGE_ID))


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "JPEG"])
def test_the_formats_that_clients_send_are_read(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    image = decode(saved(Image.fromarray(NOISE), form, **options))
    assert (image.mode, image.size) == ("RGB", (40, 24))
    if form in ("PNG", "WEBP"):
        assert np.array_equal(np.asarray(image), NOISE)


def test_other_formats_are_not_even_tried() -> None:
    for form in ("BMP", "TIFF", "PPM"):
        with pytest.raises(UnreadableImage, match="none of PNG, JPEG, WEBP, GIF"):
            decode(saved(Image.fromarray(NOISE), form))


def test_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    turned = decode(saved(Image.fromarray(NOISE), "PNG", exif=exif))
    assert turned.size == (24, 40)
    assert np.array_equal(np.asarray(turned), np.rot90(NOISE, -1))


def test_what_is_transparent_lies_on_white() -> None:
    clear = np.dstack([NOISE, np.zeros((24, 40), np.uint8)])
    assert (np.asarray(decode(saved(Image.fromarray(clear)))) == 255).all()
    grey = Image.fromarray(np.dstack([NOISE[..., 0], np.full((24, 40), 0, np.uint8)]), "LA")
    assert (np.asarray(decode(saved(grey))) == 255).all()
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([9, 9, 9] * 256)
    assert (np.asarray(decode(saved(palette, transparency=3))) == 255).all()
    assert (np.asarray(decode(saved(palette))) == 9).all()


def test_sixteen_bit_greys_are_scaled_not_cut_off() -> None:
    deep = Image.fromarray((np.arange(256, dtype=np.uint16) << 8).reshape(16, 16))
    assert deep.mode == "I;16"
    assert np.array_equal(np.asarray(decode(saved(deep)))[..., 1].ravel(), np.arange(256))


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_odd_modes_become_rgb(mode: str) -> None:
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert decode(saved(Image.fromarray(NOISE).convert(mode), form)).mode == "RGB"


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(form: str) -> None:
    frames = [Image.new("RGB", (9, 7), colour) for colour in ((200, 0, 0), (0, 200, 0))]
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert np.asarray(decode(data))[3, 3].tolist() == [200, 0, 0]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_file_that_ends_too_early_is_refused(form: str) -> None:
    data = saved(Image.fromarray(NOISE), form)
    for length in (0, 10, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(UnreadableImage, match=r"damaged|none of"):
            decode(data[:length])


def png_head(width: int, height: int) -> bytes:
    """A PNG that says how large it is and holds nothing."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (head, body)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("size", [(50_001, 1000), (20_000, 20_000), (60_000, 2000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("loud", [True, False])
def test_bombs_are_refused_before_they_are_unpacked(size: tuple[int, int], loud: bool) -> None:
    """Whether or not the library's own warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if loud else "ignore")
        with pytest.raises(UnreadableImage, match=r"pixels|damaged"):
            decode(png_head(*size))


def test_a_file_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(UnreadableImage, match="may have 100"):
        decode(b"x" * 101)


def test_the_digest_tells_pixels_size_and_preprocessing_and_nothing_else() -> None:
    """Replays vllm-mlx#197 (only the first bytes hashed) and mlx-vlm#1933 (the name and not the content)."""
    processor = qwen()
    plain = processor.facts(saved(Image.fromarray(NOISE)))
    assert processor.facts(saved(Image.fromarray(NOISE), "PNG", compress_level=0)) == plain
    assert processor.facts(saved(Image.fromarray(NOISE), "WEBP", lossless=True)) == plain
    last = NOISE.copy()
    last[-1, -1, -1] ^= 1
    reshaped = NOISE.reshape(40, 24, 3)
    others: list[Callable[[], Any]] = [
        lambda: processor.facts(saved(Image.fromarray(last))),
        lambda: processor.facts(saved(Image.fromarray(reshaped))),
        lambda: qwen(image_mean=[0.5, 0.5, 0.5]).facts(saved(Image.fromarray(NOISE))),
        lambda: qwen(do_resize=False).facts(saved(Image.fromarray(NOISE))),
    ]
    digests = {plain.digest, *(other().digest for other in others)}
    assert len(digests) == 5
    assert others[0]().tokens == plain.tokens


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (17, 300), (640, 480), (33, 31)])
def test_the_length_is_that_of_what_the_tower_reads(size: tuple[int, int]) -> None:
    processor = qwen()
    data = png(4, *size)
    pixels = processor.pixels(data)
    assert processor.facts(data).tokens == pixels.rows * pixels.columns == len(pixels.values) // 4
    assert pixels.values.dtype is torch.float32


def test_a_shape_that_the_processor_refuses_is_the_clients_fault() -> None:
    for asked in (qwen().facts, qwen().pixels):
        with pytest.raises(UnreadableImage, match="aspect ratio"):
            asked(png(5, 1, 201))


def test_the_header_tells_the_size_before_a_picture_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use 4: nothing was known of a picture before all of it was decoded."""
    processor = qwen()
    data = saved(Image.fromarray(NOISE))
    height, width = NOISE.shape[:2]
    tokens = processor.facts(data).tokens
    with monkeypatch.context() as patched:
        patched.setattr(images, "decode", lambda _data: pytest.fail("it was decoded"))
        assert qwen().size(data) == ImageSize(width * height, tokens)
        with pytest.raises(UnreadableImage, match="pixels"):
            processor.size(png_head(20_000, 20_000))
        with pytest.raises(UnreadableImage, match="none of"):
            processor.size(b"nothing")


def test_found_by_use_4_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    """A scan takes 75 bytes and a pass over all pixels, 50 ms for 50 million: a file of 20 MiB decoded for hours."""
    plain = saved(Image.fromarray(NOISE), "JPEG", progressive=True)
    last = plain.rindex(b"\xff\xda")
    scan = plain[last:-2]

    def of_scans(count: int) -> bytes:
        return plain[:-2] + scan * (count - plain.count(b"\xff\xda")) + plain[-2:]

    assert decode(of_scans(MAX_SCANS)).size == decode(plain).size
    for refused in (qwen().size, decode):
        with pytest.raises(UnreadableImage, match=f"{MAX_SCANS + 1} scans"):
            refused(of_scans(MAX_SCANS + 1))


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def test_a_file_of_very_many_header_pieces_is_refused_before_all_are_read() -> None:
    """The library reads each piece in Python: 20 MiB of empty chunks took two minutes of two cores, and filling bytes
    before a JPEG's marker one."""
    plain = saved(Image.fromarray(NOISE))
    photo = saved(Image.fromarray(NOISE), "JPEG")
    head = plain.index(b"IDAT") - 4
    second = 4 + int.from_bytes(photo[4:6], "big")
    files = (
        lambda pieces: plain[:head] + chunk(b"prIv", b"") * pieces + plain[head:],
        lambda pieces: photo[:2] + b"\xff" * pieces + photo[2:],
        lambda pieces: photo[:2] + b"\xff\xfe\x00\x02" * pieces + photo[2:],
        lambda pieces: photo[:second] + b"\x00" * pieces + photo[second:],
    )
    for file in files:
        assert decode(file(1000)).size == (40, 24)
        for refused in (qwen().size, decode):
            with pytest.raises(UnreadableImage, match=f"in more than {MAX_READS} pieces; save it again"):
                refused(file(MAX_READS))


def test_the_largest_picture_in_small_pieces_is_read() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (2300, 3000, 3), dtype=np.uint8)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise), 0)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 3000, 2300, 8, 2, 0, 0, 0))
    pieces = [chunk(b"IDAT", packed[at : at + 1024]) for at in range(0, len(packed), 1024)]
    data = b"\x89PNG\r\n\x1a\n" + head + b"".join(pieces) + chunk(b"IEND", b"")
    assert 0.99 * images.MAX_IMAGE_BYTES < len(data) < images.MAX_IMAGE_BYTES
    assert np.array_equal(np.asarray(decode(data)), noise)
