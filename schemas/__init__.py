"""The contract: settings, messages, tables, state format and errors. Imports nothing else of the project."""
