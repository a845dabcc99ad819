"""``python -m locomo.retrieval``."""

import typer

from locomo.retrieval.command import retrieval

if __name__ == "__main__":
    typer.run(retrieval)
