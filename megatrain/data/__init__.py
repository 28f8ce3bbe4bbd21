"""Text or chats → packed token batches.

records     files, hub data sets or rows → `Records`
files       rows that lie in text files, read when they are asked for
formats     what a record is: raw text, alpaca, messages or sharegpt
chat        a chat → its text and the spans of it that are trained
turns       the assistant's turns, where a template does not mark them
tokens      records → `TokenizedDataset`
documents   its flat arrays, and what became of every record
packing     documents → sequences
batches     sequences → shuffled, resumable batches
docstrings  a data set that every Python installation carries
bpe         a small tokenizer, trained in seconds
"""

from megatrain.data.batches import Batches
from megatrain.data.bpe import train_tokenizer
from megatrain.data.chat import PLAIN_CHAT_TEMPLATE
from megatrain.data.docstrings import docstring_records
from megatrain.data.documents import Counts, TokenizedDataset
from megatrain.data.formats import RecordError
from megatrain.data.records import Records, load_records, records_from_rows
from megatrain.data.tokens import tokenize

__all__ = [
    "PLAIN_CHAT_TEMPLATE",
    "Batches",
    "Counts",
    "RecordError",
    "Records",
    "TokenizedDataset",
    "docstring_records",
    "load_records",
    "records_from_rows",
    "tokenize",
    "train_tokenizer",
]
