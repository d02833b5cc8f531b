"""The command line, one file per command. Only the entry points import it.

May import everything.
"""
