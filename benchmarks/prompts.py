"""The prompts of the benchmarks: passages of text (from Python's own documentation) and chat questions."""

from pydoc_data import topics
from typing import TYPE_CHECKING

from funcspec.models.smollm2 import chat_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT = (
    "Why do leaves change colour in autumn?",
    "Give me three tips for learning to cook.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that reverses a string.",
    "Explain what a hash table is to a beginner.",
)
TEXT = ("assert", "class", "exceptions", "import", "lambda")
TEXT_TOKENS = 48


def passage(topic: str) -> str:
    """The topic's prose, without its heading."""
    lines = topics.topics[topic].strip().splitlines()
    return "\n".join(lines[2:]).strip()


def prompt_tokens(tokenizer: "Tokenizer", count: int = 5) -> dict[str, list[list[int]]]:
    """Token ids of the first `count` prompts of each kind: the beginnings of passages ("text"), and whole questions ("chat")."""
    return {
        "text": [tokenizer.encode(passage(topic)).ids[:TEXT_TOKENS] for topic in TEXT[:count]],
        "chat": [tokenizer.encode(chat_prompt(question)).ids for question in CHAT[:count]],
    }
