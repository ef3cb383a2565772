"""From an nnU-Net raw folder to cross-validated networks, on whole volumes, with nnU-Net's defaults."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zarr

from oocdl.callbacks import ModelCheckpoint
from oocdl.config import make_settings
from oocdl.config.options import Size
from oocdl.data import convert
from oocdl.data.cases import Cases, find_cases, read_samples, values
from oocdl.data.nifti import read_header
from oocdl.errors import BudgetError, InputError
from oocdl.host.optional import needed
from oocdl.host.paths import path_of
from oocdl.losses import CrossEntropy, DeepSupervision, Dice, DiceCE
from oocdl.optim import SGD, Polynomial
from oocdl.presets.fingerprint import median_shape, target_spacing, topology_of
from oocdl.presets.unets import write_nnunet
from oocdl.report.tables import Column, Sheet, text_of
from oocdl.storage.dataset.sample_stack import MARK
from oocdl.storage.files import read_text, reporting, write_text
from oocdl.storage.run.lock import locked
from oocdl.training.call import ALL_OPTIONS, read_call
from oocdl.training.run import Run
from oocdl.training.signature import hint
from oocdl.training.trainer import fit
from oocdl.training.trainer import plan as make_plan

FOLDS, FOLD_SEED = 5, 12345
WIDTHS = (32, 24, 16, 12, 8, 4)  # channels of the first level that are tried, nnU-Net's first
EPOCHS, HOURS = 100, 24.0
OTHER_NORMALIZATIONS = frozenset({"nonorm", "rescale_0_1", "rescale_to_0_1", "rgb_to_0_1"})
"""Names of channels, in small letters, that nnU-Net does not normalise by z-score."""
Fold = int | Literal["all"]
Counts = npt.NDArray[np.int64]  # voxels by true and predicted class
Fingerprint = tuple[tuple[float, ...], tuple[int, ...]]  # spacing, and extents in voxels


@dataclass(frozen=True)
class CrossValidation:
    """What ``nnunet`` has trained."""

    path: Path
    spacing: tuple[float, ...]
    """Millimetres [z, y, x] to which volumes were resampled."""
    runs: Mapping[Fold, Run]
    scores: Mapping[Fold, Mapping[str, float]]
    """Fold -> class -> Dice over the fold's own validation cases, in the grid of their files."""

    def table(self) -> Sheet:
        """Make a table with a row for each fold."""
        names = list(dict.fromkeys(name for scores in self.scores.values() for name in scores))
        columns = [Column("fold", "fold"), *(Column(name, name, "{:.4f}".format) for name in names)]
        rows = [[str(fold), *(scores[name] for name in names)] for fold, scores in self.scores.items()]
        return Sheet("Dice of validation cases", columns, rows)

    def __str__(self) -> str:
        return text_of(self.table()) if self.scores else f"trained on all cases: {self.path}"


