"""Services that use Halfway's client. Each runs as it is."""
