"""Notebooks in Databricks' source format, which also run here: `make notebooks`."""