def nnunet(
    folder: str | Path,
    *,
    workdir: str | Path | None = None,
    folds: Sequence[Fold] = tuple(range(FOLDS)),
    memory: Size | None = None,
    hours: float = HOURS,
    **options: Any,
) -> CrossValidation:
    """Train nnU-Net's plain U-Net on whole volumes of an nnU-Net raw folder, fold by fold.

    Spacing, depth, kernels, strides, loss, optimizer, transforms, normalization and splits are nnU-Net's; the
    width is the largest of 32, 24, 16, 12, 8, 4 that fits the budget and whose fold is predicted to take at
    most ``hours``. A step is one whole volume, an epoch all volumes of the fold, and there are 100 epochs.

    Each fold is a run in the working directory, ``fold_0`` and so on, with ``progress.png``, ``summary.json``
    and ``validation/*.nii.gz``. Calling it again goes on, and returns what is finished.

    Parameters
    ----------
    folder
        nnU-Net raw folder: ``dataset.json``, ``imagesTr``, ``labelsTr``, in NIfTI.
    workdir
        Directory of all results; default: ``<folder>.nnunet``.
    folds
        Which of the five folds to train; "all" trains on every case, without validation.
    memory
        Memory budget of the process, as in ``fit``.
    hours
        Maximum predicted hours of training of a fold, for the choice of the width.
    **options
        Options of ``fit`` that replace the defaults, such as ``epochs``, ``engine`` or ``client``.

    Raises
    ------
    InputError for regions, fewer cases than folds, CT beside other channels, channels such as "noNorm"
    without ``normalize``, ``splits_final.json`` that leaves cases out, and a working directory of other
    files; what ``convert`` and ``fit`` raise.

    Examples
    --------
    >>> print(oocdl.presets.nnunet("Dataset001_Heart", memory="8GiB", folds=[0]))  # doctest: +SKIP
    """
    if find_spec("matplotlib") is None:
        needed("matplotlib", "progress.png", "plot")
    source = path_of("folder", folder)
    root = path_of("workdir", workdir) if workdir is not None else source.with_name(f"{source.name}.nnunet")
    cases = find_cases(source)
    shared = _checked(_defaults(cases, options) | {"memory": memory} | options)
    listeners = tuple(shared.pop("callbacks", ()))
    splits = _splits(root, [case.name for case in cases.cases], folds)
    with locked(root / "plans.json"):
        spacing, shape = _fingerprint(root, cases)
        data = root / "data.zarr"
        if not data.exists():
            convert(source, data, spacing=spacing, memory=memory)
        outputs = _network(root, data, cases, (spacing, shape), hours, shared)
    runs, scores = dict[Fold, Run](), dict[Fold, Mapping[str, float]]()
    for fold, held_out in splits.items():
        place = root / f"fold_{fold}"
        own = {"workdir": place, "loss": _loss(cases, outputs), "callbacks": listeners}
        if held_out:
            names = [case.name for case in cases.cases]
            own |= {"validation": [names.index(name) for name in held_out], "metrics": "dice"}
            own |= {"callbacks": [ModelCheckpoint("val_dice"), *listeners]}
        run = runs[fold] = fit(root / "nnunet.onnx", data, **{**own, **shared})
        run.plot(place / "progress.png")
        if held_out:
            scores[fold] = _scored(run, data, cases, held_out)
    return CrossValidation(root, spacing, runs, scores)


def _classes(cases: Cases) -> list[str]:
    """Return the names of classes by number. Raises InputError where nnU-Net would train something else."""
    told = dict(cases.classes or {})
    if any(isinstance(number, list) for number in told.values()):
        raise InputError("the preset does not train regions: give each class one number in dataset.json")
    names = sorted(told, key=lambda name: int(told[name]))
    if [told[name] for name in names] != list(range(len(names))) or "ignore" in names[:-1]:
        raise InputError(f"classes are numbered from 0, 'ignore' last; dataset.json has {told}")
    classes = [name for name in names if name != "ignore"]
    if len(classes) < 2:
        raise InputError(f"there is no class beside '{''.join(classes)}' in dataset.json")
    return classes


