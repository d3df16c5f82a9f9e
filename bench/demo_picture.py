"""The picture of README: six pictures of one report of `make demo` and `make demo-post`, in two columns.

make demo demo-post
python -m bench.demo_picture [runs/demo] [--picture docs/images/demo.png]
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from bench.common.measure import bench_parser, refusing
from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.report.page import REPORT_FOLDER

COLUMNS = (("pareto_front", "training_curves", "domains"), ("loss_compute", "kept", "cost"))
WIDTH, GAP = 900, 24
"""Width of a column, and distance between two pictures, in pixels."""


@refusing()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/demo.png"))
    options = parser.parse_args()
    columns = [[_scaled(options.run / REPORT_FOLDER / f"{name}.png") for name in names] for names in COLUMNS]
    rows = [max(picture.height for picture in row) for row in zip(*columns, strict=True)]
    size = WIDTH * len(columns), sum(rows) + GAP * (len(rows) - 1)
    whole = Image.new("RGB", size, "white")
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            whole.paste(picture, (WIDTH * column, sum(rows[:row]) + GAP * row))
    with replacing(options.picture) as fresh:
        whole.quantize(256, dither=Image.Dither.NONE).save(fresh, format="PNG", optimize=True)
    print(f"{options.picture}: {size[0]} x {size[1]} pixels")


def _scaled(path: Path) -> Image.Image:
    """The picture ``path``, as wide as a column. Raises UserError: there is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such picture; run `make demo demo-post` first")
    picture = Image.open(path).convert("RGB")
    return picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
