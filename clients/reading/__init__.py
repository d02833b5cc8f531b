"""The consumer's side: reads committed messages from the table `messages`, from a bookmark on (docs/reading.md).

May import `schemas`.
"""
