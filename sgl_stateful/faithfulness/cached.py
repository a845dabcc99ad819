"""Results on disk: a model that has been measured once need not be measured at every start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .table import Table

logger = logging.getLogger(__name__)

_METHOD = 1  # grows when the same set is measured in another way


def result_path(
    folder: Path,
    *,
    fingerprint: str,
    policy: str,
    repairs: Sequence[str],
    questions_at: Mapping[int, int],
    conversations: str,
) -> Path:
    """Where the result of exactly this lies.

    Parameters
    ----------
    fingerprint
        Of the encodings: weights, rotary formula, layout, storage, template and header.
    conversations
        Version of the set.
    """
    parts = [_METHOD, fingerprint, policy, list(repairs), sorted(questions_at.items()), conversations]
    return folder / f"{hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()}.json"


def read_result(path: Path) -> Table | None:
    """Read a result; None where there is none that can be read."""
    try:
        return Table.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the faithfulness result %s cannot be read and is measured again: %s", path, error)
        return None


def write_result(path: Path, table: Table) -> None:
    """Write a result, whole or not at all; where that fails the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(table.to_json())
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the faithfulness result cannot be kept in %s: %s", path.parent, error)