def _defaults(cases: Cases, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nnU-Net's options of training, but for the loss. Raises InputError for what is not trained."""
    _classes(cases)
    kinds = {name.lower() == "ct" for name in cases.channels}
    if len(kinds) > 1:
        raise InputError("CT beside other channels has no one normalization; train the channels apart")
    others = [name for name in cases.channels if name.lower() in OTHER_NORMALIZATIONS]
    if others and "normalize" not in options:
        raise InputError(f"channel '{others[0]}' asks for another normalization: pass normalize=, or None")
    return {
        "optimizer": SGD(Polynomial(0.01), momentum=0.99, nesterov=True, weight_decay=3e-5, clip_norm=12.0),
        "augment": "nnunet",
        "normalize": "ct" if True in kinds else "zscore",
        "epochs": EPOCHS,
    }


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``fit``. Raises InputError for others, before a volume is converted."""
    for name in options:
        if name not in ALL_OPTIONS:
            raise InputError(f"nnunet takes no '{name}'{hint(name, sorted(ALL_OPTIONS))}")
    make_settings(**read_call(**options)[1])
    return options


def _loss(cases: Cases, outputs: Sequence[str]) -> Any:
    """Return nnU-Net's loss: Dice of the foreground and cross entropy, weighed by resolution."""
    count = len(_classes(cases))
    cross_entropy = CrossEntropy(ignore_index=count) if "ignore" in (cases.classes or {}) else CrossEntropy()
    share = count / (count - 1)
    dice = Dice(class_weights=(0.0, *[share] * (count - 1)))
    loss = DiceCE(dice, cross_entropy)
    weights = [0.5**level for level in range(len(outputs))]
    total = sum(weights)
    return DeepSupervision(loss, weights=tuple(w / total for w in weights)) if len(outputs) > 1 else loss


def _splits(root: Path, names: Sequence[str], folds: Sequence[Fold]) -> dict[Fold, list[str]]:
    """Return the cases that each fold holds out, nnU-Net's by default. Raises InputError for other folds."""
    path = root / "splits_final.json"
    if path.exists():
        splits = _read_splits(path, names, folds)
    elif set(folds) == {"all"}:
        splits = []
    else:
        if len(names) < FOLDS:
            raise InputError(f"{len(names)} cases are too few for {FOLDS} folds; pass folds=['all']")
        order = np.arange(len(names))
        np.random.RandomState(FOLD_SEED).shuffle(order)  # as scikit-learn's KFold
        splits = [[names[row] for row in sorted(part.tolist())] for part in np.array_split(order, FOLDS)]
        root.mkdir(parents=True, exist_ok=True)
        told = [{"train": [n for n in names if n not in held], "val": held} for held in splits]
        write_text(path, json.dumps(told, indent=2))
    held_out: dict[Fold, list[str]] = {"all": [], **dict(enumerate(splits))}
    for fold in folds:
        if fold not in held_out:
            raise InputError(f"folds are 0 to {len(splits) - 1} or 'all', got {fold!r}")
    return {fold: held_out[fold] for fold in folds}


def _read_splits(path: Path, names: Sequence[str], folds: Sequence[Fold]) -> list[list[str]]:
    """Return the cases that each fold of a file holds out. Raises InputError if others do not train."""
    way_out = "mend it, or delete it for folds of nnU-Net's"
    try:
        told = json.loads(read_text(path))
        splits = [[list(map(str, split[part])) for part in ("train", "val")] for split in told]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} has no 'train' and 'val' of each fold ({error!r}); {way_out}") from error
    for fold, (train, held_out) in enumerate(splits):
        odd = {*train, *held_out} ^ {*names} | {*train} & {*held_out}
        if odd and fold in folds:
            raise InputError(
                f"{path}: in fold {fold} all cases of the dataset, and no others, are to be once in 'train' "
                f"or 'val', and '{min(odd)}' is not; {way_out}"
            )
    return [held_out for _, held_out in splits]


def _fingerprint(root: Path, cases: Cases) -> Fingerprint:
    """Return spacing and median extents after it, [z, y, x]; InputError if the workdir is of other files."""
    samples = read_samples(cases, True).samples
    firsts = [sample.images[0] for sample in samples]
    spacings, shapes = [first.spacing for first in firsts], [first.shape for first in firsts]
    paths = [volume.path for sample in samples for volume in sample.volumes]
    stats = {f"{path.parent.name}/{path.name}": path.stat() for path in paths}
    facts = {
        "cases": [sample.name for sample in samples],
        "classes": _classes(cases),
        "spacings": list(map(list, spacings)),
        "shapes": list(map(list, shapes)),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }
    path = root / "dataset_fingerprint.json"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(facts, indent=2))
    elif json.loads(read_text(path)) != facts:
        raise InputError(f"{path} is of other files, or of these before they changed; choose another workdir")
    target = target_spacing(spacings, shapes)
    return target, median_shape(spacings, shapes, target)


