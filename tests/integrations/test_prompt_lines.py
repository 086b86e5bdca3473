import json

import pytest

from integrations.prompt_lines import PromptFile


def read(tmp_path, data: bytes) -> PromptFile:
    (tmp_path / "prompts.jsonl").write_bytes(data)
    return PromptFile.read(tmp_path / "prompts.jsonl")


def test_lines_keep_their_numbers(tmp_path):
    prompts = read(tmp_path, b'{"prompt": "a"}\n\n   \n{"messages": [{"role": "user", "content": "b"}], "id": 7}')
    assert prompts.good == [1, 4]
    assert prompts.lines[4].fields["id"] == 7
    assert prompts.bad == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "takes a JSON object; got list"),
        (b"{}", "neither"),
        (b'{"prompt": "a", "messages": []}', "both"),
        (b'{"prompt": ""}', "text that is not empty"),
        (b'{"prompt": 3}', "text that is not empty"),
        (b'{"messages": []}', '"messages" takes'),
        (b'{"messages": [{"role": "user"}]}', '"messages" takes'),
    ],
)
def test_what_is_wrong_is_told_by_number(tmp_path, line, problem):
    prompts = read(tmp_path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert prompts.good == [1, 3]
    (bad,) = prompts.bad
    assert bad.number == 2
    assert problem in bad.problem


def test_separators_of_unicode_end_no_line(tmp_path):
    text = "one\u2028two\u0085three"
    prompts = read(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False).encode())
    assert prompts.lines[1].fields == {"prompt": text}


def test_the_digest_is_the_files(tmp_path):
    first = read(tmp_path, b'{"prompt": "a"}').digest
    assert read(tmp_path, b'{"prompt": "b"}').digest != first
    assert read(tmp_path, b'{"prompt": "a"}').digest == first
