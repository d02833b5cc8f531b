"""The script that `spark-submit` runs: the command `halfway`."""

from halfway.pipelines.cli.app import app

if __name__ == "__main__":
    app(prog_name="halfway")
