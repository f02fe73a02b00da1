"""Runs vLLM's examples of pictures on Quire, with small stand-ins for checkpoints and pictures.

    python -m tests.compat.vision_examples FOLDER

FOLDER keeps vLLM's source distribution. An example is run as it is: `import vllm` finds Quire, a
model's name a folder with random weights, a URL a picture that is drawn. What it prints is shown,
and that it ends well is all that is looked at. Examples of models that Quire does not have, of
sounds and of films are left out.
"""

import argparse
import contextlib
import io
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

import quire.as_vllm
from quire import LLM
from quire.as_vllm import pictures
from tests.compat.source_distribution import fetch
from tests.models.vision.spoken import picture, write_spoken
from tests.pooling.pictures import test_pairs_of_towers

ARCHIVE = "vllm-0.32.0.tar.gz"
EXAMPLES = (
    ("pooling/embed/vision_embedding_offline.py", ("--model", "clip"), "CLIPModel"),
    ("pooling/embed/vision_embedding_offline.py", ("--model", "siglip"), "SiglipModel"),
    ("pooling/embed/vision_embedding_offline.py", ("--model", "e5_v"), "llava_next"),
)
"""The file, its arguments, and what stands in for its model."""


def write_stand_in(kind, folder):
    if kind.endswith("Model"):
        test_pairs_of_towers.make(folder, kind)
    else:
        write_spoken(kind, folder)


def run(examples, path, arguments, kind):
    """What an example prints. Raises what it raises."""
    with tempfile.TemporaryDirectory() as folder:
        write_stand_in(kind, Path(folder))
        make = LLM.__init__

        def with_stand_in(self, *args, **options):
            short = {"dtype": "float32", "max_model_len": None}
            make(self, **{**options, **short, "model": folder})

        out = io.StringIO()
        with (
            mock.patch.object(LLM, "__init__", with_stand_in),
            mock.patch.object(pictures, "fetch_image", lambda *args, **options: picture(1)),
            mock.patch.object(sys, "argv", [path, *arguments]),
            contextlib.redirect_stdout(out),
        ):
            runpy.run_path(str(examples / path), run_name="__main__")
        return out.getvalue()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digest", default="", help="SHA-256 of the distribution, to fetch it")
    args = parser.parse_args()
    assert quire.as_vllm is not None, "from here on vllm is Quire"
    source = fetch(args.folder, "vllm", ARCHIVE, args.digest, within="examples")
    failed = 0
    for path, arguments, kind in EXAMPLES:
        try:
            printed = run(source / "examples", path, arguments, kind)
            sys.stdout.write(f"ok      {path} {' '.join(arguments)}\n{printed}")
        except BaseException as error:
            failed += 1
            sys.stdout.write(f"FAILED  {path} {' '.join(arguments)}: {error!r}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
