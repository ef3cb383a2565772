"""Storage: datasets, the memory tier with its spill, and runs on disk.

``dataset`` reads what the user brought, ``cache`` holds the chunks of the pass that runs, and ``run``
keeps what has to survive it. All of them count in bytes.
"""
