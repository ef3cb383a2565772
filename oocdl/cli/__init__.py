"""The command line: one verb a command, the words of ``fit`` as options.

It parses arguments, calls the public functions, and prints what they return; errors become one line
and an exit status. The demo and the networks that it trains live here, too.
"""
