"""The command line: one verb a command, the words of ``fit`` as options."""
