"""The command line, one file for each command; those by hand share one. Only the entry points import it.

May import everything.
"""
