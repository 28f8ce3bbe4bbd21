"""Text, chats, preferences and prompts → batches of tokens.

records     files, hub data sets or rows → `Records`
files       rows that lie in text files, read when they are asked for
formats     what a record is: text, chats, or prompts with or without answers
reading     records one after another; bad ones refused or counted
chat        a chat → its text and the spans of it that are trained
turns       the assistant's turns, where a template does not mark them
prompted    where the answer to a prompt begins
tokens      text and chats → `TokenizedDataset`
pairs       preferences → `Pairs`
prompts     prompts to be answered → `Prompts`
documents   flat arrays, and what became of every record
packing     documents → sequences
collate     documents → rows of tensors
batches     any of these → shuffled, resumable batches
docstrings  a data set that every Python installation carries
bpe         a small tokenizer, trained in seconds
"""

from megatrain.data.batches import Batches, Dataset
from megatrain.data.bpe import train_tokenizer
from megatrain.data.chat import PLAIN_CHAT_TEMPLATE
from megatrain.data.collate import Batch as TokenBatch
from megatrain.data.docstrings import docstring_records
from megatrain.data.documents import Counts, TokenizedDataset
from megatrain.data.formats import RecordError
from megatrain.data.pairs import Pairs, tokenize_pairs
from megatrain.data.prompts import PromptBatch, Prompts, tokenize_prompts
from megatrain.data.records import Records, is_of_hub, load_records, records_from_rows
from megatrain.data.tokens import LossOn, tokenize

__all__ = [
    "PLAIN_CHAT_TEMPLATE",
    "Batches",
    "Counts",
    "Dataset",
    "LossOn",
    "Pairs",
    "PromptBatch",
    "Prompts",
    "RecordError",
    "Records",
    "TokenBatch",
    "TokenizedDataset",
    "docstring_records",
    "is_of_hub",
    "load_records",
    "records_from_rows",
    "tokenize",
    "tokenize_pairs",
    "tokenize_prompts",
    "train_tokenizer",
]
