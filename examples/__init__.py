"""Services as one writes them around Halfway's client; each runs as it stands."""
