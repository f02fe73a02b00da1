"""Ten odd pictures, as the bytes that a client would send."""

import io

import numpy as np
from PIL import Image


def noise(height, width, channels=3, seed=0, dtype=np.uint8):
    """Noise over a gradient, so that no filter and no order of channels looks like another."""
    rng = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    rows, cols = np.mgrid[0:height, 0:width]
    base = (rows * 3 + cols * 2)[..., None] * np.arange(1, channels + 1) % (top + 1)
    mixed = (base // 2 + rng.integers(0, top // 2, (height, width, channels))).astype(dtype)
    return mixed if channels > 1 else mixed[..., 0]


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(height, width, seed=0):
    return Image.fromarray(noise(height, width, seed=seed))


def _palette():
    image = picture(37, 53, seed=3).quantize(17)
    return encoded(image, transparency=3)


def _rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(40, 90, seed=5), "JPEG", quality=95, exif=exif.tobytes())


def _animated():
    frames = [picture(48, 64, seed=seed) for seed in (7, 8, 9)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=20)


def odd_pictures():
    return {
        "one pixel": encoded(picture(1, 1)),
        "1 x 3000": encoded(picture(1, 3000, seed=1)),
        "3000 x 1": encoded(picture(3000, 1, seed=2)),
        "palette with transparency": _palette(),
        "alpha": encoded(Image.fromarray(noise(61, 47, 4, seed=4))),
        "rotated by EXIF": _rotated(),
        "16 bit": encoded(Image.fromarray(noise(50, 70, 1, seed=6, dtype=np.uint16) // 97)),
        "animated": _animated(),
        "CMYK": encoded(picture(64, 96, seed=10).convert("CMYK"), "JPEG"),
        "grayscale": encoded(Image.fromarray(noise(90, 30, 1, seed=11))),
        "wide": encoded(picture(120, 1100, seed=12), "WEBP", lossless=True),
        "large": encoded(picture(1200, 1000, seed=13), "BMP"),
    }
