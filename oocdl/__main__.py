"""``python -m oocdl`` is the command ``oocdl``, for environments whose commands are on no path."""

from oocdl.cli.app import main

main()