def _network(
    root: Path, data: Path, cases: Cases, fingerprint: Fingerprint, hours: float, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write the network, as wide as fits, and return its outputs. Raises BudgetError if none fits."""
    path, model = root / "plans.json", root / "nnunet.onnx"
    if path.exists():
        return tuple(json.loads(read_text(path))["outputs"])
    spacing, shape = fingerprint
    sizes = {"in_channels": len(cases.channels), "classes": len(_classes(cases))}
    for width in WIDTHS:
        topology = topology_of(spacing, shape, width)
        outputs = write_nnunet(model, topology, **sizes)
        try:
            plan = make_plan(model, data, **{"loss": _loss(cases, outputs), **options, "client": None})
        except BudgetError:
            if width == WIDTHS[-1]:
                raise
            continue
        fold_hours = plan.seconds * plan.course.total_steps / 3600
        if fold_hours <= hours:
            break
    else:
        warnings.warn(
            f"a fold of the narrowest network, of width {width}, is predicted to take {fold_hours:.1f} "
            f"hours, more than hours={hours:g}",
            stacklevel=3,
        )
    facts = {"spacing": spacing, "median_shape": shape, "outputs": outputs}
    write_text(path, json.dumps(facts | asdict(topology), indent=2))
    return outputs


def _scored(run: Run, data: Path, cases: Cases, names: Sequence[str]) -> dict[str, float]:
    """Predict the cases that a fold holds out, and compare; returns the mean Dice, and that of each class.

    ``summary.json`` is that of the run's last step; if it is there, nothing is predicted again.
    """
    path, labels, classes = run.path / "summary.json", run.path / "validation", _classes(cases)
    told = json.loads(read_text(path)) if path.exists() else {}
    if told.get("step") != run.steps:
        run.predict(_held_out(run.path / "validation.zarr", data, names), argmax=True, nifti=labels)
        held = [case for case in cases.cases if case.name in names]
        pairs = [(one.label, labels / f"{one.name}.nii.gz") for one in held if one.label is not None]
        told = {"step": run.steps} | _summary(pairs, len(classes))
        write_text(path, json.dumps(told, indent=2))
    scores = {classes[int(number)]: one["Dice"] for number, one in told["mean"].items()}
    return {"mean": told["foreground_mean"]["Dice"], **scores}


def _held_out(path: Path, data: Path, names: Sequence[str]) -> Path:
    """Make a dataset of some samples of another, by links."""
    with reporting(path):
        if not path.exists():
            zarr.open_group(path, mode="w").attrs[MARK] = {"samples": list(names)}
        for name in names:
            if not (path / name).is_symlink():
                os.symlink(os.path.relpath(data / name, path), path / name)
    return path


def _summary(pairs: Sequence[tuple[Path, Path]], classes: int) -> dict[str, Any]:
    """Compare true and predicted volumes; a voxel of a higher true class is ignored, as is NaN in means."""
    rows = [
        {
            "reference_file": str(truth),
            "prediction_file": str(predicted),
            "metrics": {str(number): _metrics(counts, number) for number in range(1, classes)},
        }
        for truth, predicted in pairs
        for counts in [_count(truth, predicted, classes)]
    ]
    each: list[Any] = [row["metrics"] for row in rows]
    mean = {number: _means([one[number] for one in each]) for number in each[0]}
    return {"foreground_mean": _means([*mean.values()]), "mean": mean, "metric_per_case": rows}


def _count(truth: Path, predicted: Path, classes: int) -> Counts:
    """Count the voxels of two volumes by true and predicted class, plane by plane."""
    counts = np.zeros((classes, classes), np.int64)
    pieces = (values(read_header(path), np.dtype(np.int64)) for path in (truth, predicted))
    for true, guess in zip(*map(chain.from_iterable, pieces), strict=True):
        known = true < classes
        both = np.bincount(true[known] * classes + guess[known], minlength=classes**2)
        counts += both.reshape(classes, classes)
    return counts


def _metrics(counts: Counts, number: int) -> dict[str, float]:
    """Return nnU-Net's numbers of a class; NaN where neither volume has it."""
    found, truth = int(counts[:, number].sum()), int(counts[number].sum())
    both = int(counts[number, number])
    either = found + truth - both
    return {
        "Dice": 2 * both / (found + truth) if either else float("nan"),
        "IoU": both / either if either else float("nan"),
        "FN": truth - both,
        "FP": found - both,
        "TP": both,
        "TN": int(counts.sum()) - either,
        "n_pred": found,
        "n_ref": truth,
    }


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # NaN alone is not equal to itself.
    known = {name: [row[name] for row in rows if row[name] == row[name]] for name in rows[0]}
    return {name: float(np.mean(numbers)) if numbers else float("nan") for name, numbers in known.items()}
