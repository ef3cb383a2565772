"""``MLflow``: the history of a run as metrics of an MLflow run."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oocdl.callbacks.committed_rows import CommittedRows, Row
from oocdl.errors import CorruptError, ResourceError
from oocdl.events import RunFinished, RunStarted, RunStopped
from oocdl.host.optional import needed
from oocdl.storage.files import reporting, write_text

NOTE = "mlflow.json"
"""The file of a run's directory that says which MLflow run is its own."""
MOST_METRICS = 1000
"""Numbers that MLflow takes at a time."""
MOST_LETTERS = 500
"""Letters of a parameter that are kept."""


class MLflow(CommittedRows):
    """Logs numbers of each committed step, and the settings as parameters.

    ``experiment`` is made if it is not there; ``tracking_uri`` is MLflow's own by default
    (``MLFLOW_TRACKING_URI``). A run that goes on logs to the same MLflow run; one that starts anew, or goes
    on in a copy of its directory, to another. While a server cannot be reached the run goes on, with a
    warning; rows are sent with a later commit, or when the run is taken up again. Raises InputError if MLflow
    is not installed, ResourceError if it cannot be reached when the run starts.

    >>> run = oocdl.fit("unet.onnx", "brain.zarr", callbacks=[MLflow("brains")])  # doctest: +SKIP
    """

    def __init__(
        self, experiment: str = "oocdl", tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        super().__init__()
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self._library = needed("mlflow", "oocdl.callbacks.MLflow", "mlflow")
        self._client: Any = None
        self._run_id = ""
        self._unsent: list[Row] = []

    def begin(self, event: RunStarted) -> int:
        """Take up the MLflow run of this run, or begin one."""
        self._unsent = []
        note = Path(event.workdir) / NOTE
        place = {"experiment": self.experiment, "tracking_uri": self.tracking_uri}
        try:
            self._client = self._library.MlflowClient(tracking_uri=self.tracking_uri)
            known = _noted(note) if event.done and note.is_file() else {}
            if {name: known.get(name) for name in place} == place and not _is_copy(note, known):
                self._run_id = known["run_id"]
                self._client.update_run(self._run_id, status="RUNNING")
                found = self._client.get_metric_history(self._run_id, "loss")
            else:
                self._run_id, found = self._made(event), []
        except self._library.exceptions.MlflowException as error:
            raise ResourceError(f"MLflow cannot be used: {error}; fit without it, or mend that") from error
        facts = {**place, "run_id": self._run_id, "workdir": str(note.parent)}
        with reporting(note):
            write_text(note, json.dumps(facts))
        return max((metric.step for metric in found), default=0)

    def _made(self, event: RunStarted) -> str:
        """Make an MLflow run, and the experiment if there is none."""
        found = self._client.get_experiment_by_name(self.experiment)
        ident = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        name = self.run_name or Path(event.workdir).name
        made = self._client.create_run(ident, run_name=name, tags={"oocdl.workdir": event.workdir})
        known = {} if event.plan is None else {"model": event.plan.model, **event.plan.settings.stored()}
        params = [
            self._library.entities.Param(name, str(value)[:MOST_LETTERS])
            for name, value in {**known, "steps": event.steps}.items()
        ]
        self._client.log_batch(made.info.run_id, params=params)
        return str(made.info.run_id)

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows, and those that could not be sent before."""
        self._unsent += rows
        try:
            while self._unsent:
                count = max(MOST_METRICS // max(len(row.values) for row in self._unsent), 1)
                metrics = [metric for row in self._unsent[:count] for metric in self._metrics(row)]
                self._client.log_batch(self._run_id, metrics=metrics)
                del self._unsent[:count]
        except self._library.exceptions.MlflowException as error:
            count = len(self._unsent)
            text = f"MLflow did not take {count} steps ({error}); a later commit sends them, or fit does"
            warnings.warn(text, UserWarning, stacklevel=2)

    def _metrics(self, row: Row) -> Iterator[Any]:
        for name, number in row.numbers().items():
            key = re.sub(r"[^\w\-. /]", "_", name)  # what MLflow takes as a name
            yield self._library.entities.Metric(key, number, int(row.unix_seconds * 1000), row.step)

    def end(self, event: RunFinished | RunStopped) -> None:
        """Say how the run has ended."""
        self.write(())
        status = "FINISHED" if isinstance(event, RunFinished) else "KILLED"
        try:
            self._client.set_terminated(self._run_id, status)
        except self._library.exceptions.MlflowException as error:
            warnings.warn(f"MLflow was not told that the run is {status}: {error}", UserWarning, stacklevel=2)


def _noted(note: Path) -> dict[str, Any]:
    try:
        with reporting(note, "read"):
            return dict(json.loads(note.read_text()))
    except ValueError as error:
        raise CorruptError(f"{note} is damaged; without it, the run begins another MLflow run") from error


def _is_copy(note: Path, known: Mapping[str, Any]) -> bool:
    """Whether a run's directory is a copy of one that is still where it was: that one has the MLflow run."""
    first = Path(known.get("workdir", note.parent)) / note.name
    return first.is_file() and not first.samefile(note) and _noted(first) == known
