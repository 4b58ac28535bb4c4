"""`pocketllm run`: where the prompt comes from, what is printed, exit statuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from cli_sessions import ScriptedSession, use_session

from pocket_backend.api import (
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PocketLLMError,
)
from pocket_backend.cli import run
from pocket_backend.cli.exit_codes import status_of
from pocket_backend.cli.main import main
from pocket_backend.cli.session import Answer


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ScriptedSession:
    made = ScriptedSession()
    use_session(monkeypatch, made, run)
    return made


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    ("argv", "stdin", "expected"),
    [
        (["Say hi"], "", "Say hi"),
        (["-p", "Say hi"], "", "Say hi"),
        ([], "from a pipe\n", "from a pipe"),
        (["-"], "a\n\nb\n", "a\n\nb"),
        (["Summarise:"], "a long text\n", "Summarise:\n\na long text"),
    ],
)
def test_prompt_sources(
    argv: list[str],
    stdin: str,
    expected: str,
    session: ScriptedSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, stdin)
    assert main(["run", *argv]) == 0
    assert session.asked[0][0].messages == [{"role": "user", "content": expected}]
    assert capsys.readouterr().out == "Hello there\n"
    assert session.closed


def test_prompt_of_a_file_with_a_system_message(
    session: ScriptedSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    give_stdin(monkeypatch, "")
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n")
    assert main(["run", "-f", str(file), "--system", "Be kind."]) == 0
    assert session.asked[0][0].messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Grüße"},
    ]


def test_raw_and_sampling_options_under_both_names(
    session: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, "")
    argv = ["run", "--raw", "x", "--temp", "0.5", "-n", "9", "-s", "3", "--stop", "a"]
    assert main([*argv, "--stop", "b", "--repeat-penalty", "1.1"]) == 0
    [(prompt, sampling)] = session.asked
    assert prompt.text == "x"
    assert sampling == {
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 3,
        "stop": ["a", "b"],
        "repetition_penalty": 1.1,
    }
    main(["run", "x"])
    assert session.asked[1][1] == {"temperature": 0.0, "max_tokens": 1024}


def test_json_is_one_object(
    session: ScriptedSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, "")
    assert main(["run", "--json", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "scripted",
        "text": "Hello there",
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt_tokens": 7, "cached_tokens": 3, "completion_tokens": 2},
        "ttft_seconds": 0.25,
        "decode_seconds": 0.5,
        "tokens_per_second": 2.0,
    }


def test_stats_go_to_stderr(
    session: ScriptedSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, "")
    assert main(["run", "--stats", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there\n"
    assert "7 prompt tokens (3 cached), 2 new ones (stop); first token after 250 ms" in captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "PROMPT: there is none"),
        (["a", "-p", "b"], "PROMPT, --prompt and --file: give one of them"),
        (["-f", "/nowhere.txt"], "--file: /nowhere.txt: No such file"),
        (["x", "--raw", "--system", "y"], "--system: does not go with --raw"),
        (["x", "--temp", "900"], "temperature: got 900.0; must be"),
        (["x", "--url", "h:1", "-m", "m.gguf"], "--model: does not go with --url"),
        (["x", "--url", "h:1", "--threads", "1"], "--threads: does not go with --url"),
        (["x", "--timeout", "3"], "--timeout: only goes with --url"),
    ],
)
def test_wrong_usage_is_status_two(
    argv: list[str],
    message: str,
    session: ScriptedSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, "")
    assert main(["run", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not session.asked


def test_a_model_file_in_place_of_the_prompt(
    session: ScriptedSession,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, "")
    file = tmp_path / "m.gguf"
    file.touch()
    assert main(["run", str(file)]) == 2
    assert "is a model file; give it as --model" in capsys.readouterr().err


def test_errors_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, "")
    assert main(["run", "--json", "-m", "/nowhere.gguf", "x"]) == 3
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["type"] == "ModelLoadError"
    assert captured.err == f"error: {error['message']}\n"


def test_an_unreachable_server_is_status_four(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, "")
    assert main(["run", "--url", "http://127.0.0.1:1", "x"]) == 4
    assert "the server cannot be reached" in capsys.readouterr().err
    assert main(["run", "--url", "ftp://x", "x"]) == 2
    assert "--url: address: got 'ftp://x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("x"), 2),
        (ModelLoadError("x"), 3),
        (OverloadedError("x"), 4),
        (EngineError("x"), 1),
        (PocketLLMError("x"), 1),
        (ValueError("a defect"), None),
    ],
)
def test_statuses(error: Exception, status: int | None) -> None:
    assert status_of(error) == status


def test_interrupted(session: ScriptedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "")
    session.script = lambda _n: ["Hel", KeyboardInterrupt()]
    assert main(["run", "x"]) == 130
    assert session.closed


def test_in_this_process_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is real, the executor is the fake one: text, counts and the refusal are the
    engine's."""
    give_stdin(monkeypatch, "")
    assert main(["run", "-m", "fake", "--raw", "--json", "-n", "5", "abc"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 5}
    assert answer["finish_reason"] == "length"
    assert main(["run", "-m", "fake", "abc"]) == 2
    assert "fake has no chat template; --raw" in capsys.readouterr().err


def test_rate_counts_tokens_after_the_first() -> None:
    assert Answer("x", "stop", 1, 0, 11, 0.5, 2.0).tokens_per_second == 5.0
    assert Answer("x", "stop", 1, 0, 1, 0.5, 0.0).tokens_per_second == 0.0
