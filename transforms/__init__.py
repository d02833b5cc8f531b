"""Pure functions: the protocol, its Spark operator, decoding, rows. No I/O, no clock, no randomness, no `.collect()`.

May import `schemas`.
"""
