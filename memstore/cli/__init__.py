"""`memstore`: looking into a store, mending it and moving it, from a shell."""

from memstore.cli.app import app

__all__ = ["app"]
