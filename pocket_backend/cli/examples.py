"""Ready-to-paste requests for a running server: curl, tritonclient, plain Python."""

from __future__ import annotations

from pocket_backend.triton.launcher import TritonServer
from pocket_backend.triton.probes import ENSEMBLE

_TEMPLATE = """\
--- curl, streaming (server-sent events)
curl -N {http}/v2/models/{model}/generate_stream -d '{{
  {prompt_json},
  "stream": true, "max_tokens": 64}}'

--- curl, one answer
curl {http}/v2/models/{model}/generate -d '{{
  "text_input": "The capital of France is", "stream": false, "max_tokens": 16, "temperature": 0}}'

--- Python, standard library only
python3 - <<'END'
import json, urllib.request
body = {{{prompt_python},
        "stream": True, "max_tokens": 64}}
url = "{http}/v2/models/{model}/generate_stream"
with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:
    for line in answer:
        if line.startswith(b"data: "):
            print(json.loads(line[6:])["text_output"], end="", flush=True)
END

--- Python, tritonclient (pip install 'tritonclient[grpc]' 'numpy<2')
python3 - <<'END'
import queue, numpy as np, tritonclient.grpc as triton
def tensor(name, kind, array):
    made = triton.InferInput(name, array.shape, kind); made.set_data_from_numpy(array); return made
answers = queue.Queue()
client = triton.InferenceServerClient("{grpc}")
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer("{model}", [
    tensor("text_input", "BYTES", np.array([b"The capital of France is"], dtype=object)),
    tensor("stream", "BOOL", np.array([True])),
    tensor("max_tokens", "INT32", np.array([16], dtype=np.int32))])
while True:
    result, error = answers.get(timeout=60)
    if error: raise error
    print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    if result.as_numpy("finish_reason")[0]: break
client.stop_stream()
END
"""


_CHAT = {
    "prompt_json": r'"messages": "[{\"role\":\"user\",\"content\":\"Why is the sky blue?\"}]"',
    "prompt_python": (
        '"messages": json.dumps([{"role": "user", "content": "Why is the sky blue?"}])'
    ),
}
_TEXT = dict.fromkeys(_CHAT, '"text_input": "The sky is blue because"')


def examples(server: TritonServer, *, chat: bool = True) -> str:
    """The examples with this server's addresses; without ``chat`` none needs a chat template."""
    return _TEMPLATE.format(
        http=server.http_url,
        grpc=server.grpc_address,
        model=ENSEMBLE,
        **(_CHAT if chat else _TEXT),
    )
