"""The contract: headers, records, events, tables, state format, settings, errors. No I/O, no clock.

Imports nothing else of Halfway.
"""
