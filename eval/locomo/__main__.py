"""``python -m locomo``."""

from locomo.cli import app

if __name__ == "__main__":
    app(prog_name="locomo")
