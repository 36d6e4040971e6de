"""Calibration text: specs, disjoint draws, fingerprints, and one clear line for each way to be wrong."""

from __future__ import annotations

import gzip
import hashlib
import json

import numpy as np
import pytest
import torch

from prunebench.calibration import CalibrationSpec, tokens_of
from prunebench.errors import UsageError


class Tokenizer:
    """Bytes plus two; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [byte + 2 for byte in text.encode()]}


DOCUMENTS = [f"document {n} says {n * n}." for n in range(40)]


@pytest.fixture
def world(tmp_path):
    folder = tmp_path / "world"
    folder.mkdir()
    for name in ("general", "code"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    return folder


def stream() -> list[int]:
    return [token for text in DOCUMENTS for token in (0, *(byte + 2 for byte in text.encode()))]


def refused(spec: CalibrationSpec, world) -> str:
    with pytest.raises(UsageError) as info:
        tokens_of(spec, Tokenizer(), world)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draw": "D"}, "unknown draw 'D'; expected A, B or C"),
        ({"draw": "a"}, "unknown draw 'a'"),
        ({"blocks": 0}, "calibration of 0 blocks × 128 tokens; expected ≥ 1 block"),
        ({"length": 1}, "calibration of 256 blocks × 1 tokens"),
        ({"blocks": -3}, "calibration of -3 blocks"),
        ({"text": "general"}, "unknown calibration text 'general'; expected world:DOMAIN, file:PATH or hub:"),
        ({"text": "world:"}, "unknown calibration text 'world:'"),
        ({"text": "web:x"}, "unknown calibration text 'web:x'"),
        ({"text": ""}, "unknown calibration text ''"),
    ],
)
def test_a_wrong_spec_is_refused(options, reason):
    with pytest.raises(UsageError) as info:
        CalibrationSpec(**options)
    assert reason in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(("draw", "start"), [("A", 0), ("B", 60), ("C", 120)])
def test_draws_are_consecutive_slices_of_the_documents_joined_by_the_end_token(world, draw, start):
    found = tokens_of(CalibrationSpec("world:general", 6, 10, draw), Tokenizer(), world)
    assert found.ids_BL.dtype == torch.int64
    assert found.ids_BL.shape == (6, 10)
    assert found.ids_BL.flatten().tolist() == stream()[start : start + 60]


def test_draws_share_no_position(world):
    parts = [tokens_of(CalibrationSpec("world:general", 5, 8, d), Tokenizer(), world).ids_BL.flatten() for d in "ABC"]
    assert torch.cat(parts).tolist() == stream()[:120]


def test_the_fingerprint_is_of_the_very_ids(world):
    found = tokens_of(CalibrationSpec("world:general", 6, 10), Tokenizer(), world)
    ids = np.array(stream()[:60], dtype=np.int64)
    assert found.fingerprint == hashlib.sha256(ids.tobytes()).hexdigest()[:16]
    assert found.to_json() == {
        "text": "world:general", "blocks": 6, "length": 10, "draw": "A", "fingerprint": found.fingerprint,
    }  # fmt: skip


@pytest.mark.parametrize("position", [0, 17, 59])
def test_the_fingerprint_changes_with_any_token(tmp_path, position):
    ids = stream()
    path = tmp_path / "text.txt"

    def fingerprint(tokens: list[int]) -> str:
        class Given(Tokenizer):
            def __call__(self, text, *, add_special_tokens):
                return {"input_ids": tokens}

        path.write_text("anything")
        return tokens_of(CalibrationSpec(f"file:{path}", 6, 10), Given(), tmp_path).fingerprint

    changed = list(ids)
    changed[position] += 1
    # The end token comes first, so the last given id is the second to last.
    same = fingerprint(ids) == fingerprint(changed)
    assert same == (position == 59)
    assert fingerprint(ids) == fingerprint(ids[:59] + [1] * 9)


def test_the_same_text_as_jsonl_gzip_or_plain_file_has_the_same_ids(tmp_path, world):
    jsonl, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    jsonl.write_text("".join(json.dumps({"text": text, "more": 1}) + "\n" for text in DOCUMENTS))
    plain.write_text(DOCUMENTS[0])
    zipped = tokens_of(CalibrationSpec("world:code", 2, 10), Tokenizer(), world)
    lines = tokens_of(CalibrationSpec(f"file:{jsonl}", 2, 10), Tokenizer(), world)
    one = tokens_of(CalibrationSpec(f"file:{plain}", 2, 8), Tokenizer(), world)
    assert torch.equal(zipped.ids_BL, lines.ids_BL)
    assert one.ids_BL.flatten().tolist() == stream()[:16]


def test_an_unknown_domain_names_those_there_are(world):
    assert "no such calibration text; in world:mathematics; expected one of code, general" in refused(
        CalibrationSpec("world:mathematics"), world
    )


def test_a_missing_file_is_refused(world, tmp_path):
    assert "no such calibration text; in file:" in refused(CalibrationSpec(f"file:{tmp_path}/none.jsonl"), world)
    assert "no such calibration text" in refused(CalibrationSpec(f"file:{tmp_path}"), world)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_text_is_refused(world, tmp_path, name):
    (tmp_path / name).write_text("")
    assert "the calibration text is empty" in refused(CalibrationSpec(f"file:{tmp_path / name}", 1, 2), world)


@pytest.mark.parametrize("content", ["  \n \n", '{"text": ""}\n{"text": "  "}\n'])
def test_a_text_of_blanks_is_empty(world, tmp_path, content):
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.txt")
    path.write_text(content)
    assert "the calibration text is empty" in refused(CalibrationSpec(f"file:{path}", 1, 2), world)


def test_a_text_too_short_says_the_numbers_and_a_size_that_fits(world):
    total = len(stream())
    spec = CalibrationSpec("world:general", 30, 10, "C")
    text = refused(spec, world)
    assert f"the calibration text has {total} tokens; in world:general, draw C; expected 900 for 30 blocks × 10" in text
    fits = int(text.rsplit("at most ", 1)[1].split()[0])
    assert fits == total // 30
    tokens_of(CalibrationSpec("world:general", fits, 10, "C"), Tokenizer(), world)
    refused(CalibrationSpec("world:general", fits + 1, 10, "C"), world)


@pytest.mark.parametrize(
    "line", ["not json", "[1]", '"text"', '{"txt": "a"}', "3", "", '{"text": null}', '{"text": 3}', '{"text": ["a"]}']
)
def test_a_malformed_line_is_named_by_its_number(world, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + '\n{"text": "fine"}\n')
    assert f"not a calibration document; in {path}, line 2; expected" in refused(CalibrationSpec(f"file:{path}"), world)


@pytest.mark.parametrize("damage", ["not gzip", "truncated", "bad block", "not utf-8"])
def test_an_unreadable_file_is_refused(world, tmp_path, damage):
    path = tmp_path / "bad.jsonl.gz"
    whole = (world / "general.jsonl.gz").read_bytes()
    path.write_bytes({
        "not gzip": b"plain text",
        "truncated": whole[: len(whole) // 2],
        "bad block": whole[:40] + b"\xff" * 40 + whole[80:],
        "not utf-8": gzip.compress(b'{"text": "\xff\xfe"}\n'),
    }[damage])  # fmt: skip
    assert "cannot read the calibration text" in refused(CalibrationSpec(f"file:{path}"), world)


@pytest.mark.parametrize("text", ["hub:org/data", "hub:org/data:text", "hub:org/data@main", "hub:org/data@:text"])
def test_a_hub_text_must_be_pinned_and_name_its_field(text):
    with pytest.raises(UsageError, match="expected world:DOMAIN, file:PATH or hub:ID@REVISION:FIELD"):
        CalibrationSpec(text)
