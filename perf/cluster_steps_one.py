"""Train on processes of a Dask cluster and tell how large all become; print one line of JSON.

    python perf/cluster_steps_one.py '{"model": "net.onnx", "dataset": "x.zarr", "workers": 2, "every": 3}'

``every``: steps from one look at memory to the next. The other words are options of ``fit``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from one_run import cluster, train

from oocdl.events import Event, StepDone
from oocdl.host.limits import anonymous_bytes


def main() -> None:
    """Parse, train, print."""
    words = json.loads(sys.argv[1])
    model, dataset = Path(words.pop("model")), Path(words.pop("dataset"))
    every, sizes = words.pop("every"), list[list[int]]()
    with cluster(words.pop("workers"), dataset.parent) as options:

        def listen(event: Event) -> None:
            if isinstance(event, StepDone) and event.row["step"] % every == 0:
                workers: dict[str, Any] = options["client"].run(anonymous_bytes)
                sizes.append([anonymous_bytes(), *(workers[address] for address in sorted(workers))])

        found = train(model, dataset, [listen], **options, **words)
    print(json.dumps({**found, "sizes": sizes}))


if __name__ == "__main__":
    main()
