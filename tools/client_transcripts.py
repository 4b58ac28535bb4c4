"""Runs the clients of docs/clients.md against a server of our own, and writes what they printed.

``python tools/client_transcripts.py`` needs what ``make client-test`` installs, node and curl. A
client that is not installed is an error: a page with half of them would look complete.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin transcripts -->\n", "<!-- end transcripts -->\n"
NODE = ROOT / "tests" / "gateway" / "node"
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Snippet:
    """One program. ``language``: of its code block; curl's are ``sh``."""

    title: str
    language: str
    code: str


_PYTHON = """\
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:9000/v1", api_key="none", max_retries=0)
messages = [{"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"}]
"""
SNIPPETS = (
    Snippet(
        "openai for Python",
        "python",
        _PYTHON
        + """\
answer = client.chat.completions.create(
    model="pocketllm", messages=messages, max_tokens=24, temperature=0)
print(answer.choices[0].message.content, answer.choices[0].finish_reason)
print(answer.usage.prompt_tokens, answer.usage.completion_tokens)
""",
    ),
    Snippet(
        "Streaming",
        "python",
        _PYTHON
        + """\
stream = client.chat.completions.create(
    model="pocketllm", messages=messages, max_tokens=8, temperature=0,
    stream=True, stream_options={"include_usage": True})
for chunk in stream:
    for choice in chunk.choices:
        print(repr(choice.delta.content), choice.finish_reason or "", end=" ")
print(chunk.usage.completion_tokens)
""",
    ),
    Snippet(
        "Async, several at once",
        "python",
        """\
import asyncio, openai
async def main():
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9000/v1", api_key="none") as client:
        async def one(prompt):
            made = await client.completions.create(
                model="pocketllm", prompt=prompt, max_tokens=6, temperature=0)
            return made.choices[0]
        for choice in await asyncio.gather(*map(one, ["One, two, three,", "Monday, Tuesday,"])):
            print(repr(choice.text), choice.finish_reason)
asyncio.run(main())
""",
    ),
    Snippet(
        "Errors",
        "python",
        _PYTHON
        + """\
for wrong in ({"max_tokens": -1}, {"response_format": {"type": "json_object"}}, {"model": "gpt"}):
    try:
        client.chat.completions.create(**{"model": "pocketllm", "messages": messages, **wrong})
    except openai.APIStatusError as error:
        print(type(error).__name__, error.status_code, error.code, error.param)
        print("   ", error.body["message"])
""",
    ),
    Snippet(
        "Leaving early",
        "python",
        _PYTHON
        + """\
import time, urllib.request
def counted():
    text = urllib.request.urlopen("http://127.0.0.1:9000/metrics").read().decode()
    return [line for line in text.splitlines()
            if line.startswith(("pocketllm_gateway_client_disconnects_total",
                                "pocketllm_gateway_generations_in_flight"))]
with client.completions.create(model="pocketllm", prompt="Once upon a time", stream=True,
                               max_tokens=1000, extra_body={"ignore_eos": True}) as stream:
    next(iter(stream))
    print(*counted(), sep="\\n")
time.sleep(1)
print(*counted(), sep="\\n")
""",
    ),
    Snippet(
        "openai for Node",
        "javascript",
        """\
import OpenAI from "openai";
const client = new OpenAI({ baseURL: "http://127.0.0.1:9000/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "system", content: "You are a helpful assistant." },
                  { role: "user", content: "What is the capital of France?" }];
const stream = await client.chat.completions.create(
  { model: "pocketllm", messages, max_tokens: 24, temperature: 0, stream: true });
for await (const chunk of stream) process.stdout.write(chunk.choices[0].delta.content ?? "");
console.log();
try {
  await client.chat.completions.create({ model: "pocketllm", messages, top_p: 7 });
} catch (error) {
  console.log(error.constructor.name, error.status, error.param, "-", error.message);
}
""",
    ),
    Snippet(
        "LangChain",
        "python",
        """\
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="pocketllm", base_url="http://127.0.0.1:9000/v1", api_key="none",
                   temperature=0, max_tokens=24, stream_usage=True)
answer = model.invoke([("system", "You are a helpful assistant."),
                       ("human", "What is the capital of France?")])
print(answer.content, answer.response_metadata["finish_reason"])
print(answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"])
print([chunk.content for chunk in model.stream("Say hello.")][:6])
""",
    ),
    Snippet(
        "curl",
        "sh",
        """\
curl -sN http://127.0.0.1:9000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "pocketllm", "prompt": "One, two,", "max_tokens": 3, "temperature": 0,
       "stream": true, "stream_options": {"include_usage": true}}'
curl -s http://127.0.0.1:9000/tokenize -H 'Content-Type: application/json' \\
  -d '{"prompt": "Hello world"}'; echo
curl -s http://127.0.0.1:9000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "pocketllm"}'; echo
""",
    ),
)


def main() -> int:
    from served import Served

    from pocket_backend.triton.settings import find_default_model

    model = find_default_model()
    if model is None:
        raise SystemExit("no demo model is installed: make run does that")
    with Served("--gateway-port", "0", model=str(model)) as served:
        parts = [transcript(snippet, gateway_url(served.text)) for snippet in SNIPPETS]
    with Served("--gateway-port", "0", delay=0.0) as served:  # the fake model: answers are short
        parts.append(fuzzed(gateway_url(served.text)))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{''.join(parts)}{END}{after}", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(PAGE)], check=True)
    return 0


def gateway_url(text: str) -> str:
    found = re.search(r"OpenAI API at (http://\S+)/v1", text)
    assert found, text
    return found[1]


def transcript(snippet: Snippet, url: str) -> str:
    """The snippet with what it printed."""
    shown = f"## {snippet.title}\n\n```{snippet.language}\n{snippet.code}```\n\n"
    printed = run(command(snippet.language), snippet.code.replace("http://127.0.0.1:9000", url))
    return f"{shown}```text\n{printed}```\n\n"


def command(language: str) -> list[str]:
    """What runs a program from its standard input."""
    found = {"python": sys.executable, "sh": shutil.which("sh"), "javascript": shutil.which("node")}
    program = found[language]
    if program is None:
        raise SystemExit(f"{language}: not installed")
    return [program, "--input-type=module", "-"] if language == "javascript" else [program, "-"]


def run(arguments: list[str], code: str) -> str:
    """Raises SystemExit if it fails: a transcript of a failure is none."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        arguments,
        input=code,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=NODE,
        env=environment,
    )
    if done.returncode != 0 or not done.stdout:
        raise SystemExit(f"{arguments}: status {done.returncode}\n{code}\n{done.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def fuzzed(url: str) -> str:
    """schemathesis' own summary, without the path of the file that its first lines name."""
    options = ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--seed", "8"]
    options += ["--phases", "fuzzing", "--max-examples", "20", "--no-color", "--warnings", "off"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=folder,
        )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    summary = done.stdout[done.stdout.index("API Operations:") :].strip()
    shown = f"schemathesis run http://127.0.0.1:9000/openapi.json {' '.join(options)}"
    return f"## schemathesis\n\n```sh\n{shown}\n```\n\n```text\n{summary}\n```\n\n"


if __name__ == "__main__":
    sys.exit(main())
