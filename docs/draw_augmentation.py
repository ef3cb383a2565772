"""Draw what each transform makes of a slice, into `docs/images/augmentation.png`.

Needs matplotlib (``pip install '.[plot]'``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oocdl import transforms
from oocdl.augmentation.draws import Array, Draws
from oocdl.augmentation.nnunet import Blur, LowResolution
from oocdl.augmentation.preparation import evaluate
from oocdl.augmentation.transform import Sample, Transform
from oocdl.graph.ir.index import Region, as_slices, moved, region_shape, whole

PICTURE = Path(__file__).with_name("images") / "augmentation.png"
SHAPE = (1, 96, 96, 96)
DRAWN: dict[str, Transform | None] = {
    "as it is": None,
    "RandSpatialCrop": transforms.RandSpatialCrop(48),
    "RandFlip": transforms.RandFlip(1.0, 1),
    "RandRotate90": transforms.RandRotate90(1.0, 1, (1, 2)),
    "RandAffine": transforms.RandAffine(1.0, rotate_range=((0.4, 0.5),), scale_range=0.2),
    "Rand3DElastic": transforms.Rand3DElastic((6, 8), (600, 800), 1.0),
    "RandGaussianSmooth": transforms.RandGaussianSmooth((1, 2), (1, 2), (1, 2), 1.0),
    "RandGaussianNoise": transforms.RandGaussianNoise(1.0, 0.0, 0.2, sample_std=False),
    "RandScaleIntensity": transforms.RandScaleIntensity((-0.4, -0.3), 1.0),
    "RandScaleIntensityFixedMean": transforms.RandScaleIntensityFixedMean(1.0, (-0.6, -0.5)),
    "RandAdjustContrast": transforms.RandAdjustContrast(1.0, (2.0, 2.5)),
    "nnU-Net: blur": Blur(1.0, p_per_channel=1.0),
    "nnU-Net: low resolution": LowResolution(1.0, (0.2, 0.3), 1.0),
}


def phantom() -> Array:
    """A head of ellipsoids."""
    axes = np.meshgrid(*(np.linspace(-1, 1, extent) for extent in SHAPE[1:]), indexing="ij")
    image = np.zeros(SHAPE[1:], "float32")
    for value, centre, radii in (
        (0.9, (0, 0, 0), (0.9, 0.85, 0.7)),
        (-0.5, (0, 0, 0), (0.84, 0.78, 0.63)),
        (-0.3, (0, -0.1, 0.25), (0.4, 0.35, 0.12)),
        (-0.3, (0, -0.05, -0.25), (0.4, 0.45, 0.16)),
        (0.4, (0, 0.45, 0.05), (0.2, 0.12, 0.2)),
        (0.25, (0, -0.5, -0.1), (0.2, 0.06, 0.1)),
    ):
        inside = sum(((at - c) / r) ** 2 for at, c, r in zip(axes, centre, radii, strict=True)) < 1
        image += np.float32(value) * inside
    return image[None]


def draw(path: Path = PICTURE) -> None:
    """Draw one slice for each transform."""
    image = phantom()
    ranges = np.array([[image.min(), image.max(), image.mean()]])
    figure = Figure(figsize=(10, 6.3), dpi=150)
    for number, (name, transform) in enumerate(DRAWN.items(), 1):
        spatial = transform.size(3) if isinstance(transform, transforms.RandSpatialCrop) else SHAPE[1:]
        before = [(its - mine) // 2 for its, mine in zip(spatial, SHAPE[1:], strict=True)]
        around = moved(whole(SHAPE[1:]), before)
        sample = Sample(1, spatial, ranges, around)
        middle = spatial[0] // 2
        region = ((0, 1), (middle, middle + 1), *whole(spatial[1:]))

        def read(box: Region, block: Array, before: Sequence[int] = before) -> None:
            block[...] = image[as_slices(moved(box, [0, *(-low for low in before)]))]

        one = None if transform is None else transform.draw(Draws(2), sample)
        made = np.empty(region_shape(region), "float32")
        evaluate([] if one is None else [one], region, read, made, 1 << 24, made.dtype)
        axes = figure.add_subplot(3, 5, number)
        axes.imshow(made[0, 0], cmap="gray", vmin=-0.1, vmax=1)
        axes.set_title(name, fontsize=7.5)
        axes.axis("off")
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.95, 0.03, 0.14)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    draw()
