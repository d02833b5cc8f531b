"""What the simulator finds and the product does not do yet. When it does, its entry here goes."""

KNOWN: dict[str, str] = {
    "adopt noise": "an adoption reads records together that were apart, so that an id looks used twice, or too large",
    "R8 unheard": "a client that answered a check with UNKNOWN does not answer it again when an adoption sends it again",
    "frozen start": "a start that was frozen goes on to take tables whose owner it has not verified, with the same epoch",
}
"""Rules whose findings are passed over."""
