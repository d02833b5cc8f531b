"""Pure functions: the protocol and its Spark operator, decoding, rows. No I/O, clock or randomness; no action on a frame.

May import `schemas`.
"""
