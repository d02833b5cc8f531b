"""What the simulator finds and the product does not do yet. When it does, its entry here goes."""

KNOWN: dict[str, str] = {
    "adopt noise": "an adoption reads records together that were apart, so that an id looks used twice, or too large",
}
"""Rules whose findings are passed over."""
