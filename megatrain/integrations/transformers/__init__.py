"""Hugging Face's Trainer, and TRL's SFTTrainer, training through a StreamingEngine: see `stream`."""

from megatrain.integrations.transformers.trainer import StreamedTrainer, stream

__all__ = ["StreamedTrainer", "stream"]
