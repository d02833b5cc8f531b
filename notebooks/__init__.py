"""Notebooks in Databricks' source format, which also run locally by `make notebooks`.

May import what the wheel holds except `halfway.pipelines.cli`, and modules of this folder.
"""
