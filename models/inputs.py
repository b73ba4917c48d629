"""Check the shapes of a batch before the model runs, so that a mistake is named instead of broadcast."""

from __future__ import annotations

from torch import Tensor


def check_inputs(
    max_position_embeddings: int,
    input_ids: Tensor,
    token_type_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    next_sentence_label: Tensor | None,
    masked_positions: Tensor | None,
) -> None:
    """Compare shapes only: no value is read, so nothing waits for the device.

    Raises:
        ValueError: names the argument, its shape, and the shape it must have.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, sequence], got {list(input_ids.shape)}")
    batch, length = input_ids.shape
    if length > max_position_embeddings:
        raise ValueError(
            f"the sequence has {length} tokens, but model.max_position_embeddings is {max_position_embeddings};"
            " use shorter sequences or a model with more positions"
        )
    _check_shape("token_type_ids", token_type_ids, (batch, length), "as input_ids")
    _check_shape("attention_mask", attention_mask, (batch, length), "as input_ids")
    _check_shape("next_sentence_label", next_sentence_label, (batch,), "one for each sequence")
    if masked_positions is None:
        _check_shape("labels", labels, (batch, length), "as input_ids; for [batch, predictions] give masked_positions too")
        return
    if labels is None:
        raise ValueError("masked_positions were given without labels; give both, or neither to decode every position")
    if masked_positions.dim() != 2 or masked_positions.shape[0] != batch:
        raise ValueError(f"masked_positions must be [{batch}, predictions], got {list(masked_positions.shape)}")
    _check_shape("labels", labels, tuple(masked_positions.shape), "as masked_positions")


def _check_shape(name: str, x: Tensor | None, expected: tuple[int, ...], why: str) -> None:
    if x is not None and x.shape != expected:
        raise ValueError(f"{name} must be {list(expected)} {why}, got {list(x.shape)}")
