"""A run's records on disk: written beside training, followed from any process. No torch."""

from megatrain.journal.binary import decode, encode
from megatrain.journal.reader import JournalReader
from megatrain.journal.writer import Journal

__all__ = ["Journal", "JournalReader", "decode", "encode"]
