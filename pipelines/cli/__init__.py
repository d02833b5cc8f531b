"""The command line, one file for each command or few related ones. Only the entry points import it.

May import everything.
"""
