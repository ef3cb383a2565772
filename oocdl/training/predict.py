"""``predict``: runs one network or several over a dataset, and writes what they predict together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zarr

from oocdl.config.options import Size
from oocdl.errors import InputError
from oocdl.host.paths import path_of
from oocdl.training.prediction.inference import Means
from oocdl.training.prediction.outputs import write_means
from oocdl.training.run import Run, trained_of
from oocdl.training.signature import public
from oocdl.training.versions import Which

RunLike = Run | str | Path
Versions = Which | Sequence[Which]


@public
def predict(
    runs: RunLike | Sequence[RunLike],
    dataset: Any,
    out: str | Path | None = None,
    *,
    argmax: bool = False,
    probabilities: bool = False,
    mirror: bool | Sequence[int] = False,
    nifti: str | Path | None = None,
    memory: Size | None = None,
    batch_size: int = 1,
    inputs: Mapping[str, str] | None = None,
    spill: str | Path | None = None,
    which: Versions = None,
) -> zarr.Group:
    """Run trained models over a dataset, and write what they predict to the Zarr group ``out``.

    The group gets one array for each output, with the sample axis first; an earlier prediction is
    replaced. Until its end the group is marked (``oocdl_unfinished`` in its attributes), and is no
    dataset. If the call is killed, the same call with the same runs, dataset and options goes on with it,
    and computes what is not there as it was written. An output whose name cannot be a file's has it in
    the attributes of its array.

    Of several runs, and of mirrored samples, the mean is predicted: of probabilities where the loss has
    classes (of deep supervision, of the first output), else of outputs. Each run has its own weights, its own
    numbers of normalisation, and may have its own network; outputs, targets and precision are the same.

    Parameters
    ----------
    runs
        Run, or runs whose mean is predicted: paths, or what ``fit`` and ``open`` return.
    dataset
        What the network is run over, as in ``fit``; it needs no targets.
    out
        Path of the Zarr group to write; default with ``nifti``: labels.zarr in that folder.
    argmax
        Write the class of each voxel (uint8, [N, ..]) instead of logits [N, C, ..]; no logits are stored.
    probabilities
        Write probabilities of classes instead of outputs: their softmax, or their sigmoid where classes do
        not exclude each other, and where there is one. Losses without classes are refused.
    mirror
        Mirror samples along all spatial axes, or along these (0 is the first), in all combinations.
    nifti
        Folder for labels as NIfTI, with ``argmax``: ``<sample>.nii.gz`` in the grid of the sample's file.
    memory
        Memory budget of the process; default: that of the (first) run.
    batch_size
        Samples that go through the network at once.
    inputs
        Model input -> dataset array; default: as in the run.
    spill
        Folder for what does not fit; default: $OOCDL_SPILL, else in the (first) run, or in the folder for
        temporary files, with a warning, if the run can only be read.
    which
        The version: "last", "best", "ema" (the last, with the averages that ``ema=`` has made), or a step
        of ``checkpoints``; of several runs, one of these or one for each; default: that of the best
        validation if ``EarlyStopping`` has ended the run and restored it, else the last.

    Raises
    ------
    What ``fit`` raises.
    """
    members = [runs] if isinstance(runs, RunLike) else list(runs)
    versions = list(which) if isinstance(which, list | tuple) else [which] * len(members)
    if not members or len(versions) != len(members):
        raise InputError(
            f"predict takes a run or several, got {len(members)}, and which {len(versions)} times"
        )
    opened = [run if isinstance(run, Run) else Run(path_of("runs", run)) for run in members]
    trained = [trained_of(run, version) for run, version in zip(opened, versions, strict=True)]
    given = {"memory": memory, "batch_size": batch_size, "inputs": inputs, "spill": spill}
    return write_means(trained, dataset, out, argmax, nifti, Means(mirror, probabilities), **given)
