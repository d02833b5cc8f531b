"""The numbers of the rules, from the settings."""

from halfway.schemas.settings import ResolutionSettings
from halfway.transforms.protocol import Rules


def rules_of(settings: ResolutionSettings) -> Rules:
    """Return the rules' numbers from the settings."""
    return Rules(
        timeout_ms=settings.transactionTimeOut,
        check_interval_ms=settings.transactionCheckInterval,
        check_max=settings.transactionCheckMax,
        half_retention_ms=settings.half_retention,
        resolved_retention_ms=settings.resolved_retention,
    )
