"""The command line: one file a command. Nobody imports it.

May import everything.
"""
