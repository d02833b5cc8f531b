"""`python -m pipelines` is the command `halfway`."""

from pipelines.cli import app

if __name__ == "__main__":
    app(prog_name="halfway")
