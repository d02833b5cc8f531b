"""Runs the command `halfway` for `python -m halfway`."""

from halfway.pipelines.cli.app import app

if __name__ == "__main__":
    app(prog_name="halfway")
