"""`serve --json` and `demo --json`: one event a line on standard output, and nothing else."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pocket_backend.api.errors import EngineError
from pocket_backend.cli import demo, main, serving
from pocket_backend.cli.session import Answer, Prompt
from pocket_backend.triton import supervisor
from pocket_backend.triton.launcher import ServerOptions
from pocket_client import InvalidRequestError

ADDRESSES = {
    "http_url": "http://127.0.0.1:1",
    "grpc_address": "127.0.0.1:2",
    "metrics_url": "http://127.0.0.1:3/metrics",
}


class FakeServer(SimpleNamespace):
    """Starts at once, and counts."""

    def __init__(self, _options: ServerOptions) -> None:
        super().__init__(**ADDRESSES, running=False, starts=0, stops=0)

    def start(self) -> None:
        self.starts += 1

    def stop(self, _seconds: float = 0.0) -> None:
        self.stops += 1

    def failure_lines(self) -> str:
        return "the log"


@pytest.fixture
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TritonServer", FakeServer)
    monkeypatch.setattr(serving, "examples", lambda _server: "EXAMPLES")
    monkeypatch.setattr(demo, "examples", lambda _server, chat: f"EXAMPLES {chat}")


def troubles(monkeypatch: pytest.MonkeyPatch, *steps: str | BaseException) -> None:
    """What the supervisor meets, one after the other."""
    left = list(steps)

    def look(_self: object) -> str:
        step = left.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    monkeypatch.setattr(supervisor.Supervisor, "_watch_until_trouble", look)


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one["time"] > 1.6e9 for one in found)
    return [{key: one[key] for key in one if key != "time"} for one in found]


@pytest.mark.usefixtures("_no_triton")
def test_a_server_that_is_restarted_and_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    troubles(monkeypatch, "generator died (process 7)", KeyboardInterrupt())
    assert main.main(["serve", "fake", "--json"]) == 0
    found = events(capsys)
    names = [one["event"] for one in found]
    assert names == [
        *("starting", "started", "ready"),
        *("server_unhealthy", "restarting", "service_restored", "stopping", "exit"),
    ]
    starting, started, ready, unhealthy, restarting, restored, _, ended = found
    assert starting["model"] == "fake"
    assert started.items() >= ADDRESSES.items()
    assert ready == {"event": "ready", **ADDRESSES, "openai_url": None}
    assert unhealthy["problem"] == "generator died (process 7)"
    assert restarting == {"event": "restarting", "attempt": 1, "delay_seconds": 0.0}
    assert restored["restarts"] == 1
    assert ended == {"event": "exit", "status": 0}


@pytest.mark.usefixtures("_no_triton")
def test_a_server_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    troubles(monkeypatch, "generator died")
    assert main.main(["serve", "fake", "--json", "--max-restarts", "0"]) == 1
    *_, giving_up, error, ended = events(capsys)
    assert giving_up == {"event": "giving_up", "problem": "generator died", "restarts": 0}
    assert error["event"] == "error"
    assert error["error"]["type"] == EngineError.__name__
    assert "the log" in error["error"]["message"]
    assert ended == {"event": "exit", "status": 1}


@pytest.mark.usefixtures("_no_triton")
def test_for_people_nothing_of_it_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    troubles(monkeypatch, KeyboardInterrupt())
    assert main.main(["serve", "fake"]) == 0
    out = capsys.readouterr().out
    assert "{" not in out
    assert "EXAMPLES" in out
    assert "serving; Ctrl-C stops" in out


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("once", [True, False])
def test_the_demo_has_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], once: bool
) -> None:
    answer = Answer("Paris.", "stop", 5, 0, 2, 0.1, 0.2)

    def ask(_prompt: object, _parameters: object, on_piece: Any) -> Answer:
        on_piece("Paris.", 2)
        return answer

    session = SimpleNamespace(ask=ask, close=lambda: None)
    monkeypatch.setattr(demo, "connect", lambda _address: session)
    troubles(monkeypatch, KeyboardInterrupt())
    argv = ["demo", "--model", "fake", "--json", "--prompt", "What?", *(["--once"] * once)]
    assert main.main(argv) == 0
    found = {one["event"]: one for one in events(capsys)}
    assert found["answer"] == {"event": "answer", "prompt": "What?", **answer.as_dict()}
    rest = [] if once else ["ready", "stopping"]
    assert list(found) == ["starting", "started", "answer", *rest, "exit"]


REFUSALS = [
    [],
    [InvalidRequestError("messages[0].role: no system turns", field="messages[0].role")],
    [InvalidRequestError("messages: no chat template", field="messages")] * 2,
]


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("refusals", REFUSALS, ids=["all", "no system turn", "base model"])
def test_the_demo_asks_what_the_model_takes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusals: list[InvalidRequestError],
) -> None:
    """A model that cannot chat is served like any other."""
    asked: list[Prompt] = []

    def ask(prompt: Prompt, _parameters: object, on_piece: Any) -> Answer:
        asked.append(prompt)
        if len(asked) <= len(refusals):
            raise refusals[len(asked) - 1]
        on_piece("It", 1)
        on_piece(" is.", 1)
        return Answer("It is.", "stop", 5, 0, 2, 0.1, 0.2)

    session = SimpleNamespace(ask=ask, close=lambda: None)
    monkeypatch.setattr(demo, "connect", lambda _address: session)
    troubles(monkeypatch, KeyboardInterrupt())
    assert main.main(["demo", "--model", "fake", "--prompt", "What?"]) == 0
    out = capsys.readouterr().out
    turns = [[turn["role"] for turn in prompt.messages or []] for prompt in asked]
    assert turns == [["system", "user"], ["user"], []][: len(refusals) + 1]
    assert out.count("It is.") == 1
    chat = len(refusals) < 2
    assert (asked[-1].text == "What?") is not chat
    assert ("assistant  It is." in out) is chat
    assert f"EXAMPLES {chat}" in out


@pytest.mark.usefixtures("_no_triton")
def test_the_demo_does_not_hide_other_refusals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> Answer:
        raise InvalidRequestError("max_tokens: too many", field="max_tokens")

    monkeypatch.setattr(
        demo, "connect", lambda _address: SimpleNamespace(ask=ask, close=lambda: None)
    )
    assert main.main(["demo", "--model", "fake"]) == 2
    assert "max_tokens: too many" in capsys.readouterr().err


def test_usage_errors_before_the_start_end_with_their_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main.main(["serve", "/nowhere.gguf", "--json"])
    error, ended = events(capsys)[-2:]
    assert status == ended["status"] != 0
    assert "/nowhere.gguf" in error["error"]["message"]


def test_every_command_that_answers_has_json() -> None:
    parsers = next(
        action.choices for action in main._parser()._actions if isinstance(action.choices, dict)
    )
    without = {name for name, one in parsers.items() if "--json" not in one._option_string_actions}
    assert without == {"completion"}  # its output is a script
