"""Text of outputs: whole characters, exact stop strings, and what generation makes of them."""

import random
from typing import Any

import pytest
import torch
from oracle import checksum_greedy, config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import funcspec as fs
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.text import TextStream, backend


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that characters are split over tokens; id = byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return plain


TOKENIZER = byte_tokenizer()
TEXT = "naïve café, 数字 and 🙂🙃 end"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def streamed(text: str, stops: list[str], sizes: Any = None) -> tuple[list[str], int, bool]:
    """Pieces, how many tokens were kept, and whether a stop string was found."""
    stream, tokens = TextStream(TOKENIZER, stops), encode(text)
    pieces, kept, stopped = [], 0, False
    while tokens and not stopped:
        size = next(sizes) if sizes is not None else 1
        piece = stream.add(tokens[:size])
        pieces.append(piece.text)
        kept, stopped, tokens = kept + piece.kept, piece.stopped, tokens[size:]
    pieces.append(stream.finish())
    return pieces, kept, stopped


def test_characters_are_never_split() -> None:
    pieces, kept, stopped = streamed(TEXT, [])
    assert "".join(pieces) == TEXT and kept == len(encode(TEXT)) and not stopped
    assert all("\ufffd" not in piece for piece in pieces)
    assert max(map(len, pieces)) == 1  # a character is handed out with its last byte


def test_unfinished_characters_come_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.add(encode("a🙂")[:3]).text == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_are_exact_whatever_comes_together(seed: int) -> None:
    """Against the definition, spelt out: cut the text at the stop string whose end comes first."""
    source = random.Random(seed)
    text = "".join(source.choice("abé🙂") for _ in range(40))
    stops = ["".join(source.choice("abé🙂") for _ in range(source.randint(1, 4))) for _ in range(source.randint(0, 3))]
    pieces, kept, stopped = streamed(text, stops, iter(lambda: source.randint(1, 6), 0))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        end, begin = min(ends)
        assert stopped and "".join(pieces) == text[:begin] and kept == len(encode(text[:end]))
    else:
        assert not stopped and "".join(pieces) == text


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ["</end>"])
    assert stream.add(encode("one </en")).text == "one "
    assert stream.add(encode("d of it")).text == "</end of it"
    assert stream.add(encode("</end")).text == ""
    done = stream.add(encode(">more"))
    assert (done.text, done.kept, done.stopped) == ("", 1, True)
    assert stream.add(encode("x")).kept == 0 and stream.finish() == ""
    held = TextStream(TOKENIZER, ["</end>"])
    assert held.add(encode("two </")).text + held.finish() == "two </"


