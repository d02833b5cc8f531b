"""The command line, one file per command. No other room imports it.

May import everything.
"""
