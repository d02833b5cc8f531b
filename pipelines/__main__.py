"""The script that `spark-submit` runs: the command `halfway`. `python -m pipelines` runs it from the source tree."""

from halfway.pipelines.cli.app import app

if __name__ == "__main__":
    app(prog_name="halfway")