def test_what_is_refused() -> None:
    for wrong in ("stop", [1], None):
        with pytest.raises(ArgumentTypeError, match="stop_strings: expected a sequence of strings"):
            TextStream(TOKENIZER, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="stop_strings: expected strings of at least one character"):
        TextStream(TOKENIZER, ["a", ""])
    with pytest.raises(ArgumentTypeError, match=r"tokenizer: expected a tokenizers\.Tokenizer"):
        TextStream(object())
    with pytest.raises(ArgumentTypeError, match="tokenizer: expected a tokenizer, to look for stop strings"):
        fs.generate(config(), ChecksumModel(), None, [[1]], stop_strings=["a"])

    class Fast:
        backend_tokenizer = TOKENIZER

    assert backend(Fast()) is TOKENIZER


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_generation_ends_at_stop_strings(drafts: int, rows: int) -> None:
    """I3: the same text and tokens for every number of drafts, although rounds emit more behind the stop string."""
    target = ChecksumModel()
    drafter = fs.drafters.standalone(ChecksumDraft()) if drafts else None
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9]]
    outputs = [checksum_greedy(prompt, 20) for prompt in prompts]
    texts = [TOKENIZER.decode(output) for output in outputs]
    stop = texts[0][7:9]
    cut = [text.find(stop) for text in texts]
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    text = {0: "", 1: "", 2: ""}
    reasons = {}
    settings = config(rows=rows, drafts=drafts, length=64)
    for emission in fs.generate(settings, target, drafter, prompts, max_tokens=20, tokenizer=TOKENIZER, stop_strings=[stop]):
        found[emission.prompt_index] += emission.tokens
        text[emission.prompt_index] += emission.text
        reasons[emission.prompt_index] = emission.finish_reason
        assert len(emission.origin) == len(emission.tokens) >= emission.num_accepted
    for index, (output, whole, place) in enumerate(zip(outputs, texts, cut, strict=True)):
        assert text[index] == (whole[:place] if place >= 0 else whole)
        assert found[index] == output[: place + len(stop) if place >= 0 else 20]
        assert reasons[index] == (1 if place >= 0 else 2)
    assert cut[0] == 7


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("keep", [4, 5, 7])
def test_truncated_rows_go_on_as_if_the_tokens_had_never_come(donate: bool, keep: int) -> None:
    target, drafter = ChecksumModel(), fs.drafters.standalone(ChecksumDraft())
    settings = config(rows=2, length=40, block_size=4)
    state, _ = fs.admit(fs.init(settings, target, drafter), target, drafter, [[5, 6, 7], [1]])
    for _ in range(4):
        state, _ = fs.step_round(state, target, drafter)
    before, older = fs.snapshot(state), state
    cut = fs.truncate(fs.fork(state) if donate else state, {0: keep}, donate=donate)
    assert cut.num_tokens.tolist() == [keep, state.num_tokens.tolist()[1]]
    assert cut.tokens[0].tolist() == [5, 6, 7, *checksum_greedy([5, 6, 7], keep - 3)] + [-1] * (40 - keep)
    while fs.any_active(cut):
        cut, _ = fs.step_round(cut, target, drafter, donate=donate)
    assert cut.tokens[0].tolist() == [5, 6, 7, *checksum_greedy([5, 6, 7], 37)]
    assert cut.tokens[1].tolist() == [1, *checksum_greedy([1], 39)]
    assert fs.snapshot(older) == before  # what was cut back wrote into copies
    while fs.any_active(older):
        older, _ = fs.step_round(older, target, drafter)
    assert older.tokens.tolist() == cut.tokens.tolist()


def test_a_row_can_be_finished_or_revived() -> None:
    target = ChecksumModel()
    state, _ = fs.admit(fs.init(config(rows=2, drafts=0, length=10), target), target, None, [[5, 6, 7], [1]], max_tokens=[3, 9])
    for _ in range(3):
        state, _ = fs.verify(state, target)
    assert state.finish_reason.tolist() == [2, 0]
    done = fs.truncate(state, {1: 3}, finish=True)
    assert done.finish_reason.tolist() == [2, 1] and done.is_live.tolist() == [0, 0] and done.num_tokens.tolist() == [6, 3]
    revived = fs.truncate(state, {0: 5})
    assert revived.is_live.tolist() == [1, 1] and fs.verify(revived, target)[1].finish_reason.tolist() == [2, 0]
    same = fs.truncate(state, {0: 6})
    assert same.finish_reason.tolist() == [2, 0]


def test_what_truncate_refuses() -> None:
    target, drafter = ChecksumModel(), fs.drafters.standalone(ChecksumDraft())
    state, _ = fs.admit(fs.init(config(rows=2), target, drafter), target, drafter, [[5, 6, 7]])
    for wrong, message in (
        ({}, "lengths: expected a length for at least one row"),
        ({0: 3}, "lengths: expected a length from 4 to 4 for row 0, got 3"),
        ({0: 5}, "lengths: expected a length from 4 to 4 for row 0, got 5"),
        ({0: True}, "lengths: expected a length from 4 to 4 for row 0, got True"),
        ({1: 4}, "lengths: expected rows that hold a request, got row 1, which is idle"),
        ({2: 4}, "rows: expected row numbers from 0 to 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fs.truncate(state, wrong)
    with pytest.raises(fs.FuncspecError, match="expected phase 'round start' for truncate"):
        fs.truncate(fs.prefill(state, drafter)[0], {0: 4})
    assert torch.equal(fs.truncate(state, {0: 4}).tokens, state.tokens)
