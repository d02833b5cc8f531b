"""Pure functions: the protocol, its Spark adapter, decoding, routing. No I/O, no clock, no randomness."""
