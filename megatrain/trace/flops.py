"""Model FLOPs of a training step: what the arithmetic needs, not what an implementation happens to recompute."""

from __future__ import annotations


def model_flops(
    *, tokens: int, active_parameters: int, heads: int, head_dim: int, attention_area: int, frozen_parameters: int = 0
) -> int:
    """Return the FLOPs of one training step: (6·N − 2·F)·T + 6·A·H·Q.

    Matrix products (6·N·T): a multiply-accumulate parameter costs 2 FLOP per token forward and 4 backward, a frozen one
    2 backward, as it needs no gradient itself.
    Attention: QKᵀ and PV cost 2·2·Q FLOP per head and (query, key) pair forward, twice that backward: 12·H·Q per
    pair. A causal sequence of length S has S²/2 pairs per layer, so L layers over T tokens cost 6·L·T·S·H·Q.
    Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), whose 12·L·H·Q·S per token counts the masked
    half too; here causal attention is counted once. Recomputation is not counted, as in their MFU.

    tokens: T, tokens processed in the step, padding not counted.
    active_parameters: N, parameters of matrix products that a token meets: the head counts, the embedding lookup
        does not (tied weights count once), of a mixture only the experts that a token is sent to.
    frozen_parameters: F, those of them that are not trained.
    heads, head_dim: H query heads of Q each; with grouped keys and values still all query heads.
    attention_area: A, `causal_area` summed over attention layers and sequences.
    """
    return (6 * active_parameters - 2 * frozen_parameters) * tokens + 6 * attention_area * heads * head_dim


def causal_area(length: int, window: int | None = None) -> int:
    """Return twice the (query, key) pairs of one causal sequence in one layer: S², or 2·S·W − W² in a window W < S.

    length: tokens of the sequence, padding not counted; packed sequences that do not see each other are separate.
    """
    if window is None or window >= length:
        return length * length
    return 2 * length * window - window * window
