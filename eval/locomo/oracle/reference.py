"""The reference model: transformers, fp32, eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from locomo.errors import OracleError

from .layout import ExtendedSequence

# Rotary formulas whose frequencies are the same in a sequence of any length.
_RELATIVE_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


class ReferenceModel:
    """A model as transformers has it, in fp32 on the CPU, with attention written out.

    Raises
    ------
    OracleError
        The directory holds no model that transformers can load, or one whose rotary frequencies change with the
        length of the sequence: a copy of a shorter prompt inside a longer one would then be another prompt.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # its own, over the loading of weights
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise OracleError(f"cannot load a model from {directory}: {str(error).splitlines()[0]}") from error
        rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _RELATIVE_ROPE:
            raise OracleError(f"rotary embeddings of type {rope!r} depend on the length of the sequence")
        self._model = model.eval()
        self.vocab_size = int(model.config.vocab_size)

    def log_probs(self, sequence: ExtendedSequence, positions: Sequence[int]) -> torch.Tensor:
        """Log probabilities ``[len(positions), vocab]`` (fp64) of the token behind each of these rows, in one forward.

        The softmax is taken in fp64 over the logits in fp32, so that it adds no error of its own.
        """
        with torch.inference_mode():
            logits = self._model(
                input_ids=sequence.token_ids[None],
                attention_mask=sequence.additive_mask(),
                position_ids=sequence.position_ids[None],
                use_cache=False,
                logits_to_keep=torch.tensor(positions),
            ).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)
