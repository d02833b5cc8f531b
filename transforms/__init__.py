"""Pure functions: protocol, Spark operator, decoding, packs, rows. No I/O, clock, randomness, or action on a frame.

May import `schemas`.
"""
